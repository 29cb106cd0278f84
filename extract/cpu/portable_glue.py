"""Everything between two linears but attention, a row at a time, compiled by Numba.

Works on the first `n` rows of one thread's buffers and writes no other. A linear gives `product` [>= n, N], float32 or
bfloat16 bits (uint16), to be multiplied by `scales` [>= n], one a row, before `bias` [N] (length 0: none) is added.
An operand is a 2-D array of float32, of bfloat16 bits, or of bytes with zero point 128; its columns past `width`, to
the next multiple of 64, are the zeros that fill the last block of the Hadamard rotation.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from extract.cpu.portable_numbers import (
    bfloat16_bits,
    erfc_of_positive,
    exp,
    f4,
    inner,
    kernel,
    load,
    of_rank,
    offset_byte,
    rank,
)
from extract.cpu.portable_vectors import rotate_block
from extract.cpu.rotation import BLOCK, MOST_ODD, mixing_matrices

LEAST_PEAK = 1e-30
"""A row or a channel is scaled as if its largest absolute value were at least this: all zeros are no division by 0."""


MIXERS = mixing_matrices()


@inner
def mix_blocks(row: Any) -> None:
    """Mix the blocks of a row, position by position; see `extract.cpu.rotation`."""
    blocks = row.shape[0] // BLOCK
    even = blocks & -blocks
    odd = blocks // even
    stride = 1
    while stride < even:
        for block in range(blocks):
            if not block & stride:
                first, second = block * BLOCK, (block + stride) * BLOCK
                for k in range(BLOCK):
                    a, b = row[first + k], row[second + k]
                    row[first + k], row[second + k] = a + b, a - b
        stride *= 2
    if odd == 1 or odd > MOST_ODD:
        return
    given = np.empty((MOST_ODD, BLOCK), np.float32)
    mixed = np.empty(BLOCK, np.float32)
    for block in range(even):
        for i in range(odd):
            first = (i * even + block) * BLOCK
            for k in range(BLOCK):
                given[i, k] = row[first + k]
        for place in range(odd):
            for k in range(BLOCK):
                mixed[k] = f4(0)
            for i in range(odd):
                factor = MIXERS[odd, place, i]
                for k in range(BLOCK):
                    mixed[k] += given[i, k] * factor
            first = (place * even + block) * BLOCK
            for k in range(BLOCK):
                row[first + k] = mixed[k]


@inner
def rotate(row: Any) -> None:
    """Rotate a float32 row whose width is a multiple of 64, in place."""
    for first in range(0, row.shape[0], BLOCK):
        rotate_block(row, first)
    mix_blocks(row)


@kernel
def rotate_rows(rows: Any) -> None:
    """Rotate every row of a float32 matrix whose width is a multiple of 64."""
    for i in range(rows.shape[0]):
        rotate(rows[i])


def store(number: Any, like: Any) -> Any:
    """A float32 as an element of the array `like`: itself, or bfloat16 bits."""


@overload(store, inline="always")
def _store(number: Any, like: Any) -> Any:
    def as_bits(number: Any, like: Any) -> Any:
        return bfloat16_bits(number)

    def as_it_is(number: Any, like: Any) -> Any:
        return number

    return as_bits if like.dtype == types.uint16 else as_it_is


def put_row(row: Any, width: int, out: Any, scales: Any, t: int) -> None:
    """Row `t` of an operand from a float32 row, which is scratch space afterwards."""


@overload(put_row)
def _put_row(row: Any, width: int, out: Any, scales: Any, t: int) -> Any:
    def as_numbers(row: Any, width: int, out: Any, scales: Any, t: int) -> None:
        target = out[t]
        for k in range(width):
            target[k] = store(row[k], out)

    def as_bytes(row: Any, width: int, out: Any, scales: Any, t: int) -> None:
        target = out[t]
        for k in range(width, row.shape[0]):
            row[k] = f4(0)
        rotate(row)
        peak_rank = rank(f4(LEAST_PEAK))
        for k in range(row.shape[0]):
            peak_rank = max(peak_rank, rank(abs(row[k])))
        peak = of_rank(peak_rank)  # a NaN ranks above all: its row gets a NaN for a scale
        scales[t] = peak / f4(127)
        inverse = f4(127) / peak
        for k in range(row.shape[0]):
            target[k] = offset_byte(row[k] * inverse)

    return as_bytes if out.dtype == types.uint8 else as_numbers


@inner
def _inverse_rms(mean_square: Any, eps: Any) -> Any:
    return f4(1) / np.sqrt(mean_square + eps)


@kernel
def norm_rows(x: Any, n: int, weight: Any, eps: Any, out: Any, scales: Any) -> None:
    """out[:n] = RMSNorm(x[:n]) as an operand."""
    width = x.shape[1]
    row = np.empty(out.shape[1], np.float32)
    for t in range(n):
        source = x[t]
        total = f4(0)
        for k in range(width):
            total += source[k] * source[k]
        factor = _inverse_rms(total / f4(width), eps)
        for k in range(width):
            row[k] = source[k] * factor * weight[k]
        put_row(row, width, out, scales, t)


@kernel
def quantize_rows(x: Any, n: int, out: Any, scales: Any) -> None:
    """out[:n] = x[:n] as an operand."""
    width = x.shape[1]
    row = np.empty(out.shape[1], np.float32)
    for t in range(n):
        source = x[t]
        for k in range(width):
            row[k] = source[k]
        put_row(row, width, out, scales, t)


@kernel
def take_rows(product: Any, scales: Any, bias: Any, n: int, out: Any) -> None:
    """out[:n, :N] = product * scales + bias."""
    width = product.shape[1]
    for t in range(n):
        source = product[t]
        target = out[t]
        scale = scales[t]
        if bias.shape[0] > 0:
            for k in range(width):
                target[k] = store(load(source[k]) * scale + bias[k], out)
        else:
            for k in range(width):
                target[k] = store(load(source[k]) * scale, out)


@kernel
def add_rows(product: Any, scales: Any, bias: Any, factor: Any, n: int, x: Any) -> None:
    """x[:n] += factor * (product * scales + bias)."""
    width = product.shape[1]
    for t in range(n):
        source = product[t]
        target = x[t]
        scale = scales[t] * factor
        if bias.shape[0] > 0:
            for k in range(width):
                target[k] += load(source[k]) * scale + bias[k] * factor
        else:
            for k in range(width):
                target[k] += load(source[k]) * scale


@kernel
def gate_rows(product: Any, scales: Any, bias: Any, activation: int, n: int, out: Any, out_scales: Any) -> None:
    """out[:n] = activation(gate) * up as an operand; product [., 2 I] has gate, then up.

    `activation`: 0 is silu, 1 gelu by tanh, 2 gelu by erf.
    """
    width = product.shape[1] // 2
    row = np.empty(out.shape[1], np.float32)
    biased = np.empty((2, width), np.float32)
    for t in range(n):
        gate = biased[0]
        up = biased[1]
        scale = scales[t]
        for k in range(width):
            gate[k] = load(product[t, k]) * scale
            up[k] = load(product[t, width + k]) * scale
        if bias.shape[0] > 0:
            for k in range(width):
                gate[k] += bias[k]
                up[k] += bias[width + k]
        if activation == 0:
            for k in range(width):
                row[k] = gate[k] * up[k] / (f4(1) + exp(-gate[k]))
        elif activation == 1:  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
            for k in range(width):
                g = gate[k]
                u = f4(1.5957691216) * (g + f4(0.044715) * g * g * g)
                row[k] = g * up[k] / (f4(1) + exp(-u))
        else:
            for k in range(width):
                g = gate[k]
                tail = f4(0.5) * erfc_of_positive(abs(g) * f4(0.7071067811865476))
                row[k] = g * up[k] * (tail if g < f4(0) else f4(1) - tail)
        put_row(row, width, out, out_scales, t)


@kernel
def add_norm_rows(branch: Any, n: int, weight: Any, eps: Any, factor: Any, x: Any) -> None:
    """x[:n] += factor * RMSNorm(branch[:n])."""
    width = x.shape[1]
    for t in range(n):
        source = branch[t]
        target = x[t]
        total = f4(0)
        for k in range(width):
            total += source[k] * source[k]
        scale = _inverse_rms(total / f4(width), eps) * factor
        for k in range(width):
            target[k] += source[k] * scale * weight[k]


@kernel
def final_norm_rows(x: Any, n: int, weight: Any, eps: Any, out: Any) -> None:
    """out[:n] = RMSNorm(x[:n])."""
    width = x.shape[1]
    for t in range(n):
        source = x[t]
        target = out[t]
        total = f4(0)
        for k in range(width):
            total += source[k] * source[k]
        factor = _inverse_rms(total / f4(width), eps)
        for k in range(width):
            target[k] = source[k] * factor * weight[k]


@kernel
def prepare_head_rows(
    heads: Any,
    n: int,
    column: int,
    num_heads: int,
    head_dim: int,
    weight: Any,
    eps: Any,
    group: int,
    positions: Any,
    cos: Any,
    sin: Any,
) -> None:
    """Norm and rotary positions of heads, in place.

    `group`: channels that one norm covers (0: no norm); `weight` [group]. `cos`, `sin` [positions, pairs] (0 pairs:
    no rotary positions).
    """
    width = num_heads * head_dim
    pairs = cos.shape[1]
    row = np.empty(width, np.float32)
    for t in range(n):
        target = heads[t, column : column + width]
        for k in range(width):
            row[k] = load(target[k])
        if group > 0:
            for start in range(0, width, group):
                part = row[start : start + group]
                total = f4(0)
                for k in range(group):
                    total += part[k] * part[k]
                factor = _inverse_rms(total / f4(group), eps)
                for k in range(group):
                    part[k] = part[k] * factor * weight[k]
        if pairs > 0:
            c = cos[positions[t]]
            s = sin[positions[t]]
            for start in range(0, width, head_dim):
                first = row[start : start + pairs]
                second = row[start + pairs : start + 2 * pairs]
                for k in range(pairs):
                    a = first[k]
                    b = second[k]
                    first[k] = a * c[k] - b * s[k]
                    second[k] = b * c[k] + a * s[k]
        for k in range(width):
            target[k] = store(row[k], heads)
