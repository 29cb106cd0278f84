"""Engines with some linears moved to another precision, over rows whose reference states are known.

One trial is a forward pass and the head's logits of its rows; nothing is built or packed for it.
"""

import statistics
import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from extract.cpu.architecture import Architecture
from extract.cpu.linear_names import linear_names
from extract.cpu.movable_runtime import MovableRuntime
from extract.engine.next_token import LOGITS_BYTES, Head
from extract.engine.probe import Float32
from extract.engine.replay import states_of
from extract.fidelity_check.intervals import summarise
from extract.fidelity_check.results import Interval
from extract.fidelity_check.token_figures import Gathered

ROUNDS = 3
"""Of the measurement of speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Means over the tokens of some rows, with intervals; without a head there is no divergence."""

    kl: Interval | None
    top1: Interval | None
    rel_error: Interval


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trials:
    """Rows to try sets on.

    Attributes:
        ids: token ids of each row.
        expected: the reference's states, float32 [L, H] a row.
        head: what makes logits of states.
        logits_bytes: of a block of logits.
        seed: of the resamples.
    """

    ids: list[list[int]]
    expected: list[Float32]
    head: Head | None
    logits_bytes: int = LOGITS_BYTES
    seed: int = 0

    def seen(self, runtime: MovableRuntime, moved: AbstractSet[str]) -> Seen:
        """Run the rows with these linears moved; states that are not finite are infinitely far."""
        runtime.move(moved)
        found = states_of(runtime, self.ids)
        gathered = Gathered(self.head, logits_bytes=self.logits_bytes)
        lengths = [len(ids) for ids in self.ids]
        gathered.add(lengths, [np.arange(length) for length in lengths], found, self.expected)
        tokens = gathered.figures()
        if not tokens.finite.all():
            far = Interval(mean=float("inf"), low=float("inf"), high=float("inf"))
            return Seen(kl=None if self.head is None else far, top1=None, rel_error=far)
        summary = summarise(tokens, seed=self.seed)
        kl = None if summary.kl is None else summary.kl.mean
        return Seen(kl=kl, top1=summary.top1, rel_error=summary.rel_error.mean)


def costs(architecture: Architecture) -> dict[str, float]:
    """Each linear's part of the multiplications that all linears make for a token."""
    a = architecture
    sizes = {
        "qkv": a.hidden_size * (a.query_width + 2 * a.kv_width),
        "o": a.query_width * a.hidden_size,
        "gate_up": 2 * a.intermediate_size * a.hidden_size,
        "down": a.intermediate_size * a.hidden_size,
    }
    whole = sum(sizes.values()) * len(a.layers)
    return {name: sizes[name.partition(".")[2]] / whole for name in linear_names(len(a.layers))}


def speeds(runtime: MovableRuntime, ids: list[list[int]], sets: Iterable[AbstractSet[str]]) -> list[float]:
    """Tokens a second with each set moved, by turns: the median of some rounds."""
    sets = list(sets)
    found: list[list[float]] = [[] for _ in sets]
    num_tokens = sum(map(len, ids))
    for _ in range(ROUNDS):
        for rates, moved in zip(found, sets, strict=True):
            runtime.move(moved)
            started = time.perf_counter()
            states_of(runtime, ids)
            rates.append(num_tokens / (time.perf_counter() - started))
    return [statistics.median(rates) for rates in found]
