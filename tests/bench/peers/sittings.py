"""The measurement: engines kept up side by side, taking turns round by round while all others are held still.

What memory cannot hold at once is measured in several sittings. Our engines sit in every one, so each ratio is of runs
that took turns within minutes; a sample that was disturbed is run again a few times and then kept with a mark, since a
busy machine must not stop the benchmark.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from peers.disturbance import NOBODY, Disturbance, cpu_times
from peers.engine_process import EngineFailed, EngineProcess, EngineSkipped
from peers.engines import BUILD, Engine
from peers.fidelity import Fidelity, WrongOutput, compare
from peers.protocol import Job, write_ids
from peers.scenarios import Scenario

FIRST_BATCH_ROWS = 8

SAMPLE_S = 1.0
"""A sample runs the rows again until it lasted so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed run. `turn` is (sitting, round): runs of one turn are compared with each other."""

    turn: tuple[int, int]
    seconds: float
    tokens_per_s: float
    disturbance: Disturbance


@dataclass(slots=True, kw_only=True)
class Row:
    """What was found out about an engine in a scenario.

    Attributes:
        problem: why there are no samples.
    """

    engine: str
    dtype: str
    fidelity: Fidelity | None = None
    samples: list[Sample] = field(default_factory=list)
    problem: str | None = None

    @property
    def counted(self) -> list[Sample]:
        """The quiet samples; all of them if there is none."""
        return [sample for sample in self.samples if sample.disturbance.is_quiet] or self.samples

    @property
    def disturbed(self) -> int:
        """How many samples were not quiet."""
        return sum(not sample.disturbance.is_quiet for sample in self.samples)

    @property
    def tokens_per_s(self) -> float | None:
        """Median of the counted samples."""
        return statistics.median(sample.tokens_per_s for sample in self.counted) if self.samples else None


@dataclass(slots=True, kw_only=True)
class Resident:
    """A process, and what its start took.

    Attributes:
        first_batch_s: from process start to the states of the first rows, median of the starts.
    """

    process: EngineProcess
    versions: dict[str, str]
    first_batch_s: float
    first_batch_quiet: bool
    peak_memory: int = 0


class Bench:
    """Runs engines on scenarios and keeps what comes out.

    Args:
        folder: for ids, outputs and logs.
        reference: scenario name -> float32 states.
        head: float32 [V, H].
        starts: how often each engine is started to time its first batch.
        retries: how often a disturbed sample is run again.
    """

    def __init__(
        self,
        folder: Path,
        scenarios: Sequence[Scenario],
        reference: dict[str, Any],
        head: Any,
        *,
        rounds: int,
        starts: int,
        retries: int,
    ) -> None:
        self.rows: dict[str, list[Row]] = {scenario.name: [] for scenario in scenarios}
        self.starts_of: dict[str, Resident] = {}
        self._folder = folder
        self._scenarios = scenarios
        self._reference = reference
        self._head = head
        self._rounds = rounds
        self._starts = starts
        self._retries = retries
        self._residents: dict[str, Resident] = {}
        self._failed: dict[str, str] = {}
        for scenario in scenarios:
            write_ids(self._ids(scenario), scenario.sequences)

    def sit(self, number: int, engines: Sequence[Engine]) -> None:
        """One sitting: start what is not up, end what is not wanted, then every scenario."""
        wanted = {engine.process for engine in engines}
        for key in [key for key in self._residents if key not in wanted]:
            self._residents.pop(key).process.close()
        for engine in engines:
            if any(runs_in(engine, scenario) for scenario in self._scenarios):
                self._start(engine)
        for scenario in self._scenarios:
            here = [engine for engine in engines if runs_in(engine, scenario)]
            ready = [engine for engine in here if self._checked(engine, scenario)]
            for turn in range(self._rounds):
                first = turn % max(1, len(ready))
                for engine in ready[first:] + ready[:first]:
                    self._measure(engine, scenario, (number, turn))

    def close(self) -> None:
        """End all processes."""
        for resident in self._residents.values():
            resident.process.close()
        self._residents.clear()

    def _start(self, engine: Engine) -> None:
        if engine.process in self._residents or engine.process in self._failed:
            return
        say(f"start {engine.name}")
        scenario = next(scenario for scenario in self._scenarios if runs_in(engine, scenario))
        took: list[tuple[float, bool]] = []
        process = None
        while len(took) < self._starts or (len(took) == self._starts and self._retries and not took[-1][1]):
            if process is not None:
                process.close()
            before = cpu_times(NOBODY)
            process = EngineProcess(engine.driver, engine.python, self._log(engine), engine.environment)
            try:
                versions = process.load(engine.load)
                job = Job(ids=self._ids(scenario), kind=scenario.kind, options=engine.options, limit=FIRST_BATCH_ROWS)
                process.run(job)
            except (EngineFailed, EngineSkipped) as problem:
                process.close()
                self._failed[engine.process] = str(problem)
                say(f"      {problem}")
                return
            seconds = time.perf_counter() - process.started
            took.append((seconds, process.disturbance_since_start(before, seconds).is_quiet))
        assert process is not None
        process.stop()
        counted = [seconds for seconds, is_quiet in took if is_quiet] or [seconds for seconds, _ in took]
        self._residents[engine.process] = self.starts_of[engine.process] = Resident(
            process=process,
            versions=versions,
            first_batch_s=statistics.median(counted),
            first_batch_quiet=any(is_quiet for _, is_quiet in took),
        )

    def _checked(self, engine: Engine, scenario: Scenario) -> bool:
        """Run once with output: the comparison, and the warm-up on the same rows."""
        row = self._row(engine, scenario)
        if row.problem is None and row.fidelity is None:
            try:
                if engine.process in self._failed:
                    raise EngineFailed(self._failed[engine.process])
                output = str(self._folder / "states.npy")
                answer, _ = self._run(engine, scenario, output=output)
                if (answer["rows"], answer["tokens"]) != (len(scenario.sequences), scenario.num_tokens):
                    raise WrongOutput(f"ran {answer['rows']} rows and {answer['tokens']} tokens")
                head = None if scenario.kind == "mean" else self._head
                row.fidelity = compare(np.load(output), self._reference[scenario.name], head, engine.dtype)
            except (EngineFailed, EngineSkipped, WrongOutput) as problem:
                row.problem = str(problem)
                say(f"      {engine.name}, {scenario.name}: {problem}")
        return row.problem is None

    def _measure(self, engine: Engine, scenario: Scenario, turn: tuple[int, int]) -> None:
        """One sample; of several tries the first quiet one, else the least disturbed."""
        row = self._row(engine, scenario)
        tries: list[Sample] = []
        while not tries or (len(tries) <= self._retries and not tries[-1].disturbance.is_quiet):
            try:
                answer, disturbance = self._run(engine, scenario)
            except EngineFailed as problem:
                row.problem = str(problem)
                return
            speed = answer["tokens"] * answer["passes"] / answer["seconds"]
            tries.append(Sample(turn=turn, seconds=answer["seconds"], tokens_per_s=speed, disturbance=disturbance))
        best = min(tries, key=lambda sample: (not sample.disturbance.is_quiet, sample.disturbance.foreign_cpus))
        row.samples.append(best)
        mark = "" if best.disturbance.is_quiet else f"  disturbed ({best.disturbance.foreign_cpus:.2f} CPUs)"
        say(f"      {scenario.name} {turn[1] + 1}: {engine.name} {best.tokens_per_s:,.0f} tokens/s{mark}")

    def _run(self, engine: Engine, scenario: Scenario, output: str | None = None) -> tuple[dict[str, Any], Disturbance]:
        resident = self._residents[engine.process]
        job = Job(
            ids=self._ids(scenario),
            kind=scenario.kind,
            options=engine.options,
            output=output,
            at_least_s=SAMPLE_S if output is None else 0.0,
        )
        try:
            answer, disturbance = resident.process.run(job)
        finally:
            resident.process.stop()
        resident.peak_memory = answer["peak_memory"]
        return answer, disturbance

    def _row(self, engine: Engine, scenario: Scenario) -> Row:
        rows = self.rows[scenario.name]
        for row in rows:
            if row.engine == engine.name:
                return row
        rows.append(Row(engine=engine.name, dtype=engine.dtype))
        return rows[-1]

    def _ids(self, scenario: Scenario) -> str:
        return str(self._folder / f"{scenario.name}.npz")

    def _log(self, engine: Engine) -> Path:
        return BUILD / "logs" / f"{engine.name.replace(' ', '_').replace(',', '')}.log"


def runs_in(engine: Engine, scenario: Scenario) -> bool:
    """Whether the table of a scenario has a line for an engine."""
    if engine.only is not None and scenario.name not in engine.only:
        return False
    return scenario.kind in engine.kinds and (engine.main or engine.only is not None or scenario.name == "tokens")


def sittings(engines: Sequence[Engine], gib: float) -> list[list[Engine]]:
    """Peers in groups that fit in memory beside our engines, in the order given."""
    ours = [engine for engine in engines if engine.is_ours]
    left = gib - sum({engine.process: engine.gib for engine in ours}.values())
    found: list[list[Engine]] = [[]]
    for engine in engines:
        if engine.is_ours:
            continue
        memory = {member.process: member.gib for member in [*found[-1], engine]}
        if found[-1] and sum(memory.values()) > left:
            found.append([])
        found[-1].append(engine)
    return [ours + peers for peers in found]


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)
