"""The C++ kernels behind the interface of `extract.cpu.kernels`: buffers, addresses, calls. Computes nothing itself.

Calls release the interpreter's lock, so one Python thread a core runs one micro-batch each. Addresses are taken once,
when a buffer is made: a call costs a microsecond or two, a micro-batch of 256 tokens tens of milliseconds.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from extract.cpu.architecture import Activation
from extract.cpu.huge_pages import HugePages
from extract.cpu.kernels import (
    AttentionShape,
    Float32,
    HeadsNorm,
    Linear,
    Matrix,
    Norm,
    Operand,
    Precision,
    RotaryTable,
    Sequences,
    Weights,
)
from extract.cpu.native_library import NativeLibrary
from extract.errors import EngineRefused
from extract.records import Int32

PANEL = 64
STEP_BYTES = 64
SPARE_ROWS = 32
"""Rows past the last one that a tile may read."""

_CODE: dict[Precision, int] = {"float32": 0, "bfloat16": 1, "int8": 2}
_BYTES: dict[Precision, int] = {"float32": 4, "bfloat16": 2, "int8": 1}
_SOURCE = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}
_ACTIVATION: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


class NoNativeKernels(EngineRefused):
    """The native kernels cannot be had here."""

    template = "native kernels in {precision}: {problem}."


class NativeLinear(Linear):
    """Panels of 64 columns."""

    def __init__(
        self, pages: HugePages, precision: Precision, num_outputs: int, num_inputs: int, num_columns: int
    ) -> None:
        self.precision, self.code = precision, _CODE[precision]
        self.num_outputs, self.num_inputs = num_outputs, num_inputs
        self.padded = _padded(precision, num_inputs)
        self.columns = _up(num_columns, PANEL)
        self.groups = self.padded * _BYTES[precision] // 4
        self.panels = pages.zeros(self.columns // PANEL * self.groups * PANEL * 4)
        self.scale = np.zeros(self.columns, np.float32)
        self.offset = np.zeros(self.columns, np.int32)
        self.bias: Float32 | None = None
        self.activation = 0
        self.at = (_address(self.panels), _address(self.scale), _address(self.offset))

    def call(self) -> tuple[int | None, ...]:
        """Arguments that every product takes."""
        bias = None if self.bias is None else _address(self.bias)
        return (*self.at, bias, self.groups, self.columns, self.num_outputs)


class NativeOperand(Operand):
    """Rows of `stride` bytes; int8 with a scale a row and float rows to round from."""

    def __init__(self, pages: HugePages, precision: Precision, rows: int, width: int) -> None:
        self.precision, self.code = precision, _CODE[precision]
        self.width = width
        self.padded = _padded(precision, width)
        self.stride = _spread(self.padded * _BYTES[precision])
        self.data = pages.zeros((rows + SPARE_ROWS) * self.stride)
        self.scale = np.zeros(rows + SPARE_ROWS, np.float32)
        self.row_stride = self.padded
        self.rows = pages.zeros((rows if precision == "int8" else 0) * self.row_stride * 4)
        self.left = (_address(self.data), self.stride, _address(self.scale))
        self.out = (*self.left, self.padded, _address(self.rows), self.row_stride)


class NativeMatrix(Matrix):
    """Float32 or bfloat16 rows."""

    def __init__(self, pages: HugePages, rows: int, width: int, *, bf16: bool) -> None:
        self.bf16 = bf16
        size = 2 if bf16 else 4
        self.stride = _spread(_up(width * size, 64))
        raw = pages.zeros((rows + SPARE_ROWS) * self.stride).view(np.uint16 if bf16 else np.float32)
        self.array = raw.reshape(rows + SPARE_ROWS, -1)[:rows, :width]
        self.at = _address(raw)


class NativeKernels:
    """See `extract.cpu.kernels.Kernels`. Whether they are right and fast here says `extract.cpu.native_trial`.

    Raises:
        NoNativeKernels: no compiler, or a CPU without the instructions of this precision.
    """

    name: Literal["native", "portable"] = "native"

    def __init__(self, precision: Precision, library: NativeLibrary) -> None:
        missing = library.missing(precision)
        if missing:
            raise NoNativeKernels(precision=precision, problem=missing)
        assert library.functions is not None
        self.precision = precision
        self._pages = HugePages()
        self._bf16_heads = precision == "bfloat16" or (precision == "int8" and library.bfloat16)
        functions = library.functions
        self._pack = _function(functions, "pack", "iipiiipiipp")
        self._embed = _function(functions, "embed", "ipipifp")
        self._norm = _function(functions, "norm", "ipiipfpzpi")
        self._final_norm = _function(functions, "final_norm", "piipfp")
        self._add_norm = _function(functions, "add_norm", "pziipffp")
        self._project = _function(functions, "project", "ipzpippppiiiipz")
        self._project_add = _function(functions, "project_add", "ipzpippppiiifp")
        self._project_gated = _function(functions, "project_gated", "ipzpippppiiiiipzpipz")
        self._prepare_heads = _function(functions, "prepare_heads", "ipziiiipfipppi")
        self._attend = _function(functions, "attend", "iipzpzipzippppiiiiffipzpipz")

    def enter_thread(self) -> None:
        """Nothing is kept for a thread here."""

    def pack(self, blocks: Sequence[Weights], bias: Float32 | None) -> Linear:
        """See `Kernels.pack`."""
        num_outputs = sum(len(block) for block in blocks)
        linear = NativeLinear(self._pages, self.precision, num_outputs, blocks[0].shape[1], num_outputs)
        first = 0
        for block in blocks:
            self._fill(linear, block, first, 0)
            first += len(block)
        if bias is not None:
            linear.bias = np.zeros(linear.columns, np.float32)
            linear.bias[:num_outputs] = bias
        return linear

    def pack_gated(
        self, gate: Weights, up: Weights, bias: tuple[Float32, Float32] | None, activation: Activation
    ) -> Linear:
        """See `Kernels.pack_gated`: 16 columns of the gate and 16 of the other half by turns."""
        width = len(gate)
        linear = NativeLinear(self._pages, self.precision, width, gate.shape[1], 2 * _up(width, 16))
        linear.activation = _ACTIVATION[activation]
        self._fill(linear, gate, 0, 1)
        self._fill(linear, up, 0, 2)
        if bias is not None:
            both = np.zeros((linear.columns // 32, 2, 16), np.float32)
            for half, values in enumerate(bias):
                padded = np.zeros(linear.columns // 2, np.float32)
                padded[:width] = values
                both[:, half] = padded.reshape(-1, 16)
            linear.bias = both.reshape(-1)
        return linear

    def _fill(self, linear: NativeLinear, block: Weights, first: int, spread: int) -> None:
        block = np.ascontiguousarray(block)
        rows, width = block.shape
        panels, scale, offset = linear.at
        source = _SOURCE[block.dtype]
        self._pack(
            linear.code, source, _address(block), rows, width, linear.padded, panels, first, spread, scale, offset
        )

    def operand(self, rows: int, width: int) -> Operand:
        """See `Kernels.operand`."""
        return NativeOperand(self._pages, self.precision, rows, width)

    def heads(self, rows: int, width: int) -> Matrix:
        """See `Kernels.heads`."""
        return NativeMatrix(self._pages, rows, width, bf16=self._bf16_heads)

    def matrix(self, rows: int, width: int) -> Matrix:
        """See `Kernels.matrix`."""
        return NativeMatrix(self._pages, rows, width, bf16=False)

    def embed(self, table: Weights, ids: Int32, scale: float, x: Float32) -> None:
        """See `Kernels.embed`."""
        source = _SOURCE[table.dtype]
        self._embed(source, _address(table), table.shape[1], _address(ids), len(ids), scale, _address(x))

    def norm(self, x: Float32, n: int, norm: Norm, out: Operand) -> None:
        """See `Kernels.norm`."""
        assert isinstance(out, NativeOperand)
        data, stride, scale = out.left
        weight = _address(norm.weight)
        self._norm(out.code, _address(x), x.shape[1], n, weight, norm.eps, data, stride, scale, out.padded)

    def quantize(self, x: Float32, n: int, out: Operand) -> None:
        """See `Kernels.quantize`."""
        assert isinstance(out, NativeOperand)
        data, stride, scale = out.left
        self._norm(out.code, _address(x), x.shape[1], n, None, 0.0, data, stride, scale, out.padded)

    def project(self, a: Operand, n: int, linear: Linear, out: Matrix) -> None:
        """See `Kernels.project`."""
        assert isinstance(a, NativeOperand) and isinstance(linear, NativeLinear) and isinstance(out, NativeMatrix)
        stride = out.stride // (2 if out.bf16 else 4)
        self._project(linear.code, *a.left, n, *linear.call(), out.bf16, out.at, stride)

    def project_add(self, a: Operand, n: int, linear: Linear, scale: float, x: Float32) -> None:
        """See `Kernels.project_add`."""
        assert isinstance(a, NativeOperand) and isinstance(linear, NativeLinear)
        self._project_add(linear.code, *a.left, n, *linear.call(), scale, _address(x))

    def project_gated(self, a: Operand, n: int, linear: Linear, out: Operand) -> None:
        """See `Kernels.project_gated`."""
        assert isinstance(a, NativeOperand) and isinstance(linear, NativeLinear) and isinstance(out, NativeOperand)
        self._project_gated(linear.code, *a.left, n, *linear.call(), linear.activation, out.code, *out.out)

    def add_norm(self, branch: Matrix, n: int, norm: Norm, scale: float, x: Float32) -> None:
        """See `Kernels.add_norm`."""
        assert isinstance(branch, NativeMatrix)
        width = x.shape[1]
        self._add_norm(branch.at, branch.stride // 4, width, n, _address(norm.weight), norm.eps, scale, _address(x))

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
        """See `Kernels.prepare_heads`."""
        assert isinstance(heads, NativeMatrix)
        weight, eps, over = (None, 0.0, False) if norm is None else _norm_call(norm)
        cos, sin, half = (
            (None, None, 0) if rotary is None else (_address(rotary.cos), _address(rotary.sin), rotary.cos.shape[1])
        )
        self._prepare_heads(
            heads.bf16,
            heads.at,
            heads.stride,
            column,
            n,
            num_heads,
            head_dim,
            weight,
            eps,
            over,
            _address(positions),
            cos,
            sin,
            half,
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
        """See `Kernels.attend`."""
        assert isinstance(queries, NativeMatrix) and isinstance(keys_values, NativeMatrix)
        assert isinstance(out, NativeOperand) and (kept is None or isinstance(kept, NativeMatrix))
        self._attend(
            out.code,
            queries.bf16,
            queries.at,
            queries.stride,
            keys_values.at,
            keys_values.stride,
            column,
            None if kept is None else kept.at,
            0 if kept is None else kept.stride,
            len(sequences.query_start),
            _address(sequences.query_start),
            _address(sequences.query_count),
            _address(sequences.cu_keys),
            _address(sequences.key_index),
            sequences.num_kept,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.scale,
            shape.softcap or 0.0,
            shape.window or 0,
            *out.out,
        )

    def final_norm(self, x: Float32, n: int, norm: Norm, out: Float32) -> None:
        """See `Kernels.final_norm`."""
        self._final_norm(_address(x), x.shape[1], n, _address(norm.weight), norm.eps, _address(out))


def _norm_call(norm: HeadsNorm) -> tuple[int, float, bool]:
    return _address(norm.norm.weight), norm.norm.eps, norm.over_projection


_TYPES: dict[str, Any] = {"i": ctypes.c_int, "p": ctypes.c_void_p, "z": ctypes.c_size_t, "f": ctypes.c_float}


def _function(functions: ctypes.CDLL, name: str, arguments: str) -> Any:
    found = getattr(functions, f"extract_{name}")
    found.argtypes = [_TYPES[one] for one in arguments]
    found.restype = None
    return found


def _address(array: Any) -> int:
    return int(array.ctypes.data)


def _up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def _padded(precision: Precision, width: int) -> int:
    return _up(width, STEP_BYTES // _BYTES[precision])


def _spread(stride: int) -> int:
    """Rows a multiple of 512 bytes apart would share few sets of the cache."""
    return stride + 64 if stride % 512 == 0 else stride
