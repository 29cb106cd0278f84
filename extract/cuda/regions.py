"""Everything between two products, as regions that fuse into one kernel each: norm, rotary positions, gate, residual.

A region reads its inputs once and writes its outputs once; in plain torch it is several passes over memory, compiled
(`fuse`) it is one. Both are the same lines. The residual stream and all arithmetic here are float32; only what a
product or attention reads is rounded. Each region is a module of its own, because its sizes are then constants for the
compiler and only the number of rows is not.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from extract.cpu.architecture import Activation
from extract.cuda.fp8 import FP8, quantized
from extract.cuda.linears import Operand

MOST_KINDS = 1024
"""Sizes and layouts that a class of regions may be compiled for in one process."""


class Region(nn.Module):
    """What compiles into one kernel."""


class Norm(nn.Module):
    """RMSNorm in float32: weight [H] float32, 1 added where the family does so."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., H]."""
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * self.weight


class Embed(Region):
    """The residual stream as it begins."""

    table: torch.Tensor

    def __init__(self, table: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.scale = scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """float32 [T, H] of ids [T]."""
        return functional.embedding(input_ids, self.table).float() * self.scale


class Read(Region):
    """The residual stream as an operand, through a norm where there is one."""

    def __init__(self, norm: Norm | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.dtype = norm, dtype

    def forward(self, x: torch.Tensor) -> Operand:
        """Operand [n, H] of float32 [n, H]."""
        return operand(x if self.norm is None else self.norm(x), self.dtype)


class AddAndRead(Region):
    """Add a branch to the residual stream and read the stream for what comes next."""

    def __init__(self, post: Norm | None, scale: float, norm: Norm | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.post, self.scale, self.norm, self.dtype = post, scale, norm, dtype

    def forward(self, x: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, Operand]:
        """The new stream float32 [n, H], and the operand [n, H] read off it; `x` is left as it is."""
        branch = branch.float()
        if self.post is not None:
            branch = self.post(branch)
        x = x + branch * self.scale
        return x, operand(x if self.norm is None else self.norm(x), self.dtype)


class Heads(Region):
    """Queries or keys out of a product: norm and rotary positions where there are any.

    Args:
        num_heads, head_dim: of the heads.
        norm: over each head, or over all of them.
        over_projection: which.
        cos, sin: float32 [positions, rotary channels / 2], or `None`.
    """

    cos: torch.Tensor | None
    sin: torch.Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        norm: Norm | None,
        over_projection: bool,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.norm, self.over_projection = norm, over_projection
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, projected: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n, heads, D] of [n, heads * D] at positions [n], in its type."""
        found = projected.float()
        if self.norm is not None and self.over_projection:
            found = self.norm(found)
        found = found.reshape(projected.shape[0], self.num_heads, self.head_dim)
        if self.norm is not None and not self.over_projection:
            found = self.norm(found)
        if self.cos is not None and self.sin is not None:
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
            half = cos.shape[-1]
            first, second, rest = found[..., :half], found[..., half : 2 * half], found[..., 2 * half :]
            found = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
        return found.to(projected.dtype)


class Gated(Region):
    """activation(gate) * up, as an operand."""

    def __init__(self, activation: Activation, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation, self.dtype = activation, dtype

    def forward(self, gate_up: torch.Tensor) -> Operand:
        """Operand [n, I] of gate and up side by side [n, 2 I]."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        if self.activation == "silu":
            gate = functional.silu(gate)
        else:
            gate = functional.gelu(gate, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return operand(gate * up, self.dtype)


class Round(Region):
    """What attention gave, as an operand."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, values: torch.Tensor) -> Operand:
        """Operand [n, K]."""
        return operand(values, self.dtype)


def operand(values: torch.Tensor, dtype: torch.dtype) -> Operand:
    """Rows in the type of a product, with their scales where that is E4M3."""
    return quantized(values) if dtype == FP8 else (values.to(dtype), None)


def same_code() -> dict[str, Any]:
    """Options under which torch's compiler makes the same sums, in the same order, in every process.

    By itself it times several kernels on the card and keeps the fastest. They add up a row in different orders, so
    chance would decide a norm's last bits, and two workers would write different ones.
    """
    import torch._inductor.config

    return {name: True for name in ("deterministic", "batch_invariant") if hasattr(torch._inductor.config, name)}


def fuse(modules: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile every region among `modules`, for any number of rows. Nothing is compiled before it is first called.

    The forward method and not the module: its code is the class's own, so layers find each other's compiled code. So do
    engines, and each of other sizes adds its own: torch counts them for a class, and fails at the ninth unless told.
    """
    import torch._dynamo.config

    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_KINDS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, MOST_KINDS)
    for module in modules:
        if isinstance(module, Region):
            options = same_code() if backend == "inductor" else None
            compiled = torch.compile(module.forward, backend=backend, fullgraph=True, dynamic=True, options=options)
            module.forward = compiled
