"""Writes the reference of the Python interface from the code: signatures, docstrings, settings with their defaults.

What a name is, is said where it is defined and nowhere else; the reference only puts it on one page. Part of what
`python tests/readme_commands.py --write` brings up to date.
"""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

import extract
from extract.embedding import Embedded
from extract.engine.contract import Contract, Runtime
from extract.estimate import Estimate
from extract.exporting.export import Exported
from extract.exporting.request import Request
from extract.fidelity_check.results import FidelityReport, Interval, Spread
from extract.jobs import PlannedJob
from extract.output import Output, Row, Rows
from extract.runners.summary import Summary
from extract.shards.views import BatchView, Spans
from extract.streaming import StreamedBatch, StreamedRow
from extract.training_views.torch_batches import TrainingBatches
from extract.training_views.torch_rows import TrainingDataset
from extract.verification import Verification

SETTINGS = ("JobSpec", "SourceSpec", "TextSpec", "StatesSpec", "RunSpec", "Recipe")
RESULTS: tuple[type, ...] = (
    Output,
    Row,
    Rows,
    BatchView,
    Spans,
    TrainingBatches,
    TrainingDataset,
    StreamedBatch,
    StreamedRow,
    Contract,
    Runtime,
    PlannedJob,
    Estimate,
    Summary,
    Verification,
    Embedded,
    Request,
    Exported,
    FidelityReport,
    Spread,
    Interval,
)
"""What the functions give, and the options of `export`."""

SPECIAL = ("__len__", "__getitem__", "__iter__", "__contains__")


def python_reference() -> str:
    """The whole reference."""
    functions = [name for name in extract.__all__ if name not in SETTINGS]
    parts = ["## Functions", *(_function(name) for name in functions)]
    parts += ["## Settings", *(_settings(name) for name in SETTINGS)]
    parts += ["## What they give and take", *(_result(cls) for cls in RESULTS)]
    return "\n\n".join(parts)


def _function(name: str) -> str:
    function = getattr(extract, name)
    return f"### {name}\n\n```text\nextract.{_signature(function)}\n\n{inspect.getdoc(function)}\n```"


def _settings(name: str) -> str:
    cls = getattr(extract, name)
    hints, docs = typing.get_type_hints(cls), _field_docs(cls)
    lines = [f"### {name}", "", (inspect.getdoc(cls) or "").replace("\n\n", "\n"), ""]
    lines += ["| key | value | default | |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        cells = (f"`{field.name}`", _value(hints[field.name]), _default(field), docs.get(field.name, ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _result(cls: type) -> str:
    docs = _field_docs(cls)
    lines = [inspect.getdoc(cls) or ""]
    fields = [f"{name}: {kind}" for name, kind in _annotations(cls)]
    if fields:
        texts = [textwrap.indent(docs.get(name, ""), "    ") for name, _ in _annotations(cls)]
        lines.append("\n".join(f"{field}\n{text}".rstrip() for field, text in zip(fields, texts, strict=True)))
    lines += [f"{head}\n{textwrap.indent(text, '    ')}" for head, text in _members(cls)]
    body = "\n\n".join(lines)
    return f"### {cls.__name__}\n\n```text\n{body}\n```"


def _members(cls: type) -> Iterator[tuple[str, str]]:
    """Properties and methods that are for everyone, each with its docstring."""
    for name, member in vars(cls).items():
        if name.startswith("_") and name not in SPECIAL:
            continue
        text = inspect.getdoc(member) or ""
        if isinstance(member, property) or type(member).__name__ == "cached_property":
            yield name, text
        elif inspect.isfunction(member) and text:
            yield _signature(member), text


def _signature(function: Any) -> str:
    """Name, parameters and result, as the source writes them; defaults as they are."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    (node,) = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    real = inspect.signature(function).parameters
    shown, star = [], False
    for parameter in real.values():
        if parameter.name == "self":
            continue
        annotation = next(one.annotation for one in _arguments(node) if one.arg == parameter.name)
        text = parameter.name + (f": {ast.unparse(annotation)}" if annotation else "")
        if parameter.default is not parameter.empty:
            text += f" = {_written(parameter.default)}"
        if parameter.kind is parameter.VAR_KEYWORD:
            text = f"**{text}"
        elif parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            shown.append("*")
        shown.append(text)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({', '.join(shown)}){result}"
    return line if len(line) <= 100 else f"{node.name}(\n" + "".join(f"    {one},\n" for one in shown) + f"){result}"


def _written(default: Any) -> str:
    """A default as Python code; of a function only that there is one."""
    if callable(default):
        return "..."
    return json.dumps(default) if isinstance(default, str) else repr(default)


def _arguments(node: ast.FunctionDef) -> list[ast.arg]:
    found = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [*found, *(one for one in (node.args.vararg, node.args.kwarg) if one)]


def _class(cls: type) -> ast.ClassDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return node


def _annotations(cls: type) -> list[tuple[str, str]]:
    """Public fields with their types, as the source writes them."""
    found = [node for node in _class(cls).body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return [(node.target.id, ast.unparse(node.annotation)) for node in found if not node.target.id.startswith("_")]


def _field_docs(cls: type) -> dict[str, str]:
    """The string that stands under a field, as one line."""
    body = _class(cls).body
    found = {}
    for node, after in itertools.pairwise(body):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
            found[node.target.id] = re.sub(r"\s+", " ", str(after.value.value)).strip()
    return found


def _value(hint: Any) -> str:
    """What may be given, as a job spec or recipe writes it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_value(one) for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f'"{one}"' for one in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"list of {_value(typing.get_args(hint)[0])}"
    names = {str: "text", int: "whole number", float: "number", bool: "true, false"}
    return names.get(hint) or f"[{hint.__name__}](#{hint.__name__.lower()})"


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return ""
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default in (None, (), ""):
        return "none"
    return f"{field.default:,}" if type(field.default) is int else f"`{json.dumps(field.default)}`"
