"""Random signs before the rotation of int8, folded into weights: what a fixed rotation cannot spread, a random one can.

A row that is nearly constant, or has a pattern of the transform's own, comes out of a Walsh-Hadamard or cosine
transform as one huge value, and 8 bits are spent on that. Flipping the signs of a fixed random half of the channels
first breaks every such pattern. The flips cost nothing at run time: those of a norm's output lie in the norm's weight,
those of an attention's output in the value rows, those of an activated MLP in the up rows, and each next linear has its
columns flipped too, so every product is what it was, bit for bit.

Source of the idea: the randomised Hadamard transform of QuIP# (Tseng et al., 2024) and QuaRot (Ashkboos et al., 2024).
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from extract.cpu.architecture import Architecture
from extract.cpu.kernels import Float32, Weights
from extract.cpu.weights import LayerWeights

SEED = 8
BFLOAT16_SIGN = np.uint16(0x8000)

Flips = npt.NDArray[np.bool_]


def flip_signs(found: LayerWeights, architecture: Architecture, layer: int) -> LayerWeights:
    """The same layer with half of the channels before each linear negated; float32 computes the same bits with it.

    A linear that reads the residual stream itself (families that norm after a branch) keeps its channels.
    """
    a = architecture
    draw = np.random.Generator(np.random.PCG64([SEED, layer]))
    sizes = a.hidden_size, a.kv_width, a.intermediate_size
    hidden, values, inner = (draw.integers(0, 2, size).astype(bool) for size in sizes)
    heads = values.reshape(a.num_kv_heads, a.head_dim).repeat(a.num_heads // a.num_kv_heads, axis=0).reshape(-1)
    flipped = replace(
        found,
        v=_rows(found.v, values),
        v_bias=_vector(found.v_bias, values),
        o=_columns(found.o, heads),
        up=_rows(found.up, inner),
        up_bias=_vector(found.up_bias, inner),
        down=_columns(found.down, inner),
    )
    if found.attention_norm is not None:
        flipped = replace(
            flipped,
            attention_norm=_vector(found.attention_norm, hidden),
            q=_columns(flipped.q, hidden),
            k=_columns(flipped.k, hidden),
            v=_columns(flipped.v, hidden),
        )
    if found.mlp_norm is not None:
        flipped = replace(
            flipped,
            mlp_norm=_vector(found.mlp_norm, hidden),
            gate=_columns(flipped.gate, hidden),
            up=_columns(flipped.up, hidden),
        )
    return flipped


def _columns(matrix: Weights, flips: Flips) -> Weights:
    """[N, K] with the columns negated where `flips` [K] says so."""
    return _negated(matrix, flips[None])


def _rows(matrix: Weights, flips: Flips) -> Weights:
    """[N, K] with the rows negated where `flips` [N] says so."""
    return _negated(matrix, flips[:, None])


def _negated(matrix: Weights, flips: Flips) -> Weights:
    """In the type that is stored, where bfloat16 is its bits."""
    if matrix.dtype == np.uint16:
        negated: Weights = matrix ^ np.where(flips, BFLOAT16_SIGN, np.uint16(0))
    else:
        negated = matrix * np.where(flips, -1, 1).astype(matrix.dtype)
    return negated


def _vector(vector: Float32 | None, flips: Flips) -> Float32 | None:
    return None if vector is None else np.where(flips, -vector, vector)
