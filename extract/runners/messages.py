"""What a worker process and the run that started it say to each other, as plain values over a pipe.

A worker never waits for an answer: what it says is for the progress, and for knowing what was in flight when it died.
"""

from dataclasses import dataclass

from extract.commits import Commit
from extract.errors import ExtractError
from extract.progress import Counts
from extract.runners.todo import Stripe
from extract.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The first thing that a worker is told.

    Attributes:
        threads: CPU threads of its forward pass; `None`: as the engine says.
        card: value of CUDA_VISIBLE_DEVICES; `None`: as it is.
        alone: shards that were in flight when a worker died, made one at a time before anything else.
        left_out: shards that others make.
    """

    spec: JobSpec
    threads: int | None
    card: str | None
    stripe: Stripe | None = None
    alone: tuple[int, ...] = ()
    left_out: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """To a worker: exactly these shards are not for it."""

    shards: frozenset[int]


@dataclass(frozen=True, slots=True)
class Stop:
    """To a worker: drop what is in flight, and end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: its engine is loaded."""

    device: str


@dataclass(frozen=True, slots=True)
class Began:
    """From a worker: it has taken a shard."""

    shard: int


@dataclass(frozen=True, slots=True)
class Committed:
    """From a worker: a shard is committed; by another one, unless it won."""

    commit: Commit
    won: bool


@dataclass(frozen=True, slots=True)
class Broke:
    """From a worker: a shard raised."""

    shard: int
    reason: str


@dataclass(frozen=True, slots=True)
class Counted:
    """From a worker: what it has done since it started."""

    counts: Counts


@dataclass(frozen=True, slots=True)
class Said:
    """From a worker: something that the user should read."""

    text: str


@dataclass(frozen=True, slots=True)
class Refused:
    """From a worker: an error that ends the whole run."""

    error: ExtractError


@dataclass(frozen=True, slots=True)
class Ended:
    """From a worker: nothing is left for it."""


Message = Ready | Began | Committed | Broke | Counted | Said | Refused | Ended
Order = LeaveOut | Stop
