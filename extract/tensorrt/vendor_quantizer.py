"""The vendor's quantiser, called once with everything said: what it would choose by itself fits nobody."""

from pathlib import Path
from typing import Any, Literal

from extract.errors import EngineRefused
from extract.tensorrt.blaming import blaming

SEED = 1234


class QuantiserFailed(EngineRefused):
    """The vendor's quantiser gave up."""

    template = (
        "tensorrt-llm {release} could not quantise {name}: {problem}. What it wrote above says more; "
        "extract doctor says whether nvidia-modelopt and the card are there."
    )


def run_quantizer(
    checkpoint: Path,
    calibration: Path,
    output: Path,
    *,
    dtype: str,
    num_rows: int,
    max_input_tokens: int,
    cache: Literal["none", "fp8"],
    release: str,
) -> None:
    """Write an FP8 checkpoint in the vendor's format.

    Args:
        checkpoint: Hugging Face directory.
        calibration: directory whose train split has a `text` column.
        output: an empty directory.
        dtype: type of what is not quantised, and of the states.
        num_rows: of calibration.
        max_input_tokens: rows are calibrated at this length, the one that engines will run.
        cache: fp8 also calibrates scales of a paged cache, which engines without one never use.
        release: the installed one, for the message.

    Raises:
        QuantiserFailed: with the vendor's last word.
    """
    with blaming(lambda problem: QuantiserFailed(release=release, name=checkpoint.name, problem=problem)):
        quantize: Any = _quantizer()
        quantize(
            model_dir=str(checkpoint),
            device="cuda",
            calib_dataset=str(calibration),
            dtype=dtype,
            qformat="fp8",
            kv_cache_dtype="fp8" if cache == "fp8" else None,
            calib_size=num_rows,
            batch_size=1,
            calib_max_seq_length=max_input_tokens,
            awq_block_size=128,
            output_dir=str(output),
            tp_size=1,
            pp_size=1,
            cp_size=1,
            seed=SEED,
            tokenizer_max_seq_length=max(2048, max_input_tokens),
        )


def _quantizer() -> Any:
    """The function; its home changed."""
    try:
        from tensorrt_llm.quantization import quantize_and_export
    except ImportError:
        from tensorrt_llm.quantization.quantize_by_modelopt import quantize_and_export
    return quantize_and_export
