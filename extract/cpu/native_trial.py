"""The native kernels that prove right and fast on this machine, precision by precision; the others are refused.

A compiler of another version may break or slow them, which no test of ours would see. So a freshly compiled library is
tried once, in well under a second, and the verdict lies beside it as JSON. Wrong numbers are final. A slow product may
be the fault of whatever else ran: it is refused in this process, tried once more by the next one, and then final.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from extract.cpu.kernels import Precision
from extract.cpu.native import NativeKernels, NoNativeKernels
from extract.cpu.native_library import NativeLibrary, native_library
from extract.cpu.native_numbers import wrong_numbers

VERSION = 1
"""Of the trial: a verdict of another one counts for nothing."""

LEAST_OF_NUMPY = 0.5
"""The float32 product is at least so fast, beside numpy's on one thread."""

LEAST_OF_FLOAT32: dict[Precision, float] = {"bfloat16": 1.2, "int8": 1.5}
"""The others' products, beside our own in float32: else there is no reason to round."""

FEWEST_TRIES, MOST_TRIES = 5, 60
"""The best of so many counts, half a millisecond each; more than the fewest only until all are fast enough."""

_PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
_ROWS, _WIDTH, _OUTPUTS = 128, 256, 512
_SIDE, _REPEATS = 64, 16
"""numpy multiplies squares so small that its BLAS keeps to one thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was seen of one precision.

    Attributes:
        problem: why it is refused; empty: it is not.
        final: no process tries it again.
        gflops: billions of operations a second of its product, the best that was seen; 0: not tried.
        least_gflops: as many were asked for.
    """

    problem: str
    final: bool = True
    gflops: float = 0.0
    least_gflops: float = 0.0


Verdicts = dict[Precision, Verdict]


def native_kernels(precision: Precision) -> NativeKernels:
    """Kernels of one precision, compiled and tried first if this machine has not done so yet.

    Raises:
        NoNativeKernels: they cannot be had, or did not prove right and fast.
    """
    library = native_library()
    problem = library.missing(precision) or verdicts(library)[precision].problem
    if problem:
        raise NoNativeKernels(precision=precision, problem=problem)
    return NativeKernels(precision, library)


@cache
def verdicts(library: NativeLibrary) -> Verdicts:
    """What holds in this process of each precision that the library has."""
    known = known_verdicts(library)
    if known is not None and all(verdict.final for verdict in known.values()):
        return known
    found = try_library(library)
    if known is not None:
        found = {precision: _again(known[precision], verdict) for precision, verdict in found.items()}
    _write(_path(library), found)
    return found


def known_verdicts(library: NativeLibrary) -> Verdicts | None:
    """What an earlier process found; `None` if none did."""
    try:
        stored = json.loads(_path(library).read_bytes())
        if stored.pop("version") != VERSION:
            return None
        return {precision: Verdict(**stored[precision]) for precision in _precisions(library)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # not there, or damaged: it is made again
        return None


def _again(before: Verdict, now: Verdict) -> Verdict:
    """A second trial is the last one."""
    return before if before.final else Verdict(**{**asdict(now), "final": True})


def try_library(library: NativeLibrary) -> Verdicts:
    """Try the numbers, then the speed of each precision."""
    kernels = {precision: NativeKernels(precision, library) for precision in _precisions(library)}
    wrong = {precision: wrong_numbers(one) for precision, one in kernels.items()}
    gflops = _speeds(kernels)
    found: Verdicts = {}
    for precision, least in _least(gflops).items():
        problem, final = wrong[precision], True
        if not problem and gflops[precision] < least:
            final = False
            problem = f"its product makes {gflops[precision]:.1f} GFLOP/s, at least {least:.1f} expected"
        found[precision] = Verdict(
            problem=problem, final=final, gflops=round(gflops[precision], 1), least_gflops=round(least, 1)
        )
    return found


def _precisions(library: NativeLibrary) -> list[Precision]:
    return [precision for precision in _PRECISIONS if not library.missing(precision)]


def _least(gflops: dict[str, float]) -> dict[Precision, float]:
    """GFLOP/s asked of each precision."""
    return {
        precision: LEAST_OF_FLOAT32[precision] * gflops["float32"]
        if precision in LEAST_OF_FLOAT32
        else LEAST_OF_NUMPY * gflops["numpy"]
        for precision in _PRECISIONS
        if precision in gflops
    }


def _speeds(kernels: dict[Precision, NativeKernels]) -> dict[str, float]:
    """GFLOP/s of numpy and of each precision, by turns so that all see the same machine."""
    works = {"numpy": _numpy_product()}
    works.update((precision, _product(one)) for precision, one in kernels.items())
    best = dict.fromkeys(works, 0.0)
    for number in range(MOST_TRIES):
        for name, (operations, work) in works.items():
            start = time.perf_counter_ns()
            work()
            best[name] = max(best[name], operations / max(time.perf_counter_ns() - start, 1))
        if number + 1 >= FEWEST_TRIES and all(best[name] >= least for name, least in _least(best).items()):
            break
    return best


def _numpy_product() -> tuple[int, Callable[[], None]]:
    a, b = (np.random.default_rng(seed).standard_normal((_SIDE, _SIDE), np.float32) for seed in range(2))
    out = np.empty_like(a)

    def work() -> None:
        for _ in range(_REPEATS):
            np.matmul(a, b, out=out)

    return 2 * _SIDE**3 * _REPEATS, work


def _product(kernels: NativeKernels) -> tuple[int, Callable[[], None]]:
    draw = np.random.default_rng(0)
    linear = kernels.pack([draw.standard_normal((_OUTPUTS, _WIDTH), np.float32)], None)
    operand, out = kernels.operand(_ROWS, _WIDTH), kernels.matrix(_ROWS, _OUTPUTS)
    kernels.quantize(draw.standard_normal((_ROWS, _WIDTH), np.float32), _ROWS, operand)
    return 2 * _ROWS * _WIDTH * _OUTPUTS, lambda: kernels.project(operand, _ROWS, linear, out)


def _path(library: NativeLibrary) -> Path:
    assert library.path is not None
    return library.path.with_suffix(".json")


def _write(path: Path, found: Verdicts) -> None:
    """Whole or not at all; where nothing can be written every process tries for itself."""
    content: dict[str, Any] = {"version": VERSION}
    content.update((precision, asdict(verdict)) for precision, verdict in found.items())
    try:
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".draft")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        Path(draft).replace(path)
    except OSError:
        return
