"""docs/python.md runs from top to bottom as it stands, and docs/reference.md is what the code says."""

import doctest
import logging

import job_rig
import page_rig
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import python_reference
import readme_commands
import rig

import extract

PAGE = "docs/python.md"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.slow
def test_every_example_of_the_page_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXTRACT_CACHE", str(tmp_path / "cache"))
    rig.tiny_checkpoint(tmp_path / "checkpoint")
    texts: list[str | None] = job_rig.texts(40, characters=20)
    texts[4] = None
    table = {"id": [f"row/{n}" for n in range(40)], "text": texts, "label": [n % 2 for n in range(40)]}
    pq.write_table(pa.table(table), tmp_path / "texts.parquet")
    told: list[str] = []
    runner, variables = doctest.DocTestRunner(optionflags=FLAGS), {}
    for block in page_rig.blocks(page_rig.read(PAGE)):
        if block.language == "python":
            test = doctest.DocTestParser().get_doctest(block.text, variables, PAGE, PAGE, None)
            assert test.examples, block.text
            runner.run(test, out=told.append, clear_globs=False)
            variables = test.globs
    assert not told, "".join(told)
    logging.shutdown()


def test_every_public_name_has_an_example():
    page = page_rig.read(PAGE)
    shown = [name for name in extract.__all__ if f"extract.{name}" in page]
    elsewhere = {"quantize", "rank_layers", "tune", "TextSpec", "RunSpec"}  # a card; minutes; keys of a job
    assert {*extract.__all__} - {*shown} <= elsewhere


def test_every_setting_of_a_job_is_explained():
    for name in python_reference.SETTINGS[:-1]:
        cls = getattr(extract, name)
        plain = {field for field in cls.__dataclass_fields__ if field not in python_reference._field_docs(cls)}
        assert plain <= {"text", "states", "run"}, f"{name}: {plain}"


def test_the_reference_has_every_public_name_and_is_current():
    text = readme_commands.REFERENCE.read_text(encoding="utf-8")
    assert {*map(str.lower, extract.__all__)} <= {*page_rig.headings(text)}
    assert readme_commands.GENERATED[readme_commands.REFERENCE](text) == text, "python tests/readme_commands.py --write"


def test_every_public_docstring_says_what_is_raised_and_what_it_takes():
    for name in extract.__all__:
        if name not in python_reference.SETTINGS:
            text = extract.__dict__.get(name, getattr(extract, name)).__doc__
            assert "Raises:" in text, name
            assert "Args:" in text or name in ("plan", "open_output", "load_job"), name
