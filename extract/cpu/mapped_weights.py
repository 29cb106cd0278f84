"""A safetensors file mapped into memory: its tensors as numpy arrays, without copying and without torch.

Knows names, types and shapes as the header gives them, and nothing of models. The header is checked against the size of
the file before any tensor is read, because a cut file can be mapped all the same and reading it then kills the process.
A tensor that has been copied elsewhere is given back with `drop`, so that file and copy are not both in memory.
"""

import json
import math
import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from extract.cpu.kernels import Float32, Weights
from extract.errors import EngineRefused

PLAIN = ("F32", "F16", "BF16")
"""Types of plain weights; bfloat16 comes as uint16, its bits."""
FP8 = ("F8_E4M3",)
"""The type of weights that mean nothing without their scales; it comes as uint8, its bits."""

_TYPES: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
}


class DamagedWeights(EngineRefused):
    """The weights file of an engine is not a whole safetensors file."""

    template = "{path}: {problem}. Build the engine again."


class UnfitWeights(EngineRefused):
    """The weights file of an engine does not hold what its architecture asks for."""

    template = "{path}: tensor {tensor}: {problem}. Build the engine again."


class WeightsFile:
    """Tensors of a mapped safetensors file. Views stay valid for as long as anything refers to them."""

    def __init__(self, path: Path) -> None:
        """Map the file and check its header against its size.

        Raises:
            DamagedWeights: the file is missing, cut, padded, or its header cannot be read.
        """
        self.path = path
        try:
            size = path.stat().st_size
            if size < 8:  # an empty file cannot even be mapped
                raise DamagedWeights(path=path, problem=f"{size} bytes found, a header expected")
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DamagedWeights(path=path, problem=f"cannot be mapped: {error.strerror}") from None
        try:
            self._spans = _spans(self._map, path)
        except DamagedWeights:
            self._map.close()
            raise

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors in the file."""
        return frozenset(self._spans)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, types: tuple[str, ...] = PLAIN) -> Weights:
        """The tensor as a read-only view: float32, float16, uint16 with the bits of bfloat16, uint8 with those of E4M3.

        Args:
            name: as the file has it.
            shape: that it must have; `None`: any.
            types: that will do, of `PLAIN` and `FP8`.

        Raises:
            UnfitWeights: it is not in the file, of another type, or of another shape.
        """
        span = self._spans.get(name)
        if span is None:
            raise UnfitWeights(path=self.path, tensor=name, problem="not in the file")
        if span.dtype not in types:
            problem = f"type {span.dtype} found, {', '.join(types)} expected"
            raise UnfitWeights(path=self.path, tensor=name, problem=problem)
        if shape is not None and span.shape != shape:
            problem = f"shape {list(span.shape)} found, {list(shape)} expected"
            raise UnfitWeights(path=self.path, tensor=name, problem=problem)
        array = np.frombuffer(self._map, _TYPES[span.dtype], math.prod(span.shape), span.start).reshape(span.shape)
        return np.require(array, requirements="A")  # copies only where a foreign writer did not align its header

    def place_of(self, array: Weights) -> int | None:
        """Where in the file a tensor's first byte lies, or that of rows of it; `None`: it is a copy."""
        if not array.flags.c_contiguous:
            return None
        first = int(np.frombuffer(self._map, np.uint8, 1).ctypes.data)
        place = int(array.ctypes.data) - first
        return place if 0 <= place <= len(self._map) - array.nbytes else None

    def drop(self, *names: str) -> None:
        """Let the kernel take the memory of these tensors; views stay valid, reading them goes to the file again."""
        if sys.platform == "win32":
            return
        for name in names:
            span = self._spans[name]
            start = span.start - span.start % mmap.PAGESIZE
            if span.stop > start:
                self._map.madvise(mmap.MADV_DONTNEED, start, span.stop - start)

    def close(self) -> None:
        """Unmap the file, or leave that to the last view."""
        with suppress(BufferError):  # raised while views are alive: each holds the map, which goes with the last one
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def to_float32(array: Weights) -> Float32:
    """Values as float32, exactly: a copy of float16 and of bfloat16 bits, the array itself where it is float32."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class _Span:
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _spans(file: mmap.mmap, path: Path) -> dict[str, _Span]:
    """Where each tensor lies in the file, checked to cover the file without gap or overlap."""
    first = 8 + int.from_bytes(file[:8], "little")
    if first > len(file):
        raise DamagedWeights(path=path, problem=f"a header up to byte {first:,} in a file of {len(file):,} bytes")
    try:
        header = json.loads(file[8:first])
        spans = {
            name: _Span(
                str(entry["dtype"]),
                tuple(int(size) for size in entry["shape"]),
                first + int(entry["data_offsets"][0]),
                first + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DamagedWeights(path=path, problem=f"the header does not parse ({type(error).__name__})") from None
    at = first
    for name, span in sorted(spans.items(), key=lambda item: (item[1].start, item[1].stop)):
        if min(span.shape, default=0) < 0:
            raise DamagedWeights(path=path, problem=f"tensor {name}: the shape {list(span.shape)} found")
        kind = _TYPES.get(span.dtype)
        length = max(span.stop - span.start, 0) if kind is None else math.prod(span.shape) * np.dtype(kind).itemsize
        if (span.start, span.stop) != (at, at + length):
            found = f"bytes {span.start - first:,} to {span.stop - first:,} found"
            expected = f"{at - first:,} to {at - first + length:,} expected"
            raise DamagedWeights(path=path, problem=f"tensor {name}: {found}, {expected}")
        at = span.stop
    if at != len(file):
        raise DamagedWeights(path=path, problem=f"{len(file):,} bytes found, {at:,} expected")
    return spans
