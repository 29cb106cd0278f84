"""Weights as a checkpoint stores them -> weights as they are multiplied, in the type of a precision.

int8: weights [N, K] are filled with zeros to a multiple of 64 columns, rotated (`extract.cpu.rotation`), then rounded,
half to even, to w / scale with scale = max(1e-30, max |w|) / 127 of the channel, all in float32. Rows of an operand
likewise. Rotating both sides multiplies the product by a gain; what stands as the channel's scale is therefore
scale / gain. Knows nothing of how a product lays weights out.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from extract.cpu.kernels import Float32, Precision, Weights
from extract.cpu.portable_glue import LEAST_PEAK, rotate_rows
from extract.cpu.portable_products import Channels
from extract.cpu.rotation import BLOCK, gain

CONVERTED_ROWS = 1024
"""Rows that are float32 at a time: a whole linear would double the memory of a build."""

_TYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def packed_channels(blocks: Sequence[Weights], precision: Precision, rows_hint: int) -> Channels:
    """Blocks [N_i, K] one under the other."""
    num_outputs, width = sum(len(block) for block in blocks), blocks[0].shape[1]
    weights = torch.zeros(num_outputs, filled_width(width, precision), dtype=_TYPES[precision])
    scales = torch.ones(num_outputs)
    first = 0
    for block in blocks:
        for start in range(0, len(block), CONVERTED_ROWS):
            rows = as_float32(block[start : start + CONVERTED_ROWS])
            last = first + len(rows)
            if precision == "int8":
                values, peaks = _rotated(rows)
                weights[first:last], scales[first:last] = torch.from_numpy(values), torch.from_numpy(peaks)
            else:
                weights[first:last, :width] = torch.from_numpy(rows)
            first = last
    return Channels(weights, scales, rows_hint)


def filled_width(width: int, precision: Precision) -> int:
    """Columns of an operand: whole blocks of the rotation, and of AMX.

    oneDNN's bfloat16 product with AMX reads past a last part of a block into the next row and multiplies by zero: NaN
    where that row is.
    """
    return width if precision == "float32" else -(-width // BLOCK) * BLOCK


def as_float32(weights: Weights) -> Float32:
    """A float32 copy."""
    if weights.dtype == np.uint16:
        return (weights.astype(np.uint32) << 16).view(np.float32)
    return weights.astype(np.float32)


def _rotated(rows: Float32) -> tuple[Any, Float32]:
    """int8 weights [N, K filled] and the scales [N] of their products; a channel that is not finite gets scale NaN."""
    filled = np.zeros((len(rows), filled_width(rows.shape[1], "int8")), np.float32)
    filled[:, : rows.shape[1]] = rows
    rotate_rows(filled)
    peaks = np.abs(filled).max(axis=1)
    finite = np.isfinite(peaks)
    scales = np.maximum(np.where(finite, peaks, 0), np.float32(LEAST_PEAK)) / np.float32(127)
    values = np.rint(np.where(finite[:, None], filled, 0) / scales[:, None]).astype(np.int8)
    return values, np.where(finite, scales / np.float32(gain(filled.shape[1])), np.float32(np.nan))
