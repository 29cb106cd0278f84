"""The header of a GGUF file: architecture, metadata, and where each tensor lies; no tensor is read.

Parsed here with bounds instead of by gguf's reader, which takes seconds for a vocabulary and maps a cut file without a
word. What the settings mean, and which are accepted, is for `gguf_settings`.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from extract.errors import CheckpointRefused

HEAD = "output.weight"

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 8


class RefusedGguf(CheckpointRefused):
    """A GGUF file that is not whole, or that the import would not carry over exactly."""

    template: ClassVar[str] = "{path}: {problem}. {advice}"


class ArrayLength(int):
    """Stands in the metadata for an array, which is not kept; of its own type, so it is never taken for a setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor: GGUF's name and type name ("Q4_1"), shape (slowest dimension first), where its bytes lie."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    """From the start of the file."""
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a GGUF file says of itself. Arrays of the metadata are kept as their lengths."""

    architecture: str
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    def setting(self, key: str) -> Any:
        """A value of the architecture's own metadata, such as "block_count"; `None` if it is not there."""
        return self.metadata.get(f"{self.architecture}.{key}")


class _Cursor:
    """Reads little-endian values from a mapped file and never past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position = data, path, 0

    def take(self, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self.bytes(struct.calcsize("<" + form)))

    def bytes(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise _broken(self.path, f"the file is cut short: its header needs {end:,} bytes, found {len(self.data):,}")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def text(self) -> str:
        return self.bytes(self.take("Q")[0]).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < 4:
            inner, count = self.take("IQ")
            if inner in _SCALARS:
                self.bytes(count * struct.calcsize("<" + _SCALARS[inner]))
            else:
                for _ in range(count):
                    self.value(inner, depth + 1)
            return ArrayLength(count)
        raise _broken(self.path, f"metadata of type {kind} found, which GGUF does not have")


def read_gguf(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Raises:
        RefusedGguf: no GGUF file, an unknown version or tensor type, or cut short.
    """
    if path.stat().st_size < 24:
        raise _broken(path, f"{path.stat().st_size} bytes are too few for a GGUF header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, path)
        magic = cursor.bytes(4)
        if magic != b"GGUF":
            raise _broken(path, f'not a GGUF file: it starts with {magic!r}, "GGUF" expected')
        version, num_tensors, num_keys = cursor.take("IQQ")
        if version not in (2, 3):
            raise _broken(path, f"GGUF version {version} found, 2 or 3 expected")
        metadata = {}
        for _ in range(num_keys):
            key = cursor.text()
            metadata[key] = cursor.value(cursor.take("I")[0])
        tensors = _tensors(cursor, num_tensors, int(metadata.get("general.alignment", 32)), len(data))
    architecture = str(metadata.get("general.architecture"))
    return GgufHeader(architecture=architecture, metadata=metadata, tensors=tensors)


def _tensors(cursor: _Cursor, count: int, alignment: int, size: int) -> tuple[GgufTensor, ...]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    entries, end = [], 0
    for _ in range(count):
        name = cursor.text()
        (num_dimensions,) = cursor.take("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise _broken(cursor.path, f"tensor {name} has {num_dimensions} dimensions")
        shape = cursor.take(f"{num_dimensions}Q")
        kind, offset = cursor.take("IQ")
        try:
            kind = GGMLQuantizationType(kind)
        except ValueError:
            raise _broken(cursor.path, f"tensor {name} is of type {kind}, which this gguf version lacks") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(shape) // block * block_bytes
        end = max(end, offset + num_bytes)
        entries.append((name, kind.name, tuple(reversed(shape)), offset, num_bytes))
    if alignment < 1 or not entries:
        raise _broken(cursor.path, f"{len(entries)} tensors and an alignment of {alignment} found")
    start = -(-cursor.position // alignment) * alignment
    if start + end > size:
        problem = f"the file is cut short: {len(entries)} tensors need {start + end:,} bytes, found {size:,}"
        raise _broken(cursor.path, problem)
    return tuple(
        GgufTensor(name=name, type=kind, shape=shape, offset=start + offset, num_bytes=num_bytes)
        for name, kind, shape, offset, num_bytes in entries
    )


def _broken(path: Path, problem: str) -> RefusedGguf:
    return RefusedGguf(path=path, problem=problem, advice="Copy the file again, or take a whole one.")
