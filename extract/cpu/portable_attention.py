"""Causal attention of packed sequences on one thread, compiled by Numba.

Per sequence and key head, keys (transposed) and values are gathered once, as float32, from this micro-batch and from
the kept rows; all query heads of that key head then go over them in tiles of four rows. Tiles follow query by query,
the heads of a group side by side, so a single last query fills its tile with them. Scores of a whole row are held, not
streamed: sequences are short here. A key that a query may not see never enters a sum, not even times zero, so a NaN
cannot travel back in time.
"""

from typing import Any

import numpy as np

from extract.cpu.portable_glue import put_row
from extract.cpu.portable_numbers import exp, f4, inner, kernel, load, of_rank, rank, tanh
from extract.cpu.portable_vectors import COLUMNS, ROWS, tile_product

STEP = 32
"""Scores that a vectorised loop takes at a time."""


@inner
def _round_up(number: int, step: int) -> int:
    return (number + step - 1) // step * step


@kernel
def _gather(
    source: Any, row: int, column: int, value_column: int, head_dim: int, keys: Any, values: Any, j: int
) -> None:
    """Key and value of one position into column `j` of `keys` and row `j` of `values`."""
    key = source[row, column : column + head_dim]
    value = source[row, value_column : value_column + head_dim]
    target = values[j]
    for d in range(head_dim):
        keys[d, j] = load(key[d])
    for d in range(head_dim):
        target[d] = load(value[d])


@kernel
def _weigh_rest(scores: Any, values: Any, first: int, end: int, total: Any) -> None:
    """Add scores[j] * values[j], first <= j < end, to `total`."""
    for j in range(first, end):
        weight = scores[j]
        value = values[j]
        for d in range(total.shape[0]):
            total[d] += weight * value[d]


@kernel
def _exponentials(scores: Any, count: int, softcap: Any) -> Any:
    """Replace the first `count` scores by exp(score - largest score), capped before; the sum of all.

    The others fill the last whole step of a vectorised loop: they become next to nothing, e**-87, and have no value.
    """
    if softcap > f4(0):
        inverse = f4(1) / softcap
        for j in range(scores.shape[0]):
            scores[j] = softcap * tanh(scores[j] * inverse)
    for j in range(count, scores.shape[0]):
        scores[j] = f4(-np.inf)
    peak_rank = rank(scores[0])
    for j in range(scores.shape[0]):
        peak_rank = max(peak_rank, rank(scores[j]))
    peak = of_rank(peak_rank)
    total = f4(0)
    for j in range(scores.shape[0]):
        weight = exp(scores[j] - peak)
        scores[j] = weight
        total += weight
    return total


@kernel
def attend_rows(
    queries: Any,
    keys_values: Any,
    column: int,
    kept: Any,
    num_kept: int,
    query_start: Any,
    query_count: Any,
    cu_keys: Any,
    key_index: Any,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: Any,
    softcap: Any,
    window: int,
    out: Any,
    out_scales: Any,
) -> None:
    """Attention of every sequence; see `Kernels.attend`. `softcap` 0 and `window` 0: none."""
    group = num_heads // num_kv_heads
    width = num_heads * head_dim
    depth = _round_up(head_dim, COLUMNS)
    longest = 0
    most = 0
    for b in range(query_start.shape[0]):
        longest = max(longest, cu_keys[b + 1] - cu_keys[b])
        most = max(most, query_count[b])
    capacity = (
        _round_up(longest, COLUMNS) + COLUMNS
    )  # never a power of two, or columns of `keys` would share cache sets
    keys = np.zeros((depth, capacity), np.float32)
    values = np.zeros((capacity, depth), np.float32)
    scores = np.zeros((ROWS, capacity + STEP), np.float32)
    tile = np.zeros((ROWS, depth), np.float32)
    sums = np.empty((ROWS, depth), np.float32)
    first_key = np.empty(ROWS, np.int64)
    end_key = np.empty(ROWS, np.int64)
    inverse = np.empty(ROWS, np.float32)
    rows = np.empty((most, out.shape[1]), np.float32)
    for b in range(query_start.shape[0]):
        index = key_index[cu_keys[b] : cu_keys[b + 1]]
        start = query_start[b]
        count = query_count[b]
        first = index.shape[0] - count  # position of the first query
        base = max(0, first - window + 1) if window > 0 else 0  # position of the first key that any query sees
        for kv in range(num_kv_heads):
            for position in range(base, index.shape[0]):
                row = index[position]
                if row < num_kept:
                    at = kv * head_dim
                    value_at = at + num_kv_heads * head_dim
                    _gather(kept, row, at, value_at, head_dim, keys, values, position - base)
                else:
                    at = column + kv * head_dim
                    value_at = at + num_kv_heads * head_dim
                    _gather(keys_values, row - num_kept, at, value_at, head_dim, keys, values, position - base)
            for row0 in range(0, count * group, ROWS):
                size = min(ROWS, count * group - row0)
                for i in range(size):
                    query = (row0 + i) // group
                    head = kv * group + (row0 + i) % group
                    source = queries[start + query, head * head_dim : (head + 1) * head_dim]
                    target = tile[i]
                    for d in range(head_dim):
                        target[d] = load(source[d]) * scale
                    end_key[i] = first + query + 1 - base
                    first_key[i] = max(0, end_key[i] - window) if window > 0 else 0
                for j in range(first_key[0] // COLUMNS * COLUMNS, end_key[size - 1], COLUMNS):
                    tile_product(tile, keys, 0, head_dim, j, scores)
                for i in range(size):
                    count_seen = end_key[i] - first_key[i]
                    row_scores = scores[i, first_key[i] : first_key[i] + _round_up(count_seen, STEP)]
                    inverse[i] = f4(1) / _exponentials(row_scores, count_seen, softcap)
                # Keys that all rows see are taken together, the few others row by row.
                low = first_key[size - 1]
                high = max(low, end_key[0])
                for d in range(0, depth, COLUMNS):
                    tile_product(scores, values, low, high - low, d, sums)
                for i in range(size):
                    _weigh_rest(scores[i], values, first_key[i], min(low, end_key[i]), sums[i])
                    _weigh_rest(scores[i], values, max(high, first_key[i]), end_key[i], sums[i])
                    query = (row0 + i) // group
                    head = kv * group + (row0 + i) % group
                    result = rows[query, head * head_dim : (head + 1) * head_dim]
                    total = sums[i]
                    for d in range(head_dim):
                        result[d] = total[d] * inverse[i]
        for i in range(count):
            put_row(rows[i], width, out, out_scales, start + i)
