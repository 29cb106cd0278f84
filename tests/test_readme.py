"""README.md cannot drift from the code: its map, its command reference and its exit codes are compared with it."""

import ast
import re
from pathlib import Path

import readme_commands

import extract
from extract import errors

PACKAGE = Path(extract.__file__).parent
README = readme_commands.README.read_text(encoding="utf-8")
LINE = re.compile(r"^(?:[-*] )?`(extract/\S+\.py)`\s+(\S.*)$", re.MULTILINE)


def section(heading: str) -> str:
    """The text under `## heading`, up to the next heading of that level."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no heading ## {heading}"
    return found[1]


def modules() -> list[str]:
    """Every module of the package, but for packages' `__init__.py` that only say what they are."""
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or holds_code(path)]
    return [f"extract/{path.relative_to(PACKAGE).as_posix()}" for path in files]


def holds_code(path: Path) -> bool:
    """Anything but a docstring."""
    return len(ast.parse(path.read_text(encoding="utf-8")).body) > 1


def test_the_map_names_every_module_once_and_nothing_else():
    named = [line[0] for line in LINE.findall(section("Map"))]
    assert len(named) == len(set(named))
    assert {"missing": sorted(set(modules()) - set(named)), "gone": sorted(set(named) - set(modules()))} == {
        "missing": [],
        "gone": [],
    }


def test_a_line_of_the_map_is_one_sentence_of_some_words():
    for module, text in LINE.findall(section("Map")):
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


def test_writing_the_reference_again_changes_nothing():
    assert readme_commands.written(README) == README
