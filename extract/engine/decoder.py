"""`load_decoder`: a checkpoint's text decoder in memory, and only if it is exactly what the files hold.

Loading is left to transformers' base model classes: with the file's own dtype the weights stay memory mapped and the
head is never read. What transformers only logs (weights it made up, weights it left over, other shapes) is a refusal
here. A vision-language wrapper is loaded as its text decoder alone; its towers are not read.
"""

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from extract.engine.checkpoint import Checkpoint
from extract.engine.model_config import load_config
from extract.engine.quiet_transformers import quiet_transformers
from extract.engine.tensor_names import WRAPPER_PREFIX, outside_decoder
from extract.errors import CheckpointRefused

if TYPE_CHECKING:
    import torch

_MEANINGS = {
    "head": "language model head not loaded",
    "tower": "vision, audio or projector weights not loaded",
    "prediction": "multi-token prediction layers not loaded",
    "buffer": "stored buffers ignored, they are computed",
}


class CannotLoad(CheckpointRefused):
    """Loading itself fails."""

    template: ClassVar[str] = "{path}: transformers {version} cannot load the weights: {reason}"


class WeightsDoNotFit(CheckpointRefused):
    """Weights and config do not belong together."""

    template: ClassVar[str] = (
        "{path}: the weights do not fit {architecture} with this config: {problem}. Nothing is filled in or left out "
        "in silence; check that config.json and the weight files are from the same checkpoint."
    )


class NonFiniteWeights(CheckpointRefused):
    """NaN or infinity in a weight."""

    template: ClassVar[str] = (
        "{path}: weight {name} ({dtype} {shape}) has {count:,} values that are not finite. The checkpoint is damaged, "
        "or overflowed when it was converted; take another copy."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A text decoder without its head.

    Attributes:
        model: transformers' base model, in eval mode, without gradients; `last_hidden_state` is its output.
        config: the text decoder's config; `use_cache` is False.
        notes: what was not loaded, in words.
    """

    model: "torch.nn.Module"
    config: Any
    notes: tuple[str, ...] = ()


def load_decoder(checkpoint: Checkpoint, dtype: str, *, attn_implementation: str | None = None) -> Decoder:
    """Load the text decoder of a checkpoint on the CPU.

    Args:
        checkpoint: from `open_checkpoint`.
        dtype: torch name of the weights' type in memory; with the checkpoint's own they stay memory mapped.
        attn_implementation: transformers' name ("eager", "sdpa"); `None` is the family's default.

    Raises:
        CannotLoad: transformers gives up (also: a pickle that holds more than weights).
        WeightsDoNotFit: weights are missing, left over without an explanation, or of another shape.
        NonFiniteWeights: a weight holds NaN or infinity.
    """
    if checkpoint.kind == "gguf":
        from extract.engine.gguf_import import import_gguf

        model, report, leftover = _attempt(checkpoint, lambda: import_gguf(checkpoint.path, dtype, attn_implementation))
    else:
        config = load_config(checkpoint.path)
        text = config.get_text_config(decoder=True)
        is_wrapper = text is not config
        model, report = _attempt(
            checkpoint, lambda: _from_files(checkpoint, text, is_wrapper, dtype, attn_implementation)
        )
        leftover = set(report["unexpected_keys"])
    notes = _judge(checkpoint, model, report, leftover)
    model.config.use_cache = False
    model.eval().requires_grad_(False)
    _check_finite(checkpoint.path, model)
    return Decoder(model=model, config=model.config, notes=notes)


def _from_files(
    checkpoint: Checkpoint, text: Any, is_wrapper: bool, dtype: str, attention: str | None
) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModel

    options: dict[str, Any] = {}
    if is_wrapper:
        options["key_mapping"] = {WRAPPER_PREFIX: ""}
    if attention is not None:
        options["attn_implementation"] = attention
    text.use_cache = False
    if isinstance(getattr(text, "quantization_config", None), dict):
        text.quantization_config["dequantize"] = True  # also on devices that could compute with the quantised weights
    model, report = AutoModel.from_pretrained(
        checkpoint.path,
        config=text,
        dtype=getattr(torch, dtype),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported instead of raised without details; refused below
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=not checkpoint.pickled,
        weights_only=True,
        **options,
    )
    return model, report


def _attempt(checkpoint: Checkpoint, load: Callable[[], Any]) -> Any:
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    failures = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, AssertionError)
    try:
        with quiet_transformers():
            return load()
    except (*failures, pickle.UnpicklingError, SafetensorError, StrictDataclassError) as error:
        reason = (" ".join(str(error).split()) or type(error).__name__)[:400]
        raise CannotLoad(path=checkpoint.path, version=transformers.__version__, reason=reason) from error


def _judge(checkpoint: Checkpoint, model: Any, report: Any, leftover: set[str]) -> tuple[str, ...]:
    """Refuse what the loading report says, or put it in words."""

    def refuse(problem: str) -> WeightsDoNotFit:
        return WeightsDoNotFit(path=checkpoint.path, architecture=type(model).__name__, problem=problem)

    missing = sorted(report["missing_keys"])
    if missing:
        raise refuse(f"{len(missing)} weights are missing from the files ({_some(missing)})")
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        shapes = [f"{name}: {list(found)} found, {list(expected)} expected" for name, found, expected in mismatched]
        raise refuse(f"{len(shapes)} weights have another shape ({_some(shapes)})")
    if report["error_msgs"]:
        raise refuse(_some([" ".join(str(message).split()) for message in report["error_msgs"]]))
    config = model.config
    ahead = max(
        (
            getattr(config, key, 0) or 0
            for key in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
        ),
        default=0,
    )
    parts = {
        name: outside_decoder(name, num_layers=config.num_hidden_layers, num_prediction_layers=ahead)
        for name in leftover
    }
    unexplained = sorted(name for name, part in parts.items() if part is None)
    if unexplained:
        raise refuse(f"{len(unexplained)} weights of the files have no place in it ({_some(unexplained)})")
    counts = Counter(part for part in parts.values() if part is not None)
    return tuple(f"{_MEANINGS[part]} ({count} tensors)" for part, count in sorted(counts.items()))


def _check_finite(path: Path, model: "torch.nn.Module") -> None:
    import torch

    for name, weight in model.named_parameters():
        # The extremes are enough (NaN wins both) and need no copy of a weight that is memory mapped.
        if weight.numel() and not all(torch.isfinite(extreme) for extreme in torch.aminmax(weight)):
            count = weight.numel() - int(torch.isfinite(weight).sum())
            kind, shape = str(weight.dtype).removeprefix("torch."), list(weight.shape)
            raise NonFiniteWeights(path=path, name=name, dtype=kind, shape=shape, count=count)


def _some(items: list[str]) -> str:
    return ", ".join(items[:4]) + (", ..." if len(items) > 4 else "")
