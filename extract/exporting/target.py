"""What every target of an export promises: refuse at once or write shard by shard, then say how it is read.

A part is what one shard of the output becomes. `write` is called in order of the shards, and what it returns is kept
on disk, so that an export that was killed goes on with the part that was being written; whatever a part wrote before
it was recorded is written again.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from extract.errors import SpecError
from extract.exporting.request import Request
from extract.exporting.rows import RowStream
from extract.exporting.state_columns import FINAL
from extract.shards.views import BatchView


class TargetCannotHold(SpecError):
    """The output does not fit the target."""

    template = "{path}: {problem}, which --to {kind} cannot hold. {advice}"


class TargetNeeds(SpecError):
    """The target needs something that the output does not have."""

    template = "{path}: --to {kind} needs {needed}. {advice}"


class MissingPackage(SpecError):
    """The target's own library is not installed."""

    template = "--to {kind} needs the package {package}, which is not installed: pip install {package}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one shard became.

    Attributes:
        shard: its number.
        rows: rows written, of which the first is row `first_row` of the export.
        outcomes: how those rows ended.
        no_states: rows left out because they have no states, by outcome.
        not_chosen: rows left out because they were not asked for.
        files: paths below the export, written by this part alone.
        facts: what the target keeps for itself, JSON values.
    """

    shard: int
    first_row: int
    rows: int
    outcomes: dict[str, int]
    no_states: dict[str, int]
    not_chosen: int
    files: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)


class Target(ABC):
    """One kind of export, being written into a folder that nobody else reads."""

    kind: ClassVar[str]
    title: ClassVar[str]
    """What it is, in a few words."""
    cannot_carry: ClassVar[str]
    """What gets lost, in sentences."""
    reading: ClassVar[str]
    """Two lines of Python; `{path}` is the export."""
    with_states_only: ClassVar[bool]
    """Whether rows without states are left out (and counted)."""

    def __init__(self, stream: RowStream, request: Request, folder: Path) -> None:
        self.stream, self.request, self.folder = stream, request, folder

    @property
    def shared_files(self) -> tuple[str, ...]:
        """Files that several parts write to; they are cut back to where the last recorded part ended."""
        return ()

    @property
    def layer_read_back(self) -> str:
        """Which stored states `read_back` gives."""
        return FINAL

    def refuse(self) -> None:
        """Raise if the output does not fit; nothing has been written yet.

        Raises:
            TargetCannotHold, TargetNeeds, MissingPackage: see there.
        """
        if self.stream.dtype == "int8":
            raise TargetCannotHold(
                path=self.stream.output.path,
                problem="holds int8: rotated numbers with a scale a state",
                kind=self.kind,
                advice="Choose what they become: --cast float16, float32 or bfloat16.",
            )

    @abstractmethod
    def write(self, shard: int, first_row: int, batches: Iterator[BatchView], done: Sequence[Part]) -> "Written":
        """Write one part: the chosen rows of a shard, of which the first is row `first_row` of the export."""

    def finish(self, parts: Sequence[Part]) -> tuple[str, ...]:
        """Write what describes the whole; returns its files."""
        return ()

    @abstractmethod
    def read_back(self, parts: Sequence[Part], row: int) -> npt.NDArray[Any] | None:
        """The stored numbers of one row, through the target's own loader: [L, H], or [H] for pooled kinds.

        `None` if the row has none. bfloat16 comes as its bits, as stored.
        """

    def holds(self, parts: Sequence[Part], row: int, expected: npt.NDArray[Any]) -> bool:
        """Whether a row reads back as the stored numbers [L, H] (L is 1 for pooled kinds, 0 for a row without)."""
        found = self.read_back(parts, row)
        if found is None or not len(expected):
            return found is None and not len(expected)
        found = np.ascontiguousarray(found.reshape(-1, expected.shape[1]))
        same: bool = found.dtype == expected.dtype and found.tobytes() == np.ascontiguousarray(expected).tobytes()
        return same

    def facts(self, parts: Sequence[Part]) -> dict[str, Any]:
        """What else the export's record should say."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files of a part, and what the target keeps for itself."""

    files: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


def part_of(parts: Sequence[Part], row: int) -> Part:
    """The part that holds row `row` of an export."""
    starts = np.array([part.first_row + part.rows for part in parts])
    return parts[int(np.searchsorted(starts, row, side="right"))]
