"""One fault of an output, as `verify` reports it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and in which shard; `None` for faults of the whole."""

    shard: int | None
    what: str

    def __str__(self) -> str:
        """`shard 12: ...`."""
        return self.what if self.shard is None else f"shard {self.shard}: {self.what}"
