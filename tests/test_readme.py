"""The pages cannot drift from the code: map, command reference and exit codes are compared with it."""

from pathlib import Path

import pytest
import readme_commands

from extract import errors

ARCHITECTURE = readme_commands.ARCHITECTURE.read_text(encoding="utf-8")


def test_the_map_names_every_module_once_and_nothing_else():
    named = [line[0] for line in readme_commands.MAP_LINE.findall(ARCHITECTURE)]
    assert len(named) == len(set(named))
    known = readme_commands.modules()
    missing, gone = sorted(set(known) - set(named)), sorted(set(named) - set(known))
    assert (missing, gone) == ([], []), "python tests/readme_commands.py --write"


def test_a_line_of_the_map_is_one_sentence_of_some_words():
    for module, text in readme_commands.MAP_LINE.findall(ARCHITECTURE):
        assert len(text.split()) >= 3, module
        assert text[-1] in ".?", module


@pytest.mark.parametrize("page", readme_commands.GENERATED, ids=lambda page: page.name)
def test_what_is_generated_is_what_the_code_says(page: Path):
    text = page.read_text(encoding="utf-8")
    assert readme_commands.GENERATED[page](text) == text, "python tests/readme_commands.py --write"


def test_every_exit_code_has_a_class_of_its_own():
    assert sorted(readme_commands.families()) == [2, 3, 4, 5, 6, 7, 8, 130]
    assert errors.ExtractError.exit_code == 1


def test_writing_brings_an_old_map_up_to_date():
    lines = ARCHITECTURE.splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if line.startswith("- `extract/text/cuts.py`"))
    old = "".join([*lines[:place], "- `extract/text/gone.py`  Not there any more.\n", *lines[place + 1 :]])
    new = readme_commands.mapped(old)
    assert "gone.py" not in new
    assert "- `extract/text/cuts.py`  Cut the content ids of rows to the limit" in new
    assert sorted(new.splitlines()) == sorted(ARCHITECTURE.splitlines())


@pytest.mark.parametrize(
    ("page", "now", "old"),
    [
        (readme_commands.README, "| 130 |", "| 131 |"),
        (readme_commands.COMMANDS_PAGE, "  -h, --help", "  -x, --help"),
    ],
)
def test_writing_brings_old_parts_up_to_date(page: Path, now: str, old: str):
    text = page.read_text(encoding="utf-8")
    assert now in text
    assert readme_commands.GENERATED[page](text.replace(now, old)) == text
