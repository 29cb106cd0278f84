"""What a sweep found: the points of its table, what was left out, and the settings that were chosen.

Knows nothing of how a point is measured. "Budget" is one word for two things, since an engine has one or the other:
tokens of a micro-batch, where our own decoder runs it, and tokens of a pass, where transformers' model does.
"""

from dataclasses import dataclass
from typing import Literal

from extract.engine.recipe import Recipe

NOISY = 0.15
"""A spread beyond which a point is marked: something else ran on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a precision's states are from float32's, on the build's passages.

    Attributes:
        rel_error: worst row's largest difference, over its largest value.
        kl: mean KL divergence of the next token's distribution, in nats; `None` where no tied head can tell.
        top1: part of the tokens whose most likely next token is the same; `None` likewise.
    """

    rel_error: float
    kl: float | None
    top1: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One row of the table.

    Attributes:
        threads: `None` on a card.
        budget: tokens of a micro-batch or of a pass, see `Tuning.budget_is`.
        tokens_per_s: median over the runs; `None`: this budget does not fit in memory.
        slowest, fastest: tokens/s of the slowest and the fastest run.
        spread: fastest less slowest, over the median.
        memory_bytes: how much the process grew at most, from loading the engine to the end of the first run; `None`
            where the system does not tell.
        difference: the same for all points of a precision; `None`: not measured, or the reference itself.
        expected_bytes: memory of a card by arithmetic, where `memory_bytes` is what tensors took there at most.
    """

    precision: str
    threads: int | None
    budget: int
    tokens_per_s: float | None
    slowest: float | None
    fastest: float | None
    spread: float | None
    runs: int
    memory_bytes: int | None
    difference: Difference | None
    expected_bytes: int | None = None

    @property
    def curve(self) -> str:
        """Which curve it is on, as people say it."""
        return curve_name(self.precision, self.threads)

    @property
    def noisy(self) -> bool:
        """Runs of this point differ by more than `NOISY`."""
        return self.spread is not None and self.spread > NOISY


def curve_name(precision: str, threads: int | None) -> str:
    """`bfloat16, 2 threads`."""
    if threads is None:
        return precision
    return f"{precision}, 1 thread" if threads == 1 else f"{precision}, {threads} threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """Points that were asked for and not measured.

    Attributes:
        threads: `None`: any number, or on a card.
        from_budget: this budget and those above it; `None`: all.
        reason: one sentence without a full stop.
    """

    precision: str
    threads: int | None
    from_budget: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A finished sweep.

    Attributes:
        checkpoint, architecture, dtype: what was tuned, and the type that its weights are stored in.
        device: its name, "cpu" or "cuda" being `recipe.device`.
        decoder: which one runs the engine.
        arithmetic: which kernels compute.
        budget_is: what a budget counts.
        mean_tokens: of the rows that were run.
        date: ISO date.
        seconds: of the whole sweep, builds included.
        points: in the order of precision, threads, budget.
        chosen: one of them.
        recipe: builds an engine that runs as `chosen` did.
    """

    checkpoint: str
    architecture: str
    dtype: str
    device: str
    decoder: Literal["own", "transformers", "vendor"]
    arithmetic: str
    budget_is: Literal["tokens per micro-batch", "tokens per pass"]
    mean_tokens: float
    date: str
    seconds: float
    points: tuple[Point, ...]
    unmeasured: tuple[Unmeasured, ...]
    chosen: Point
    recipe: Recipe
