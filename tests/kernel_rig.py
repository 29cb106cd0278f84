"""Every kernel written out in float64 numpy, one claim a line, and the implementations that are held to it."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from extract.cpu.kernels import AttentionShape, HeadsNorm, Kernels, Matrix, Norm, Operand, RotaryTable, Sequences
from extract.cpu.native import NoNativeKernels
from extract.cpu.native_trial import native_kernels
from extract.cpu.rotation import MOST_ODD, mixing_matrix, power_of_two

PRECISIONS = ("float32", "bfloat16", "int8")
CAPACITY = 304
"""Rows of every buffer here."""


def implementation(name: str, precision: str, missing: str | None = None) -> Any:
    """One parameter set of a test; `missing` says why it cannot run here."""
    marks = [] if missing is None else [pytest.mark.skip(reason=missing)]
    return pytest.param((name, precision), id=f"{name}-{precision}", marks=marks)


def missing_native(precision: Any) -> str | None:
    """Why the native kernels of a precision cannot run here."""
    try:
        native_kernels(precision)
    except NoNativeKernels as error:
        return str(error)
    return None


IMPLEMENTATIONS = [
    *(implementation("portable", precision) for precision in PRECISIONS),
    *(implementation("native", precision, missing_native(precision)) for precision in PRECISIONS),
]


@cache
def make_kernels(name: str, precision: Any) -> Kernels:
    if name == "portable":
        from extract.cpu.portable import portable_kernels

        return portable_kernels(precision, rows_hint=CAPACITY)
    return native_kernels(precision)


# --- numbers --------------------------------------------------------------------------------------------------------


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def bfloat16_bits(values: Any) -> Any:
    """Round to nearest, half to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def numbers(array: Any) -> Any:
    """float64 of float32 or of bfloat16 bits."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def rotation_matrix(width: int) -> Any:
    """What int8 rows of `width` (a multiple of 64) values are multiplied by, float64 [width, width], with its gain."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < 64:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    blocks = width // 64
    even = power_of_two(blocks)
    butterflies = np.ones((1, 1))
    while len(butterflies) < even:
        butterflies = np.block([[butterflies, butterflies], [butterflies, -butterflies]])
    odd = blocks // even
    mixer = np.eye(odd) if odd > MOST_ODD else mixing_matrix(odd).astype(np.float64)
    return np.kron(np.kron(mixer, butterflies), hadamard)


def error(found: Any, expected: Any) -> float:
    """Largest difference beside the largest expected number; NaN if there is one."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def operand_of(kernels: Kernels, rows: Any) -> Operand:
    """Rows as an operand, in a buffer with room for more."""
    operand = kernels.operand(CAPACITY, rows.shape[1])
    kernels.quantize(np.ascontiguousarray(rows, np.float32), len(rows), operand)
    return operand


def matrix_of(matrix: Matrix, rows: Any) -> Matrix:
    """A buffer filled with rows as far as they go."""
    values = rows.astype(np.float32)
    matrix.array[: len(rows), : rows.shape[1]] = bfloat16_bits(values) if matrix.array.dtype == np.uint16 else values
    return matrix


def read(kernels: Kernels, operand: Operand, n: int) -> Any:
    """What an operand holds, through a linear that changes nothing."""
    same = kernels.pack([np.eye(operand.width, dtype=np.float32)], None)
    matrix = kernels.matrix(CAPACITY, operand.width)
    kernels.project(operand, n, same, matrix)
    return matrix.array[:n].astype(np.float64)


# --- what each method must give -------------------------------------------------------------------------------------


def normed(x: Any, norm: Norm) -> Any:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + norm.eps) * norm.weight


def linear(x: Any, weights: Any, bias: Any = None) -> Any:
    return x.astype(np.float64) @ weights.astype(np.float64).T + (0 if bias is None else bias)


def activated(x: Any, activation: str) -> Any:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def prepared(
    rows: Any, num_heads: int, head_dim: int, norm: HeadsNorm | None, positions: Any, rotary: RotaryTable | None
) -> Any:
    rows = rows.astype(np.float64)
    if norm is not None and norm.over_projection:
        rows = normed(rows, norm.norm)
    heads = rows.reshape(len(rows), num_heads, head_dim)
    if norm is not None and not norm.over_projection:
        heads = normed(heads, norm.norm)
    if rotary is not None:
        half = rotary.cos.shape[1]
        cos, sin = (table[positions][:, None, :].astype(np.float64) for table in (rotary.cos, rotary.sin))
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        heads = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return heads.reshape(len(rows), -1)


def attended(queries: Any, keys: Any, values: Any, sequences: Sequences, shape: AttentionShape) -> Any:
    """Rows of `queries`; `keys` and `values` are the kept rows, then those of the micro-batch."""
    width = shape.head_dim
    result = np.zeros((len(queries), shape.num_heads * width))
    for b, (start, count) in enumerate(zip(sequences.query_start, sequences.query_count, strict=True)):
        rows = sequences.key_index[sequences.cu_keys[b] : sequences.cu_keys[b + 1]]
        for i in range(count):
            position = len(rows) - count + i
            first = 0 if shape.window is None else max(0, position - shape.window + 1)
            seen = rows[first : position + 1]
            for head in range(shape.num_heads):
                kv_head = head // (shape.num_heads // shape.num_kv_heads)
                of_head = slice(head * width, (head + 1) * width)
                of_kv_head = slice(kv_head * width, (kv_head + 1) * width)
                scores = keys[seen, of_kv_head] @ queries[start + i, of_head] * shape.scale
                if shape.softcap is not None:
                    scores = shape.softcap * np.tanh(scores / shape.softcap)
                weights = np.exp(scores - scores.max())
                result[start + i, of_head] = weights / weights.sum() @ values[seen, of_kv_head]
    return result


def sequences_of(lengths: list[int], num_kept: int = 0, counts: list[int] | None = None) -> Sequences:
    """Sequences whose own tokens lie end to end, each after the kept rows; queries are the last `counts` of each.

    Without `counts` all own tokens are queries and lie where the keys do; with it, queries lie end to end.
    """
    own_start = np.cumsum([0, *lengths])
    index = [
        np.concatenate([np.arange(num_kept), num_kept + np.arange(start, start + length)])
        for start, length in zip(own_start, lengths, strict=False)
    ]
    counts = lengths if counts is None else counts
    return Sequences(
        query_start=np.cumsum([0, *counts])[:-1].astype(np.int32),
        query_count=np.array(counts, np.int32),
        cu_keys=np.cumsum([0, *map(len, index)]).astype(np.int32),
        key_index=np.concatenate(index).astype(np.int32),
        num_kept=num_kept,
    )


def rotary_table(positions: int, pairs: int) -> RotaryTable:
    angles = np.outer(np.arange(positions), 10_000.0 ** -(np.arange(pairs) / pairs))
    return RotaryTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
