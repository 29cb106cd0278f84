"""Numbers that Numba does not know or is slow at: bfloat16 bits, exp, tanh, erfc, bytes, and a maximum that vectorises.

How the portable kernels are compiled stands here too (`kernel`, `inner`). Knows no rows and no layers. Two choices to
question: `nnan` and `ninf` are left out of fast arithmetic, because a NaN in the weights must come out as a NaN; and
the functions that lose digits when sums are regrouped are compiled without `reassoc`, each with its own flags.

Compiled code is kept under a name that is a hash of all sources it can come from. Numba's own rule, the time of one
file, misses what a called function of another file became, and a process that began before an upgrade stores its old
code as the new file's: wrong numbers, found the hard way.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from extract.cpu.native_library import cache_directory

Function = TypeVar("Function", bound=Callable[..., Any])

_FAST = {"contract", "reassoc", "nsz", "arcp"}
_INT8, _INT16, _INT32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_AS_WRITTEN = ("contract",)  # an instruction that has flags of its own keeps them when Numba adds the caller's

f4 = np.float32


def kernel(function: Function) -> Function:
    """Compile a loop over rows: no GIL, fast arithmetic, kept on disk where a directory for it can be written."""
    options: Any = {"nogil": True, "error_model": "numpy", "fastmath": _FAST}
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = str(_cache())  # type: ignore[attr-defined]
    try:
        compiled: Function = numba.njit(function, cache=True, **options)
    except (RuntimeError, OSError):  # nothing can be written there: compile in every process
        compiled = numba.njit(function, **options)
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]
    return compiled


@cache
def _cache() -> Path:
    """Where code compiled from these very sources is kept."""
    here = Path(__file__).parent
    sources = sorted([*here.glob("portable*.py"), here / "rotation.py"])
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    key.update(numba.__version__.encode())
    return cache_directory().parent / "numba" / key.hexdigest()[:16]


def inner(function: Function) -> Function:
    """Compile a part of a kernel whose sums stay as written."""
    compiled: Function = numba.njit(function, error_model="numpy", fastmath={"contract"}, forceinline=True)
    return compiled


def instructions(generator: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kernels may call, given by the LLVM instructions it becomes."""
    emitted: Any = intrinsic(generator)
    return cast(Callable[..., Any], emitted)


@instructions
def load(_context: Any, number: Any) -> Any:
    """A float32, or the float32 whose upper half are the bits of a bfloat16 (uint16)."""

    def as_it_is(_context: Any, _builder: Any, _signature: Any, arguments: Any) -> Any:
        return arguments[0]

    def widen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(arguments[0], _INT32), _INT32(16)), _FLOAT)

    return types.float32(number), widen if number == types.uint16 else as_it_is


@instructions
def bfloat16_bits(_context: Any, number: Any) -> Any:
    """Round a float32 to the nearest bfloat16, half to even; a NaN stays one."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], _INT32)
        odd = builder.and_(builder.lshr(bits, _INT32(16)), _INT32(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _INT32(0x7FFF))), _INT32(16))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.trunc(builder.select(is_nan, _INT32(0x7FC0), rounded), _INT16)

    return types.uint16(types.float32), generate


@instructions
def offset_byte(_context: Any, number: Any) -> Any:
    """Round |number| <= 127 to the nearest integer, half to even, and add 128; anything for a NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        # Added to 1.5 * 2**23, a number leaves its integer in the low bits.
        shifted = builder.fadd(arguments[0], _FLOAT(1.5 * 2**23 + 128), flags=_AS_WRITTEN)
        return builder.trunc(builder.bitcast(shifted, _INT32), _INT8)

    return types.uint8(types.float32), generate


@instructions
def rank(_context: Any, number: Any) -> Any:
    """An int32 of the same order as the float32: LLVM vectorises a maximum of integers, but not one of floats."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], _INT32)
        return builder.xor(bits, builder.and_(builder.ashr(bits, _INT32(31)), _INT32(0x7FFFFFFF)))

    return types.int32(types.float32), generate


@instructions
def of_rank(_context: Any, number: Any) -> Any:
    """The float32 of a `rank`."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        sign = builder.ashr(arguments[0], _INT32(31))
        return builder.bitcast(builder.xor(arguments[0], builder.and_(sign, _INT32(0x7FFFFFFF))), _FLOAT)

    return types.float32(types.int32), generate


@instructions
def nearest_int(_context: Any, number: Any) -> Any:
    """Round |number| < 2**22 to the nearest int32; anything for a NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        shifted = builder.fadd(arguments[0], _FLOAT(1.5 * 2**23), flags=_AS_WRITTEN)
        return builder.sub(builder.bitcast(shifted, _INT32), _INT32(0x4B400000))

    return types.int32(types.float32), generate


@instructions
def power_of_two(_context: Any, exponent: Any) -> Any:
    """2**exponent for an int32 from -126 to 127."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(arguments[0], _INT32(127)), _INT32(23)), _FLOAT)

    return types.float32(types.int32), generate


@inner
def exp(x: Any) -> Any:
    """e**x, with x first cut to [-87, 88]; relative error at most 2e-7 inside, NaN of NaN. Vectorises."""
    x = f4(-87) if x < f4(-87) else x  # in this form a NaN passes
    x = f4(88) if x > f4(88) else x
    n = nearest_int(x * f4(1.44269504))
    r = x - f4(n) * f4(0.693359375)
    r = r + f4(n) * f4(2.12194440e-4)
    p = f4(1.9875691500e-4)
    p = p * r + f4(1.3981999507e-3)
    p = p * r + f4(8.3334519073e-3)
    p = p * r + f4(4.1665795894e-2)
    p = p * r + f4(1.6666665459e-1)
    p = p * r + f4(5.0000001201e-1)
    return (p * (r * r) + r + f4(1)) * power_of_two(n)


@inner
def tanh(x: Any) -> Any:
    """Hyperbolic tangent; relative error at most 2e-7."""
    size = abs(x)
    z = x * x
    p = f4(-5.70498872745e-3)
    p = p * z + f4(2.06390887954e-2)
    p = p * z + f4(-5.37397155531e-2)
    p = p * z + f4(1.33314422036e-1)
    p = p * z + f4(-3.33332819422e-1)
    near_zero = p * z * x + x
    far = f4(1) - f4(2) / (exp(size + size) + f4(1))
    return near_zero if size < f4(0.625) else (-far if x < f4(0) else far)


@inner
def erfc_of_positive(x: Any) -> Any:
    """1 - erf(x) for x >= 0; absolute error at most 4e-7, and small beside erfc(x) in the tail too."""
    t = f4(1) / (f4(1) + f4(0.5) * x)
    p = f4(0.17087277)
    p = p * t + f4(-0.82215223)
    p = p * t + f4(1.48851587)
    p = p * t + f4(-1.13520398)
    p = p * t + f4(0.27886807)
    p = p * t + f4(-0.18628806)
    p = p * t + f4(0.09678418)
    p = p * t + f4(0.37409196)
    p = p * t + f4(1.00002368)
    p = p * t + f4(-1.26551223)
    return t * exp(p - x * x)
