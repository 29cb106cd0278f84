"""Which models of a vendor's tree a patch of the decoder base class does not reach, by the structure of their classes.

A model is reached if it derives from the base class and every `forward` on the way there calls `super().forward`. Reads
the sources and imports nothing. Classes are told apart by name and by the module that they are imported from.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from extract.patching.patch import Patch

MODEL_MAP = "MODEL_MAP"
"""The vendor's table of architectures, in `models/__init__.py`."""


@dataclass(frozen=True, slots=True)
class Unreached:
    """A model that the patch leaves as it is.

    Attributes:
        model: its class.
        architectures: the names in checkpoints that lead to it; empty if it is not in the vendor's table.
        why: what in its code keeps the patch away.
        about: what it is, where that is known.
    """

    model: str
    architectures: tuple[str, ...]
    why: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """What the patch reaches in a tree.

    Attributes:
        num_reached: models of the vendor's table that it does.
        unreached: the others, and subclasses of the base class that it misses.
        unread: files that are no Python that can be read.
    """

    num_reached: int
    unreached: tuple[Unreached, ...]
    unread: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Class:
    name: str
    file: Path
    node: ast.ClassDef
    imports: dict[str, tuple[str, str]]

    def forward(self, name: str) -> ast.FunctionDef | None:
        functions = (node for node in self.node.body if isinstance(node, ast.FunctionDef))
        return next((node for node in functions if node.name == name), None)


def reach_of(package: Path, patch: Patch) -> Reach:
    """Look through the folder of the file that the patch changes."""
    folder = (package / patch.file.partition("/")[2]).parent
    classes: dict[str, list[_Class]] = {}
    unread: list[str] = []
    table: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("*.py")):
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            unread.append(file.relative_to(package).as_posix())
            continue
        imports = _imports(tree)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(_Class(node.name, file, node, imports))
        if file == folder / "__init__.py":
            table = _model_map(tree)
    unreached, num_reached = [], 0
    base = next(
        (found for found in classes.get(patch.class_name, []) if found.file.name == Path(patch.file).name), None
    )
    mapped = {name: next(iter(classes.get(name, [])), None) for name in table}
    derived = {found.name: found for same in classes.values() for found in same if base in list(_line(found, classes))}
    for name, found in {**mapped, **derived}.items():
        if found is base and found is not None:
            continue
        why = f"its class is not below {folder.name}/" if found is None else _why(found, base, classes, patch)
        if why:
            unreached.append(Unreached(name, tuple(table.get(name, ())), why, patch.untouched.get(name, "")))
        elif name in table:
            num_reached += 1
    return Reach(num_reached, tuple(sorted(unreached, key=lambda one: one.model)), tuple(unread))


def _why(found: _Class, base: _Class | None, classes: dict[str, list[_Class]], patch: Patch) -> str:
    """Why a class does not come to the base class's method; empty if it does."""
    line = list(_line(found, classes))
    if base not in line:
        return f"does not derive from {patch.class_name}"
    for one in line[: line.index(base)]:
        own = one.forward(patch.function)
        if own is not None and not _calls_super(own, patch.function):
            whose = "its" if one is found else f"{one.name}'s"
            return f"{whose} {patch.function} does not call super().{patch.function}"
    return ""


def _line(found: _Class, classes: dict[str, list[_Class]], above: tuple[_Class, ...] = ()) -> Iterator[_Class]:
    """The class and those that it inherits from, depth first: the order of lookup where no base is shared."""
    yield found
    for base in found.node.bases:
        inner = _resolve(base, found, classes)
        if inner is not None and inner is not found and inner not in above:
            yield from _line(inner, classes, (*above, found))


def _resolve(base: ast.expr, user: _Class, classes: dict[str, list[_Class]]) -> _Class | None:
    name = ast.unparse(base).rpartition(".")[2]
    module, name = user.imports.get(name, ("", name))
    candidates = classes.get(name, [])
    same_file = [one for one in candidates if one.file == user.file]
    imported = [one for one in candidates if module and one.file.with_suffix("").parts[-1] == module.rpartition(".")[2]]
    nearby = [one for one in imported if module.split(".")[-2:-1] == list(one.file.parts[-2:-1])]
    return next(iter(nearby or (imported if module else same_file) or same_file or candidates), None)


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Local name -> module and name there."""
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _model_map(tree: ast.Module) -> dict[str, list[str]]:
    """Class name -> the architectures that the vendor's table leads to it from."""
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Dict):
            continue
        if ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) == MODEL_MAP:
            for key, model in zip(node.value.keys, node.value.values, strict=True):
                name = key.value if isinstance(key, ast.Constant) else ast.unparse(key) if key else "**"
                found.setdefault(ast.unparse(model).rpartition(".")[2], []).append(str(name))
    return found


def _calls_super(function: ast.FunctionDef, name: str) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
        and ast.unparse(node.func.value).startswith("super(")
        for node in ast.walk(function)
    )
