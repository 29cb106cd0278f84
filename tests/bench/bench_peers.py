"""Ours beside the best of the peers: one command, one machine, one run, the same token ids for everyone.

The limit is how fast this machine multiplies matrices, which is measured first. Then every engine runs in a process of
its own, by turns, and only after its states were compared with the model's in float32: nobody is fast by being wrong.
Tokenising counts for nobody. Peers live in environments of their own; those that are missing are named and left out.

    make bench-smoke    transformers and ours, 16 passages, a minute; needs nothing but the project
    make bench          all peers that `make bench-peers-setup` could install, all scenarios
    make bench-full     more passages, more rounds, several starts
"""

import argparse
import hashlib
import json
import os
import shlex
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers.card import card
from peers.disturbance import watched
from peers.engine_process import BENCH, EngineFailed, EngineProcess, EngineSkipped
from peers.engines import BUILD, TIERS, Engine, catalogue
from peers.fidelity import head_of
from peers.protocol import Job, write_ids
from peers.report import Report
from peers.scenarios import NAMES, Scenario, Workload
from peers.sittings import Bench, runs_in, say, sittings
from peers.whole_job import JobResult, whole_job

from extract.sample import write_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much of everything a tier does.

    Attributes:
        passages: rows of the scenario `tokens`; the others take half of them.
        ceiling_s: seconds for each type's ceiling.
        starts: how often each engine is started, to time its first batch.
        retries: how often a disturbed sample is run again.
    """

    passages: int
    rounds: int
    ceiling_s: float
    starts: int
    retries: int
    scenarios: tuple[str, ...]


EFFORTS = {
    "smoke": Effort(passages=16, rounds=2, ceiling_s=1.0, starts=1, retries=1, scenarios=("tokens",)),
    "peers": Effort(passages=128, rounds=3, ceiling_s=3.0, starts=1, retries=2, scenarios=(*NAMES, "job")),
    "full": Effort(passages=512, rounds=5, ceiling_s=3.0, starts=3, retries=3, scenarios=(*NAMES, "job")),
}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines are ended on the way out
    given = _arguments()
    effort = EFFORTS[given.tier]
    names = given.scenario or list(effort.scenarios)
    passages, rounds = given.passages or effort.passages, given.rounds or effort.rounds
    retries = effort.retries if given.retries is None else given.retries
    checkpoint = given.checkpoint.resolve()
    about = card(given.threads) | {"command": shlex.join(["python", "tests/bench/bench_peers.py", *sys.argv[1:]])}
    say(f"ceilings of {about['device']}")
    ceilings = _ceilings(checkpoint, given.threads, effort.ceiling_s, retries)

    works = {"tokens": Workload(checkpoint, passages)}
    works["others"] = Workload(checkpoint, max(1, passages // 2))
    scenarios = [works.get(name, works["others"]).scenario(name) for name in names if name != "job"]
    engines = [engine for engine in catalogue(checkpoint, given.threads) if _is_asked_for(engine, given)]
    engines = [engine for engine in engines if "job" in names or any(runs_in(engine, one) for one in scenarios)]
    engines, skipped = _prepared(engines)

    with tempfile.TemporaryDirectory(prefix="bench-", dir=BUILD) as temporary:
        folder = Path(temporary)
        reference = {scenario.name: _reference(folder, checkpoint, scenario, given.threads) for scenario in scenarios}
        bench = Bench(
            folder,
            scenarios,
            reference,
            head_of(checkpoint),
            rounds=rounds,
            starts=effort.starts,
            retries=retries,
        )
        try:
            for number, together in enumerate(sittings(engines, given.memory)):
                say(f"sitting {number + 1}: {', '.join(engine.name for engine in together)}")
                bench.sit(number, together)
        finally:
            bench.close()
        jobs = _whole_jobs(engines, passages, rounds) if "job" in names else []

    report = Report(
        card=about,
        ceilings=ceilings,
        scenarios=scenarios,
        rows=bench.rows,
        residents={
            engine.name: bench.starts_of[engine.process] for engine in engines if engine.process in bench.starts_of
        },
        skipped=skipped,
        jobs=jobs,
    )
    print(report.markdown())
    if given.output:
        given.output.write_text(report.markdown())
    print(json.dumps(report.json()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parser.add_argument("--tier", choices=TIERS, default="smoke")
    parser.add_argument("--checkpoint", type=Path, default=BUILD / "checkpoint", help="Hugging Face directory")
    parser.add_argument("--only", help="names of engines, or parts of them, between semicolons")
    parser.add_argument(
        "--scenario", action="append", choices=[*NAMES, "job"], help="may be repeated; default: the tier's"
    )
    parser.add_argument("--passages", type=int, help="rows of `tokens`, half of them in other scenarios")
    parser.add_argument("--rounds", type=int, help="default: the tier's")
    parser.add_argument("--retries", type=int, help="how often a disturbed sample is run again; default: the tier's")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all CPUs")
    parser.add_argument("--memory", type=float, default=0.75 * memory, help="GiB for engines that are up at once")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    return parser.parse_args()


def _is_asked_for(engine: Engine, given: argparse.Namespace) -> bool:
    if given.only:
        return any(part.strip() in engine.name for part in given.only.split(";"))
    return TIERS.index(engine.tier) <= TIERS.index(given.tier)


def _ceilings(checkpoint: Path, threads: int, seconds: float, retries: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "peers.ceilings", str(checkpoint)]
    command += ["--threads", str(threads), "--seconds", str(seconds)]
    found: list[dict[str, Any]] = []
    while not found or (len(found) <= retries and not found[-1]["quiet"]):
        done, disturbance = watched(command, BENCH)
        if done.returncode:
            raise SystemExit(f"the ceilings cannot be measured: {done.stderr.strip().splitlines()[-1]}")
        found.append(json.loads(done.stdout) | {"quiet": disturbance.is_quiet})
    return max(found, key=lambda one: (one["quiet"], one["ceilings"]["float32"]["gflops"]))


def _prepared(engines: list[Engine]) -> tuple[list[Engine], dict[str, str]]:
    """Engines whose one-time work is done, and why the others are left out."""
    outcome: dict[str, str | None] = {}
    for engine in engines:
        if engine.process in outcome:
            continue
        if not engine.python.exists():
            outcome[engine.process] = "not installed (make bench-peers-setup)"
            continue
        say(f"prepare {engine.name}")
        process = EngineProcess(
            engine.driver, engine.python, BUILD / "logs" / f"prepare-{engine.driver}.log", engine.environment
        )
        try:
            process.prepare(engine.load)
            outcome[engine.process] = None
        except (EngineFailed, EngineSkipped) as problem:
            outcome[engine.process] = str(problem)
            say(f"      {problem}")
        finally:
            process.close()
    kept = [engine for engine in engines if outcome[engine.process] is None]
    skipped = {engine.name: outcome[engine.process] for engine in engines if outcome[engine.process] is not None}
    return kept, {name: str(reason) for name, reason in skipped.items()}


def _reference(folder: Path, checkpoint: Path, scenario: Scenario, threads: int) -> Any:
    """States of transformers in float32, one row at a time; kept below build/bench for the next run."""
    weights = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(checkpoint.iterdir())]
    key = hashlib.sha256(json.dumps([scenario.kind, scenario.sequences, weights]).encode()).hexdigest()[:16]
    kept = BUILD / "reference" / f"{scenario.name}-{key}.npy"
    if not kept.exists():
        say(f"reference of {scenario.name}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        ids, output = str(folder / "reference.npz"), str(folder / "reference.npy")
        write_ids(ids, scenario.sequences)
        process = EngineProcess("transformers", Path(sys.executable), BUILD / "logs" / "reference.log")
        try:
            process.load({"checkpoint": str(checkpoint), "dtype": "float32", "threads": threads})
            process.run(Job(ids=ids, kind=scenario.kind, options={"size": 1}, output=output))
        finally:
            process.close()
        Path(output).rename(kept)
    return np.load(kept)


def _whole_jobs(engines: list[Engine], passages: int, rounds: int) -> list[JobResult]:
    """bench_job.py on each of our engines."""
    data = BUILD / "job-passages.parquet"
    if not data.exists():
        write_sample(data, 4096)
    found = []
    for engine in engines:
        if engine.is_ours and engine.only is None:
            say(f"job with {engine.name}")
            found.append(whole_job(engine.name, Path(engine.load["engine"]), data, 4 * passages, rounds))
    return found


if __name__ == "__main__":
    main()
