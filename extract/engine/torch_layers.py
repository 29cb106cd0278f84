"""Find a model's decoder layers, whose outputs are the residual stream: recognised by what they give, not by name.

transformers' `output_hidden_states` is the judge: of all lists of modules, the decoder layers are the one whose n-th
member gives, bit for bit, the n-th state of that tuple, whose first member is fed its first state, and whose last
member's output is what the final norm is fed (the tuple has the normed state there). A family that does anything else
between its layers, runs one twice or carries several streams has no such list, and is refused rather than guessed at.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from extract.engine.contract import NoLayerStates
from extract.engine.torch_final_norm import FinalNorm, family_of, first_tensor, last_hidden_state, same_bits


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayers:
    """The layers of a model, in the order in which they run."""

    modules: tuple[nn.Module, ...]

    @contextmanager
    def taking(
        self, layers: Sequence[int], keep: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[list[torch.Tensor]]:
        """While inside, a pass fills the list that is given with the states after `layers` (ascending, 0 included).

        Args:
            layers: 0 is what enters the first layer, n what comes out of the n-th.
            keep: makes of a state, [..., H] and overwritten later, what is kept of it.
        """
        taken: list[torch.Tensor] = []

        def before(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            taken.append(keep(_given(given, named)))

        def after(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            state = first_tensor(output)
            assert state is not None  # it was a tensor when the layers were found
            taken.append(keep(state))

        handles = [
            self.modules[layer - 1].register_forward_hook(after)
            if layer
            else self.modules[0].register_forward_pre_hook(before, with_kwargs=True)
            for layer in layers
        ]
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()


def find_decoder_layers(
    model: nn.Module, final_norm: FinalNorm, num_layers: int | None, forward: Callable[..., Any]
) -> DecoderLayers:
    """Run a short row through `model` and say which modules its decoder layers are.

    Args:
        model: a transformers base model.
        final_norm: what `find_final_norm` said of it.
        num_layers: how many there should be; `None` is not known.
        forward: runs the row with the keyword arguments that it is given; returns what the model returns.

    Raises:
        NoLayerStates: no list of modules gives what it should.
    """
    lists = {path: list(module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    ran: dict[nn.Module, list[_Ran]] = {}

    def remember(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        entered, state = _given(given, named), first_tensor(output)
        # Copies: what a later module does in place must show.
        ran.setdefault(module, []).append(_Ran(_copy(entered), _copy(state)))

    watched = {module for members in lists.values() for module in members}
    if final_norm.norm_path:
        watched.add(model.get_submodule(final_norm.norm_path))
    handles = [module.register_forward_hook(remember, with_kwargs=True) for module in watched]
    try:
        output = forward(output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    told = getattr(output, "hidden_states", None)
    if not told:
        raise NoLayerStates(model=family_of(model), problem="transformers' own model returns no states of layers")
    if final_norm.norm_path:
        fed = ran[model.get_submodule(final_norm.norm_path)][-1].given
    else:
        fed = last_hidden_state(output)
    problems = []
    for path, members in lists.items():
        if len(members) != len(told) - 1 or (num_layers is not None and len(members) != num_layers):
            continue
        problem = _unlike([ran.get(module, []) for module in members], told, fed, final_norm.width)
        if problem is None:
            return DecoderLayers(tuple(members))
        problems.append(f"{path} {problem}")
    expected = f", {num_layers} expected" if num_layers is not None else ""
    problem = "; ".join(problems) or f"no list of modules runs once for each of its {len(told) - 1} layers{expected}"
    raise NoLayerStates(model=family_of(model), problem=problem)


@dataclass(frozen=True, slots=True)
class _Ran:
    """The first tensors that went into a module and came out of it, once."""

    given: torch.Tensor | None
    output: torch.Tensor | None


def _unlike(ran: list[list[_Ran]], told: Sequence[Any], fed: torch.Tensor | None, width: int) -> str | None:
    """How the runs of a list's members differ from what decoder layers give; `None` if they do not."""
    if any(len(runs) != 1 for runs in ran):
        return "does not run each of its members once"
    runs = [one[0] for one in ran]
    if any(one.output is None or one.output.shape[-1] != width or one.output.ndim != told[0].ndim for one in runs):
        return f"gives no states of width {width:,}"
    if not _same(runs[0].given, told[0]):
        return "is not fed the embeddings that transformers counts as state 0"
    for number, (one, state) in enumerate(zip(runs[:-1], told[1:-1], strict=True), start=1):
        if not _same(one.output, state):
            return f"gives another state after layer {number} than transformers counts"
    return None if _same(runs[-1].output, fed) else "has a last member whose output is not what the final norm is fed"


def _given(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return given[0] if given else named.get("hidden_states")


def _copy(state: Any) -> torch.Tensor | None:
    return state.clone() if isinstance(state, torch.Tensor) else None


def _same(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.shape == other.shape and same_bits(one, other)
