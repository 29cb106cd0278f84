"""A source of which only some rows are read, counted from 0: wraps any other source, and passes over the gaps."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from extract.canonical import digest
from extract.selection import BadSelection, Selection, shortened
from extract.sources.base import Source, SourceLayout


class SelectedRows:
    """A source of which only some rows are read; its rows are counted by index."""

    def __init__(self, source: Source, selection: Selection, text: str) -> None:
        self._source = source
        self._selection = selection
        self._text = text

    def layout(self) -> SourceLayout:
        """The whole source's, with the selection's number of rows.

        Raises:
            BadSelection: a position lies past the source's end.
        """
        whole = self._source.layout()
        last = int(self._selection.stops[-1]) - 1
        if whole.num_rows is not None and last >= whole.num_rows:
            problem = f"position {last} lies past the source's last row, {whole.num_rows - 1}"
            raise BadSelection(found=shortened(self._text), problem=problem)
        fingerprint: dict[str, Any] = {**whole.fingerprint, "selected": digest(self._text)}
        return replace(whole, num_rows=self._selection.num_rows, fingerprint=fingerprint)

    def read(self, start: int, stop: int | None, max_rows: int) -> Iterator[pa.RecordBatch]:
        """Rows of the indices `start` to `stop`; a batch never spans a gap."""
        end = self._selection.num_rows if stop is None else min(stop, self._selection.num_rows)
        if start >= end:
            return
        positions = self._selection.positions(start, end)
        edges = np.concatenate([[0], np.flatnonzero(np.diff(positions) > 1) + 1, [len(positions)]])
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            yield from self._source.read(int(positions[first]), int(positions[last - 1]) + 1, max_rows)

    def close(self) -> None:
        """Release files."""
        self._source.close()
