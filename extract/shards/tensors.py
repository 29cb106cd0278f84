"""Stored values as torch tensors that share their memory: the one place where numpy's types become torch's.

A tensor has no flag that says read-only. What a tensor may be written to is for whoever mapped the memory to say.
"""

import warnings
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt


def shared_tensor(values: npt.NDArray[Any], *, bfloat16: bool = False) -> Any:
    """A torch tensor over the memory of `values`.

    Args:
        values: of any shape, of a type that torch has.
        bfloat16: the values are uint16 and hold the bits of bfloat16.
    """
    import torch

    _hear_the_warning()
    tensor = torch.from_numpy(values.view(np.int16) if bfloat16 else values)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


@cache
def _hear_the_warning() -> None:
    """Of an array that is not writable torch warns once a process; sharing without a copy is the point here."""
    import torch

    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)
