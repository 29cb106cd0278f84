"""Time one precision on one number of threads, with any token budget.

Our own decoder on a CPU is opened once for each budget, as a run would open it, and stays open while memory is plenty:
rounds over several budgets then cost nothing but their runs. On a card, and with transformers' model, an engine is
opened once, since a budget is no more than how rows are cut into passes. A run is made of whole passes that keep every
thread busy, and lasts half a second or longer.
"""

import dataclasses
import math
import time
from collections.abc import Iterator

from extract.engine.comparison import available_memory
from extract.engine.contract import Runtime
from extract.engine.recipe import MAX_TOKENS
from extract.packing import TokenBudget, pack
from extract.records import TokenBatch
from extract.tuning import card_memory, peak_memory
from extract.tuning.engines import Engine
from extract.tuning.growth import Run
from extract.tuning.workload import Workload

RUN_S = 0.5
"""Shortest run."""

PASS_TOKENS = 16_384
"""Largest pass of our own decoder, where a micro-batch for each thread is smaller: its usual budget."""

FIRST_BUDGET = {"own": 64, "cpu": 256, "cuda": 4096}
CARD_PASSES = 4
"""Passes of a batch on a card, where copies of one run beside the next."""
BEYOND_PROVEN = 8
"""transformers' model is tried with passes this many times the usual budget, which its build has proven."""


class Trial:
    """An engine on `threads` threads (`None` on a card).

    Attributes:
        memory_bytes: by budget: how much the process grew at most; see `Point`. On a card: what tensors took.
        expected_bytes: by budget, on a card: the same by arithmetic.
        arithmetic: which kernels compute, once something was run.
    """

    def __init__(self, engine: Engine, work: Workload, threads: int | None) -> None:
        self.engine = engine
        self.threads = threads
        self.memory_bytes: dict[int, int | None] = {}
        self.expected_bytes: dict[int, int] = {}
        self.arithmetic = ""
        self._work = work
        self._own, self._on_card = engine.own_on == "cpu", engine.own_on == "cuda"
        self._opened: dict[int, Runtime] = {}
        self._before: dict[int, int | None] = {}
        self._units: dict[int, int] = {}

    def budgets(self) -> list[int]:
        """Ascending powers of two."""
        limits, kind = self.engine.contract.limits, self.engine.contract.device.type
        if self._own:
            first, most = FIRST_BUDGET["own"], MAX_TOKENS // (self.threads or 1)
        elif self._on_card:
            first, most = FIRST_BUDGET["cuda"], card_memory.most_tokens(self.engine)
        else:
            beyond = BEYOND_PROVEN if limits.binding == "the recipe" else 1
            first, most = FIRST_BUDGET[kind], min(MAX_TOKENS, beyond * limits.max_tokens)
        return [first << step for step in range(20) if first << step <= most] or [most]

    def pass_tokens(self, budget: int) -> int:
        """Tokens of the largest batch that runs with a budget."""
        if self._on_card:
            return min(MAX_TOKENS, CARD_PASSES * budget)
        return max(PASS_TOKENS, self._unit(budget)) if self._own else budget

    def run(self, budget: int) -> Run:
        """One timed run. The first one of a budget opens the engine and warms it up before."""
        if self._on_card:
            card_memory.start()
            self.expected_bytes[budget] = card_memory.expected(self.engine, budget)
        runtime = self._runtime(budget)
        batches = list(self._batches(budget, self._units[budget]))
        started = time.perf_counter()
        for batch in batches:
            runtime.hidden_states(batch, "tokens")
        seconds = time.perf_counter() - started
        if self._on_card:
            self.memory_bytes[budget] = max(self.memory_bytes.get(budget) or 0, card_memory.peak() or 0) or None
        elif budget not in self.memory_bytes:
            before, peak = self._before[self._key(budget)], peak_memory.peak()
            self.memory_bytes[budget] = None if before is None or peak is None else max(0, peak - before)
        return Run(sum(batch.num_tokens for batch in batches), seconds)

    def close(self) -> None:
        """Give all memory back."""
        for runtime in self._opened.values():
            runtime.close()
        self._opened.clear()

    def _runtime(self, budget: int) -> Runtime:
        key = self._key(budget)
        if key not in self._opened:
            while self._opened and available_memory() < 4 * self.engine.num_bytes:
                self._opened.pop(next(iter(self._opened))).close()
            self._before[key] = peak_memory.start()
            self._opened[key] = self.engine.open(budget, self.threads)
            self.arithmetic = self._opened[key].arithmetic
            self._warm_up(budget)
        elif budget not in self._units:
            peak_memory.start()
            self._warm_up(budget)
        self._limit(budget)
        return self._opened[key]

    def _limit(self, budget: int) -> None:
        """Cut passes on a card at a budget."""
        if self._on_card:
            runtime = self._opened[self._key(budget)]
            limits = dataclasses.replace(runtime.contract.limits, pass_tokens=budget)
            runtime.contract = dataclasses.replace(runtime.contract, limits=limits)

    def _warm_up(self, budget: int) -> None:
        """Run small passes twice, or for a fifth of a second, and set how many units a timed run takes."""
        self._limit(budget)
        batches, fastest, spent, count = list(self._batches(budget, 1)), math.inf, 0.0, 0
        while count < 2 or (spent < RUN_S / 5 and count < 20):
            started = time.perf_counter()
            for batch in batches:
                self._opened[self._key(budget)].hidden_states(batch, "tokens")
            seconds = time.perf_counter() - started
            fastest, spent, count = min(fastest, seconds), spent + seconds, count + 1
            if seconds > RUN_S:
                break
        self._units[budget] = math.ceil(RUN_S / fastest)

    def _batches(self, budget: int, units: int) -> Iterator[TokenBatch]:
        """Passes of `units` units in all, as few as may be, all about equally full."""
        unit = self._unit(budget)
        together = max(1, min(units, self.pass_tokens(budget) // unit))
        rows = self._work.rows(math.ceil(units / together) * together * unit)
        contract = self.engine.contract
        limit = TokenBudget(
            max_tokens=together * unit,
            max_sequences=contract.limits.max_sequences,
            equal_length=contract.runtime.layout == "dense",
        )
        return pack(rows, limit)

    def _unit(self, budget: int) -> int:
        """Tokens that keep every thread busy once."""
        return budget * (self.threads or 1) if self._own else budget

    def _key(self, budget: int) -> int:
        return budget if self._own else 0
