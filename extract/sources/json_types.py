"""The Arrow type of JSON values seen one after another, since a JSONL file declares none.

null joins anything, an integer joins a fraction, lists and objects join member by member. Anything else is a conflict:
guessing that a number meant text is the caller's business, not ours.
"""

from typing import Any

import pyarrow as pa

_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
EXACT_AS_FLOAT = 2**53
"""Integers up to this size have an equal float64."""
_SCALARS: dict[type, pa.DataType] = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


class Conflict(ValueError):
    """A value that does not join the ones before it."""


class SeenValues:
    """What has been seen of one column, or of one place inside it.

    Attributes:
        kind: Python type of all values that are not null; `None` before the first.
        item: what lists held; `fields`: what objects held, by key.
        lone_surrogate: a string that UTF-8 cannot hold was seen here or inside.
        wide: an integer was seen that no float64 equals.
    """

    __slots__ = ("fields", "item", "kind", "lone_surrogate", "wide")

    def __init__(self) -> None:
        self.kind: type | None = None
        self.item: SeenValues | None = None
        self.fields: dict[str, SeenValues] = {}
        self.lone_surrogate = False
        self.wide = False

    def add(self, value: Any) -> None:
        """Take one more value into account.

        Raises:
            Conflict: it does not join; says how.
        """
        if value is None:
            return
        kind = type(value)
        if kind is not self.kind:
            self._join(kind)
        if kind is str:
            if not value.isascii() and not _is_utf8(value):
                self.lone_surrogate = True
        elif kind is list:
            self._add_items(value)
        elif kind is dict:
            self._add_fields(value)
        elif kind is int:
            self._add_integer(value)

    def arrow(self) -> pa.DataType:
        """The type that holds every value seen."""
        if self.kind is list:
            assert self.item is not None
            return pa.list_(self.item.arrow())
        if self.kind is dict:
            return pa.struct([(name, seen.arrow()) for name, seen in self.fields.items()])
        return pa.null() if self.kind is None else _SCALARS[self.kind]

    def _join(self, kind: type) -> None:
        if self.kind is None or (self.kind, kind) == (int, float):
            self.kind = kind
        elif (self.kind, kind) != (float, int):
            raise Conflict(f"{_NAMES[kind]}, where the lines before have {_NAMES[self.kind]}")
        if self.wide and kind is float:
            raise Conflict("a number with a fraction, where a line before has an integer that a fraction cannot hold")

    def _add_integer(self, value: int) -> None:
        if not -(2**63) <= value < 2**63:
            raise Conflict("an integer beyond 64 bits")
        if not -EXACT_AS_FLOAT <= value <= EXACT_AS_FLOAT:
            self.wide = True
            if self.kind is float:
                raise Conflict("an integer that a fraction cannot hold, where the lines before have numbers with one")

    def _add_items(self, values: list[Any]) -> None:
        self.item = self.item or SeenValues()
        for value in values:
            self.item.add(value)
        self.lone_surrogate |= self.item.lone_surrogate

    def _add_fields(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name not in self.fields:
                if not _is_utf8(name):
                    raise Conflict("a key that is not valid Unicode")
                self.fields[name] = SeenValues()
            self.fields[name].add(value)
            self.lone_surrogate |= self.fields[name].lone_surrogate


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
