"""What torch raises where memory is not enough: several types on a CPU and on a card, told apart by their words."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a forward pass failed for lack of memory, of the card or of this machine, and a smaller one may fit."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in said or "can't allocate memory" in said)
