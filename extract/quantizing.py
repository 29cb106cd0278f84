"""`quantize`: a Hugging Face checkpoint -> an FP8 checkpoint in TensorRT-LLM's format, once, for every engine after it.

The vendor's quantiser does the arithmetic. Ours is what goes in (rows of any source, at the length that engines will
run) and what is checked of what comes out: the linears are FP8, the head is not, and it says what it was made from.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from extract.engine.checkpoint import Checkpoint, open_checkpoint
from extract.engine.recipe import Recipe
from extract.engine.weights_files import read_header
from extract.errors import CheckpointRefused, SourceError, SpecError
from extract.sample import spread
from extract.spec import SourceSpec
from extract.tensorrt.gate import check_vendor
from extract.tensorrt.model_shape import CONFIG, read_shape
from extract.tensorrt.vendor_checkpoint import Origin, write_origin
from extract.tensorrt.vendor_quantizer import run_quantizer
from extract.whole_directory import whole_directory

CALIBRATION_ROWS = 512
"""As many as the vendor's own example takes."""


class QuantizedExists(SpecError):
    """The output directory is there already."""

    template = "{path}: exists already. Choose another directory with -o, or remove this one first."


class NotQuantizable(CheckpointRefused):
    """A checkpoint that the vendor's quantiser does not take."""

    template = "{path}: {problem}. Give the unquantised Hugging Face directory."


class BadQuantization(CheckpointRefused):
    """What the vendor wrote is not what was asked for."""

    template = "{name}: the quantised checkpoint has {field} {found}, {expected} expected. Nothing was kept."


class NoCalibrationRows(SourceError):
    """The calibration data has no text."""

    template = "{source}: none of the first {count:,} rows of column {column} is a text. Choose another --column."


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """What was written, and from what."""

    path: str
    name: str
    weights: str
    dtype: str
    cache: str
    num_bytes: int
    calibration: str
    num_rows: int


def quantize(
    checkpoint: str | Path,
    output: str | Path,
    *,
    calibration: SourceSpec | None = None,
    num_rows: int = CALIBRATION_ROWS,
    max_input_tokens: int = Recipe().max_input_tokens,
    cache: Literal["none", "fp8"] = "none",
    revision: str | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> Quantized:
    """Quantise a checkpoint to FP8.

    Args:
        checkpoint: Hugging Face directory or hub id.
        output: the new checkpoint; it must not exist.
        calibration: rows that activations are measured on; `None`: docstrings of the standard library.
        num_rows: how many of them.
        max_input_tokens: they are cut at this length.
        cache: "fp8" also gives a paged cache its scales.
        revision: branch, tag or commit of a hub id.
        say: called with a line whenever a step begins.

    Raises:
        CheckpointRefused: the checkpoint cannot be quantised, or was not as it should be.
        EngineRefused: no vendor package, no card, or the vendor gave up.
        SourceError: the calibration rows cannot be read.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise QuantizedExists(path=output)
    opened = open_checkpoint(checkpoint, revision=revision)
    if opened.kind == "gguf" or opened.dtype not in ("float32", "bfloat16", "float16"):
        raise NotQuantizable(path=checkpoint, problem=f"a {opened.kind} checkpoint in {opened.dtype}")
    versions = check_vendor("quantize")
    dtype = "bfloat16" if opened.dtype == "float32" else opened.dtype
    with whole_directory(output) as draft:
        with tempfile.TemporaryDirectory(prefix="extract-calibration-") as scratch:
            described, count = _write_texts(calibration, num_rows, Path(scratch))
            say(f"quantising {opened.name} to fp8 with {count:,} rows of {described}, {max_input_tokens} tokens each")
            run_quantizer(
                opened.path,
                Path(scratch),
                draft,
                dtype=dtype,
                num_rows=count,
                max_input_tokens=max_input_tokens,
                cache=cache,
                release=versions.tensorrt_llm,
            )
        _check(draft, opened, dtype, cache)
        made = f"tensorrt-llm {versions.tensorrt_llm}, fp8, cache {cache}, {count} rows of {described}"
        where = opened.path.resolve() if opened.kind == "directory" else Path(opened.name)
        write_origin(draft, Origin(name=opened.name, sha256=opened.sha256, path=str(where), made=made))
    return Quantized(
        path=str(output),
        name=opened.name,
        weights="fp8",
        dtype=dtype,
        cache=cache,
        num_bytes=sum(file.stat().st_size for file in output.iterdir()),
        calibration=described,
        num_rows=count,
    )


def _write_texts(calibration: SourceSpec | None, num_rows: int, folder: Path) -> tuple[str, int]:
    """Write `train.parquet` with a `text` column, as the vendor's reader of local datasets wants it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if calibration is None:
        described = "the standard library's docstrings"
        texts = [passage.text for passage in spread(num_rows)]
    else:
        described = " ".join(calibration.paths)
        texts = list(_texts(calibration, num_rows))
        if not texts:
            raise NoCalibrationRows(source=described, count=num_rows, column=calibration.column)
    pq.write_table(pa.table({"text": texts}), folder / "train.parquet")
    return described, len(texts)


def _texts(spec: SourceSpec, num_rows: int) -> Iterator[str]:
    """Texts of the first rows, without what is null or empty."""
    from extract.sources import open_source

    source = open_source(spec)
    try:
        source.layout()
        for batch in source.read(0, num_rows, 256):
            for text in batch.column(0).to_pylist():
                if isinstance(text, str) and text.strip():
                    yield text
    finally:
        source.close()


def _check(draft: Path, opened: Checkpoint, dtype: str, cache: str) -> None:
    """Look at what the vendor wrote: sizes, types, and that the head kept its precision.

    Raises:
        BadQuantization: the first thing that is not as asked.
    """

    def same(field: str, found: object, expected: object) -> None:
        if found != expected:
            raise BadQuantization(name=opened.name, field=field, found=found, expected=expected)

    shape = read_shape(draft)
    same("weights in", shape.weights, "fp8")
    same("states in", shape.dtype, dtype)
    same("a cache in", shape.cache, "fp8" if cache == "fp8" else dtype)
    same("ranks", shape.world_size, 1)
    config = json.loads((draft / CONFIG).read_bytes())
    excluded = [str(name) for name in (config.get("quantization") or {}).get("exclude_modules") or ()]
    same("a head that is", "excluded" if any("lm_head" in name for name in excluded) else "quantised", "excluded")
    tensors = {tensor.name: tensor.dtype for tensor in read_header(draft / "rank0.safetensors")}
    narrow = [name for name, kind in tensors.items() if kind.startswith("F8")]
    same("FP8 tensors", "some" if narrow else "none", "some")
    same("FP8 tensors in the head", [name for name in narrow if "lm_head" in name], [])
