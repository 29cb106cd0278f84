"""A place in a stream of batches that stays open between reads, so that reading on never decodes a row twice."""

from collections.abc import Generator

import pyarrow as pa

Batches = Generator[pa.RecordBatch, None, None]


class RowCursor:
    """Rows from `row` on. `batches` begins at that row; positions only grow."""

    def __init__(self, batches: Batches, row: int) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None
        self.row = row

    def take(self, row: int, max_rows: int) -> pa.RecordBatch | None:
        """At least one and at most `max_rows` rows from `row` on; what is before it is dropped. `None` at the end."""
        while self._rest is None or self.row + self._rest.num_rows <= row:
            self.row += self._rest.num_rows if self._rest is not None else 0
            self._rest = next(self._batches, None)
            if self._rest is None:
                return None
        batch = self._rest.slice(row - self.row, max_rows)
        used = row - self.row + batch.num_rows
        self._rest = self._rest.slice(used)
        self.row += used
        return batch

    def close(self) -> None:
        """Release what the batches come from."""
        self._rest = None
        self._batches.close()
