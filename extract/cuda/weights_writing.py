"""Write a safetensors file tensor by tensor: the header from types and shapes alone, then each tensor as it is made.

safetensors' own writer takes all tensors at once, so a model that is rounded on its way to the disk would lie in memory
twice. Here one tensor at a time is there beside the model that it is made from.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from extract.cuda.fp8 import FP8

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", FP8: "F8_E4M3"}
_ALIGNMENT = 64
"""Bytes of which the header is a multiple, so that tensors lie where arrays may begin."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Type and shape of a tensor that will be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return self.dtype.itemsize * math.prod(self.shape)


def file_bytes(kinds: Mapping[str, TensorKind]) -> int:
    """Size of the file that holds these tensors."""
    return len(_header(kinds)) + sum(kind.num_bytes for kind in kinds.values())


def write_tensors(path: Path, kinds: Mapping[str, TensorKind], tensors: Iterable[torch.Tensor]) -> None:
    """Write a safetensors file.

    Args:
        path: the file.
        kinds: every tensor by name, in the order of the file.
        tensors: the same, on any device; each is asked for when the one before is written.

    Raises:
        OSError: the disk refuses.
    """
    with path.open("wb") as file:
        file.write(_header(kinds))
        for (name, kind), tensor in zip(kinds.items(), tensors, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (kind.dtype, kind.shape), name
            file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _header(kinds: Mapping[str, TensorKind]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in kinds.items():
        start, end = end, end + kind.num_bytes
        table[name] = {"dtype": _NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
