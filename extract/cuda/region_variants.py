"""Which compiled code a region needs: regions with equal sizes and switches share it, whatever their weights are.

Weights enter compiled code as inputs, so a decoder of 32 layers needs about as many pieces of code as one layer has
regions. The same region may be called with rows that lie apart in memory (queries out of one product with keys and
values) and with rows that do not: compiled code computes addresses with the strides that it was compiled for and does
not look again, so each way is a variant of its own, found by the strides of its inputs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from extract.canonical import digest
from extract.cuda.regions import Region

Layout = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
"""For each input: type, sizes but for the number of rows, strides."""


def regions_of(decoder: nn.Module) -> Iterator[Region]:
    """Every region of a decoder."""
    return (module for module in decoder.modules() if isinstance(module, Region))


def signature(region: Region) -> str:
    """Equal for regions that one piece of code computes: class, sizes, types and switches, of its parts too."""
    parts = [
        {
            "name": name,
            "class": type(module).__name__,
            "switches": {key: str(value) for key, value in vars(module).items() if _is_switch(key, value)},
            "buffers": [(key, str(value.dtype), list(value.shape)) for key, value in module.named_buffers("", False)],
        }
        for name, module in region.named_modules()
    ]
    return digest(parts)[:16]


def layout(inputs: tuple[torch.Tensor, ...]) -> Layout:
    """What compiled code takes for granted about its inputs."""
    return tuple((str(one.dtype), tuple(one.shape[1:]), one.stride()) for one in inputs)


def leaves(output: Any) -> list[torch.Tensor]:
    """The tensors of a region's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for part in output if part is not None for leaf in leaves(part)]


def rebuilt(pattern: Any, found: Iterator[torch.Tensor]) -> Any:
    """The output with this `pattern_of` from its tensors."""
    if pattern == "tensor":
        return next(found)
    return None if pattern is None else tuple(rebuilt(part, found) for part in pattern)


def pattern_of(output: Any) -> Any:
    """How an output nests, in JSON's words: "tensor", `None`, or a list of them."""
    if isinstance(output, torch.Tensor):
        return "tensor"
    return None if output is None else [pattern_of(part) for part in output]


def _is_switch(key: str, value: object) -> bool:
    return not key.startswith("_") and key != "training" and isinstance(value, (bool, int, float, str, torch.dtype))
