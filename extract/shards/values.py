"""Stored value types: how a state becomes the numbers on disk and back, and which states a type cannot hold.

Knows arrays and nothing of files, rows or tokens. Every type reports the states it cannot hold instead of writing an
infinity or a repaired number. "int8" means rotated int8 (see `rotation.py`): half the size of float16, with less error
than bfloat16 arithmetic makes.

Letters: K states, H hidden size. States come in as float32, float16, or uint16 holding the bits of bfloat16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from extract.records import States, UInt8
from extract.shards.rotation import block_size, rotate

Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

SLICE_VALUES = 2**18
"""Values converted at a time, so that temporaries stay in cache."""
LARGEST: dict[type[np.generic], float] = {
    np.float32: float(np.finfo(np.float32).max),
    np.float16: float(np.finfo(np.float16).max),
    np.uint16: float.fromhex("0x1.fep127"),
}
"""Largest magnitude of each type that states come in."""


class Fault(IntEnum):
    """Why a state is not stored."""

    NONE = 0
    NON_FINITE = 1
    """The state itself holds NaN or infinity."""
    OVERFLOW = 2
    """The state is finite, but larger than the stored type can hold."""
    ZERO_NORM = 3
    """A state of zeros has no unit length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """States as they are stored.

    Attributes:
        values: [K, H] of the type's `storage`; of a state with a fault neither values nor scale mean anything.
        scales: float32 [K] for a scaled type, else `None`.
        faults: uint8 [K], codes of `Fault`.
    """

    values: npt.NDArray[Any]
    scales: Float32 | None
    faults: UInt8

    @property
    def bad(self) -> Bool:
        """Which states cannot be stored: bool [K]."""
        bad: Bool = self.faults != Fault.NONE
        return bad


class ValueType(Protocol):
    """One stored type. Encoding a state depends on nothing but that state."""

    name: str
    storage: np.dtype[Any]
    largest: float
    """Largest magnitude that it holds."""
    scaled: bool
    """A float32 scale is stored beside each state."""
    bytes_per_value: int
    """Before compression, without scales."""

    def encode(self, states: States, *, finite: bool = False) -> Encoded:
        """Encode `states` [K, H]. Shares memory with `states` where they already have the stored type.

        Args:
            states: in any of their types.
            finite: all of them are known to be finite. Where the stored type holds whatever is, nobody looks again.
        """

    def decode(self, values: npt.NDArray[Any], scales: Float32 | None = None) -> Float32:
        """float32 [K, H] of stored `values` [K, H] (and `scales` [K])."""

    def recipe(self, width: int) -> str:
        """Lines of numpy that turn `values` [K, width] (and `scale` [K]) into float32 `states` [K, width]."""


class _Float:
    """float32 and float16: numpy's own types."""

    scaled = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.storage: np.dtype[Any] = np.dtype(name)
        self.largest = LARGEST[self.storage.type]
        self.bytes_per_value = self.storage.itemsize

    def encode(self, states: States, *, finite: bool = False) -> Encoded:
        values = states
        if states.dtype != self.storage:
            values = np.empty(states.shape, self.storage)
            with np.errstate(over="ignore"):
                for part in _slices(states):
                    values[part] = as_float32(states[part])
        return Encoded(values=values, scales=None, faults=_faults(states, values, finite=finite))

    def decode(self, values: npt.NDArray[Any], scales: Float32 | None = None) -> Float32:
        return as_float32(values)

    def recipe(self, width: int) -> str:
        return "states = values.astype(numpy.float32)"


class _Bfloat16:
    """bfloat16 as its bits in uint16, because numpy and most Arrow readers have no such type."""

    name = "bfloat16"
    storage: np.dtype[Any] = np.dtype(np.uint16)
    largest = LARGEST[np.uint16]
    scaled = False
    bytes_per_value = 2

    def encode(self, states: States, *, finite: bool = False) -> Encoded:
        values = states
        if states.dtype != self.storage:
            values = np.empty(states.shape, self.storage)
            for part in _slices(states):
                values[part] = bfloat16_bits(as_float32(states[part]))
        return Encoded(values=values, scales=None, faults=_faults(states, values, finite=finite))

    def decode(self, values: npt.NDArray[Any], scales: Float32 | None = None) -> Float32:
        return as_float32(values)

    def recipe(self, width: int) -> str:
        return "states = (values.astype(numpy.uint32) << 16).view(numpy.float32)"


class _Int8:
    """int8 of Hadamard-rotated blocks, one symmetric scale per state, which is all that is looked at."""

    name = "int8"
    storage: np.dtype[Any] = np.dtype(np.int8)
    largest = float(np.finfo(np.float32).max) / 8  # what a rotation of 64 values cannot carry beyond float32
    scaled = True
    bytes_per_value = 1

    def encode(self, states: States, *, finite: bool = False) -> Encoded:
        values = np.empty(states.shape, np.int8)
        scales = np.empty(len(states), np.float32)
        for part in _slices(states):
            with np.errstate(over="ignore", invalid="ignore"):
                rotated = rotate(as_float32(states[part]))
                scale = np.abs(rotated).max(axis=1, initial=0) / np.float32(127)
            fine = np.isfinite(scale)
            if not fine.all():
                rotated[~fine] = 0
                scale[~fine] = np.nan
            scales[part] = scale
            rotated /= np.where(fine & (scale > 0), scale, np.float32(1))[:, None]
            np.rint(rotated, out=rotated)
            values[part] = np.clip(rotated, -127, 127, out=rotated)
        return Encoded(values=values, scales=scales, faults=_faults(states, scales[:, None]))

    def decode(self, values: npt.NDArray[Any], scales: Float32 | None = None) -> Float32:
        if scales is None:
            raise TypeError("int8 values are decoded with their scales")
        states = np.empty(values.shape, np.float32)
        for part in _slices(values):
            states[part] = rotate(values[part].astype(np.float32)) * scales[part, None]
        return states

    def recipe(self, width: int) -> str:
        block = block_size(width)
        if block == 1:
            return "states = values.astype(numpy.float32) * scale[:, None]"
        return (
            f"rotation = numpy.ones((1, 1), numpy.float32)\n"
            f"while len(rotation) < {block}: "
            "rotation = numpy.block([[rotation, rotation], [rotation, -rotation]]) / numpy.float32(2**0.5)\n"
            f"states = (values.astype(numpy.float32).reshape(-1, {block}) @ rotation)"
            f".reshape(-1, {width}) * scale[:, None]"
        )


VALUE_TYPES: dict[str, ValueType] = {
    "float16": _Float("float16"),
    "float32": _Float("float32"),
    "bfloat16": _Bfloat16(),
    "int8": _Int8(),
}


def value_type(name: str) -> ValueType:
    """The stored type called `name` ("float16", "float32", "bfloat16" or "int8")."""
    return VALUE_TYPES[name]


def as_float32(states: States) -> Float32:
    """float32 values of states in any compute type, exactly; the same memory if they are float32 already."""
    if states.dtype == np.uint16:
        wide = states.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return states.astype(np.float32, copy=False)


def bfloat16_bits(states: Float32) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; every NaN stays a NaN."""
    bits = np.ascontiguousarray(states).view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    nan = np.isnan(states)
    if nan.any():
        rounded[nan] = (bits[nan] >> 16) | 0x40
    return rounded.astype(np.uint16)


def unit_length(states: States) -> tuple[Float32, Bool]:
    """States [K, H] scaled to length 1 in float32, and which of them are all zeros (left as they are)."""
    wide = as_float32(states)
    with np.errstate(invalid="ignore"):
        largest = np.abs(wide).max(axis=1, keepdims=True, initial=0)
        zero: Bool = largest[:, 0] == 0
        largest[zero] = 1
        scaled: Float32 = wide / largest  # squares of what is left neither overflow nor vanish
        length = np.linalg.norm(scaled, axis=1, keepdims=True)
        length[zero] = 1
        scaled /= length
    return scaled, zero


def not_finite(values: npt.NDArray[Any]) -> Bool:
    """bool, shape of `values`: NaN or infinity, for float32, float16 and the bits of bfloat16."""
    found: Bool
    if values.dtype == np.float32:
        found = ~np.isfinite(values)
    else:
        exponent = 0x7F80 if values.dtype == np.uint16 else 0x7C00
        found = (values.view(np.uint16) & exponent) == exponent
    return found


def _faults(states: States, encoded: npt.NDArray[Any], *, finite: bool = False) -> UInt8:
    """uint8 [K]: the fault of each state, from what it was and what it became (not finite where it does not fit).

    `finite`: all states are known to be; where the stored type holds whatever is, nobody looks.
    """
    faults = np.zeros(len(states), np.uint8)
    if finite and LARGEST[states.dtype.type] <= LARGEST[encoded.dtype.type]:
        return faults
    for part in _slices(encoded):
        if not _all_finite(encoded[part]):
            rows = part.start + np.flatnonzero(not_finite(encoded[part]).any(axis=1))
            non_finite = not_finite(states[rows]).any(axis=1)
            faults[rows] = np.where(non_finite, Fault.NON_FINITE, Fault.OVERFLOW)
    return faults


def _all_finite(values: npt.NDArray[Any]) -> bool:
    """One cheap pass over the common case, in which nothing is wrong."""
    if values.dtype == np.float32:
        return bool(np.isfinite(values).all())
    bits, exponent = values.view(np.uint16), 0x7F80 if values.dtype == np.uint16 else 0x7C00
    return bool((bits & 0x7FFF).max(initial=0) < exponent)


def _slices(states: npt.NDArray[Any]) -> Iterator[slice]:
    """Row ranges of about `SLICE_VALUES` values."""
    step = max(1, SLICE_VALUES // max(1, states.shape[1]))
    for start in range(0, len(states), step):
        yield slice(start, start + step)
