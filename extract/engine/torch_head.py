"""What a model's own head would read, compared with the state that the engine gives, without ever holding a head.

The family's class with a head is built on the meta device, which has shapes and no memory; the loaded base model takes
the place of its empty one, and a module that only looks at its input takes the place of the output embedding. One row
then runs through the family's own code between base model and head, so a scale or a further layer there is seen, not
looked up. It can fail for reasons that say nothing about the state; then the answer is "not checked" with the reason.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.initialization import no_init_weights

from extract.engine.torch_decoder import TorchDecoder
from extract.engine.torch_packed_pass import Group, packed_pass


class _HeadReached(Exception):
    """Ends the forward at the head; carries what the head was given."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given = given


class _TransformedBefore(Exception):
    """A module with weights of its own stands between the base model and the output embedding."""


class _Capture(nn.Module):
    """Stands in for an output embedding; some families read the type of its weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, given: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        raise _HeadReached(given)


@torch.inference_mode()
def head_input(decoder: TorchDecoder, input_ids: torch.Tensor) -> str:
    """How the head's input differs from the engine's state, on the row `input_ids` int64 [L].

    Returns:
        "identical" (bit for bit), "scaled by <c>", "transformed", "transformed by <module>" or
        "not checked (<reason>)".
    """
    model = decoder.model
    try:
        with_head = _with_head(model)
    except Exception as error:
        return f"not checked ({_short(error)})"
    if isinstance(with_head, str):
        return f"not checked ({with_head})"
    state = decoder.states(input_ids, [0, len(input_ids)])
    length = len(input_ids)
    try:
        with packed_pass((Group(0, 1, length),), length):  # does nothing where the family's own attention runs
            with_head(input_ids=input_ids[None].to(decoder.device), use_cache=False)
    except _HeadReached as reached:
        return _compared(state, reached.given)
    except _TransformedBefore as error:
        return f"transformed by {error}"
    except Exception as error:
        return f"not checked ({_short(error)})"
    return "not checked (the output embedding was not used)"


def causal_model_around(model: Any) -> tuple[Any, str] | str:
    """The family's causal class, empty, with `model` as its base, and the name of that place; a string: why not."""
    try:
        head_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    except KeyError:
        return f"no class with a head is known for {type(model.config).__name__}"
    with torch.device("meta"), no_init_weights():
        with_head = head_class._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    with_head.eval()
    # Not `base_model_prefix`: families whose decoder is part of a larger model name another slot there.
    slots = [name for name, child in with_head.named_children() if type(child) is type(model)]
    if len(slots) != 1:
        return f"{head_class.__name__} has {len(slots)} places for a {type(model).__name__}"
    if with_head.get_output_embeddings() is None:
        return f"{head_class.__name__} names no output embedding"
    setattr(with_head, slots[0], model)
    return with_head, slots[0]


def replace_module(model: Any, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `model` has `old`."""
    for name, module in list(model.named_modules()):
        if module is old:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)


def _with_head(model: Any) -> Any:
    """The family's causal class around `model`, its head replaced; a string says why there is none."""
    made = causal_model_around(model)
    if isinstance(made, str):
        return made
    with_head, slot = made
    replace_module(with_head, with_head.get_output_embeddings(), _Capture(model.dtype))
    for name, module in list(with_head.named_modules()):
        inside = name == slot or name.startswith(f"{slot}.")
        if not inside and any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_refuse(name))
    return with_head


def _refuse(name: str) -> Any:
    def hook(*_: object) -> None:
        raise _TransformedBefore(name)

    return hook


def _compared(state: torch.Tensor, given: torch.Tensor) -> str:
    given = given.reshape(-1, given.shape[-1])
    if given.shape != state.shape:
        return "transformed"
    if torch.equal(given, state):
        return "identical"
    known, seen = state.double(), given.double()
    factor = float((known * seen).sum() / (known * known).sum())
    close = float((seen - factor * known).abs().max() / seen.abs().max()) <= 2 * torch.finfo(state.dtype).eps
    return f"scaled by {factor:.6g}" if close else "transformed"


def _short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    return text if len(text) <= 120 else text[:117] + "..."
