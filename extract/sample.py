"""Real text that lies on any machine with Python: the docstrings of the standard library, parsed and never imported.

Used for `extract sample`, and by builds that need real passages to measure on.
"""

import ast
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from extract.errors import SpecError
from extract.store import clear_write_errors

SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "ensurepip"})


class NoPassages(SpecError):
    """The standard library's sources are not there."""

    template = "{path}: no Python sources found, so there are no docstrings to sample. Use a dataset of your own."


class SampleExists(SpecError):
    """The file to write is there already."""

    template = "{path}: exists already. Choose another file with -o, or remove this one first."


@dataclass(frozen=True, slots=True)
class Passage:
    """One docstring: where it stands and what it says."""

    id: str
    module: str
    text: str


def passages() -> Iterator[Passage]:
    """Docstrings of the running Python's standard library, by file name and position."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _sources(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        yield from _docstrings(tree, module, module)


def _sources(root: Path) -> list[Path]:
    """Sorted Python files; skipped folders are not even listed, since `site-packages` may hold a hundred thousand."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def spread(count: int) -> list[Passage]:
    """`count` passages at even distances over all of them (all, if there are fewer)."""
    found = list(passages())
    if not found:
        raise NoPassages(path=sysconfig.get_paths()["stdlib"])
    if count >= len(found):
        return found
    return [found[place * len(found) // count] for place in range(count)]


def write_sample(path: Path, count: int) -> int:
    """Write passages as a Parquet file with columns `id`, `module`, `text`; returns how many rows it holds.

    Raises:
        SampleExists: something of that name is there.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.exists():
        raise SampleExists(path=path)
    chosen = spread(count)
    table = pa.table({key: [getattr(passage, key) for passage in chosen] for key in ("id", "module", "text")})
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, compression="zstd", row_group_size=1000)
    return len(chosen)


def _docstrings(node: ast.AST, name: str, module: str) -> Iterator[Passage]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield Passage(name, module, text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child, f"{name}.{child.name}", module)
