"""The portable kernels: torch multiplies, Numba does the rest, on any CPU that both run on.

`Kernels` in its own layouts: an operand is one torch tensor (and the numpy array of its memory), a linear the product
that torch prepacked. A call works on one thread, if that has called `enter_thread`: torch would else start its own.
Products are made of whole steps of rows, since oneDNN compiles one for each number of rows it meets; what the last
rows of a step give is dropped.
"""

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from extract.cpu.architecture import Activation
from extract.cpu.kernels import (
    AttentionShape,
    Float32,
    HeadsNorm,
    Kernels,
    Linear,
    Matrix,
    Norm,
    Operand,
    Precision,
    RotaryTable,
    Sequences,
    Weights,
)
from extract.cpu.portable_attention import attend_rows
from extract.cpu.portable_glue import (
    add_norm_rows,
    add_rows,
    final_norm_rows,
    gate_rows,
    norm_rows,
    prepare_head_rows,
    quantize_rows,
    take_rows,
)
from extract.cpu.portable_packing import as_float32, filled_width, packed_channels
from extract.cpu.portable_products import Product, packer
from extract.records import Int32

ROW_STEP = 16
"""Rows of a product are a multiple of this."""

_TORCH_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_NOTHING: Float32 = np.empty(0, np.float32)
_NO_TABLE: Float32 = np.empty((0, 0), np.float32)


class PortableLinear(Linear):
    """A prepacked product, its bias (length 0: none) and, of a gated pair, the activation."""

    def __init__(
        self,
        product: Product,
        precision: Precision,
        shape: tuple[int, ...],
        bias: Float32 | None,
        activation: int = 0,
    ) -> None:
        self.product, self.precision = product, precision
        self.num_outputs, self.num_inputs = shape
        self.bias = _NOTHING if bias is None else np.array(bias, np.float32)
        self.activation = activation


class PortableOperand(Operand):
    """A tensor [rows, width filled up with zeros]; `scales` float32 [rows], 1 but for int8."""

    def __init__(self, rows: int, width: int, precision: Precision) -> None:
        filled = filled_width(width, precision)
        self.precision, self.width = precision, width
        self.tensor = torch.zeros(_whole_steps(rows), filled, dtype=_TORCH_TYPES[precision])
        self.array = _numbers(self.tensor)
        self.scales: Float32 = np.ones(rows, np.float32)


class PortableMatrix(Matrix):
    """A numpy array."""

    def __init__(self, rows: int, width: int, dtype: type) -> None:
        self.array = np.zeros((rows, width), dtype)


class PortableKernels(Kernels):
    """Arithmetic of one precision; see `Kernels`."""

    name: Literal["native", "portable"] = "portable"

    def __init__(self, precision: Precision, rows_hint: int) -> None:
        self.precision = precision
        self._rows_hint = _whole_steps(rows_hint)
        self._pack = packer(precision)
        _keep_freed_memory()

    def enter_thread(self) -> None:
        """Keep torch to the calling thread."""
        torch.set_num_threads(1)

    def pack(self, blocks: Sequence[Weights], bias: Float32 | None) -> PortableLinear:
        """A linear of blocks one under the other."""
        shape = (sum(len(block) for block in blocks), blocks[0].shape[1])
        product = self._pack(packed_channels(blocks, self.precision, self._rows_hint))
        return PortableLinear(product, self.precision, shape, bias)

    def pack_gated(
        self, gate: Weights, up: Weights, bias: tuple[Float32, Float32] | None, activation: Activation
    ) -> PortableLinear:
        """Gate and up as one product, gate first."""
        both = None if bias is None else np.concatenate(bias)
        product = self._pack(packed_channels([gate, up], self.precision, self._rows_hint))
        return PortableLinear(product, self.precision, gate.shape, both, _ACTIVATIONS[activation])

    def operand(self, rows: int, width: int) -> PortableOperand:
        """A buffer of operand rows."""
        return PortableOperand(rows, width, self.precision)

    def heads(self, rows: int, width: int) -> PortableMatrix:
        """bfloat16 bits, float32 where the precision is float32."""
        return PortableMatrix(rows, width, np.float32 if self.precision == "float32" else np.uint16)

    def matrix(self, rows: int, width: int) -> PortableMatrix:
        """float32."""
        return PortableMatrix(rows, width, np.float32)

    def embed(self, table: Weights, ids: Int32, scale: float, x: Float32) -> None:
        """Rows of the table, in float32."""
        np.multiply(as_float32(table[ids]), np.float32(scale), out=x[: len(ids)])

    def norm(self, x: Float32, n: int, norm: Norm, out: Operand) -> None:
        """RMSNorm into an operand."""
        target = _own(out)
        norm_rows(x, n, norm.weight, np.float32(norm.eps), target.array, target.scales)

    def quantize(self, x: Float32, n: int, out: Operand) -> None:
        """Into an operand as it is."""
        target = _own(out)
        quantize_rows(x, n, target.array, target.scales)

    def project(self, a: Operand, n: int, linear: Linear, out: Matrix) -> None:
        """A linear into a matrix."""
        product, scales, bias = self._multiply(a, n, linear)
        take_rows(product, scales, bias, n, out.array)

    def project_add(self, a: Operand, n: int, linear: Linear, scale: float, x: Float32) -> None:
        """A linear onto the residual stream."""
        product, scales, bias = self._multiply(a, n, linear)
        add_rows(product, scales, bias, np.float32(scale), n, x)

    def project_gated(self, a: Operand, n: int, linear: Linear, out: Operand) -> None:
        """The gated half of an MLP."""
        product, scales, bias = self._multiply(a, n, linear)
        target = _own(out)
        gate_rows(product, scales, bias, _packed(linear).activation, n, target.array, target.scales)

    def _multiply(self, a: Operand, n: int, linear: Linear) -> tuple[Any, Float32, Float32]:
        """The product of the first `n` rows (and a few more), the scale of each row, and the bias."""
        source, packed = _own(a), _packed(linear)
        return _numbers(packed.product(source.tensor[: _whole_steps(n)])), source.scales, packed.bias

    def add_norm(self, branch: Matrix, n: int, norm: Norm, scale: float, x: Float32) -> None:
        """A normed branch onto the residual stream."""
        add_norm_rows(branch.array, n, norm.weight, np.float32(norm.eps), np.float32(scale), x)

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
        """Norm and rotary positions, in place."""
        if norm is None and rotary is None:
            return
        weight, eps, group = _NOTHING, 0.0, 0
        if norm is not None:
            weight, eps = norm.norm.weight, norm.norm.eps
            group = num_heads * head_dim if norm.over_projection else head_dim
        cos, sin = (_NO_TABLE, _NO_TABLE) if rotary is None else (rotary.cos, rotary.sin)
        prepare_head_rows(
            heads.array, n, column, num_heads, head_dim, weight, np.float32(eps), group, positions, cos, sin
        )

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
        """Causal attention into an operand."""
        target = _own(out)
        attend_rows(
            queries.array,
            keys_values.array,
            column,
            keys_values.array[:0] if kept is None else kept.array,
            sequences.num_kept,
            sequences.query_start,
            sequences.query_count,
            sequences.cu_keys,
            sequences.key_index,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            np.float32(shape.scale),
            np.float32(shape.softcap or 0),
            shape.window or 0,
            target.array,
            target.scales,
        )

    def final_norm(self, x: Float32, n: int, norm: Norm, out: Float32) -> None:
        """RMSNorm in float32."""
        final_norm_rows(x, n, norm.weight, np.float32(norm.eps), out)


def portable_kernels(precision: Precision, rows_hint: int) -> Kernels:
    """The portable kernels of one precision; `rows_hint` is the usual number of rows of a micro-batch."""
    return PortableKernels(precision, rows_hint)


def _own(operand: Operand) -> PortableOperand:
    assert isinstance(operand, PortableOperand)
    return operand


def _packed(linear: Linear) -> PortableLinear:
    assert isinstance(linear, PortableLinear)
    return linear


def _whole_steps(rows: int) -> int:
    return -(-rows // ROW_STEP) * ROW_STEP


def _numbers(tensor: torch.Tensor) -> Any:
    """The tensor's memory as numpy, bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _keep_freed_memory() -> None:
    """Have glibc keep what products free: a product's memory is new each time, and pages from the kernel cost more."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 1 << 25)  # the most that every glibc takes
        mallopt(trim_threshold, 1 << 30)
