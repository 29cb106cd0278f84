"""Where in a source file a patch goes: class, function, anchor and the `if` around it, found in the syntax tree.

Refuses whatever is not as the patch knows it, the order of work included: a tensor of the right name that is taken
before the final norm or behind a scaling would be marked without complaint, and the numbers would be wrong.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from extract.patching.patch import Kind, Patch
from extract.patching.vendor_tree import PatchRefused

N = TypeVar("N", bound=ast.AST)

_NOT_COMPARED = {"ctx", "kind", "type_comment"}


class StructureNotKnown(PatchRefused):
    """A file that is not built as the patch expects it."""

    template = "{path}: {problem}. Nothing was changed."


@dataclass(frozen=True, slots=True)
class Place:
    """Where the lines go.

    Attributes:
        tree: the file's syntax tree.
        body: the statements of the `if`, a list inside `tree`.
        number: of the anchor in `body`.
    """

    tree: ast.Module
    body: list[ast.stmt]
    number: int

    @property
    def anchor(self) -> ast.stmt:
        """The statement after which the lines go."""
        return self.body[self.number]


def find_place(path: Path, source: bytes, patch: Patch, kind: Kind) -> Place:
    """Find the anchor of an unpatched source.

    Raises:
        StructureNotKnown: it cannot be sure that this is the place.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        said = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise StructureNotKnown(path=path, problem=f"it is no Python that can be read ({said})") from None
    problem = _name_taken(tree, patch)
    if problem:
        raise StructureNotKnown(path=path, problem=problem)
    try:
        cls = _only(_classes(tree, patch), f"class {patch.class_name}", "it")
        method = _only(_methods(cls, patch), f"method {patch.function}", f"class {patch.class_name}")
        _check_order(method, patch)
        anchor = _only(_found(method, kind.anchor), f"statement `{kind.anchor}`", patch.method)
        body, number = _guarded_body(method, anchor, patch)
    except LookupError as error:
        raise StructureNotKnown(path=path, problem=error.args[0]) from None
    if _shares_its_line(body, number, source):
        problem = f"line {body[number].lineno} of {patch.method} holds other code beside `{kind.anchor}`"
        raise StructureNotKnown(path=path, problem=problem)
    return Place(tree, body, number)


def _name_taken(tree: ast.Module, patch: Patch) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == patch.output_name:
            return f'line {node.lineno} already uses the name "{patch.output_name}", and it is not this patch'
    return ""


def _only(found: list[N], what: str, where: str) -> N:
    if len(found) != 1:
        count = f"{len(found)} times" if found else "not at all"
        raise LookupError(f"{where} should hold {what} once, and holds it {count}")
    return found[0]


def _classes(tree: ast.Module, patch: Patch) -> list[ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == patch.class_name]


def _methods(cls: ast.ClassDef, patch: Patch) -> list[ast.FunctionDef]:
    return [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == patch.function]


def _check_order(method: ast.FunctionDef, patch: Patch) -> None:
    steps = [_only(_found(method, step), f"`{step}`", patch.method) for step in patch.order]
    places = [(step.lineno, step.col_offset) for step in steps]
    if places != sorted(places):
        raise LookupError(
            f"{patch.method} does its work in another order than {', '.join(f'`{step}`' for step in patch.order)}"
        )


def _found(method: ast.FunctionDef, pattern: str) -> list[ast.stmt | ast.expr]:
    """Statements or calls inside the method that a pattern fits."""
    wanted: ast.AST = ast.parse(pattern).body[0]
    if isinstance(wanted, ast.Expr):
        wanted = wanted.value
    return [node for node in ast.walk(method) if isinstance(node, (ast.stmt, ast.expr)) and _fits(wanted, node)]


def _fits(pattern: object, node: object) -> bool:
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call) and pattern.args and _is_open(pattern.args[0]):
        return _fits(pattern.func, node.func)
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            _fits(value, getattr(node, name, None))
            for name, value in ast.iter_fields(pattern)
            if name not in _NOT_COMPARED
        )
    if isinstance(pattern, list):
        return isinstance(node, list) and len(node) == len(pattern) and all(map(_fits, pattern, node))
    return pattern == node


def _is_open(argument: ast.expr) -> bool:
    """Whether it is the `...` of a pattern: any arguments."""
    return isinstance(argument, ast.Constant) and argument.value is Ellipsis


def _guarded_body(method: ast.FunctionDef, anchor: ast.AST, patch: Patch) -> tuple[list[ast.stmt], int]:
    """The body of the `if` whose condition is the guard and which holds the anchor itself, and the anchor's number."""
    for node in ast.walk(method):
        if isinstance(node, ast.If) and _is_guard(node.test, patch):
            for number, statement in enumerate(node.body):
                if statement is anchor:
                    return node.body, number
    raise LookupError(f"`{ast.unparse(anchor)}` of {patch.method} is not directly inside `if ....{patch.guard}():`")


def _is_guard(test: ast.expr, patch: Patch) -> bool:
    called = isinstance(test, ast.Call) and not test.args and not test.keywords
    return called and isinstance(test.func, ast.Attribute) and test.func.attr == patch.guard  # type: ignore[attr-defined]


def _shares_its_line(body: list[ast.stmt], number: int, source: bytes) -> bool:
    """Whether lines put behind the anchor's last line would not come right behind the anchor."""
    anchor = body[number]
    line = source.splitlines()[anchor.lineno - 1]
    ends = {ending for other in _others(body, number) for ending in (other.lineno, other.end_lineno)}
    return bool(line[: anchor.col_offset].strip()) or bool(ends & {anchor.lineno, anchor.end_lineno})


def _others(body: list[ast.stmt], number: int) -> Iterator[ast.stmt]:
    yield from body[:number]
    yield from body[number + 1 :]
