"""Outputs of every kind and type, as shards hold them, and what a row of an export should be."""

from pathlib import Path
from typing import Any

import numpy as np
import shard_rig

from extract.output import open_output
from extract.spec import StatesSpec

KINDS = ("tokens", "last")
DTYPES = ("float16", "float32", "bfloat16")
LENGTHS = (3, 0, 1, 5, 0, 128, 2)


def output(root: Path, kind: str = "tokens", dtype: str = "float16", **options: Any) -> Path:
    """An output of three shards of seven rows (two of each shard without tokens), small record batches."""
    spec = StatesSpec(kind=kind, dtype=dtype, record_batch_bytes=2**16, compression_level=1)
    shard_rig.write_output(root / "out", spec, **options)
    return root / "out"


def stored(path: Path, *, with_states_only: bool = False) -> list[np.ndarray | None]:
    """The stored numbers of every row, in order: [L, H] or [H], bfloat16 as its bits, `None` without states."""
    found: list[np.ndarray | None] = []
    opened = open_output(path)
    for batch in opened.batches():
        for n in range(batch.num_rows):
            values = batch.values[batch.state_spans[n]]
            found.append(None if not len(values) else values if opened.kind == "tokens" else values[0])
    return [one for one in found if one is not None] if with_states_only else found


def assert_same(found: list[Any], expected: list[np.ndarray | None]) -> None:
    """Bit for bit."""
    assert [one is None for one in found] == [one is None for one in expected]
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            one = np.ascontiguousarray(one)
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.tobytes() == other.tobytes()
