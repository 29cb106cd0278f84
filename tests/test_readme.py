"""README.md cannot drift from the code: its map, its command reference and its exit codes are compared with it."""

import re

import readme_commands

from extract import errors

README = readme_commands.README.read_text(encoding="utf-8")


def section(heading: str) -> str:
    """The text under `## heading`, up to the next heading of that level."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no heading ## {heading}"
    return found[1]


def test_the_map_names_every_module_once_and_nothing_else():
    named = [line[0] for line in readme_commands.MAP_LINE.findall(section("Map"))]
    assert len(named) == len(set(named))
    known = readme_commands.modules()
    missing, gone = sorted(set(known) - set(named)), sorted(set(named) - set(known))
    assert (missing, gone) == ([], []), "python tests/readme_commands.py --write"


def test_a_line_of_the_map_is_one_sentence_of_some_words():
    for module, text in readme_commands.MAP_LINE.findall(section("Map")):
        assert len(text.split()) >= 3, module
        assert text[-1] in ".?", module


def test_the_command_reference_is_what_help_prints():
    expected = readme_commands.command_reference()
    assert readme_commands.between(README, "commands").strip() == expected, "python tests/readme_commands.py --write"


def test_the_table_of_exit_codes_is_that_of_the_classes():
    assert readme_commands.between(section("Exit codes"), "exit codes").strip() == readme_commands.exit_codes()


def test_every_exit_code_has_a_class_of_its_own():
    assert sorted(readme_commands.families()) == [2, 3, 4, 5, 6, 7, 8, 130]
    assert errors.ExtractError.exit_code == 1


def test_writing_brings_an_old_readme_up_to_date():
    lines = README.splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if line.startswith("- `extract/text/cuts.py`"))
    old = [*lines[:place], "- `extract/text/gone.py`  Not there any more.\n", *lines[place + 1 :]]
    old = "".join(old).replace("  -h, --help", "  -x, --help").replace("| 130 |", "| 131 |")
    new = readme_commands.written(old)
    assert "gone.py" not in new
    assert "- `extract/text/cuts.py`  Cut the content ids of rows to the limit" in new
    assert sorted(new.splitlines()) == sorted(README.splitlines())


def test_writing_the_reference_again_changes_nothing():
    assert readme_commands.written(README) == README
