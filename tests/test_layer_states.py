"""States of other layers beside the final ones, through both decoders, against what transformers' own model says.

The reference is the family's own base model on each row alone: `output_hidden_states` for the embeddings and all layers
but the last, and what the final norm is fed for the last one, where that tuple has the normed state.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_zoo import VOCAB, small_model
from kernel_rig import missing_native
from rig import relative_error
from test_packed_decoder import (
    EVERY,
    IMPLEMENTATIONS,
    NATIVE,
    ROWS,
    WAYS,
    Tiny,
    any_family,  # noqa: F401
    by_row,
    decoder,
    distance,
    joined,
    plan_of,
    rich,  # noqa: F401
    states_of,
    write_tiny,
)
from torch import nn

from extract.cpu.runtime import means
from extract.engine.contract import NoLayerStates
from extract.engine.families import FAMILIES, float32_bound
from extract.engine.torch_decoder import TorchDecoder
from extract.engine.torch_final_norm import find_final_norm

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]

PICKED = {
    "tokens": lambda one: one,
    "last": lambda one: one[-1:],
    "first": lambda one: one[:1],
    "mean": lambda one: one.mean(0, keepdims=True),
}


@torch.no_grad()
def told(model: Any, rows: list[list[int]]) -> list[list[np.ndarray]]:
    """By layer, 0 to the number of layers, the states of each row alone: [L, H]."""
    norm = model.get_submodule(find_final_norm(model, torch.arange(8)).norm_path)
    fed: list[torch.Tensor] = []
    hook = norm.register_forward_pre_hook(lambda module, given: fed.append(given[0].clone()))
    found = []
    for row in rows:
        output = model(input_ids=torch.tensor([row]), use_cache=False, output_hidden_states=True)
        found.append([state[0].numpy().copy() for state in (*output.hidden_states[:-1], fed[-1])])
    hook.remove()
    return [list(layer) for layer in zip(*found, strict=True)]


def runnable(precision: str) -> list[tuple[str, str]]:
    """The kernels of this machine."""
    names = ("portable",) if missing_native(precision) else ("portable", "native")
    return [(name, precision) for name in names]


# --- our own decoder ------------------------------------------------------------------------------------------------


def layers_of(
    found: Any, rows: list[list[int]] = ROWS, kind: Any = "tokens", *, share: bool, layers: Any = None, **options: Any
) -> list[Any]:
    """What a pass gives beside the final states, by layer: float32 [T, H], or [B, H]."""
    plan = plan_of(rows, kind, share, **options)
    layers = range(len(found.architecture.layers) + 1) if layers is None else layers
    final, *states = found.layer_states(plan, layers)
    whole = states_of(found, rows, kind, share=share, **options)
    index = slice(None) if plan.output_index is None else plan.output_index
    assert np.array_equal(final[index] if kind != "mean" else means(final[index], joined(rows)[1]), whole)
    states = [state[index] for state in states]
    return [means(state, joined(rows)[1]) for state in states] if kind == "mean" else states


def assert_near(tiny: Tiny, which: Any) -> None:
    expected, rounded = told(tiny.model().double(), ROWS), told(tiny.model(), ROWS)
    with decoder(tiny, which) as found:
        for share in (True, False):
            for layer, states in enumerate(layers_of(found, share=share)):
                error = relative_error(by_row(states), expected[layer])
                own = relative_error(rounded[layer], expected[layer])  # of transformers in float32
                assert error <= max(1e-5, 2 * own), (layer, share)


@pytest.mark.slow
def test_every_layer_of_every_family_is_transformers_own(any_family: Tiny) -> None:  # noqa: F811
    assert_near(any_family, runnable("float32")[-1])


@pytest.mark.parametrize("which", IMPLEMENTATIONS["float32"])
def test_every_layer_with_every_option_is_transformers_own(rich: Tiny, which: Any) -> None:  # noqa: F811
    assert_near(rich, which)


@pytest.mark.parametrize("share", [True, False], ids=["sharing", "plain"])
@pytest.mark.parametrize("kind", ["last", "first", "mean"])
def test_one_state_a_row_is_picked_from_every_layer_alike(rich: Tiny, kind: str, share: bool) -> None:  # noqa: F811
    which = runnable("float32")[-1]
    expected = told(rich.model().double(), ROWS)
    with decoder(rich, which) as found:
        for layer, states in enumerate(layers_of(found, kind=kind, share=share)):
            picked = [PICKED[kind](one) for one in expected[layer]]
            assert relative_error(np.split(states, len(ROWS)), picked) <= 1e-5, layer


@pytest.mark.parametrize("which", NATIVE)
def test_native_layers_are_the_same_bits_however_they_are_computed(rich: Tiny, which: Any) -> None:  # noqa: F811
    with decoder(rich, which, longest=400) as found:
        expected = [by_row(states) for states in layers_of(found, share=False)]
        for way in WAYS[1:]:
            for states, layer in zip(layers_of(found, **way), expected, strict=True):
                assert np.array_equal(states, np.concatenate(layer)), way
        for share in (True, False):
            for states, layer in zip(layers_of(found, kind="last", share=share), expected, strict=True):
                assert np.array_equal(states, [one[-1] for one in layer])


@pytest.mark.parametrize("which", EVERY)
def test_a_layers_bits_do_not_depend_on_which_others_are_asked_for(rich: Tiny, which: Any) -> None:  # noqa: F811
    with decoder(rich, which) as found:
        every = layers_of(found, share=True)
        for layer in (0, 3, 4):
            assert np.array_equal(layers_of(found, share=True, layers=[layer])[0], every[layer])


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_no_layer_is_further_off_in_a_rounded_precision_than_the_final_state(
    rich: Tiny,  # noqa: F811
    precision: str,
) -> None:
    expected = told(rich.model().double(), ROWS)
    for which in runnable(precision):
        with decoder(rich, which) as found:
            final = distance(states_of(found, share=False), np.concatenate(rich.expected))
            for layer, states in enumerate(layers_of(found, share=False)):
                assert distance(states, np.concatenate(expected[layer])) <= 1.2 * final, layer


def test_the_residual_stream_is_in_the_models_own_basis_though_int8_flips_and_rotates(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, "llama", {})
    expected = told(tiny.model(), ROWS)
    for which in runnable("int8"):
        with decoder(tiny, which) as found:
            states = layers_of(found, share=False)
        assert np.array_equal(states[0], np.concatenate(expected[0]))
        for layer in (1, 2, 3, 4):
            one, other = states[layer], np.concatenate(expected[layer])
            by_channel = (one * other).sum(0) / np.linalg.norm(one, axis=0) / np.linalg.norm(other, axis=0)
            assert by_channel.min() > 0.98  # a flipped channel would be at -1


# --- transformers' own model ----------------------------------------------------------------------------------------

LENGTHS = (1, 17, 2, 17, 3, 31, 5)
SOME = ("llama", "gemma3_text", "gpt2", "gpt_neox", "opt", "bloom", "recurrent_gemma", "mixtral", "phi", "openai-gpt")
"""No hidden-state tuple is like another: scaled embeddings, parallel branches, a projection, recurrence, experts."""

REFUSED = {
    "deepseek_v4": "layers has a last member whose output is not what the final norm is fed",
    "dory": "no list of modules runs once for each of its 6 layers, 4 expected",
    "falcon_mamba": "layers is not fed the embeddings that transformers counts as state 0",
    "gemma3n_text": "layers has a last member whose output is not what the final norm is fed",
    "hrm_text": "no list of modules runs once for each of its 32 layers",
    "hy_v4": "layers has a last member whose output is not what the final norm is fed",
    "inkling2_loop_text": "layers has a last member whose output is not what the final norm is fed",
    "inkling2_text": "layers has a last member whose output is not what the final norm is fed",
    "longcat_flash": "no list of modules runs once for each of its 4 layers, 8 expected",
    "mamba": "layers is not fed the embeddings that transformers counts as state 0",
    "mamba2": "layers is not fed the embeddings that transformers counts as state 0",
    "openai-gpt": "h has a last member whose output is not what the final norm is fed",
    "rwkv": "blocks is not fed the embeddings that transformers counts as state 0",
}
"""Families whose layers cannot be taken, and what the refusal says: several streams, loops, two layers in one module,
another count of states, a norm inside the last layer."""

DECODERS = [name for name, family in FAMILIES.items() if family.layout != "refused" and name != "qwen4_exp_text"]
"""All but those that are refused as a whole, and one whose states have no norm and so need consent."""


def rows_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [np.random.default_rng([7, n]).integers(0, VOCAB, length).tolist() for n, length in enumerate(lengths)]


def taken(model: nn.Module, name: str, kind: Any = "tokens") -> list[list[np.ndarray]]:
    """By layer, the final one first, what the decoder gives for each row."""
    layout: Any = FAMILIES[name].layout
    found = TorchDecoder(model, layout=layout)
    rows = rows_of()
    layers = range(len(found.layers.modules) + 1)
    passes = [rows] if layout == "packed" else [[row] for row in rows]
    parts = []
    for some in passes:
        bounds = np.cumsum([0, *map(len, some)])
        ids = torch.tensor(np.concatenate(some))
        states = found.layer_states(ids, bounds, kind, layers)
        plain = found.layer_states(ids, bounds, kind, ())[0]
        assert torch.equal(states[0], plain)
        assert torch.equal(found.layer_states(ids, bounds, kind, [1])[1], states[2])
        cuts = bounds[1:-1] if kind == "tokens" else len(some)
        parts.append([np.split(state.numpy(), cuts) for state in states])
    found.close()
    return [[row for part in column for row in part] for column in zip(*parts, strict=True)]


def assert_taken(name: str) -> None:
    model = small_model(name)
    if name in REFUSED:
        with pytest.raises(NoLayerStates, match=REFUSED[name]):
            taken(model, name)
        return
    expected = told(model, rows_of())
    for layer, states in enumerate(taken(model, name)[1:]):
        assert relative_error(states, expected[layer]) <= float32_bound(name), layer


@pytest.mark.parametrize("name", SOME)
def test_layers_of_a_family_are_its_own_models(name: str) -> None:
    assert_taken(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in SOME])
def test_layers_of_every_family_are_its_own_models_or_refused(name: str) -> None:
    assert_taken(name)
