"""What a comparison found, as plain values: figures with their intervals, over all tokens and by groups of them."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["all", "noise", "higher", "lower", "few rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over tokens and its 95 % confidence interval, from resampling rows."""

    mean: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value cannot be told from the mean with these rows."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How one figure is spread over tokens.

    Attributes:
        mean: over all tokens.
        median: half of the tokens are better.
        tail: one token in a hundred is worse.
        worst: of all tokens.
    """

    mean: Interval
    median: float
    tail: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tokens of one kind; `kl` and `top1` are `None` without a head.

    Attributes:
        name: positions or lengths, such as "4-15".
        num_rows: rows that have such tokens.
        verdict: whether the mean KL (without a head: the relative error) differs from that of all tokens by more than
            chance, allowing for the number of groups; "all" where the group is all tokens.
    """

    name: str
    num_rows: int
    num_tokens: int
    rel_error: Interval
    cosine: Interval
    kl: Interval | None
    top1: Interval | None
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityReport:
    """An engine against the plain model.

    Attributes:
        engine, engine_id, precision, arithmetic: what was compared.
        checkpoint, checkpoint_sha256, reference: with what, and in which precision.
        own_checkpoint: the engine was built from these very weights.
        rows: where the rows came from.
        num_non_finite: tokens whose state is not finite in the engine; they are in no other figure.
        rel_error: |difference| / |reference| of each token's state, Euclidean.
        cosine: of each token's state with the reference's.
        worst_row: largest, over rows, of max |difference| / max |reference|: what `bound` of the contract is held to.
        kl: KL(reference || engine) of the next token in nats; `None` without a head.
        top1: part of the tokens whose most likely next token is the same.
        no_head: why there is no next-token figure.
        by_position, by_length: of tokens by their place in the row, and by the length of their row.
        max_kl: the target that was asked for.
        written: the figures are in the engine's contract.
    """

    engine: str
    engine_id: str
    precision: str
    arithmetic: str
    checkpoint: str
    checkpoint_sha256: str
    reference: str
    own_checkpoint: bool
    rows: str
    num_rows: int
    num_tokens: int
    num_non_finite: int
    num_resamples: int
    seed: int
    rel_error: Spread
    cosine: Spread
    worst_row: float
    bound: float
    kl: Spread | None
    top1: Interval | None
    no_head: str | None
    by_position: tuple[Group, ...]
    by_length: tuple[Group, ...]
    notes: tuple[str, ...]
    seconds: float
    max_kl: float | None = None
    written: bool = False

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
