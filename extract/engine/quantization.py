"""Checkpoints whose weights were quantised by somebody else: which are dequantised, which are refused, and why.

transformers skips an unknown method with a warning and dequantises FP8 and MXFP4 with another one; here both are said
aloud, the first as a refusal (dequantising is transformers' work, and needs accelerate). Methods with a package of
their own are refused even where it is installed: numbers depend on its kernels, and an engine holds plain weights.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from extract.engine.tensor_names import is_quantised
from extract.engine.weights_files import StoredTensor
from extract.errors import CheckpointRefused

DEQUANTISED = ("fp8", "mxfp4")
_PACKAGES = {
    "aqlm": "aqlm[gpu,cpu]",
    "auto-round": "auto-round",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "fbgemm-gpu",
    "gptq": "optimum gptqmodel",
    "hqq": "hqq",
    "quanto": "optimum-quanto",
    "torchao": "torchao",
}


class QuantizedCheckpoint(CheckpointRefused):
    """The weights are quantised in a way that is not read here."""

    template: ClassVar[str] = (
        "{path}: the weights are quantised with {method}{bits}, which is not read here. Take the checkpoint that it "
        "was made from, or dequantise it first and save it again{install}."
    )


class UnknownQuantization(CheckpointRefused):
    """Something quantised the weights, and nothing says how."""

    template: ClassVar[str] = (
        "{path}: {problem}. Weights that cannot be read as they were meant are never guessed; take the checkpoint that "
        "it was made from."
    )


def check_quantization(directory: Path, config: Mapping[str, Any], tensors: Iterable[StoredTensor]) -> tuple[str, ...]:
    """Refuse quantised weights that would be read wrongly; return notes for those that are dequantised.

    Raises:
        QuantizedCheckpoint: a known method with its own package, or ModelOpt's `hf_quant_config.json`.
        UnknownQuantization: an unknown method, or packed weights without a `quantization_config`.
    """
    if (directory / "hf_quant_config.json").is_file():
        raise QuantizedCheckpoint(path=directory, method="ModelOpt (hf_quant_config.json)", bits="", install="")
    nested = config.get("text_config")
    inner = nested.get("quantization_config") if isinstance(nested, dict) else None
    settings = config.get("quantization_config") or inner
    if not settings:
        packed = sorted(tensor.name for tensor in tensors if _is_packed(tensor))
        if packed:
            problem = f"quantised, no quantization_config: {len(packed)} tensors such as {packed[0]} are packed weights"
            raise UnknownQuantization(path=directory, problem=problem)
        return ()
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method is None and isinstance(settings, dict) and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if method in DEQUANTISED and isinstance(nested, dict):
        problem = f"{method} weights inside a wrapper of several models are not supported"
        raise UnknownQuantization(path=directory, problem=problem)
    if method in DEQUANTISED and importlib.util.find_spec("accelerate") is None:
        install = " (reading it needs: pip install accelerate)"
        raise QuantizedCheckpoint(path=directory, method=method, bits="", install=install)
    if method in DEQUANTISED:
        return (f"dequantised: the checkpoint's weights are {method}",)
    if method in _PACKAGES:
        install = f" (it needs: pip install {_PACKAGES[method]})"
        raise QuantizedCheckpoint(path=directory, method=method, bits=_bits(settings), install=install)
    problem = f'quantization_config has quant_method "{method}", which is not known here'
    raise UnknownQuantization(path=directory, problem=problem)


def _is_packed(tensor: StoredTensor) -> bool:
    small = tensor.dtype.startswith(("F8", "F6", "F4"))
    whole = tensor.name.endswith(".weight") and tensor.dtype in ("I8", "U8", "I16", "I32")
    return small or whole or is_quantised(tensor.name)


def _bits(settings: Mapping[str, Any]) -> str:
    bits = settings.get("bits") or settings.get("w_bit") or settings.get("nbits")
    if bits is None and settings.get("load_in_4bit"):
        bits = 4
    if bits is None and settings.get("load_in_8bit"):
        bits = 8
    groups = settings.get("config_groups")
    if bits is None and isinstance(groups, dict):
        weights = next((group.get("weights") for group in groups.values() if isinstance(group, dict)), None)
        bits = weights.get("num_bits") if isinstance(weights, dict) else None
    return f" ({bits} bits)" if bits is not None else ""
