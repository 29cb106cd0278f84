"""What every source of rows promises: a layout known before compute, and any row range without reading the rest.

A row is identified by its position in the source, counted over all files in order; never by a counter of rows kept.

Text may hold what no Arrow string can: a text column is `large_string` unless a file holds bytes, in which case it is
`large_binary` for the whole source. Nothing here judges UTF-8: a string column may hold invalid bytes (Parquet does not
check), and a lone surrogate of a JSON text arrives as bytes encoded with "surrogatepass". The tokeniser judges.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from extract.spec import SourceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLayout:
    """What a plan needs to know of a source.

    Attributes:
        format: "parquet", "arrow", "jsonl" or "hf".
        num_rows: rows after `limit`; `None` for a stream of unknown length.
        schema: Arrow types of exactly the columns asked for (input column first, then id, then carried, each name
            once), under the names as asked, unified over files. Input text is `large_string` or `large_binary`,
            messages a list of structs, input_ids a list of integers. No dictionary and no view types.
        fingerprint: JSON values that change when the rows change: for each file its name relative to the source, size,
            rows and content digest (and mtime_ns, which `check_unchanged` uses as a shortcut but resume ignores).
            Files that `limit` leaves wholly unread are not part of it.
    """

    format: str
    num_rows: int | None
    schema: pa.Schema
    fingerprint: dict[str, Any]


class Source(Protocol):
    """Rows of a dataset, by position. One reader at a time: it holds one cursor."""

    def layout(self) -> SourceLayout:
        """Names, sizes and types, from footers and headers; reads no column data beyond what a fingerprint needs.

        JSONL has no header: its files are read once.
        """

    def read(self, start: int, stop: int | None, max_rows: int) -> Iterator[pa.RecordBatch]:
        """Rows `start` (inclusive) to `stop` (exclusive, `None` is the end), in order, at most `max_rows` a batch.

        Batches have exactly `layout().schema`. Consecutive calls that continue where the last one ended do not read
        anything twice. Memory stays flat whatever the row-group sizes are. A `stop` past the end yields what there is.

        Raises:
            SourceError: a file is unreadable or has changed since `layout`; the message names file and column.
        """

    def close(self) -> None:
        """Release files; a process can exit at once afterwards."""


def column_names(spec: SourceSpec) -> tuple[str, ...]:
    """The columns that a spec asks for, input first, each once."""
    ids = (spec.id_column,) if spec.id_column is not None else ()
    return tuple(dict.fromkeys((spec.column, *ids, *spec.carry)))


def copied_columns(spec: SourceSpec) -> frozenset[str]:
    """Of the columns that a spec asks for, those that go to the output as they are."""
    return frozenset((*spec.carry, *((spec.id_column,) if spec.id_column is not None else ())))


def identity(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint without modification times: equal for equal rows, wherever and whenever they were copied."""
    kept = dict(fingerprint)
    if "files" in kept:
        kept["files"] = [{key: value for key, value in entry.items() if key != "mtime_ns"} for entry in kept["files"]]
    return kept
