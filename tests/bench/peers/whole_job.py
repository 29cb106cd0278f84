"""The scenario `job`: text -> shards on disk against the engine alone, by bench_job.py, for each of our engines."""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.disturbance import Disturbance, watched
from peers.engine_process import BENCH, ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """`ratio`: speed of the overlapped job over that of its forward passes alone, median of the rounds."""

    engine: str
    tokens_per_s: float | None = None
    ratio: float | None = None
    disturbance: Disturbance | None = None
    problem: str | None = None


def whole_job(name: str, engine: Path, passages: Path, limit: int, rounds: int) -> JobResult:
    """Run bench_job.py on the first `limit` rows of `passages`."""
    if not engine.is_dir():
        return JobResult(engine=name, problem="not built")
    command = [sys.executable, str(BENCH / "bench_job.py"), "--engine", str(engine), "--data", str(passages)]
    command += ["--limit", str(limit), "--rounds", str(rounds)]
    done, disturbance = watched(command, ROOT)
    if done.returncode:
        return JobResult(engine=name, problem=(done.stderr.strip().splitlines() or ["failed"])[-1][:300])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return JobResult(
        engine=name,
        tokens_per_s=statistics.median(found["speeds"]["overlapped"]),
        ratio=found["ratios"]["overlapped/engine"],
        disturbance=disturbance,
    )
