"""The tutorial runs as it is written, on the real model, and prints what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import page_rig
import pytest
from page_rig import ROOT

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(3600)]  # minutes, on a machine that is not busy

PAGE = page_rig.read("docs/tutorial.md")
MODEL = "demo/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """By command line, what the page shows for it and what it printed."""
    if not (ROOT / MODEL).is_file():
        pytest.skip("SmolLM2 is not here: make model")
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "demo").mkdir()
    (folder / MODEL).symlink_to(ROOT / MODEL)
    found: dict[str, tuple[str, str]] = {}
    line = ""
    for block in page_rig.blocks(PAGE):
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        elif block.language == "sh":
            for words in page_rig.commands(block):
                if words[0] in ("extract", "python"):
                    line = " ".join(words)
                    found[line] = ("", type_it(words, folder))
        elif block.language == "text":
            found[line] = (block.text, found[line][1])
    return found


def type_it(words: list[str], folder: Path) -> str:
    program = ["-m", "extract"] if words[0] == "extract" else []
    options = ["--reserve-bytes", "0"] if words[1] == "run" else []
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run(
        [sys.executable, *program, *words[1:], *options],
        cwd=folder,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, (words, ended.stderr)
    return ended.stdout


def first_words(text: str) -> list[str]:
    """What each line is about: what machines, releases of Python and rounding do not change."""
    return [re.split(r"\s{2,}|[\d(:|]", line.strip())[0].strip() for line in text.splitlines()]


def test_every_command_prints_the_lines_that_the_page_shows(printed):
    shown = {line: pair for line, pair in printed.items() if pair[0]}
    assert len(shown) == 7
    for line, (page, output) in shown.items():
        if line == "python choose.py":  # which packages there are is a matter of Python's release
            assert {"asyncio", "email", "tkinter"} & set(first_words(output))
        elif line.startswith("python look.py"):
            assert len(output.splitlines()) == len(page.splitlines())
        else:
            assert [word for word in first_words(output) if word not in ("kernels", "note")] == [
                word for word in first_words(page) if word not in ("kernels", "note")
            ], line


def test_the_probe_is_far_above_chance_and_near_what_the_page_says(printed):
    page, output = printed["python probe.py"]
    told, shown = accuracies(output), accuracies(page)
    assert told.keys() == shown.keys()
    for name in told:
        assert abs(told[name] - shown[name]) < 8, name
    for name in ("bag of words", "final state"):
        assert told[name] > told["most frequent package"] + 50


def accuracies(text: str) -> dict[str, float]:
    """Percent right by what was looked at, of all rows."""
    lines = text.partition("\nrows that")[0].splitlines()[1:]
    return {line[:24].strip(): float(line[24:].split()[0]) for line in lines}


def test_the_text_says_the_figures_that_it_shows():
    shown = next(block.text for block in page_rig.blocks(PAGE) if "most frequent package  " in block.text)
    rows = re.search(r"([\d,]+) to learn from, ([\d,]+) to be tested", shown)
    both = sum(int(number.replace(",", "")) for number in rows.groups())
    assert f"{both:,} pieces of real text" in PAGE
