"""The chosen point as a recipe, and the file that holds it, with the whole table as a comment.

A file is replaced only if a sweep wrote it: two minutes of measuring must not end a recipe that somebody made by hand.
"""

import json
from dataclasses import asdict
from pathlib import Path

from extract.engine.recipe import Recipe
from extract.errors import SpecError
from extract.store import clear_write_errors, replace_file
from extract.tuning.results import Tuning

MARK = "extract tune"
"""Stands in the first lines of every file that a sweep writes, a picture too."""

MARKED_WITHIN = 4096


class TuningExists(SpecError):
    """A file to write is there already, and no sweep wrote it."""

    template = "{path}: exists already, and `extract tune` did not write it. Choose another file with {option}."


def check_replaceable(path: Path, option: str) -> None:
    """Refuse a path that is taken; `option` sets it.

    Raises:
        TuningExists: by anything but a file that a sweep wrote.
    """
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            if MARK.encode() in file.read(MARKED_WITHIN):
                return
    raise TuningExists(path=path, option=option)


def write_recipe(path: Path, tuning: Tuning, table: str) -> None:
    """Write the recipe; `table` becomes a comment."""
    standard = asdict(Recipe())
    chosen = {key: value for key, value in asdict(tuning.recipe).items() if value not in (None, standard[key])}
    lines = [f"# Written by {MARK}. Build with it: extract build CHECKPOINT -o ENGINE --recipe {path.name}"]
    lines += [f"{key} = {_toml(value)}" for key, value in chosen.items()]
    lines += ["", *(f"# {line}".rstrip() for line in table.splitlines())]
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, ("\n".join(lines) + "\n").encode())


def _toml(value: object) -> str:
    """Strings, whole numbers and lists of strings are written as in JSON, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
