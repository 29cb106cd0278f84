"""What the packed decoder asks of the arithmetic: one small interface, two implementations held to the same tests.

`extract.cpu.portable` runs anywhere torch does; `extract.cpu.native` is a C++ file compiled for the CPU at hand. Both
work on the first `n` rows of buffers that are allocated once per thread, and neither knows layers, families or files.

The residual stream is float32 in every precision. An `Operand` is the left side of a linear in the precision's own
type: float32, bfloat16, or int8 after a Hadamard rotation with one scale a row. A `Matrix` holds what a linear gave.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from extract.cpu.architecture import Activation
from extract.records import Int32

Float32 = npt.NDArray[np.float32]
Weights = npt.NDArray[Any]
"""Weights as a checkpoint stores them: float32, float16, or uint16 holding the bits of bfloat16."""

Precision = Literal["float32", "bfloat16", "int8"]

HIGH: Precision = "bfloat16"
"""In what an int8 engine computes the linears that it keeps in high precision."""


class Linear:
    """Weights [N, K] (and bias) in a precision's type and the layout of one implementation."""

    precision: Precision
    num_outputs: int
    num_inputs: int


class Operand:
    """Rows that a linear of the same precision multiplies, in its type and an implementation's own layout."""

    precision: Precision
    width: int


class Matrix:
    """Rows that a linear gave.

    Attributes:
        array: [capacity, width] float32, or uint16 holding bfloat16 bits.
    """

    array: npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    """Cosines and sines of positions: float32 [positions, rotary_dim / 2] each, contiguous."""

    cos: Float32
    sin: Float32


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """An RMSNorm: v / sqrt(mean(v * v) + eps) * weight, weight float32 (1 + weight where that applies)."""

    weight: Float32
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class HeadsNorm:
    """An RMSNorm of queries or keys; `over_projection`: over all heads at once, else over each head."""

    norm: Norm
    over_projection: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What attention of one layer computes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """Which queries attend to which keys, B sequences of one micro-batch.

    Attributes:
        query_start: int32 [B], first query of each sequence, a row of the query buffer.
        query_count: int32 [B], its queries, consecutive rows; they are the sequence's last `query_count` positions.
        cu_keys: int32 [B + 1], cumulative numbers of keys; a sequence's keys are its positions from 0 on.
        key_index: int32 [cu_keys[B]], where the key and value of each position lie: k < num_kept is row k of the kept
            rows, any other row k - num_kept of this micro-batch.
        num_kept: rows kept from the pass's first micro-batch (0: none).
    """

    query_start: Int32
    query_count: Int32
    cu_keys: Int32
    key_index: Int32
    num_kept: int = 0


class Kernels(Protocol):
    """Arithmetic of one precision. Objects are shared by threads, buffers are not. `n` is the number of rows.

    What they pack and allocate is of their precision; what a call computes in is that of its arguments, so that of two
    objects of one implementation either takes what the other has made: an int8 product may end in a bfloat16 operand.
    Every result of a row depends on that row alone (in `native` bit for bit, in `portable` but for rounding).
    """

    name: Literal["native", "portable"]
    precision: Precision

    def enter_thread(self) -> None:
        """Called once in each thread that will call the others."""

    def pack(self, blocks: Sequence[Weights], bias: Float32 | None) -> Linear:
        """A linear whose weights are `blocks` [N_i, K] one under the other; `bias` is [sum of N_i]."""

    def pack_gated(
        self, gate: Weights, up: Weights, bias: tuple[Float32, Float32] | None, activation: Activation
    ) -> Linear:
        """The two linears [I, K] of a gated MLP, for `project_gated`."""

    def operand(self, rows: int, width: int) -> Operand:
        """A buffer of `rows` operand rows."""

    def heads(self, rows: int, width: int) -> Matrix:
        """A buffer for queries, keys and values: bfloat16 bits where attention computes in it, else float32."""

    def matrix(self, rows: int, width: int) -> Matrix:
        """A buffer of float32."""

    def embed(self, table: Weights, ids: Int32, scale: float, x: Float32) -> None:
        """x[:n] = table[ids] * scale, with n = len(ids); x [capacity, H]."""

    def norm(self, x: Float32, n: int, norm: Norm, out: Operand) -> None:
        """out[:n] = RMSNorm(x[:n])."""

    def quantize(self, x: Float32, n: int, out: Operand) -> None:
        """out[:n] = x[:n] in the operand's type (for families that feed the residual stream itself)."""

    def project(self, a: Operand, n: int, linear: Linear, out: Matrix) -> None:
        """out[:n, :N] = a[:n] times weights, plus bias."""

    def project_add(self, a: Operand, n: int, linear: Linear, scale: float, x: Float32) -> None:
        """x[:n] += scale * (a[:n] times weights, plus bias)."""

    def project_gated(self, a: Operand, n: int, linear: Linear, out: Operand) -> None:
        """out[:n] = activation(a times gate) * (a times up), in the type of `out`, which may be another than `a`'s."""

    def add_norm(self, branch: Matrix, n: int, norm: Norm, scale: float, x: Float32) -> None:
        """x[:n] += scale * RMSNorm(branch[:n]), with branch float32 [., H]."""

    def prepare_heads(
        self,
        heads: Matrix,
        n: int,
        column: int,
        num_heads: int,
        head_dim: int,
        norm: HeadsNorm | None,
        positions: Int32,
        rotary: RotaryTable | None,
    ) -> None:
        """In place on columns `column` to `column + num_heads * head_dim`: norm, then rotary positions, in float32.

        Rotary: channels i and i + r/2 of the first r = rotary_dim channels are one pair; the rest is left as it is.
        `positions` is int32 [n].
        """

    def attend(
        self,
        queries: Matrix,
        keys_values: Matrix,
        column: int,
        kept: Matrix | None,
        sequences: Sequences,
        shape: AttentionShape,
        out: Operand,
    ) -> None:
        """Causal attention; rows of `out` are the query rows, its columns the heads one after the other.

        Queries are columns 0 to num_heads * head_dim of `queries`; keys begin at `column` of `keys_values`, values
        num_kv_heads * head_dim later. `kept` [num_kept, 2 * num_kv_heads * head_dim] has keys, then values.
        Softmax is in float32. The query at position p sees its sequence's keys at positions <= p (and > p - window).
        """

    def final_norm(self, x: Float32, n: int, norm: Norm, out: Float32) -> None:
        """out[:n] = RMSNorm(x[:n]) in float32, with `out` [>= n, H] contiguous."""
