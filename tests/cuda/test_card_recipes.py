"""The shipped recipes for cards say what the memory model says, and say that it was computed."""

from pathlib import Path

import pytest
from cuda_rig import LLAMA_8B

from extract.cuda.memory import MemoryModel, memory_model
from extract.cuda.opening import LEFT_ALONE
from extract.engine.recipe import load_recipe

GB = 10**9
"""What a card of so many GB has at least: some have GiB."""
CARDS = (16, 24, 32, 48, 80, 141)
RECIPES = sorted((Path(__file__).parents[2] / "engines" / "llama-8b").glob("*-cuda-*gb.toml"))


def model_of(precision: str) -> MemoryModel:
    return memory_model(LLAMA_8B, precision, backend="varlen", max_positions=128, fused=True)


def gigabytes(path: Path) -> int:
    return int(path.stem.rpartition("-")[2].removesuffix("gb"))


def test_there_is_one_for_each_card_and_precision_that_fits() -> None:
    fitting = {
        f"{precision}-cuda-{card}gb"
        for precision in ("bfloat16", "fp8")
        for card in CARDS
        if model_of(precision).pass_tokens(int(LEFT_ALONE * card * GB), 131_072)
    }
    assert {path.stem for path in RECIPES} == fitting
    assert "bfloat16-cuda-16gb" not in fitting


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_passes_are_the_largest_that_the_card_takes(path: Path) -> None:
    recipe, memory = load_recipe(path), model_of(path.stem.partition("-")[0])
    room = int(LEFT_ALONE * gigabytes(path) * GB)
    assert recipe.pass_tokens == memory.pass_tokens(room, 131_072)
    assert memory.needed_bytes(recipe.pass_tokens) <= room
    said = f"passes of {recipe.pass_tokens:,} tokens, {memory.needed_bytes(recipe.pass_tokens) / 2**30:.1f} GiB in all."
    assert said in path.read_text()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_says_that_nobody_measured_it(path: Path) -> None:
    assert "Computed for Llama 3.1 8B, not measured" in path.read_text()
    assert "computed and not measured" in load_recipe(path).description
