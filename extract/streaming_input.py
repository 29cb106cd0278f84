"""What a program hands to `stream`, as Arrow columns of some rows at a time: texts, conversations or token ids.

Takes whatever iterates over rows and only as many as are asked for. What iterates over something else, such as one text
over its characters or a data frame over the names of its columns, is refused: the rows that it would give look like
rows.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from extract.errors import BadValue
from extract.spec import InputKind

MAX_BYTES = 8 * 2**20
"""Of rows that are taken together, unless one alone has more."""

_ROWS = {
    "text": "a list or another iterable of texts",
    "messages": "a list or another iterable of conversations, each a list of messages",
    "input_ids": "a list or another iterable of rows, each a list of ids",
}
_ROW = {
    "text": "a str, bytes or None",
    "messages": "a list of dictionaries with role and content, JSON text, or None",
    "input_ids": "a list, array or tensor of whole numbers, or None",
}


def check_rows(rows: Any, kind: InputKind) -> None:
    """Refuse what iterates over something else than rows.

    Raises:
        BadValue: one text, one array of texts with two dimensions, a dictionary, a data frame, or no iterable at all.
    """
    dimensions = getattr(rows, "ndim", None)
    no_rows = isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable)
    if no_rows or (dimensions is not None and dimensions != 1 and not (kind == "input_ids" and dimensions == 2)):
        found = f"one {type(rows).__name__}"
        raise BadValue(where="stream", key="texts", found=found, expected=_ROWS[kind])


def columns_of(rows: Iterable[Any], kind: InputKind, num_rows: int) -> Iterator[tuple[int, pa.Array]]:
    """Position of the first row, and a column of at most `num_rows` rows: fewer where they are long.

    Raises:
        BadValue: a row that is no such thing, with its position.
    """
    taken: list[Any] = []
    first_row, num_bytes = 0, 0
    for row, value in enumerate(rows):
        stored, size = _stored(value.as_py() if isinstance(value, pa.Scalar) else value, kind, row)
        taken.append(stored)
        num_bytes += size
        if len(taken) == num_rows or num_bytes >= MAX_BYTES:
            yield first_row, _column(taken, kind)
            first_row, num_bytes, taken = row + 1, 0, []
    if taken:
        yield first_row, _column(taken, kind)


def _column(taken: list[Any], kind: InputKind) -> pa.Array:
    return pa.array(taken, pa.list_(pa.int64()) if kind == "input_ids" else pa.large_binary())


def _stored(value: Any, kind: InputKind, row: int) -> tuple[Any, int]:
    """A row as it is put into a column, and its bytes; a lone surrogate becomes bytes that are no valid text."""
    if value is None:
        return None, 0
    if kind == "input_ids":
        ids = _ids(value)
        if ids is not None:
            return ids, ids.nbytes
    elif isinstance(value, str | bytes):
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return text, len(text)
    elif kind == "messages" and isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value):
        try:
            text = json.dumps(value, ensure_ascii=False, default=dict).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError) as error:
            found = f"no conversation ({error})"
            raise BadValue(where="texts", key=f"text {row}", found=found, expected=_ROW[kind]) from None
        return text, len(text)
    raise BadValue(where="texts", key=f"text {row}", found=type(value).__name__, expected=_ROW[kind])


def _ids(value: Any) -> Any:
    """int64 [L], or `None` if it is nothing like that."""
    try:
        ids = np.asarray(value)
    except (TypeError, ValueError):
        return None
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        return None
    return ids.astype(np.int64)
