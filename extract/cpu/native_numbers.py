"""Are the native kernels' numbers right on this machine? Every kind of kernel against itself in float64, in 10 ms.

Catches a compiler that breaks them and a source that does not suit this CPU; the tests of the project look far closer.
Knows nothing of libraries, files and speed.
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from extract.cpu.kernels import AttentionShape, Float32, HeadsNorm, Kernels, Norm, Precision, RotaryTable, Sequences

Exact = npt.NDArray[np.float64]

TOLERANCES: dict[Precision, float] = {"float32": 1e-5, "bfloat16": 1.5e-2, "int8": 4e-2}
"""Largest difference beside the largest number expected."""

LENGTHS = (50, 1, 86)
"""Of the sequences that attention is tried with: more keys than one block has, not a multiple of anything."""

ROWS, WIDTH, OUTPUTS = sum(LENGTHS), 144, 80
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 24


def wrong_numbers(kernels: Kernels) -> str:
    """Which kernel gives wrong numbers, and how wrong; empty if none does."""
    allowed = TOLERANCES[kernels.precision]
    with np.errstate(all="ignore"):  # anything may come out
        for name, found, expected in _tried(kernels):
            error = float(np.abs(found - expected).max() / np.abs(expected).max())
            if not error <= allowed:
                return f"{name} differs from numpy by {error:.1e} (relative), at most {allowed:.0e} expected"
    return ""


def _tried(kernels: Kernels) -> Iterator[tuple[str, Exact, Exact]]:
    """Name, found and expected numbers of each kernel."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Float32:
        return draw.standard_normal(shape, np.float32)

    x, weights, bias = normal(ROWS, WIDTH), normal(OUTPUTS, WIDTH), normal(OUTPUTS)
    norm = Norm(np.float32(1) + normal(WIDTH) / np.float32(4), 1e-5)
    packed, operand, product = (
        kernels.pack([weights], bias),
        kernels.operand(ROWS, WIDTH),
        kernels.matrix(ROWS, OUTPUTS),
    )
    kernels.quantize(x, ROWS, operand)
    kernels.project(operand, ROWS, packed, product)
    yield "a product", product.array.astype(np.float64), x.astype(np.float64) @ weights.T + bias

    kernels.norm(x, ROWS, norm, operand)
    kernels.project(operand, ROWS, packed, product)
    yield "a norm", product.array.astype(np.float64), _normed(x, norm) @ weights.T + bias
    final = np.empty_like(x)
    kernels.final_norm(x, ROWS, norm, final)
    yield "the final norm", final.astype(np.float64), _normed(x, norm)

    gate, up, down = normal(OUTPUTS, WIDTH) / 6, normal(OUTPUTS, WIDTH) / 12, normal(WIDTH, OUTPUTS)
    kernels.quantize(x, ROWS, operand)
    for activation, function in _ACTIVATIONS.items():
        middle, stream = kernels.operand(ROWS, OUTPUTS), np.zeros_like(x)
        kernels.project_gated(operand, ROWS, kernels.pack_gated(gate, up, None, activation), middle)
        kernels.project_add(middle, ROWS, kernels.pack([down], None), 1.0, stream)
        expected = (function(x.astype(np.float64) @ gate.T) * (x.astype(np.float64) @ up.T)) @ down.T
        yield f"an MLP with {activation}", stream.astype(np.float64), expected

    yield from _tried_heads(kernels, normal)


def _tried_heads(kernels: Kernels, normal: Callable[..., Float32]) -> Iterator[tuple[str, Exact, Exact]]:
    query_width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    to_heads, out_weights = normal(query_width + 2 * kv_width, WIDTH) / 12, normal(OUTPUTS, query_width)
    x, operand = normal(ROWS, WIDTH), kernels.operand(ROWS, WIDTH)
    heads, attended = kernels.heads(ROWS, len(to_heads)), kernels.operand(ROWS, query_width)
    kernels.quantize(x, ROWS, operand)
    kernels.project(operand, ROWS, kernels.pack([to_heads], None), heads)
    angles = np.outer(np.arange(ROWS, dtype=np.float32), 0.5 ** np.arange(HEAD_DIM // 2, dtype=np.float32))
    rotary = RotaryTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in LENGTHS])
    head_norm = HeadsNorm(Norm(np.float32(1) + normal(HEAD_DIM) / np.float32(4), 1e-5), over_projection=False)
    kernels.prepare_heads(heads, ROWS, 0, HEADS, HEAD_DIM, head_norm, positions, rotary)
    exact = x.astype(np.float64) @ to_heads.T
    queries = _rotated(
        _normed(exact[:, :query_width].reshape(ROWS, HEADS, HEAD_DIM), head_norm.norm), rotary, positions
    )
    yield "rotary positions", _exact(heads.array)[:, :query_width], queries.reshape(ROWS, query_width)

    keys, values = (part.reshape(ROWS, KV_HEADS, HEAD_DIM) for part in np.split(exact[:, query_width:], 2, axis=1))
    starts = np.cumsum([0, *LENGTHS], dtype=np.int32)
    sequences = Sequences(
        query_start=starts[:-1],
        query_count=np.array(LENGTHS, np.int32),
        cu_keys=starts,
        key_index=np.arange(ROWS, dtype=np.int32),
    )
    packed, product = kernels.pack([out_weights], None), kernels.matrix(ROWS, OUTPUTS)
    for window, softcap in ((None, None), (20, 3.0)):
        shape = AttentionShape(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=0.3, softcap=softcap, window=window
        )
        kernels.attend(heads, heads, query_width, None, sequences, shape, attended)
        kernels.project(attended, ROWS, packed, product)
        parts = [_attended(queries[a:b], keys[a:b], values[a:b], shape) for a, b in pairwise(starts.tolist())]
        yield "attention", product.array.astype(np.float64), np.concatenate(parts) @ out_weights.T


def _normed(x: Any, norm: Norm) -> Exact:
    wide: Exact = x.astype(np.float64)
    result: Exact = wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + norm.eps) * norm.weight
    return result


def _rotated(heads: Exact, rotary: RotaryTable, positions: Any) -> Exact:
    cos, sin = (table[positions][:, None].astype(np.float64) for table in (rotary.cos, rotary.sin))
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attended(queries: Exact, keys: Exact, values: Exact, shape: AttentionShape) -> Exact:
    """[L, HEADS, HEAD_DIM] and twice [L, KV_HEADS, HEAD_DIM] -> [L, HEADS * HEAD_DIM]."""
    repeat = shape.num_heads // shape.num_kv_heads
    scores = np.einsum("qhd,khd->hqk", queries, np.repeat(keys, repeat, axis=1)) * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * np.tanh(scores / shape.softcap)
    distance = np.arange(len(queries))[:, None] - np.arange(len(queries))
    seen = (distance >= 0) & (distance < (shape.window or len(queries)))
    weights = np.exp(np.where(seen, scores, -np.inf))
    mixed: Exact = np.einsum(
        "hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), np.repeat(values, repeat, axis=1)
    )
    return mixed.reshape(len(queries), -1)


def _exact(array: Any) -> Exact:
    """float64 of float32 or of bfloat16 bits."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    wide: Exact = array.astype(np.float64)
    return wide


def _silu(x: Exact) -> Exact:
    result: Exact = x / (1 + np.exp(-x))
    return result


def _gelu_tanh(x: Exact) -> Exact:
    result: Exact = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


def _gelu(x: Exact) -> Exact:
    result: Exact = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return result


_ACTIVATIONS: dict[Any, Callable[[Exact], Exact]] = {"silu": _silu, "gelu_tanh": _gelu_tanh, "gelu": _gelu}
