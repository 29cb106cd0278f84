"""Which kernels compute on this machine: the native ones where they can be had, else the portable ones."""

from collections.abc import Sequence
from typing import Literal, cast

from extract.cpu.cpu_flags import cpu_flags
from extract.cpu.kernels import HIGH, Kernels, Precision
from extract.engine.contract import Contract

Choice = Literal["auto", "native", "portable"]


def kernels_for(precision: Precision, *, micro_batch: int, choice: Choice = "auto") -> Kernels:
    """Kernels of one precision.

    Args:
        precision: of weights and products.
        micro_batch: usual number of rows.
        choice: "native" and "portable" take that one; tests and comparisons use it.

    Raises:
        NoNativeKernels: choice "native", and there are none here.
    """
    return kernels_together((precision,), micro_batch=micro_batch, choice=choice)[0]


def kernels_together(
    precisions: Sequence[Precision], *, micro_batch: int, choice: Choice = "auto"
) -> tuple[Kernels, ...]:
    """Kernels of several precisions that work on each other's operands: all native, or all portable.

    Raises:
        NoNativeKernels: choice "native", and one of them is not to be had here.
    """
    if choice != "portable":
        from extract.cpu.native import NoNativeKernels
        from extract.cpu.native_trial import native_kernels

        try:
            return tuple(native_kernels(precision) for precision in precisions)
        except NoNativeKernels:
            if choice == "native":
                raise
    from extract.cpu.portable import portable_kernels

    return tuple(portable_kernels(precision, micro_batch) for precision in precisions)


COMPILING = "compiling kernels for this CPU, once (about ten seconds)"


def compiles_first() -> bool:
    """Whether opening an engine of our own decoder will compile the native kernels here."""
    from extract.cpu.native_library import library_if_compiled

    return library_if_compiled() is None


def engine_kernels(contract: Contract) -> str | None:
    """`kernels_here` for an engine; `None` if our own decoder does not run it."""
    if contract.runtime.decoder != "own":
        return None
    precision = cast("Precision", contract.precision.activations)
    return kernels_here(precision, *(() if contract.precision.high_precision is None else (HIGH,)))


def kernels_here(*precisions: Precision) -> str:
    """In words, which kernels "auto" takes on this machine, and why. Compiles and tries nothing, imports no torch.

    Of several precisions of one engine the first that has no native kernels decides.
    """
    from extract.cpu.native_library import library_if_compiled
    from extract.cpu.native_trial import known_verdicts

    library = library_if_compiled()
    if library is None:
        return "native, not compiled yet"
    for precision in precisions:
        known = {} if library.missing(precision) else known_verdicts(library)
        if known is None:
            return "native, not tried yet"
        problem = library.missing(precision) or known[precision].problem
        if problem:
            return f"portable ({problem})"
    flags = cpu_flags()
    units = [next((name for flag, name in _UNITS.items() if flag in flags), "no vector unit known")]
    if library.amx and precisions != ("float32",):
        units.append("amx")
    return f"native ({'+'.join(units)})"


_UNITS = {"avx512f": "avx512", "avx2": "avx2", "sve": "sve", "asimd": "neon"}
