"""Which kernels compute on this machine: the native ones where they can be had, else the portable ones."""

from typing import Literal

from extract.cpu.kernels import Kernels, Precision

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
    if choice != "portable":
        from extract.cpu.native import NativeKernels, NoNativeKernels

        try:
            return NativeKernels(precision)
        except NoNativeKernels:
            if choice == "native":
                raise
    from extract.cpu.portable import portable_kernels

    return portable_kernels(precision, micro_batch)
