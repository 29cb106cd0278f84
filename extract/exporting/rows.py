"""The rows of an output as a stream of record batches, shard by shard: the chosen ones, cast where that is asked.

Knows no target. One record batch is in memory at a time, whatever the size of the output. Row order is the source's.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from extract.commits import Commit
from extract.derivation import Change, Recast, Unfinished
from extract.exporting.request import Request
from extract.exporting.state_columns import layer_names, read_states
from extract.output import Output
from extract.record_sums import RecordSums
from extract.records import Int64
from extract.selection import Selection, parse_selection
from extract.shards import schema as names
from extract.shards.values import Bool
from extract.shards.views import BatchView
from extract.spec import OutputKind, StatesSpec, ValueType


@dataclass(slots=True)
class Tally:
    """What passed through a stream: rows that were handed on, and why others were not.

    Attributes:
        rows: handed on.
        outcomes: how those ended.
        no_states: rows without states, by outcome, that the target has no place for.
        not_chosen: rows that were not asked for.
    """

    rows: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    no_states: Counter[str] = field(default_factory=Counter)
    not_chosen: int = 0


class RowStream:
    """The chosen rows of an output."""

    def __init__(self, output: Output, request: Request, *, with_states_only: bool) -> None:
        """Look at the job record and the commit records; no row is read.

        Args:
            output: finished, or not if the request says so.
            request: which rows, and the type.
            with_states_only: leave out rows that have no states.

        Raises:
            Unfinished: the output is not complete.
            BadSelection: ranges that do not parse.
        """
        self.output, self.with_states_only = output, with_states_only
        problem = RecordSums(output.job, output.shards).problem
        if problem is not None and not request.unfinished:
            raise Unfinished(path=output.path, problem=f"{problem} (--unfinished exports what is there)")
        self.complete = problem is None
        self._outcomes = request.outcomes
        self._rows: Selection | None = None if request.rows is None else parse_selection(request.rows)
        self._recast: Recast | None = None
        if request.cast is not None and request.cast != output.dtype:
            self._recast = Recast(output, Change(dtype=request.cast))

    @property
    def spec(self) -> StatesSpec:
        """What the batches hold."""
        return self.output.spec if self._recast is None else self._recast.spec

    @property
    def schema(self) -> pa.Schema:
        """Of every batch."""
        return self.output.schema if self._recast is None else self._recast.schema

    @property
    def kind(self) -> OutputKind:
        """Which states: "tokens", "last", "mean" or "first"."""
        return self.spec.kind

    @property
    def dtype(self) -> ValueType:
        """Type of the values."""
        return self.spec.dtype

    @property
    def width(self) -> int:
        """H."""
        return self.output.width

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the columns with states of other layers than the final norm's."""
        return layer_names(self.spec)

    @property
    def shards(self) -> list[Commit]:
        """Commit records, in order."""
        return self.output.shards

    def batches(self, shard: int, tally: Tally) -> Iterator[BatchView]:
        """The chosen rows of a shard, at least one a batch, and the counts of all of its rows."""
        file = self.output.shard(shard)
        for number in range(file.num_batches):
            batch = file.batch(number)
            if not self._chosen(batch.row).any():
                tally.not_chosen += batch.num_rows
                continue
            for view in [batch] if self._recast is None else self._recast(batch):
                kept = self._kept(view, tally)
                if kept.num_rows:
                    yield kept

    def _kept(self, batch: BatchView, tally: Tally) -> BatchView:
        outcomes = batch.outcomes
        keep = self._chosen(batch.row)
        if self._outcomes:
            keep &= np.isin(outcomes, self._outcomes)
        tally.not_chosen += int(np.count_nonzero(~keep))
        if self.with_states_only:
            spans = read_states(batch, self.spec).spans
            has_states = spans.stops > spans.starts
            tally.no_states.update(outcomes[keep & ~has_states].tolist())
            keep &= has_states
        tally.rows += int(np.count_nonzero(keep))
        tally.outcomes.update(outcomes[keep].tolist())
        return batch if keep.all() else BatchView(batch.arrow.filter(pa.array(keep)), self.spec)

    def _chosen(self, positions: Int64) -> Bool:
        """Bool [N]: whether each position is among the rows that were asked for."""
        ranges = self._rows
        if ranges is None:
            return np.ones(len(positions), bool)
        group = np.searchsorted(ranges.stops, positions, side="right")
        inside: Bool = group < len(ranges.starts)
        inside[inside] = positions[inside] >= ranges.starts[group[inside]]
        return inside


def plain_columns(batch: BatchView, *, without: tuple[str, ...] = ()) -> pa.Table:
    """A batch's columns but those named, `outcome` as text: what describes rows beside arrays of their states."""
    table = pa.Table.from_batches([batch.arrow]).drop_columns(list(without))
    place = table.schema.get_field_index(names.OUTCOME)
    return table.set_column(place, names.OUTCOME, table.column(names.OUTCOME).cast(pa.string()))


def schema_facts(stream: RowStream) -> dict[str, str]:
    """What the schema's metadata says of the numbers and of the job."""
    found = {key.decode(): value.decode() for key, value in (stream.schema.metadata or {}).items()}
    return {key: value for key, value in found.items() if key.startswith(names.METADATA_PREFIX)}
