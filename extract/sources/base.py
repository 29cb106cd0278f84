"""What every source of rows promises: a layout known before compute, and any row range without reading the rest.

A row is identified by its position in the source, counted over all files in order; never by a counter of rows kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLayout:
    """What a plan needs to know of a source.

    Attributes:
        format: "parquet", "arrow", "jsonl" or "hf".
        num_rows: rows after `limit`; `None` for a stream of unknown length.
        schema: Arrow types of exactly the columns asked for (input column first, then id, then carried), under the
            names as asked, unified over files.
        fingerprint: JSON values that change when the rows change: for each file its name relative to the source, size,
            rows and content digest (and mtime_ns, which `check_unchanged` uses as a shortcut but resume ignores).
    """

    format: str
    num_rows: int | None
    schema: pa.Schema
    fingerprint: dict[str, Any]


class Source(Protocol):
    """Rows of a dataset, by position."""

    def layout(self) -> SourceLayout:
        """Names, sizes and types, from footers and headers; reads no column data beyond what a fingerprint needs."""

    def read(self, start: int, stop: int | None, max_rows: int) -> Iterator[pa.RecordBatch]:
        """Rows `start` (inclusive) to `stop` (exclusive, `None` is the end), in order, at most `max_rows` a batch.

        Batches have exactly `layout().schema`. Consecutive calls that continue where the last one ended do not read
        anything twice. Memory stays flat whatever the row-group sizes are.

        Raises:
            SourceError: a file is unreadable or has changed since `layout`; the message names file and column.
        """

    def close(self) -> None:
        """Release files; a process can exit at once afterwards."""


Columns = Sequence[str]
