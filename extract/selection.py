"""Which rows of a source a job reads: all of them, or ranges such as "0-99,250,1000-1999".

The output keeps each row's position in the source. Shards split the selected rows, counted from 0; that count is called
an index here, to keep it apart from positions.
"""

from dataclasses import dataclass

import numpy as np

from extract.errors import SpecError
from extract.records import Int64

MAX_DIGITS = 18
"""Of a position, which is an int64."""


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
        if not _is_position(first) or (dash and not _is_position(last)):
            raise BadSelection(found=shortened(text), problem=f'"{part.strip()}" is neither a position nor a range')
        start, stop = int(first), int(last if dash else first) + 1
        if stop <= start or (stops and start < stops[-1]):
            raise BadSelection(found=shortened(text), problem=f'"{part.strip()}" does not come after what is before it')
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


def _is_position(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_DIGITS


def shortened(text: str) -> str:
    """A selection as messages show it."""
    return text if len(text) <= 60 else f"{text[:57]}..."
