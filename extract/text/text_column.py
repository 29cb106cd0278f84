"""An Arrow column of text as Python strings, slice by slice; nothing is replaced or repaired.

A row that is not valid UTF-8 (a lone surrogate counts, which JSON lines can hold) becomes a fault of that row alone and
names the first bad byte. Arrow itself does not check what a string column holds, so strings are checked like bytes.
Numbers are refused, not printed: a column of the wrong type is more often a slip than a wish.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from extract.errors import SourceError

SLICE_BYTES = 2**20
"""Text that is in Python's hands, and in the tokenizer's, at once (or one row, if that is longer)."""


class WrongColumnType(SourceError):
    """The input column is of a type that this kind of input cannot be."""

    template = (
        'the input column has type {found}; source.input = "{input}" reads {expected}. '
        "Name another source.column or another source.input."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSlice:
    """Consecutive rows as strings: `texts[i]` is row `first + i` of the column, None where it is null or faulty."""

    first: int
    texts: list[str | None]
    faults: dict[int, str] = field(default_factory=dict)
    """Row of the column -> why it is not text."""


def plain(column: pa.Array) -> pa.Array:
    """The column without extension type, run-end or dictionary encoding."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type may hold text."""
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_null(kind)
    )


def read_texts(column: pa.Array) -> Iterator[TextSlice]:
    """The rows of a text column in slices of at most `SLICE_BYTES`, or of one row.

    Raises:
        WrongColumnType: the column holds neither text nor bytes.
    """
    column = plain(column)
    if not is_text(column.type):
        raise WrongColumnType(found=column.type, input="text", expected="strings or bytes")
    column = column.cast(pa.large_binary())
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)
    first = 0
    while first < len(column):
        before = ends[first - 1] if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, before + SLICE_BYTES, side="right")))
        yield _decoded(first, column.slice(first, stop - first))
        first = stop


def _decoded(first: int, column: pa.Array) -> TextSlice:
    try:
        return TextSlice(first=first, texts=column.cast(pa.large_string()).to_pylist())
    except pa.ArrowInvalid:
        pass  # some row of the slice is not UTF-8: find which
    texts: list[str | None] = []
    faults: dict[int, str] = {}
    for row, value in enumerate(column.to_pylist(), start=first):
        try:
            texts.append(None if value is None else value.decode())
        except UnicodeDecodeError as error:
            texts.append(None)
            faults[row] = f"byte {error.start} (0x{value[error.start]:02x}) is not valid UTF-8"
    return TextSlice(first=first, texts=texts, faults=faults)
