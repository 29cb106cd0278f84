"""Engines for a card from build to shards: the same checks and the same proof as for a CPU, on memory of this machine.

Only here is an engine of a card opened without one (`on_this_machine`): what torch says of cards is made up, and the
runtime's card is this machine's memory. Everything else is what a card would run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rig
import torch
from cuda_rig import CARD
from test_packed_decoder import distance

from extract.cpu.architecture import ARCHITECTURE_FILE
from extract.cuda import opening
from extract.cuda.cards import VisibleCard
from extract.cuda.host_card import HostCard
from extract.engine.build_plan import plan_build
from extract.engine.builder import NoOwnDecoder, RecipeDoesNotFit, build
from extract.engine.contract import Contract, Device, EngineDoesNotFit, read_contract
from extract.engine.recipe import Recipe
from extract.engine.replay import states_of
from extract.engine.runtimes import load_runtime

LIMIT = 32
GIB = 2**30
ROWS = [np.random.default_rng(length).integers(0, 300, length).tolist() for length in (1, 2, 5, 17, LIMIT, LIMIT)]


@contextmanager
def on_this_machine(device: Device = CARD, total_bytes: int = 8 * GIB) -> Iterator[None]:
    """A card that is made of this machine's memory."""
    card = VisibleCard(index=0, device=device, total_bytes=total_bytes)
    opened = partial(opening.open_cuda_runtime, card=HostCard(device, total_bytes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "visible_cards", lambda: [card])
        patch.setattr(opening, "open_cuda_runtime", opened)
        patch.setattr(opening, "choose_backend", partial(_plain, opening.choose_backend))
        for module in ("builder", "device", "build_plan"):
            patch.setattr(f"extract.engine.{module}.this_device", lambda *_: device, raising=False)
        yield


def _plain(choose: Any, architecture: Any, dtype: Any, device: str, capability: Any) -> Any:
    return choose(architecture, dtype, "cpu", capability)


def recipe(dtype: str, **settings: Any) -> Recipe:
    return Recipe(device="cuda", dtype=dtype, max_input_tokens=LIMIT, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.tiny_checkpoint(tmp_path_factory.mktemp("llama") / "llama", "llama")


def built(checkpoint: Path, output: Path, dtype: str, **settings: Any) -> Contract:
    with on_this_machine():
        return build(checkpoint, output, recipe(dtype, **settings))


@pytest.mark.parametrize(("dtype", "output", "worst"), [
    ("float32", "float32", 1e-5), ("bfloat16", "bfloat16", 0.1), ("fp8", "bfloat16", 0.5),
])  # fmt: skip
def test_an_engine_is_proven_recorded_and_loaded_again(
    checkpoint: Path, tmp_path: Path, dtype: str, output: str, worst: float
) -> None:
    contract = built(checkpoint, tmp_path / "engine", dtype)
    assert contract == read_contract(tmp_path / "engine")
    assert (contract.runtime.name, contract.runtime.decoder, contract.runtime.layout) == ("torch", "own", "packed")
    assert contract.runtime.attention == "plain: no card"
    assert contract.runtime.micro_batch is None
    assert contract.device == CARD
    assert (contract.precision.activations, contract.precision.output, contract.output.dtype) == (dtype, output, output)
    assert contract.precision.weights == dtype
    assert contract.limits.pass_tokens is not None and contract.limits.memory_bytes is not None
    assert 0 < contract.limits.pass_tokens <= contract.limits.max_tokens == 131_072
    assert 0 <= contract.fidelity.rel_error_max <= worst
    assert ARCHITECTURE_FILE in [file.name for file in contract.files]
    with on_this_machine():
        runtime = load_runtime(tmp_path / "engine")
    states = states_of(runtime, ROWS)
    runtime.close()
    cpu = build(checkpoint, tmp_path / "cpu", Recipe(device="cpu", dtype="float32", max_input_tokens=LIMIT))
    expected = states_of(load_runtime(tmp_path / "cpu"), ROWS)
    assert cpu.device.type == "cpu"
    assert distance(np.concatenate(states), np.concatenate(expected)) <= {"float32": 1e-6}.get(dtype, worst)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_what_a_build_would_make_is_said_before(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    limits = built(checkpoint, tmp_path / "engine", dtype).limits
    with on_this_machine():
        plan = plan_build(checkpoint, recipe(dtype))
    assert (plan.dtype, plan.max_tokens, plan.pass_tokens) == (dtype, limits.max_tokens, limits.pass_tokens)
    assert plan.card_bytes == 8 * GIB
    assert limits.memory_bytes is not None
    assert plan.memory["total"] == pytest.approx(limits.memory_bytes, rel=1e-3)
    assert plan.memory["total"] == plan.memory["weights"] + plan.memory["a pass"]


def test_a_family_that_is_not_ours_runs_as_before_and_has_no_fp8(tmp_path: Path) -> None:
    gpt2 = rig.tiny_checkpoint(tmp_path / "gpt2", "gpt2")
    with on_this_machine(), pytest.raises(NoOwnDecoder) as error:
        build(gpt2, tmp_path / "engine", recipe("fp8"))
    assert str(error.value) == (
        "recipe: it asks for our own decoder (or for int8, fp8, passes or a way to compile, which only that has), but "
        'gpt2: our packed decoder does not know model_type = "gpt2"; transformers\' own model runs it. Leave out '
        "--decoder own, or choose --dtype float32 or bfloat16."
    )


def test_fp8_is_refused_by_cards_that_do_not_have_it(checkpoint: Path, tmp_path: Path) -> None:
    old = Device(type="cuda", name="NVIDIA A100", compute_capability="8.0", num_sms=108)
    with on_this_machine(old), pytest.raises(RecipeDoesNotFit) as error:
        build(checkpoint, tmp_path / "engine", recipe("fp8"))
    assert str(error.value) == (
        "recipe: dtype is fp8, which needs a card of compute capability 8.9 or higher, and this is one of 8.0; "
        "use bfloat16."
    )


def test_a_card_that_is_too_small_is_refused_with_found_and_needed(checkpoint: Path, tmp_path: Path) -> None:
    with on_this_machine(total_bytes=GIB), pytest.raises(EngineDoesNotFit) as error:
        build(checkpoint, tmp_path / "engine", recipe("bfloat16"))
    assert "recipe: this engine needs free memory on its card: 1.6 GiB, this machine has 0.8 of 1.0 GiB" in str(
        error.value
    )
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(("device", "field"), [
    (Device(type="cuda", name="Other", compute_capability="9.0", num_sms=132), "card Card of the tests"),
    (Device(type="cuda", name=CARD.name, compute_capability="8.0", num_sms=132), "compute capability 9.0"),
])  # fmt: skip
def test_an_engine_of_another_card_is_not_loaded(checkpoint: Path, tmp_path: Path, device: Device, field: str) -> None:
    built(checkpoint, tmp_path / "engine", "bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "visible_cards", lambda: [VisibleCard(index=0, device=device, total_bytes=8 * GIB)])
        with pytest.raises(EngineDoesNotFit, match=f"this engine needs {field}, this machine has"):
            load_runtime(tmp_path / "engine")


def test_an_engine_is_not_loaded_beside_others_that_took_the_memory(checkpoint: Path, tmp_path: Path) -> None:
    needed = built(checkpoint, tmp_path / "engine", "bfloat16").limits.memory_bytes
    assert needed is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "visible_cards", lambda: [VisibleCard(index=0, device=CARD, total_bytes=8 * GIB)])
        patch.setattr(opening, "free_memory", lambda card: needed - 2**29)
        with pytest.raises(EngineDoesNotFit) as error:
            load_runtime(tmp_path / "engine")
    assert str(error.value) == (
        f"{tmp_path / 'engine'}: this engine needs free memory on its card: {needed / GIB:.1f} GiB, this machine has "
        f"{(needed - 2**29) / GIB:.1f} of 8.0 GiB (Card of the tests). Stop what else runs on that card, or choose "
        "another one with CUDA_VISIBLE_DEVICES. Build an engine with a smaller --max-tokens."
    )


def test_no_engine_of_a_card_opens_without_one(checkpoint: Path, tmp_path: Path) -> None:
    built(checkpoint, tmp_path / "engine", "bfloat16")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    with pytest.raises(EngineDoesNotFit, match="this machine has no CUDA device that torch can use"):
        load_runtime(tmp_path / "engine")
