"""The rows that everybody runs: random token ids, the same for all.

`full`: every row is 128 tokens. `mixed`: lengths as documentation has them, cut at 128 (quantiles 10 / 25 / 50 % = 41 /
83 / 128). `shared`: 128 tokens, of which the first 90 (70 %) are the same in all rows, as under one prompt.
"""

from typing import Any

import numpy as np

LIMIT = 128
SHARED = 90


def rows_of(kind: str, num_rows: int, vocabulary: int, *, limit: int = LIMIT, seed: int = 0) -> list[Any]:
    """int32 [L] each."""
    draw = np.random.Generator(np.random.PCG64(seed))
    if kind == "mixed":
        low = draw.integers(limit // 16 or 1, limit // 3 + 1, num_rows)
        middle = draw.integers(limit // 3, limit + 1, num_rows)
        part = draw.random(num_rows)
        lengths = np.where(part < 0.1, low, np.where(part < 0.4, middle, limit))
    else:
        lengths = np.full(num_rows, limit)
    ids = draw.integers(0, vocabulary, (num_rows, limit), dtype=np.int32)
    if kind == "shared":
        ids[:, : max(1, round(limit * SHARED / LIMIT))] = ids[0, : max(1, round(limit * SHARED / LIMIT))]
    return [row[:length] for row, length in zip(ids, lengths, strict=True)]
