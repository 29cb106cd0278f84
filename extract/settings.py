"""Turn a TOML table into a frozen dataclass: types checked, unknown keys refused with the nearest known one.

Knows nothing of what the settings mean; ranges and rules between keys live in each dataclass's `__post_init__`.
"""

import dataclasses
import difflib
import functools
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from extract.errors import BadValue, UnknownKey, UnreadableSpec

T = TypeVar("T")

MAX_TOML_BYTES = 16 * 2**20
MAX_INT = 2**63 - 1
"""Whole numbers are int64, as in TOML and Arrow."""

NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
PLURALS = {str: "strings", int: "whole numbers", float: "numbers"}


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; errors name the file, and the line where it does not parse."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOML_BYTES + 1)
        if len(content) > MAX_TOML_BYTES:
            raise UnreadableSpec(
                path=path, problem=f"more than {MAX_TOML_BYTES:,} bytes, absurdly many for such a file."
            )
        return tomllib.loads(content.decode("utf-8"))
    except FileNotFoundError:
        raise UnreadableSpec(path=path, problem="no such file.") from None
    except OSError as error:
        raise UnreadableSpec(path=path, problem=f"cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UnreadableSpec(path=path, problem=f"not UTF-8 text: {error.reason} at byte {error.start:,}.") from None
    except RecursionError:
        raise UnreadableSpec(path=path, problem="not valid TOML: nested too deeply.") from None
    except ValueError as error:  # TOMLDecodeError, or a number with too many digits for Python
        raise UnreadableSpec(path=path, problem=f"not valid TOML: {error}.") from None


def parse(cls: type[T], table: Any, where: str) -> T:
    """Build `cls` from `table`. `where` names the file (and table) in messages.

    Raises:
        UnknownKey: a key that `cls` has no field for.
        BadValue: a value of the wrong type, a missing key, or one that `__post_init__` refuses.
    """
    if not isinstance(table, dict):
        raise BadValue(where=where, key="this table", found=_shown(table), expected="a table of keys")
    hints, required = _hints(typing.cast("Any", cls))
    values: dict[str, Any] = {}
    for key, value in table.items():
        kind = type(value)
        if hints.get(key) is kind and (kind is str or kind is bool or (kind is int and abs(value) <= MAX_INT)):
            values[key] = value  # what most values of most files are
            continue
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known keys: {', '.join(sorted(hints))}."
            raise UnknownKey(where=where, key=_cut(str(key)), hint=hint)
        values[key] = _coerce(hints[key], value, where, key)
    for name in required:
        if name not in values:
            raise BadValue(where=where, key=name, found="missing", expected=_expected(hints[name]))
    try:
        return cls(**values)
    except ValueError as error:
        key, _, expected = str(error).partition(": ")
        raise BadValue(where=where, key=key, found=_shown(values.get(key)), expected=expected) from None


@functools.cache
def _hints(cls: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Types of the fields, and the names of those without a default, looked up once: a job may have 100,000 records."""
    fields, missing = dataclasses.fields(cls), dataclasses.MISSING
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields}, tuple(
        field.name for field in fields if field.default is missing and field.default_factory is missing
    )


def _coerce(hint: Any, value: Any, where: str, key: str) -> Any:
    for kind, inner in _options(hint):
        if kind == "plain":
            if _is_a(value, inner):
                return float(value) if inner is float else value
        elif kind == "null":
            if value is None:
                return None
        elif kind == "table":
            if isinstance(value, dict):
                return parse(inner, value, f"{where} [{key}]")
        elif kind == "choice":
            if value in inner:
                return value
        elif kind == "tables":
            if isinstance(value, (list, tuple)):
                return tuple(_coerce(inner, item, where, f"{key}[{place}]") for place, item in enumerate(value))
        elif kind == "list":
            if isinstance(value, (list, tuple)) and all(_is_a(item, inner) for item in value):
                return tuple(value)
        elif isinstance(value, dict) and (inner is Any or all(_is_a(item, inner) for item in value.values())):
            return value
    raise BadValue(where=where, key=key, found=_shown(value), expected=_expected(hint))


@functools.cache
def _options(hint: Any) -> tuple[tuple[str, Any], ...]:
    """What a value may be, as kind and type."""
    return tuple(_option(option) for option in (typing.get_args(hint) if _is_union(hint) else (hint,)))


def _option(option: Any) -> tuple[str, Any]:
    if option is type(None):
        return "null", None
    if dataclasses.is_dataclass(option):
        return "table", option
    origin, inner = typing.get_origin(option), typing.get_args(option)
    if origin is typing.Literal:
        return "choice", inner
    if origin is tuple:
        return ("tables" if dataclasses.is_dataclass(inner[0]) else "list"), inner[0]
    if origin is dict:
        return "dict", inner[1]
    return "plain", option


def _is_a(value: Any, kind: Any) -> bool:
    if kind is str:
        return isinstance(value, str)
    if kind is float:
        return isinstance(value, float) or _is_a(value, int)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and -MAX_INT - 1 <= value <= MAX_INT
    return isinstance(value, kind)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _expected(hint: Any) -> str:
    if _is_union(hint):
        return " or ".join(_expected(option) for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(f'"{value}"' for value in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return f"a list of {PLURALS.get(inner, 'tables')}"
    return NAMES.get(hint, "a table")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _cut(f'"{value}"' if isinstance(value, str) else repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
