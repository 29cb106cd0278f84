"""How-to pages do what they say: their commands and programs run in order, on a tiny engine and twenty rows."""

import importlib.util
import re
import shutil
from pathlib import Path

import page_rig
import pytest
from command_line import extract, write_rows
from page_rig import Block

from extract.engine.device import computes_in, this_device

HOW_TOS = ["exporting", "fidelity", "jobs", "precision", "recovery", "reports", "reprocessing"]
FIRST = ("run", "--engine", "engine", "--data", "texts.parquet", "-o", "out")
"""What each page starts from; its own command of this kind goes on with it."""


@pytest.fixture
def folder(tiny_engine, llama_checkpoint, tmp_path, monkeypatch, capsys) -> Path:
    """The folder that the reader is in."""
    write_rows(tmp_path / "texts.parquet")
    (tmp_path / "engine").symlink_to(tiny_engine)
    (tmp_path / "checkpoint").symlink_to(llama_checkpoint)
    monkeypatch.chdir(tmp_path)
    run(FIRST, capsys)
    return tmp_path


def run(words: tuple[str, ...] | list[str], capsys: pytest.CaptureFixture[str]) -> None:
    small = {"run": ["--threads", "1", "--reserve-bytes", "0"], "build": ["--max-tokens", "512"]}.get(words[0], [])
    ended = extract(capsys, *words, *small)
    assert ended.code == 0, (words, ended.err)


@pytest.mark.parametrize("page", HOW_TOS)
def test_what_a_page_says_to_type_works(page: str, folder: Path, capsys):
    if page in ("fidelity", "precision") and not computes_in(this_device("cpu"), "bfloat16"):
        pytest.skip("this CPU has no bfloat16 arithmetic")
    for block in page_rig.blocks(page_rig.read(f"docs/{page}.md")):
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        elif block.language == "python":
            run_program(block)
        elif block.language == "sh":
            for words in page_rig.commands(block):
                assert words[0] == "extract"
                if "lance" not in words or importlib.util.find_spec("lance"):
                    run(words[1:], capsys)


def test_the_start_of_the_readme_works(folder: Path, capsys):
    (start,) = [block for block in page_rig.blocks(page_rig.read("README.md")) if "extract sample" in block.text]
    for made in ("texts.parquet", "engine"):
        (folder / made).unlink()
    shutil.rmtree(folder / "out")
    small = {"HuggingFaceTB/SmolLM2-135M": "checkpoint", "1000": "30"}
    for words in page_rig.commands(start):
        run([small.get(word, word) for word in words[1:]], capsys)
    for block in page_rig.blocks(page_rig.read("README.md")):
        if block.language == "python":
            run_program(block)


def run_program(block: Block) -> None:
    """Run it, where the packages that it imports are installed."""
    packages = re.findall(r"^(?:import|from) (\w+)", block.text, re.MULTILINE)
    if all(importlib.util.find_spec(name) for name in packages):
        exec(block.text, {})


def test_the_two_commands_that_mend_a_damaged_shard_mend_it(folder: Path, capsys):
    ((repair, again),) = (
        list(page_rig.commands(block))
        for block in page_rig.blocks(page_rig.read("docs/recovery.md"))
        if "--repair" in block.text
    )
    (shard,) = (folder / "out" / "data").iterdir()
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100] + bytes(100))
    assert extract(capsys, "verify", "out").code == 7
    assert extract(capsys, *repair[1:]).code == 7
    assert list((folder / "out" / "quarantine").iterdir())
    run(again[1:], capsys)
    run(["verify", "out"], capsys)
    assert (folder / "out" / "data" / shard.name).read_bytes() == whole


def test_every_target_of_export_has_its_section_and_its_loader():
    from extract.exporting import TARGETS, target_class

    page = page_rig.read("docs/exporting.md")
    programs = [
        block.text.strip().replace("\n\n", "\n") for block in page_rig.blocks(page) if block.language == "python"
    ]
    for kind in TARGETS:
        assert kind in page_rig.headings(page)
        reading = target_class(kind).reading.partition("  #")[0].format(path=f"out-{kind}")
        assert reading in programs
