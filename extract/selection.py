"""Which rows of a source a job reads: all of them, or ranges such as "0-99,250,1000-1999". And a source of only those.

The output keeps each row's position in the source. Shards split the selected rows, counted from 0; that count is called
an index here, to keep it apart from positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from extract.canonical import digest
from extract.errors import SpecError
from extract.records import Int64
from extract.sources.base import Source, SourceLayout


class BadSelection(SpecError):
    """Row ranges that do not parse, overlap or lie outside the source."""

    template = 'source.rows is "{found}": {problem}. Write ascending positions and ranges, such as "0-99,250".'


@dataclass(frozen=True, slots=True)
class Selection:
    """Ascending, separate ranges of source positions: int64 [G] `starts` and `stops` (exclusive)."""

    starts: Int64
    stops: Int64

    @property
    def num_rows(self) -> int:
        """How many rows are selected."""
        return int((self.stops - self.starts).sum())

    def positions(self, first: int, last: int) -> Int64:
        """Source positions of the indices `first` to `last` (exclusive): int64 [last - first]."""
        ends = np.cumsum(self.stops - self.starts)
        index = np.arange(first, last, dtype=np.int64)
        group = np.searchsorted(ends, index, side="right")
        found: Int64 = index - (ends - (self.stops - self.starts))[group] + self.starts[group]
        return found

    def index_of(self, position: int) -> int | None:
        """The index of a source position, or `None` if it is not selected."""
        group = int(np.searchsorted(self.stops, position, side="right"))
        if group == len(self.starts) or position < self.starts[group]:
            return None
        before = int((self.stops[:group] - self.starts[:group]).sum())
        return before + position - int(self.starts[group])


def parse_selection(text: str) -> Selection:
    """Read "0-99,250" (ends included).

    Raises:
        BadSelection: not of that form, not ascending, or overlapping.
    """
    starts: list[int] = []
    stops: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise BadSelection(found=_short(text), problem=f'"{part.strip()}" is neither a position nor a range')
        start, stop = int(first), int(last if dash else first) + 1
        if stop <= start or (stops and start < stops[-1]):
            raise BadSelection(found=_short(text), problem=f'"{part.strip()}" does not come after what is before it')
        starts.append(start)
        stops.append(stop)
    return Selection(np.array(starts, np.int64), np.array(stops, np.int64))


def format_selection(rows: Int64) -> str:
    """Ascending positions int64 [R] as text, neighbours joined to ranges."""
    breaks = np.flatnonzero(np.diff(rows) > 1)
    first = rows[np.concatenate([[0], breaks + 1])]
    last = rows[np.concatenate([breaks, [len(rows) - 1]])]
    return ",".join(
        str(one) if one == other else f"{one}-{other}" for one, other in zip(first.tolist(), last.tolist(), strict=True)
    )


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
            raise BadSelection(found=_short(self._text), problem=problem)
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


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
