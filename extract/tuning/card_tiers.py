"""`tune` for tensorrt-llm: build tier after tier, each for passes twice as large, until memory refuses or speed stops.

Each budget is an engine of its own there, so a point costs a build; built tiers stay in a scratch folder while the
curve is measured, and only one is open at a time, because each plans for the whole card.
"""

import dataclasses
import datetime
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from extract.engine.build_plan import BuildPlan, plan_build
from extract.engine.builder import build
from extract.engine.contract import Contract, PassOutOfMemory, Runtime
from extract.engine.recipe import Recipe, override
from extract.engine.runtimes import load_runtime
from extract.engine.tensorrt_builder import check_can_build
from extract.errors import EngineRefused
from extract.packing import TokenBudget, pack
from extract.tensorrt.open_runtime import NotLoaded
from extract.tensorrt.vendor_build import VendorBuildFailed
from extract.tuning.growth import Run, grow
from extract.tuning.results import Difference, Tuning, Unmeasured
from extract.tuning.sweep import NO_TIME, choose, point_of
from extract.tuning.workload import Workload, workload

RUN_S = 1.0
"""Shortest run; a card needs a moment to reach its clock."""


class NoTierBuilt(EngineRefused):
    """Not even the smallest tier could be measured."""

    template = "{checkpoint}: passes of {budget:,} tokens could not be measured: {reason}."


def tune_tiers(
    checkpoint: str | Path,
    recipe: Recipe,
    *,
    reference: str | Path | None,
    seconds: float,
    say: Callable[[str], None],
) -> Tuning:
    """Measure tiers of an engine on the card at hand; see `extract.tuning.search.tune`.

    Args:
        checkpoint: as for `build`.
        recipe: with runtime tensorrt-llm.
        reference: as for `build`.
        seconds: no tier is begun that would not be done by then; the first one always is.
        say: called with a line whenever a step begins.

    Raises:
        NoTierBuilt: memory, or the vendor, refuses the smallest.
    """
    started = time.monotonic()
    check_can_build(recipe, checkpoint)
    planned = plan_build(checkpoint, recipe)
    with tempfile.TemporaryDirectory(prefix="extract-tune-") as scratch:
        tiers = Tiers(checkpoint, planned, recipe, reference, Path(scratch), say)
        try:
            curve = grow(planned.tiers, tiers.run, lambda more: time.monotonic() - started + more < seconds)
        finally:
            tiers.close()
    if not curve.runs:
        raise NoTierBuilt(checkpoint=planned.checkpoint, budget=planned.tiers[0], reason=tiers.refusal)
    budgets = [*curve.runs, *([] if curve.refused is None else [curve.refused])]
    points = tuple(
        point_of(curve, budget, planned.weights, None, tiers.memory.get(budget), tiers.differences.get(budget))
        for budget in budgets
    )
    chosen = choose(points, [planned.weights])
    assert chosen is not None  # there are runs, all in one precision
    left = [] if curve.next_budget is None else [_left(planned.weights, curve.next_budget, NO_TIME)]
    contract = tiers.contracts[chosen.budget]
    return Tuning(
        checkpoint=planned.checkpoint,
        architecture=planned.architecture,
        dtype=planned.dtype,
        device=contract.device.name,
        decoder="vendor",
        arithmetic=f"tensorrt-llm {contract.runtime.version}",
        budget_is="tokens per pass",
        mean_tokens=round(tiers.work.mean_tokens, 1),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        seconds=round(time.monotonic() - started, 1),
        points=points,
        unmeasured=tuple(left),
        chosen=chosen,
        recipe=override(
            recipe,
            dtype=planned.weights,
            pass_tokens=chosen.budget,
            architectures=(planned.architecture,),
            description=f"extract tune, {datetime.datetime.now(datetime.UTC).date().isoformat()}: {planned.checkpoint} "
            f"in {planned.weights} on {contract.device.name} gave {chosen.tokens_per_s:,.0f} tokens/s "
            f"(median of {chosen.runs} runs)",
        ),
    )


class Tiers:
    """Engines of one checkpoint by token budget, built when they are first asked for, one of them open.

    Attributes:
        contracts, memory, differences: of the tiers built so far.
        refusal: why the last one that was refused was.
        work: rows that are run, each as long as an engine takes.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        planned: BuildPlan,
        recipe: Recipe,
        reference: str | Path | None,
        scratch: Path,
        say: Callable[[str], None],
    ) -> None:
        self.contracts: dict[int, Contract] = {}
        self.memory: dict[int, int | None] = {}
        self.differences: dict[int, Difference] = {}
        self.refusal = ""
        self.work: Workload = workload(None, planned.max_input_tokens, planned.vocab_size)
        self._checkpoint, self._recipe, self._reference = checkpoint, recipe, reference
        self._scratch, self._say = scratch, say
        self._open: tuple[int, Runtime] | None = None

    def run(self, budget: int) -> Run:
        """One timed run of whole passes.

        Raises:
            PassOutOfMemory: the vendor could not build this tier, or the card cannot hold it.
        """
        try:
            runtime = self._runtime(budget)
        except (VendorBuildFailed, NotLoaded) as error:
            self.refusal = str(error).rstrip(".")
            self._say(f"passes of {budget:,} tokens: {error}")
            raise PassOutOfMemory(tokens=f"{budget:,}", sequences="any number of", device="the card") from None
        once = max(self._timed(runtime, budget).seconds, 1e-6)
        run = self._timed(runtime, budget * math.ceil(RUN_S / once))
        self._say(f"passes of {budget:,} tokens: {run.tokens / run.seconds:,.0f} tokens/s")
        return run

    def close(self) -> None:
        """Give the card back."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _timed(self, runtime: Runtime, num_tokens: int) -> Run:
        limits = runtime.contract.limits
        most = TokenBudget(max_tokens=limits.max_tokens, max_sequences=limits.max_sequences)
        batches = list(pack(self.work.rows(num_tokens), most))
        started = time.perf_counter()
        for batch in batches:
            runtime.hidden_states(batch, "last")
        return Run(sum(batch.num_tokens for batch in batches), time.perf_counter() - started)

    def _runtime(self, budget: int) -> Runtime:
        if self._open is not None and self._open[0] == budget:
            return self._open[1]
        self.close()
        directory = self._scratch / str(budget)
        if budget not in self.contracts:
            recipe = dataclasses.replace(self._recipe, pass_tokens=budget)
            contract = build(self._checkpoint, directory, recipe, reference=self._reference, say=self._say)
            seen = contract.fidelity
            self.contracts[budget], self.memory[budget] = contract, contract.limits.memory_bytes
            self.differences[budget] = Difference(rel_error=seen.rel_error_max, kl=seen.kl_mean, top1=seen.top1)
        self._open = budget, load_runtime(directory)
        return self._open[1]


def _left(precision: str, budget: int, reason: str) -> Unmeasured:
    return Unmeasured(precision=precision, threads=None, from_budget=budget, reason=reason)
