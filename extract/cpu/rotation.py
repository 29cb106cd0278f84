"""The rotation before int8: what spreads an outlier of a row over the whole row, the same for both sets of kernels.

A row of 64 b values is b blocks. Each block is Walsh-Hadamard transformed; then the blocks are mixed, position by
position: with b = 2^s * o, o odd, butterflies over the power of two, and an orthonormal cosine transform (DCT-II) over
the odd factor up to MOST_ODD, which a row of 576 or 1,536 values needs. Blocks alone left a SmolLM2-135M at a KL
divergence of 6.2e-3 and 0.958 agreement, mixed it is at 4.5e-3 and 0.970. Weights and rows are rotated alike, so
products stay as they were but for a gain; larger odd factors stay unmixed, which is right but spreads less.

Source of the idea: QuaRot (Ashkboos et al., 2024) and its use of Hadamard matrices times a small orthogonal one.
"""

import math
from typing import Any

import numpy as np

from extract.cpu.kernels import Float32

BLOCK = 64
MOST_ODD = 15


def mixing_matrix(size: int) -> Float32:
    """The orthonormal DCT-II: float32 [size, size], computed in double."""
    values = [
        [math.sqrt((1 if k == 0 else 2) / size) * math.cos(math.pi * (i + 0.5) * k / size) for i in range(size)]
        for k in range(size)
    ]
    return np.array(values, np.float64).astype(np.float32)


def mixing_matrices() -> Any:
    """float32 [MOST_ODD + 1, MOST_ODD, MOST_ODD]; of entry o the first [o, o] is its matrix, for odd o."""
    matrices = np.zeros((MOST_ODD + 1, MOST_ODD, MOST_ODD), np.float32)
    for size in range(1, MOST_ODD + 1, 2):
        matrices[size, :size, :size] = mixing_matrix(size)
    return matrices


def power_of_two(blocks: int) -> int:
    """The largest power of two that divides `blocks`."""
    return blocks & -blocks


def gain(width: int) -> int:
    """By what a product of two rotated rows of `width` (a multiple of BLOCK) values is larger than of the rows."""
    return BLOCK * power_of_two(width // BLOCK)
