"""Digest values of hidden states: one number a token, enough to see a wrong norm, a wrong weight or a wrong kernel.

The number is the dot product of the state with a fixed vector of signs, divided by the square root of H: every
dimension counts the same, and a state shifted by rounding moves it by no more than its own rounding.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def signs(width: int) -> Float32:
    """The fixed vector: float32 [H] of +1 and -1."""
    bits = np.random.Generator(np.random.PCG64(20_11)).integers(0, 2, width)
    return np.asarray(2 * bits - 1, dtype=np.float32)


def projection(states: Float32) -> Float32:
    """float32 [L, H] -> float32 [L]."""
    return np.asarray(states @ signs(states.shape[1]) / np.sqrt(states.shape[1]), dtype=np.float32)


def relative_error(found: Float32, expected: Float32) -> float:
    """Max |found - expected| over max |expected|; infinite where `found` is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), 1e-30))


def token_error(found: Float32, expected: Float32) -> float:
    """Largest, over rows of [K, H], of `relative_error`: each state beside its own largest value."""
    if not np.isfinite(found).all():
        return float("inf")
    sizes = np.maximum(np.abs(expected).max(axis=1), 1e-30)
    return float((np.abs(found - expected).max(axis=1) / sizes).max())


def cosines(found: Float32, expected: Float32) -> Float32:
    """Cosine of each pair of rows: [K, H], [K, H] -> [K]."""
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return np.asarray((found * expected).sum(axis=1) / np.maximum(norms, 1e-30), dtype=np.float32)


def as_rows(flat: Float32, lengths: Sequence[int]) -> list[Float32]:
    """[T, H] -> one [L, H] a sequence."""
    return np.split(flat, np.cumsum(lengths)[:-1])
