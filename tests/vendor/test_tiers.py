"""Tiers: several engines from one checkpoint, and the sweep that builds and measures them until the card refuses."""

import pytest
from vendor_rig import LIMIT, VendorEngines, recipe, vendor

from extract.engine.contract import read_contract
from extract.engine.recipe import Recipe, load_recipe
from extract.engine.tiers import NoTiers, build_tiers
from extract.tensorrt import pass_limits, vendor_build
from extract.tensorrt.vendor_build import VendorBuildFailed
from extract.tuning import card_tiers
from extract.tuning.recipe_file import write_recipe
from extract.tuning.search import NotOfThisRuntime, tune
from extract.tuning.table import tuning_text


@pytest.fixture(autouse=True)
def small_tiers(monkeypatch):
    """Tiers of 128, 256 and 512 tokens."""
    monkeypatch.setattr(pass_limits, "FIRST_TIER", 128)
    monkeypatch.setattr(card_tiers, "RUN_S", 0.01)


def refuse_from(monkeypatch, tokens: int) -> None:
    """The vendor's build fails for passes of `tokens` and more, as it does when memory runs out."""
    real = vendor_build.build_engine

    def build_engine(checkpoint, recipe, shape, limits, *rest):
        if limits.pass_tokens >= tokens:
            raise VendorBuildFailed(release="1.2.1", step="build the engine", problem="out of memory")
        real(checkpoint, recipe, shape, limits, *rest)

    monkeypatch.setattr(vendor_build, "build_engine", build_engine)


def test_each_tier_is_twice_the_one_before_and_what_is_there_is_kept(vendor_engines: VendorEngines, tmp_path):
    said: list[str] = []
    with vendor():
        first = build_tiers(vendor_engines.checkpoint(), tmp_path / "tiers", recipe(pass_tokens=256))
        again = build_tiers(vendor_engines.checkpoint(), tmp_path / "tiers", recipe(pass_tokens=512), say=said.append)
    assert {path.name: contract.limits.pass_tokens for path, contract in first.items()} == {
        "tokens-128": 128,
        "tokens-256": 256,
    }
    assert [path.name for path in again] == ["tokens-128", "tokens-256", "tokens-512"]
    assert sum(line.endswith("is there already") for line in said) == 2
    assert all(read_contract(path) == contract for path, contract in again.items())


def test_the_first_tier_that_does_not_fit_ends_them(vendor_engines: VendorEngines, tmp_path, monkeypatch):
    refuse_from(monkeypatch, 256)
    said: list[str] = []
    with vendor():
        built = build_tiers(vendor_engines.checkpoint(), tmp_path / "tiers", recipe(pass_tokens=512), say=said.append)
    assert [path.name for path in built] == ["tokens-128"]
    assert said[-1].startswith("tier of 256 tokens does not fit: tensorrt-llm 1.2.1 could not build the engine")


def test_when_not_even_the_first_fits_its_reason_is_the_error(vendor_engines: VendorEngines, tmp_path, monkeypatch):
    refuse_from(monkeypatch, 1)
    with vendor(), pytest.raises(VendorBuildFailed):
        build_tiers(vendor_engines.checkpoint(), tmp_path / "tiers", recipe(pass_tokens=512))


def test_an_engine_of_torch_has_no_tiers(tmp_path):
    with pytest.raises(NoTiers) as error:
        build_tiers(tmp_path, tmp_path / "tiers", Recipe())
    assert str(error.value) == ("tiers: runtime torch serves every token budget with one engine. Leave out --tiers.")


def test_a_sweep_measures_tiers_until_the_card_refuses_and_writes_a_recipe_that_builds(
    vendor_engines: VendorEngines, tmp_path, monkeypatch
):
    refuse_from(monkeypatch, 512)
    monkeypatch.setattr(pass_limits, "MAX_TOKENS", 1024)
    with vendor():
        found = tune(vendor_engines.checkpoint(), runtime="tensorrt-llm", max_input_tokens=LIMIT, seconds=120)
        write_recipe(tmp_path / "tuned.toml", found.recipe, tuning_text(found))
    assert [(point.budget, point.tokens_per_s is None) for point in found.points] == [
        (128, False),
        (256, False),
        (512, True),
    ]
    assert (found.decoder, found.budget_is) == ("vendor", "tokens per pass")
    written = load_recipe(tmp_path / "tuned.toml")
    assert (written.runtime, written.pass_tokens) == ("tensorrt-llm", found.chosen.budget)
    assert "out of memory" in tuning_text(found)


def test_precisions_and_threads_are_not_chosen_there(vendor_engines: VendorEngines):
    with pytest.raises(NotOfThisRuntime) as error:
        tune(vendor_engines.checkpoint(), runtime="tensorrt-llm", threads=[1])
    assert str(error.value) == (
        "tune: precisions, threads and int8 are not for runtime tensorrt-llm, which runs a checkpoint in the precision "
        "that it has. Leave them out."
    )
