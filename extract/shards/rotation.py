"""The block-Hadamard rotation that makes states fit for int8.

A few dimensions of a state are tens of times larger than the rest, and with one scale a state they would drown the
rest in rounding error. Rotating blocks of 64 spreads each over its block. The rotation is orthonormal and its own
inverse, so a reader needs one small matrix and no statistics of the data.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

MAX_BLOCK = 64
MIN_BLOCK = 16


def block_size(width: int) -> int:
    """Largest power of two up to 64 that divides `width`, or 1 (no rotation) if that is under 16."""
    block = min(width & -width, MAX_BLOCK)
    return block if block >= MIN_BLOCK else 1


def rotate(states: Float32) -> Float32:
    """Multiply each block of each state [K, H] by the orthonormal Hadamard matrix, which is its own inverse."""
    block = block_size(states.shape[1])
    if block == 1:
        return states.copy()
    rotated: Float32 = states.reshape(-1, block) @ _hadamard(block)
    return rotated.reshape(states.shape)


@cache
def _hadamard(size: int) -> Float32:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.float32(np.sqrt(size))
    return matrix
