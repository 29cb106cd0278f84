"""Which weight files a checkpoint directory has, and whether each is whole: headers only, no tensor is read.

A cut or padded safetensors file can be mapped and read as zeros or rubbish, so every header is compared with the size
of its file, byte for byte, before anything is loaded. Headers are parsed here instead of by the safetensors package:
a refusal can then say what was found and expected, and an absurd length is refused before it is allocated. This module
knows nothing of models: a tensor is a name, a type, a shape and a size.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from extract.errors import CheckpointRefused

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED_SINGLE, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}


class BrokenWeights(CheckpointRefused):
    """A weight file is not whole, or is not what the index says."""

    template: ClassVar[str] = "{path}: {problem}. Copy the checkpoint again, or take a whole one."


class NoWeights(CheckpointRefused):
    """A directory with a config, but without weights that can be read."""

    template: ClassVar[str] = "{path}: no weights: neither {single} nor {index} is there{found}. {advice}"


class PickledWeights(CheckpointRefused):
    """Weights are there only as a pickle, and nobody allowed that."""

    template: ClassVar[str] = (
        "{path}: the weights are there only as {name}, a pickle. Convert them to safetensors (better), or allow them "
        "with --allow-pickle: they are then read with weights_only, which runs no code."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a weight file: its safetensors type name ("BF16"), shape and bytes on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: str

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The weight files that will be loaded, and their index; `tensors` is empty for pickles, whose inside is unread."""

    files: tuple[Path, ...]
    index: Path | None
    tensors: tuple[StoredTensor, ...]
    pickled: bool = False


def find_weights(directory: Path, *, allow_pickle: bool = False) -> WeightFiles:
    """Find the weight files that transformers would load from `directory`, and check them without reading a tensor.

    Raises:
        NoWeights: none with a name that is loaded.
        PickledWeights: only `.bin` files, without `allow_pickle`.
        BrokenWeights: a shard is missing, a file is cut, padded or corrupt, or the index does not fit the shards.
    """
    if (directory / SINGLE).is_file():
        path = directory / SINGLE
        return WeightFiles(files=(path,), index=None, tensors=read_header(path))
    if (directory / INDEX).is_file():
        return _sharded(directory)
    pickled = next((directory / name for name in (PICKLED_SINGLE, PICKLED_INDEX) if (directory / name).is_file()), None)
    if pickled is None:
        raise _no_weights(directory)
    if not allow_pickle:
        raise PickledWeights(path=directory, name=pickled.name)
    if pickled.name == PICKLED_SINGLE:
        return WeightFiles(files=(pickled,), index=None, tensors=(), pickled=True)
    shards = _present_shards(pickled, _weight_map(pickled))
    return WeightFiles(files=shards, index=pickled, tensors=(), pickled=True)


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """Tensors of a safetensors file, checked against the file's size.

    Raises:
        BrokenWeights: the header or the data is cut, has bytes left over, or contradicts itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise BrokenWeights(path=path, problem=_cut(f"a header of {length:,} bytes", length + 8, size))
        if length > MAX_HEADER_BYTES:
            problem = f"a safetensors header of {length:,} bytes found, at most {MAX_HEADER_BYTES:,} expected"
            raise BrokenWeights(path=path, problem=problem)
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise BrokenWeights(path=path, problem=f"the safetensors header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise BrokenWeights(path=path, problem="the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    tensors, spans = [], []
    for name, entry in header.items():
        tensor, begin, end = _entry(path, name, entry)
        tensors.append(tensor)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            problem = f"tensor {name} starts at byte {begin:,} of the data, {position:,} expected"
            raise BrokenWeights(path=path, problem=problem)
        position = end
    if 8 + length + position != size:
        raise BrokenWeights(path=path, problem=_cut(f"{len(tensors)} tensors", 8 + length + position, size))
    if not tensors:
        raise BrokenWeights(path=path, problem="the file holds no tensors")
    return tuple(tensors)


def _cut(what: str, expected: int, found: int) -> str:
    state = "is cut short" if found < expected else "has bytes left over"
    return f"the file {state}: {what} need {expected:,} bytes, found {found:,}"


def _entry(path: Path, name: str, entry: Any) -> tuple[StoredTensor, int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        bits = _BITS[dtype]
        numbers = [*shape, begin, end]
        if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
            raise ValueError(f"shape {shape} and offsets {begin, end} must be whole numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenWeights(path=path, problem=f"tensor {name} has a header that does not parse ({error!r})") from None
    expected = math.prod(shape) * bits // 8
    if end - begin != expected:
        problem = f"tensor {name} ({dtype} {list(shape)}) needs {expected:,} bytes, its header gives {end - begin:,}"
        raise BrokenWeights(path=path, problem=problem)
    tensor = StoredTensor(name=name, dtype=dtype, shape=shape, num_bytes=expected, file=path.name)
    return tensor, begin, end


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice")
    return table


def _sharded(directory: Path) -> WeightFiles:
    index = directory / INDEX
    weight_map = _weight_map(index)
    shards = _present_shards(index, weight_map)
    tensors = [tensor for shard in shards for tensor in read_header(shard)]
    where: dict[str, str] = {}
    for tensor in tensors:
        if tensor.name in where:
            problem = f"tensor {tensor.name} stands in two shards, {where[tensor.name]} and {tensor.file}"
            raise BrokenWeights(path=directory, problem=problem)
        where[tensor.name] = tensor.file
    for name, shard in weight_map.items():
        if where.get(name) != shard:
            found = f"it is in {where[name]}" if name in where else "no shard holds it"
            raise BrokenWeights(path=index, problem=f"tensor {name} should be in {shard}, but {found}")
    return WeightFiles(files=shards, index=index, tensors=tuple(tensors))


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        pairs = dict(weight_map)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BrokenWeights(path=index, problem=f"not an index with a weight_map ({error!r})") from None
    for name, shard in pairs.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard:
            problem = f'tensor {name} is said to be in "{shard}", which is not a file of this directory'
            raise BrokenWeights(path=index, problem=problem)
    if not pairs:
        raise BrokenWeights(path=index, problem="the weight_map is empty")
    return pairs


def _present_shards(index: Path, weight_map: dict[str, str]) -> tuple[Path, ...]:
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise BrokenWeights(path=index, problem=f"{len(missing)} of {len(shards)} shards are missing: {shown}")
    return tuple(index.parent / name for name in shards)


def _no_weights(directory: Path) -> NoWeights:
    names = sorted(path.name for path in directory.iterdir())
    weights = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt"))]
    found = f"; found {', '.join(weights[:4])}{', ...' if len(weights) > 4 else ''}" if weights else ""
    ggufs = [name for name in weights if name.endswith(".gguf")]
    if ggufs:
        advice = f"Give the GGUF file itself: {directory / ggufs[0]}"
    elif "consolidated.safetensors" in names:
        advice = "consolidated.safetensors is its publisher's own layout: take the one that transformers reads."
    elif any(name.startswith("model-") and name.endswith(".safetensors") for name in names):
        advice = f"These are shards without their index: fetch {INDEX} too."
    else:
        advice = "Fetch the weights too, as safetensors."
    return NoWeights(path=directory, single=SINGLE, index=INDEX, found=found, advice=advice)
