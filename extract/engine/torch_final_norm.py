"""Find the module whose output is the state: the final norm, recognised by what it does and not by its name.

One row runs through the base model with a hook on every module. The final norm is the module that ran last among those
whose class is a norm and whose output is, bit for bit, the model's `last_hidden_state`. Never by name (families call it
`norm`, `ln_f`, `out_norm`, ...) and never `hidden_states[-1]`, which is taken before the norm in some families.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from extract.errors import CheckpointRefused

REMEMBERED_MODULES = 64
"""The final norm is among the last modules that run; the outputs of earlier ones are not kept."""


class NoFinalNorm(CheckpointRefused):
    """The model's output does not come out of a norm."""

    template = (
        "{family}: no final norm found. The last modules that ran: {last}. Its states would be the model's output as "
        "it is. If that is what you want, say so: --allow-no-final-norm"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalNorm:
    """Where the states of a model come from."""

    path: str
    """Module whose output is taken; "" is the model's own output."""
    how: Literal["final norm", "last block's norm", "projection after the norm", "none"]
    width: int
    """H, the size of a state."""
    norm_path: str
    """The norm itself; it differs from `path` where a projection follows, and is "" where there is none."""
    norm_width: int

    @property
    def described(self) -> str:
        """One line for contracts and listings."""
        if self.how == "projection after the norm":
            return f"{self.path} (projects {self.norm_path}, {self.norm_width} -> {self.width})"
        if self.how == "last block's norm":
            return f"{self.path} (the last block's own norm)"
        return self.path or "none (the model's output, no norm)"


@dataclass(frozen=True, slots=True)
class _Ran:
    """One module that ran: its path, what it is, the first tensor that went in and the one that came out."""

    path: str
    module: nn.Module
    given: torch.Tensor | None
    output: torch.Tensor

    @property
    def is_norm(self) -> bool:
        return "norm" in type(self.module).__name__.lower()

    @property
    def in_block(self) -> bool:
        return any(part.isdecimal() for part in self.path.split("."))


def first_tensor(output: Any) -> torch.Tensor | None:
    """The tensor that a module returned, alone or first of several."""
    if isinstance(output, (tuple, list)):
        output = output[0] if output else None
    return output if isinstance(output, torch.Tensor) else None


def last_hidden_state(output: Any) -> torch.Tensor:
    """[n, L, H] out of whatever a base model returns."""
    found = getattr(output, "last_hidden_state", None)
    state = found if found is not None else first_tensor(output)
    assert isinstance(state, torch.Tensor), f"a base model returned {type(output).__name__}"
    return state


@torch.inference_mode()
def find_final_norm(model: nn.Module, input_ids: torch.Tensor, *, allow_no_final_norm: bool = False) -> FinalNorm:
    """Run `input_ids` int64 [L] through `model` and say where its output comes from.

    Where a projection follows the norm (OPT with another embedding size), the projection is taken, because that is what
    the head reads; where a family ends with its last block's own norm, that one.

    Raises:
        NoFinalNorm: nothing of the kind, and `allow_no_final_norm` is false.
    """
    ran: deque[_Ran] = deque(maxlen=REMEMBERED_MODULES)

    def remember(path: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            state, before = first_tensor(output), first_tensor(given)
            if state is not None:
                # Copies: a later operation in place must not make a module's output look like the model's.
                ran.append(_Ran(path, module, before.clone() if before is not None else None, state.clone()))

        return hook

    handles = [module.register_forward_hook(remember(path)) for path, module in model.named_modules() if path]
    try:
        state = last_hidden_state(model(input_ids=input_ids[None], use_cache=False))
    finally:
        for handle in handles:
            handle.remove()

    width = state.shape[-1]
    same = [one for one in reversed(ran) if same_bits(one.output, state)]
    for one in same:
        if one.is_norm:
            how: Any = "last block's norm" if one.in_block else "final norm"
            return FinalNorm(path=one.path, how=how, width=width, norm_path=one.path, norm_width=width)
    for one in same:
        norm = _norm_before(one, ran) if isinstance(one.module, nn.Linear) and not one.in_block else None
        if norm is not None:
            return FinalNorm(
                path=one.path,
                how="projection after the norm",
                width=width,
                norm_path=norm.path,
                norm_width=norm.output.shape[-1],
            )
    if not allow_no_final_norm:
        last = ", ".join(f"{one.path} ({type(one.module).__name__})" for one in list(ran)[-3:])
        raise NoFinalNorm(family=family_of(model), last=last or "none")
    return FinalNorm(path="", how="none", width=width, norm_path="", norm_width=0)


def family_of(model: nn.Module) -> str:
    """`model_type` of a model's config: the name that messages call it by."""
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _norm_before(projection: _Ran, ran: deque[_Ran]) -> _Ran | None:
    for one in reversed(ran):
        if one.is_norm and projection.given is not None and same_bits(one.output, projection.given):
            return one
    return None


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits, so that states of NaN are told by the probe and not taken for states of another module."""
    if one.dtype != other.dtype or one.numel() != other.numel() or one.shape[-1] != other.shape[-1]:
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
