"""Two inner loops written as LLVM vector instructions, where Numba's own loops stay scalar or leave the registers.

LLVM turns the vectors into whatever registers the CPU has. Knows float32 arrays whose last axis is contiguous, and
neither checks bounds nor looks for overlaps: that is the callers' business.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from extract.cpu.portable_numbers import instructions
from extract.cpu.rotation import BLOCK

ROWS = 4
"""Rows of a tile product: with 16 columns its sums fit the registers of every CPU with vectors."""

COLUMNS = 16
"""Columns of a tile product."""

_FLOAT = ir.FloatType()
_FUSED = ("contract",)
_LANE = ir.IntType(32)


@instructions
def tile_product(_context: Any, a: Any, b: Any, first: Any, count: Any, column: Any, out: Any) -> Any:
    """out[:4, column : column + 16] = a[:4, first : first + count] @ b[first : first + count, the same columns]."""
    signature = types.void(a, b, types.intp, types.intp, types.intp, out)
    vector = ir.VectorType(_FLOAT, COLUMNS)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        first, count, column = arguments[2:5]
        left, right, result = (_Rows(context, builder, kind, arguments[i]) for i, kind in ((0, a), (1, b), (5, out)))
        sums = [cgutils.alloca_once(builder, vector) for _ in range(ROWS)]  # type: ignore[no-untyped-call]
        for total in sums:
            builder.store(ir.Constant(vector, [0.0] * COLUMNS), total)
        with cgutils.for_range(builder, count) as loop:
            k = builder.add(first, loop.index)
            columns = builder.load(right.at(k, column, vector), align=4)
            for i, total in enumerate(sums):
                number = builder.load(left.at(context.get_constant(types.intp, i), k, _FLOAT))
                one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _LANE(0))
                splat = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_LANE, COLUMNS), [0] * COLUMNS))
                product = builder.fmul(splat, columns, flags=_FUSED)
                builder.store(builder.fadd(builder.load(total), product, flags=_FUSED), total)
        for i, total in enumerate(sums):
            target = result.at(context.get_constant(types.intp, i), column, vector)
            builder.store(builder.load(total), target, align=4)
        return context.get_dummy_value()

    return signature, generate


@instructions
def rotate_block(_context: Any, row: Any, first: Any) -> Any:
    """Walsh-Hadamard transform of row[first : first + 64], in natural order, unnormalised, in place.

    Six stages of stride 1, 2, 4, ... 32: of each pair at that distance, first + second, then first - second.
    """
    signature = types.void(row, types.intp)
    vector = ir.VectorType(_FLOAT, BLOCK)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array = context.make_array(row)(context, builder, arguments[0])
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), vector.as_pointer())
        block = builder.load(place, align=4)
        for stride in (1, 2, 4, 8, 16, 32):
            partner = builder.shuffle_vector(block, block, _lanes([lane ^ stride for lane in range(BLOCK)]))
            sums = builder.fadd(block, partner, flags=_FUSED)
            differences = builder.fsub(partner, block, flags=_FUSED)
            taken = [lane + BLOCK if lane & stride else lane for lane in range(BLOCK)]
            block = builder.shuffle_vector(sums, differences, _lanes(taken))
        builder.store(block, place, align=4)
        return context.get_dummy_value()

    return signature, generate


class _Rows:
    """Places in a 2-D float32 array."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        self._builder = builder
        array = context.make_array(kind)(context, builder, value)
        self._data = array.data
        # Contiguous, so this is the step from row to row too.
        self._width = cgutils.unpack_tuple(builder, array.shape)[1]  # type: ignore[no-untyped-call]

    def at(self, row: Any, column: Any, type_: Any) -> Any:
        """A pointer to a number, or to a vector that begins there."""
        place = self._builder.add(self._builder.mul(row, self._width), column)
        return self._builder.bitcast(self._builder.gep(self._data, [place]), type_.as_pointer())


def _lanes(numbers: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_LANE, len(numbers)), numbers)
