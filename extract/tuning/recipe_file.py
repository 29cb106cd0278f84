"""A recipe that a command chose, and the file that holds it, with what was measured as a comment.

A file is replaced only if the same command wrote it: two minutes of measuring must not end a recipe that somebody made
by hand.
"""

import json
from dataclasses import asdict
from pathlib import Path

from extract.engine.recipe import Recipe
from extract.errors import SpecError
from extract.store import clear_write_errors, replace_file

MARK = "extract tune"
"""Stands in the first lines of every file that a sweep writes, a picture too; another command's files have its own."""

MARKED_WITHIN = 4096


class TuningExists(SpecError):
    """A file to write is there already, and the same command did not write it."""

    template = "{path}: exists already, and `{writer}` did not write it. Choose another file with {option}."


def check_replaceable(path: Path, option: str, writer: str = MARK) -> None:
    """Refuse a path that is taken; `option` sets it.

    Raises:
        TuningExists: by anything but a file that the command `writer` wrote.
    """
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            if writer.encode() in file.read(MARKED_WITHIN):
                return
    raise TuningExists(path=path, option=option, writer=writer)


def write_recipe(path: Path, recipe: Recipe, table: str, writer: str = MARK) -> None:
    """Write the recipe; `table` becomes a comment."""
    standard = asdict(Recipe())
    chosen = {key: value for key, value in asdict(recipe).items() if value not in (None, standard[key])}
    lines = [f"# Written by {writer}. Build with it: extract build CHECKPOINT -o ENGINE --recipe {path.name}"]
    lines += [f"{key} = {_toml(value)}" for key, value in chosen.items()]
    lines += ["", *(f"# {line}".rstrip() for line in table.splitlines())]
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, ("\n".join(lines) + "\n").encode())


def _toml(value: object) -> str:
    """Strings, whole numbers and lists of strings are written as in JSON, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
