"""Hold a half-precision model in float32 for a while, and give back exactly the bits that it had.

Rounding of bfloat16 moves states by several per cent where token ids are random, which would hide a lost window or a
leak; in float32 the same faults stand out a thousandfold. Every bfloat16 and float16 value is a float32 value, so the
way there and back changes nothing. Needs room for the float32 weights; whether there is any the caller must know.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """While inside, all half-precision parameters and buffers of `model` are float32."""
    halves = [
        (tensor, tensor.dtype)
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.dtype in (torch.bfloat16, torch.float16)
    ]
    try:
        for tensor, _ in halves:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in halves:
            tensor.data = tensor.data.to(dtype)
