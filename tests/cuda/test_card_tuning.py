"""A sweep on a card doubles passes until memory refuses, says what it took beside what was expected, and can be built.

On this machine's memory, as tests/cuda/test_cuda_engine.py opens engines; what a card really refuses is made up.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rig
from test_cuda_engine import LIMIT, on_this_machine

from extract.cuda.runtime import CudaRuntime
from extract.engine.builder import build
from extract.engine.contract import PassOutOfMemory
from extract.engine.recipe import MAX_TOKENS, load_recipe
from extract.tuning import card_memory, search, trials
from extract.tuning.growth import REPEATS
from extract.tuning.recipe_file import write_recipe
from extract.tuning.results import Tuning
from extract.tuning.search import NoPassFits, tune
from extract.tuning.table import tuning_text

FIRST = 64
REFUSED = 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.tiny_checkpoint(tmp_path_factory.mktemp("tuned") / "llama", "llama", tied=True)


@pytest.fixture(scope="module")
def a_card() -> Iterator[pytest.MonkeyPatch]:
    """One that holds passes of less than `REFUSED` tokens."""
    real = CudaRuntime.hidden_states

    def hidden_states(self: CudaRuntime, *arguments: Any) -> Any:
        if REFUSED <= self.pass_tokens < 65_536:  # what builds run is let pass
            raise PassOutOfMemory(tokens=f"{self.pass_tokens}", sequences="1", device="a card")
        return real(self, *arguments)

    with on_this_machine(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "this_device", lambda *_: rig_device())
        patch.setattr(trials, "RUN_S", 0.002)
        patch.setitem(trials.FIRST_BUDGET, "cuda", FIRST)
        patch.setattr("extract.tuning.growth.PATIENCE", 100)
        patch.setattr(CudaRuntime, "hidden_states", hidden_states)
        patch.setattr(card_memory, "peak", lambda: 123_000_000)
        yield patch


def rig_device() -> Any:
    from cuda_rig import CARD

    return CARD


def tuned(checkpoint: Path, *precisions: str, **options: Any) -> Tuning:
    return tune(checkpoint, precisions=precisions, max_input_tokens=LIMIT, device="cuda", seconds=100, **options)


@pytest.fixture(scope="module")
def found(checkpoint: Path, a_card: pytest.MonkeyPatch) -> Tuning:
    return tuned(checkpoint, "float32", "fp8")


def test_passes_double_until_memory_refuses(found: Tuning) -> None:
    for precision in ("float32", "fp8"):
        curve = [point for point in found.points if point.precision == precision]
        assert [point.budget for point in curve] == [64, 128, 256, 512]
        assert [point.runs for point in curve] == [REPEATS, REPEATS, REPEATS, 0]
        assert curve[-1].tokens_per_s is None
    assert (found.decoder, found.budget_is) == ("own", "tokens per pass")
    assert {point.threads for point in found.points} == {None}


def test_memory_is_shown_as_measured_and_as_expected(found: Tuning) -> None:
    measured = [point for point in found.points if point.tokens_per_s is not None]
    assert {point.memory_bytes for point in measured} == {123_000_000}
    for precision in ("float32", "fp8"):
        expected = [point.expected_bytes for point in measured if point.precision == precision]
        assert expected == sorted(set(expected))
    lines = tuning_text(found).splitlines()
    head = next(line for line in lines if line.lstrip().startswith("precision"))
    assert "memory" in head and "expected" in head
    assert any("123 MB" in line for line in lines)


def test_the_precision_is_never_lower_than_the_checkpoints_unless_that_is_allowed(
    checkpoint: Path, found: Tuning
) -> None:
    assert found.chosen.precision == "float32"
    assert tuned(checkpoint, "fp8", allow_int8=True).recipe.dtype == "fp8"


def test_differences_of_precisions_are_measured(found: Tuning) -> None:
    seen = {point.precision: point.difference for point in found.points}
    assert seen["float32"] is not None and seen["float32"].rel_error < 1e-5
    assert seen["fp8"] is not None and 1e-3 < seen["fp8"].rel_error < 0.5
    assert seen["fp8"].kl is not None and seen["fp8"].kl > 0


def test_the_recipe_builds_an_engine_with_these_passes(
    checkpoint: Path, found: Tuning, a_card: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_recipe(tmp_path / "tuned.toml", found.recipe, tuning_text(found))
    recipe = load_recipe(tmp_path / "tuned.toml")
    assert recipe == found.recipe
    assert (recipe.device, recipe.pass_tokens, recipe.micro_batch) == ("cuda", found.chosen.budget, None)
    limits = build(checkpoint, tmp_path / "engine", recipe).limits
    assert limits.pass_tokens == found.chosen.budget
    assert found.chosen.budget <= limits.max_tokens <= MAX_TOKENS


def test_a_card_on_which_no_pass_fits_is_an_error(checkpoint: Path, a_card: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(trials.FIRST_BUDGET, "cuda", REFUSED)
        with pytest.raises(NoPassFits) as refused:
            tuned(checkpoint, "float32")
    assert str(refused.value) == (
        "llama: passes of 512 tokens do not fit in the memory of Card of the tests. Use a larger machine."
    )


def test_passes_that_kernels_cannot_count_are_not_tried(checkpoint: Path, a_card: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_memory, "most_tokens", lambda engine: 200)
        assert [point.budget for point in tuned(checkpoint, "float32").points] == [64, 128]
