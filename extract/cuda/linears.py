"""The linears of the decoder, in the precision of an engine, over operands that were made ready for them.

An operand is what a region of `extract.cuda.regions` reads off the residual stream: rows in the computing type, and for
FP8 a scale for each. Rounding there and not here lets it fuse with the norm before it.
"""

import torch
from torch import nn
from torch.nn import functional

from extract.cuda.fp8 import scaled_product

Operand = tuple[torch.Tensor, torch.Tensor | None]
"""Rows [n, K], and float32 scales [n, 1] where the rows are E4M3."""


class Linear(nn.Module):
    """Weights [N, K], and a bias [N] or none, in the operand's type."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, operand: Operand, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Outputs `start` to `stop` of each row: [n, stop - start]."""
        bias = None if self.bias is None else self.bias[start:stop]
        return functional.linear(operand[0], self.weight[start:stop], bias)


class ScaledLinear(nn.Module):
    """E4M3 weights [N, K] with float32 scales [N, 1]; products come out in bfloat16."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, operand: Operand, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Outputs `start` to `stop` of each row: bfloat16 [n, stop - start]."""
        values, scales = operand
        assert scales is not None
        found = scaled_product(values, scales, self.weight[start:stop], self.scale[start:stop])
        return found if self.bias is None else found.add_(self.bias[start:stop])  # a sum of its own is as large again
