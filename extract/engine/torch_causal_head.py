"""A checkpoint's own head: the logits that its model would give for states that somebody else computed.

The family's class with a head runs its own forward, so that a scale, a cap or a bias is applied by the family's code;
only its base model is replaced, by one that returns the given states, and its output embedding, by one that multiplies
in blocks and so never holds a float32 copy of half-precision weights. The head's weights alone are read from the files.
Whether the result is the model's real distribution is tried on one row when the head is opened.
"""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from extract.engine.checkpoint import Checkpoint
from extract.engine.next_token import Logits
from extract.engine.probe import Float32
from extract.engine.quiet_transformers import quiet_transformers
from extract.engine.tensor_names import outside_decoder
from extract.engine.torch_head import causal_model_around, replace_module
from extract.engine.weights_files import find_weights

WRAPPERS = r"^((model|language_model|text_model)\.)*"
"""What a wrapper may put before the name of a head's weight."""

VOCABULARY_BLOCK_BYTES = 32 * 2**20
"""Of the float32 copy of a block of the output embedding."""

TRIAL_TOLERANCE = 1e-4
"""Largest difference of the trial row's logits, in units of the largest one: rounding, and nothing else."""


class NoHead(Exception):
    """Why there is no next-token distribution; ends in a note, never at the user."""


class CausalHead:
    """From final states to logits, as the family's own class with a head computes them.

    Args:
        with_head: the class, its output embedding in place.
        slot: name of its base model, of which only the settings are used from now on.
        example: an output of that base model.
    """

    def __init__(self, with_head: Any, slot: str, example: Any) -> None:
        self._given = _GivenStates(example)
        base = copy.copy(getattr(with_head, slot))  # shares all but its forward: families read settings off it
        base.forward = self._given
        setattr(with_head, slot, base)
        self._with_head = with_head
        self.vocab_size = int(self.logits(self._given.example.last_hidden_state[0, :1].float().cpu().numpy()).shape[1])

    @torch.inference_mode()
    def logits(self, states: Float32) -> Logits:
        """float32 [T, H] -> float32 [T, V]; the caller sees to it that T x V is small."""
        self._given.states = torch.from_numpy(states)[None]
        ids = torch.zeros((1, len(states)), dtype=torch.int64)
        logits: Logits = self._with_head(input_ids=ids, use_cache=False).logits[0].float().numpy()
        return logits


def causal_head(model: Any, checkpoint: Checkpoint, states: Callable[[list[int]], Float32]) -> CausalHead | str:
    """The head of `checkpoint`, to be given final states.

    Args:
        model: its decoder, on the CPU.
        checkpoint: where the head's weights are.
        states: that decoder's final states, float32 [L, H] of a row of ids, to try the head with.

    Returns:
        The head, or why there is none.
    """
    try:
        with quiet_transformers():
            return _open(model, checkpoint, states)
    except NoHead as error:
        return str(error)
    except Exception as error:  # families' code may raise anything; the states are compared all the same
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return text if len(text) <= 160 else f"{text[:157]}..."


@torch.inference_mode()
def _open(model: Any, checkpoint: Checkpoint, states: Callable[[list[int]], Float32]) -> CausalHead:
    made = causal_model_around(model)
    if isinstance(made, str):
        raise NoHead(made)
    with_head, slot = made
    _fill(with_head, slot, model, checkpoint)
    embedding = with_head.get_output_embeddings()
    if type(embedding) is nn.Linear:
        replace_module(with_head, embedding, _BlockedLinear(embedding))
    ids = torch.arange(8)[None] % model.get_input_embeddings().weight.shape[0]
    example = model(input_ids=ids, use_cache=False)
    expected = with_head(input_ids=ids, use_cache=False).logits[0].float()
    head = CausalHead(with_head, slot, example)
    found = torch.from_numpy(head.logits(states(ids[0].tolist())))
    if not float((found - expected).abs().max()) <= TRIAL_TOLERANCE * float(expected.abs().max()):
        raise NoHead(f"{type(with_head).__name__} reads something else than the final state")
    return head


def _fill(with_head: Any, slot: str, model: Any, checkpoint: Checkpoint) -> None:
    """Give every parameter outside the base model its value: from the files, or from the embedding it is tied to."""
    tied = with_head.get_expanded_tied_weights_keys()
    wanted = {
        name: parameter
        for name, parameter in with_head.named_parameters(remove_duplicate=False)
        if not name.startswith(f"{slot}.")
    }
    stored = _stored(checkpoint, wanted)
    for name, parameter in wanted.items():
        value = stored.get(name)
        source = tied.get(name, "")
        if source.startswith(f"{slot}."):
            shared = model.get_parameter(source.removeprefix(f"{slot}."))
            # As transformers does: a head that is stored and differs is the head, whatever the config says.
            if value is None or (value.shape == shared.shape and torch.equal(value.to(shared.dtype), shared)):
                value = shared
        if value is None:
            raise NoHead(f"the checkpoint holds no {name}")
        if value.shape != parameter.shape:
            raise NoHead(f"{name} is {list(value.shape)}, {list(parameter.shape)} expected")
        if not value.is_floating_point() or value.element_size() == 1:
            raise NoHead(f"{name} is stored as {str(value.dtype).removeprefix('torch.')}")
        parent, _, leaf = name.rpartition(".")
        setattr(with_head.get_submodule(parent), leaf, nn.Parameter(value, requires_grad=False))
    left = [name for name, tensor in with_head.named_buffers() if tensor.is_meta and not name.startswith(f"{slot}.")]
    if left:
        raise NoHead(f"the value of {left[0]} is not known")


def _stored(checkpoint: Checkpoint, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The wanted tensors that the checkpoint's files hold, mapped into memory where the format allows."""
    if checkpoint.kind == "gguf":
        from extract.engine.gguf_import import gguf_head

        head = gguf_head(checkpoint.path)
        names = [name for name in wanted if name.endswith(".weight")]
        return {} if head is None or len(names) != 1 else {names[0]: torch.from_numpy(head)}
    found: dict[str, torch.Tensor] = {}
    alike: dict[str, list[torch.Tensor]] = {name: [] for name in wanted}
    for stored_name, tensor in _heads(checkpoint, wanted):
        for name, parameter in wanted.items():
            if re.search(f"{WRAPPERS}{re.escape(name)}$", stored_name):
                found[name] = tensor
            elif stored_name.rpartition(".")[2] == name.rpartition(".")[2] and tensor.shape == parameter.shape:
                alike[name].append(tensor)  # families rename their heads now and then
    return {name: tensors[0] for name, tensors in alike.items() if len(tensors) == 1} | found


def _heads(checkpoint: Checkpoint, wanted: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor outside the decoder that may be the head's, by its name in the files."""
    weights = find_weights(checkpoint.path, allow_pickle=checkpoint.pickled)
    if weights.pickled:
        for path in weights.files:
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            yield from ((name, tensor) for name, tensor in tensors.items() if _is_head(name, wanted))
        return
    from safetensors import safe_open

    for file in sorted({tensor.file for tensor in weights.tensors if _is_head(tensor.name, wanted)}):
        with safe_open(_path(weights.files, file), framework="pt") as opened:
            names = opened.keys()
            for name in names:
                if _is_head(name, wanted):
                    yield name, opened.get_tensor(name)


def _is_head(name: str, wanted: dict[str, torch.Tensor]) -> bool:
    exact = any(re.search(f"{WRAPPERS}{re.escape(one)}$", name) for one in wanted)
    return exact or outside_decoder(name, num_layers=10**9) == "head"


def _path(files: tuple[Path, ...], name: str) -> Path:
    return next(path for path in files if path.name == Path(name).name)


class _GivenStates:
    """Takes the place of a base model's forward: returns the states it was given, as that model's own output."""

    def __init__(self, example: Any) -> None:
        self.example = example
        self.states: torch.Tensor | None = None

    def __call__(self, *_: object, **__: object) -> Any:
        output = copy.copy(self.example)
        output["last_hidden_state"] = self.states
        return output


class _BlockedLinear(nn.Module):
    """A linear over a large vocabulary, in float32, block by block; its weights stay in the type they are stored in."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight, self._bias = linear.weight.data, linear.bias.data.float() if linear.bias is not None else None
        self._rows = max(1, VOCABULARY_BLOCK_BYTES // (4 * linear.in_features))
        self.weight = torch.empty(0)  # some families read its type

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        given = given.float()
        if self._weight.dtype == torch.float32:
            return functional.linear(given, self._weight, self._bias)
        logits = torch.empty((*given.shape[:-1], len(self._weight)))
        for start in range(0, len(self._weight), self._rows):
            block = slice(start, start + self._rows)
            logits[..., block] = functional.linear(given, self._weight[block].float())
        return logits if self._bias is None else logits + self._bias
