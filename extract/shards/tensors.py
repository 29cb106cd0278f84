"""Stored values as torch tensors that share their memory: the one place where numpy's types become torch's.

A tensor has no flag that says read-only. What a tensor may be written to is for whoever mapped the memory to say.
"""

import warnings
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

    array = values.view(np.int16) if bfloat16 else values
    if array.flags.writeable:
        tensor = torch.from_numpy(array)
    else:
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so; sharing without a copy is the point here.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
            tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor
