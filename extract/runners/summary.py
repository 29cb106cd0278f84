"""What a run did, in numbers: all of it, and each worker's part."""

from dataclasses import asdict, dataclass, field
from typing import Any

from extract.errors import ShardsFailed
from extract.record_sums import Totals


class SomeShardsFailed(ShardsFailed):
    """Shards that broke twice."""

    template = (
        "{path}: {failed} of {shards} shards failed twice and are missing: {details}. Run again to try them again."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPart:
    """What one worker did.

    Attributes:
        node: the machine, or the name of a node.
        device: what it computed on.
        num_starts: 1, and one more for each time that it was started again.
        seconds: from the moment that its engine was loaded.
        idle_share: part of that time in which no forward pass ran.
    """

    worker: int
    node: str
    device: str
    num_starts: int
    num_shards: int
    num_rows: int
    num_tokens: int
    seconds: float
    tokens_per_s: float
    idle_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run did, and what the output holds now."""

    path: str
    job: str
    complete: bool
    num_shards_total: int | None
    num_shards_made: int
    num_shards_before: int
    totals: Totals
    tokens_computed: int
    seconds: float
    tokens_per_s: float
    stage_shares: dict[str, float] = field(default_factory=dict)
    workers: tuple[WorkerPart, ...] = ()
    """Where the run had several."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def first_reasons(failed: dict[int, str]) -> str:
    """The first five failed shards, each with its reason."""
    return "; ".join(f"shard {shard}: {reason}" for shard, reason in sorted(failed.items())[:5])
