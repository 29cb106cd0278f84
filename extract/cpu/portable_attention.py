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

TILE = 4
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
def _scores(queries: Any, keys: Any, low: int, high: int, scores: Any) -> None:
    """scores[i, j] = queries[i] . keys[:, j] for a tile of rows and low <= j < high."""
    # Loops from 0 over contiguous slices vectorise; of an index from `low` Numba would have to ask if it is negative.
    s0, s1, s2, s3 = scores[0, low:high], scores[1, low:high], scores[2, low:high], scores[3, low:high]
    for j in range(high - low):
        s0[j] = f4(0)
        s1[j] = f4(0)
        s2[j] = f4(0)
        s3[j] = f4(0)
    for d in range(0, keys.shape[0], 4):
        k0, k1, k2, k3 = keys[d, low:high], keys[d + 1, low:high], keys[d + 2, low:high], keys[d + 3, low:high]
        a0, a1, a2, a3 = queries[0, d], queries[0, d + 1], queries[0, d + 2], queries[0, d + 3]
        b0, b1, b2, b3 = queries[1, d], queries[1, d + 1], queries[1, d + 2], queries[1, d + 3]
        c0, c1, c2, c3 = queries[2, d], queries[2, d + 1], queries[2, d + 2], queries[2, d + 3]
        e0, e1, e2, e3 = queries[3, d], queries[3, d + 1], queries[3, d + 2], queries[3, d + 3]
        for j in range(high - low):
            x0, x1, x2, x3 = k0[j], k1[j], k2[j], k3[j]
            s0[j] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            s1[j] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            s2[j] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            s3[j] += e0 * x0 + e1 * x1 + e2 * x2 + e3 * x3


@kernel
def _weigh(scores: Any, values: Any, low: int, high: int, sums: Any) -> None:
    """sums[i] += scores[i, j] * values[j] for a tile of rows and low <= j < high, a multiple of four of them."""
    o0, o1, o2, o3 = sums[0], sums[1], sums[2], sums[3]
    for j in range(low, high, 4):
        v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
        a0, a1, a2, a3 = scores[0, j], scores[0, j + 1], scores[0, j + 2], scores[0, j + 3]
        b0, b1, b2, b3 = scores[1, j], scores[1, j + 1], scores[1, j + 2], scores[1, j + 3]
        c0, c1, c2, c3 = scores[2, j], scores[2, j + 1], scores[2, j + 2], scores[2, j + 3]
        e0, e1, e2, e3 = scores[3, j], scores[3, j + 1], scores[3, j + 2], scores[3, j + 3]
        for d in range(o0.shape[0]):
            x0, x1, x2, x3 = v0[d], v1[d], v2[d], v3[d]
            o0[d] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            o1[d] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            o2[d] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            o3[d] += e0 * x0 + e1 * x1 + e2 * x2 + e3 * x3


@kernel
def _weigh_one(weight: Any, value: Any, total: Any) -> None:
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
    depth = _round_up(head_dim, 4)
    longest = 0
    most = 0
    for b in range(query_start.shape[0]):
        longest = max(longest, cu_keys[b + 1] - cu_keys[b])
        most = max(most, query_count[b])
    capacity = _round_up(longest, 16) + 16  # never a power of two, or columns of `keys` would share cache sets
    keys = np.zeros((depth, capacity), np.float32)
    values = np.zeros((capacity, depth), np.float32)
    scores = np.zeros((TILE, capacity + STEP), np.float32)
    tile = np.zeros((TILE, depth), np.float32)
    sums = np.empty((TILE, depth), np.float32)
    first_key = np.empty(TILE, np.int64)
    end_key = np.empty(TILE, np.int64)
    inverse = np.empty(TILE, np.float32)
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
            for row0 in range(0, count * group, TILE):
                size = min(TILE, count * group - row0)
                for i in range(size):
                    query = (row0 + i) // group
                    head = kv * group + (row0 + i) % group
                    source = queries[start + query, head * head_dim : (head + 1) * head_dim]
                    target = tile[i]
                    for d in range(head_dim):
                        target[d] = load(source[d]) * scale
                    end_key[i] = first + query + 1 - base
                    first_key[i] = max(0, end_key[i] - window) if window > 0 else 0
                _scores(tile, keys, first_key[0] // 8 * 8, _round_up(end_key[size - 1], 8), scores)
                for i in range(size):
                    count_seen = end_key[i] - first_key[i]
                    row_scores = scores[i, first_key[i] : first_key[i] + _round_up(count_seen, STEP)]
                    inverse[i] = f4(1) / _exponentials(row_scores, count_seen, softcap)
                # Keys that all rows see go four at a time, the few others alone.
                low = first_key[size - 1]
                high = low + max(0, end_key[0] - low) // 4 * 4
                sums[:] = f4(0)
                _weigh(scores, values, low, high, sums)
                for i in range(size):
                    for j in range(first_key[i], min(low, end_key[i])):
                        _weigh_one(scores[i, j], values[j], sums[i])
                    for j in range(max(high, first_key[i]), end_key[i]):
                        _weigh_one(scores[i, j], values[j], sums[i])
                    query = (row0 + i) // group
                    head = kv * group + (row0 + i) % group
                    result = rows[query, head * head_dim : (head + 1) * head_dim]
                    total = sums[i]
                    for d in range(head_dim):
                        result[d] = total[d] * inverse[i]
        for i in range(count):
            put_row(rows[i], width, out, out_scales, start + i)
