"""Writes what the documentation takes from the code: reference and table of commands, exit codes, list of modules.

`python tests/readme_commands.py --write` puts the reference into docs/commands.md and two tables into README.md,
between their markers, and the Python interface into docs/reference.md. In the map of docs/architecture.md it adds
modules that are missing, beside their neighbours and with the opening of their docstring, and takes out those that are
gone; lines that are there stay as they are.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

import click
from python_reference import python_reference

import extract
from extract import errors
from extract.cli import COMMANDS, cli
from extract.errors import ExtractError

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
COMMANDS_PAGE = ROOT / "docs" / "commands.md"
REFERENCE = ROOT / "docs" / "reference.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGE = Path(extract.__file__).parent
MAP_LINE = re.compile(r"- `(extract/\S+\.py)`\s+(\S.*)")
WIDTH = 100


def command_reference() -> str:
    """`extract --help`, then the help of every command under a heading of its own."""
    top = click.Context(cli, info_name="extract", terminal_width=WIDTH, max_content_width=WIDTH, **cli.context_settings)
    parts = [("extract", cli.get_help(top))]
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=top, **command.context_settings)
        parts.append((f"extract {name}", command.get_help(context)))
    return "\n".join(f"## {name}\n\n```text\n$ {name} --help\n{text}\n```\n" for name, text in parts).rstrip()


def command_table() -> str:
    """Each command in a line, with a link into the reference."""
    lines = ["| command | |", "|---|---|"]
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        lines.append(f"| [`{name}`](docs/commands.md#extract-{name}) | {command.get_short_help_str(limit=WIDTH)} |")
    return "\n".join(lines)


def exit_codes() -> str:
    """A table: each code, the classes of `errors.py` that carry it, and what they say it is."""
    lines = ["| code | class | meaning |", "|---|---|---|", "| 0 | | The command did what was asked. |"]
    lines += ["| 1 | | An internal error: Python prints its traceback. Please report it. |"]
    for code, family in sorted(families().items()):
        names = ", ".join(f"`{cls.__name__}`" for cls in family)
        lines.append(f"| {code} | {names} | {' '.join(inspect.getdoc(cls) or '' for cls in family)} |")
    return "\n".join(lines)


def families() -> dict[int, list[type[ExtractError]]]:
    """The bases of `errors.py` by exit code."""
    found: dict[int, list[type[ExtractError]]] = {}
    for cls in vars(errors).values():
        if inspect.isclass(cls) and cls.__bases__ == (ExtractError,):
            found.setdefault(cls.exit_code, []).append(cls)
    return found


def between(text: str, marker: str) -> str:
    """What stands between `<!-- marker -->` and `<!-- /marker -->`, with the white space around it."""
    _, opened, rest = text.partition(f"<!-- {marker} -->")
    found, closed, _ = rest.partition(f"<!-- /{marker} -->")
    assert opened, f"there is no <!-- {marker} -->"
    assert closed, f"there is no <!-- /{marker} -->"
    return found


def filled(text: str, marker: str, part: str) -> str:
    """The text with this part between the markers."""
    around = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    return text.replace(between(text, marker).join(around), f"\n\n{part}\n\n".join(around))


def modules() -> list[str]:
    """Every module of the package, but for packages' `__init__.py` that only say what they are."""
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or len(_parsed(path).body) > 1]
    return sorted(f"extract/{path.relative_to(PACKAGE).as_posix()}" for path in files)


def mapped(text: str) -> str:
    """The page of the map with every module of today."""
    known = set(modules())
    lines = text.splitlines(keepends=True)
    lines = [line for line in lines if not (named := MAP_LINE.match(line)) or named[1] in known]
    for module in sorted(known - {named[1] for line in lines if (named := MAP_LINE.match(line))}):
        folder = module.rpartition("/")[0]
        places = [
            number for number, line in enumerate(lines) if re.match(rf"- `{re.escape(folder)}/[^/]*\.py`", line)
        ] or [number for number, line in enumerate(lines) if MAP_LINE.match(line)]
        opening = (ast.get_docstring(_parsed(PACKAGE.parent / module)) or "").split("\n\n")[0].replace("\n", " ")
        lines.insert(places[-1] + 1, f"- `{module}`  {opening}\n")
    return "".join(lines)


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


GENERATED: dict[Path, Callable[[str], str]] = {
    README: lambda text: filled(filled(text, "command table", command_table()), "exit codes", exit_codes()),
    COMMANDS_PAGE: lambda text: filled(text, "commands", command_reference()),
    REFERENCE: lambda text: filled(text, "reference", python_reference()),
    ARCHITECTURE: mapped,
}
"""The pages with generated parts, and what brings the text of each up to date."""


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for page, renewed in GENERATED.items():
            page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write("\n\n".join((command_table(), exit_codes(), command_reference())) + "\n")
