"""What `--rank-layers` found, as plain values: damage by linear and layer, the way to a set, the set itself."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from extract.fidelity_check.results import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What int8 does to one linear, or to a layer, when all else is exact.

    Attributes:
        name: "5.down", or "5" for the whole layer.
        kl: KL(reference || engine) of the next token in nats; `None` without a head.
        rel_error: |difference| / |reference| of each token's state.
        cost: its part of all linears' multiplications.
    """

    name: str
    kl: Interval | None
    rel_error: Interval
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A set of linears in bfloat16 that was measured on the way.

    Attributes:
        change: what was done to the set before.
        names: which linears that put in or took out.
        num_linears: in the set now.
        cost: their part of all linears' multiplications.
        kl: of the engine with this set.
        kept: the search went on from here; a set without one more linear may have been too far away.
    """

    change: Literal["start", "add", "drop"]
    names: tuple[str, ...]
    num_linears: int
    cost: float
    kl: Interval
    kept: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """An engine on the rows that chose nothing.

    Attributes:
        name: "int8", "chosen" or "bfloat16".
        tokens_per_s: measured by turns with the others, on this machine as busy as it was.
        expected_tokens_per_s: by its part of the multiplications, between the other two; `None` for these.
    """

    name: Literal["int8", "chosen", "bfloat16"]
    num_linears: int
    cost: float
    kl: Interval | None
    rel_error: Interval
    top1: Interval | None
    tokens_per_s: float
    expected_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRanking:
    """Which linears int8 harms most, and which to leave in bfloat16 for a divergence that was asked for.

    Attributes:
        rest: precision of all that was not in int8 when single linears and layers were measured.
        rows: where the rows came from; `rank_rows`, `search_rows` and `held_rows` of them ranked, chose and confirmed.
        linears, layers: by damage for what they cost, the worst first.
        kl_budget: what was asked for; without it nothing is searched.
        path: sets in the order in which they were measured.
        chosen: layers and linears to keep in bfloat16, as a recipe names them; `None`: nothing was searched, or no set
            is near enough.
        looks: how often a set was measured on the rows that confirm.
        confirmed: int8, what was chosen, bfloat16.
        recipe: the file that was written.
    """

    engine: str
    engine_id: str
    arithmetic: str
    checkpoint: str
    reference: str
    rest: str
    rows: str
    rank_rows: int
    search_rows: int
    held_rows: int
    linears: tuple[Damage, ...]
    layers: tuple[Damage, ...]
    kl_budget: float | None
    path: tuple[Step, ...]
    chosen: tuple[str, ...] | None
    looks: int
    confirmed: tuple[Confirmed, ...]
    no_head: str | None
    notes: tuple[str, ...]
    seconds: float
    recipe: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
