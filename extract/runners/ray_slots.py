"""One place for a worker on a cluster's node: what runs there now, and what has been done there."""

import time
from dataclasses import dataclass, field
from typing import Any

from extract.progress import Counts
from extract.runners.ray_actor import Loaded
from extract.runners.ray_cluster import Node
from extract.runners.summary import WorkerPart


@dataclass(kw_only=True)
class RaySlot:
    """A place on a node.

    Attributes:
        handle: of the living worker, or `None`.
        loading, counting: calls that are out.
        making: calls that are out, with their shards, in the order in which they were handed out.
        alive: when it last showed progress, or was given something to do when it had nothing (monotonic seconds).
    """

    number: int
    node: Node
    handle: Any = None
    loading: Any = None
    counting: Any = None
    making: dict[Any, int] = field(default_factory=dict)
    alive: float = 0.0
    asked: float = 0.0
    loaded: Loaded | None = None
    counts: Counts = field(default_factory=Counts)
    committed_rows: int = 0
    broke_in_a_row: int = 0
    num_starts: int = 0
    num_shards: int = 0
    num_rows: int = 0
    tokens: int = 0
    forward_seconds: float = 0.0
    seconds: float = 0.0
    ready_at: float | None = None
    device: str = "?"

    def began(self, handle: Any, loading: Any) -> None:
        """A worker was placed here."""
        self.handle, self.loading, self.making, self.counting = handle, loading, {}, None
        self.loaded, self.counts, self.committed_rows = None, Counts(), 0
        self.broke_in_a_row = 0
        self.alive = time.monotonic()
        self.num_starts += 1

    @property
    def shards(self) -> tuple[int, ...]:
        """That it has been handed and not answered for; the first one is the one in work."""
        return tuple(self.making.values())

    def is_ready(self, loaded: Loaded) -> None:
        """Its engine is loaded."""
        self.loading, self.loaded, self.device = None, loaded, loaded.device
        self.ready_at = self.alive = time.monotonic()

    def heard(self, counts: Counts) -> Counts:
        """New counts; returns those before. Any change is a sign of life."""
        before = self.counts
        if counts != before:
            self.alive = time.monotonic()
        self.counts = counts
        self.tokens += counts.tokens - before.tokens
        self.forward_seconds += counts.seconds[1] - before.seconds[1]
        return before

    def made(self, rows: int) -> None:
        """It has committed a shard."""
        self.num_shards += 1
        self.num_rows += rows
        self.committed_rows += rows

    def ended(self) -> None:
        """The worker is gone."""
        if self.ready_at is not None:
            self.seconds += time.monotonic() - self.ready_at
        self.handle = self.loading = self.counting = self.loaded = self.ready_at = None
        self.making = {}

    def part(self) -> WorkerPart:
        """What was done here, by however many workers."""
        seconds = max(self.seconds, 1e-9)
        return WorkerPart(
            worker=self.number,
            node=f"{self.node.name} ({self.node.node_id[:8]})",
            device=self.device,
            num_starts=self.num_starts,
            num_shards=self.num_shards,
            num_rows=self.num_rows,
            num_tokens=self.tokens,
            seconds=round(self.seconds, 3),
            tokens_per_s=round(self.tokens / seconds, 1),
            idle_share=round(max(0.0, 1 - self.forward_seconds / seconds), 4) if self.seconds else 0.0,
        )
