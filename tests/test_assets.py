"""Recipes, patches and jobs are found by name, in a checkout and in a wheel; all that come along are valid."""

import re
from pathlib import Path

import pytest

from extract import assets
from extract.assets import NoSuchAsset
from extract.engine.recipe import load_recipe
from extract.spec import load_job


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package directory as a wheel leaves it."""
    monkeypatch.setattr(assets, "__file__", str(tmp_path / "extract" / "assets.py"))
    data = tmp_path / "extract" / "_data"
    for name in ("engines/any/fast.toml", "engines/own.toml", "jobs/smoke.toml", "patches/README.md"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text("")
    return data


def test_a_checkout_finds_them_beside_the_package():
    assert assets.folder("engines") == Path(assets.__file__).parent.parent / "engines"
    assert "any/float32-cpu" in assets.names("engines")
    assert "demo" in assets.names("jobs")


def test_a_wheel_finds_them_inside_the_package(shipped):
    assert assets.names("engines") == ["any/fast", "own"]
    assert assets.names("jobs") == ["smoke"]
    assert assets.names("patches") == []
    assert assets.find("engines", "any/fast") == shipped / "engines/any/fast.toml"


def test_a_file_goes_before_a_shipped_one_of_that_name(shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own").touch()
    assert assets.find("engines", "own") == Path("own")


def test_a_toml_path_is_taken_at_its_word_so_that_reading_it_says_what_is_wrong(shipped):
    assert assets.find("jobs", "gone/job.toml") == Path("gone/job.toml")


def test_a_folder_is_no_file(shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("smoke").mkdir()
    assert assets.find("jobs", "smoke") == shipped / "jobs/smoke.toml"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("engines", "fats: no such file, and no recipe of that name comes with extract (any/fast, own)."),
        ("jobs", "fats: no such file, and no job spec of that name comes with extract (smoke)."),
        ("patches", "fats: no such file, and no patch of that name comes with extract (none do)."),
    ],
)
def test_a_name_that_is_neither_lists_what_there_is(shipped, kind, message):
    with pytest.raises(NoSuchAsset) as caught:
        assets.find(kind, "fats")
    assert (str(caught.value), caught.value.exit_code) == (message, 2)


@pytest.mark.parametrize("name", assets.names("engines"))
def test_every_shipped_recipe_is_valid_and_says_what_it_is_for(name):
    recipe = load_recipe(assets.find("engines", name))
    assert recipe.description
    assert recipe.max_input_tokens == 128
    place = f"{recipe.card_memory_gib:g}gb" if recipe.runtime == "tensorrt-llm" else recipe.device
    assert re.search(rf"{recipe.dtype}-{place}(-\d+gb)?$", name)


@pytest.mark.parametrize("name", assets.names("jobs"))
def test_every_shipped_job_is_valid_and_stays_below_the_directory_it_is_run_from(name):
    job = load_job(assets.find("jobs", name))
    for path in (job.engine, job.output, *job.source.paths):
        assert path is None or not Path(path).is_absolute()
