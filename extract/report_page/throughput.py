"""Speed of a job over its run, by worker, from its commit records.

A record holds busy seconds by stage and no clock; when it was created is the time of its file. A shard's tokens are
spread over its busiest stage before that. Where the times of the files cannot be true, because a copy did not keep
them, speed is shown by shard number instead.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from extract.canonical import digest
from extract.commits import Commit, commit_path
from extract.job import StoredJob
from extract.report_page.facts import Throughput, WorkerFigures

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]

MAX_BINS = 60
MAX_WORKERS = 7
MAX_PROCESSES = 64
"""Most processes of one kind of worker; if more must have been busy at once, a copy lost the times of the files."""


def throughput(job: StoredJob, commits: Sequence[Commit]) -> Throughput | None:
    """Speeds of a job; `None` where no record holds seconds."""
    timed = [commit for commit in commits if _busiest(commit) > 0]
    if not timed:
        return None
    workers = _by_worker(timed)
    stops = np.array([commit_path(job.directory.commits, commit.shard).stat().st_mtime for commit in timed])
    busy = np.array([_busiest(commit) for commit in timed])
    begin = float((stops - busy).min())
    span = float(stops.max()) - begin
    axis: Literal["time", "shard"]
    if busy.sum() <= MAX_PROCESSES * len(workers) * max(span, 1e-9) and np.unique(stops).size > len(stops) // 2:
        axis, low, high = "time", stops - busy - begin, stops - begin
        edges = np.linspace(0, span, min(MAX_BINS, 2 * len(timed)) + 1)
        weights = np.full((len(workers), len(edges) - 1), span / (len(edges) - 1))
    else:
        axis, low = "shard", np.array([commit.shard for commit in timed], np.float64)
        high = low + 1
        last = int(high.max())
        edges = np.unique(np.linspace(0, last, min(MAX_BINS, last) + 1).round())
        weights = np.stack([_spread(edges, low, high, busy * mine) for mine in workers.values()])
    tokens = np.array([commit.num_tokens for commit in timed], np.float64)
    amounts = np.stack([_spread(edges, low, high, tokens * mine) for mine in workers.values()])
    speeds = np.divide(amounts, weights, out=np.zeros_like(amounts), where=weights > 0)
    return Throughput(
        axis=axis,
        started=datetime.fromtimestamp(begin, UTC).isoformat(timespec="seconds") if axis == "time" else None,
        edges=tuple(round(float(edge), 3) for edge in edges),
        tokens_per_s=tuple(tuple(round(float(speed), 2) for speed in row) for row in speeds),
        workers=tuple(_figures(name, timed, mine) for name, mine in workers.items()),
    )


def _by_worker(commits: Sequence[Commit]) -> dict[str, Bool]:
    """Which shards, bool [commits], each kind of worker made, by its name; the one with the most tokens first."""
    keys = [digest(commit.worker) for commit in commits]
    tokens: dict[str, int] = {}
    for key, commit in zip(keys, commits, strict=True):
        tokens[key] = tokens.get(key, 0) + commit.num_tokens
    ordered = sorted(tokens, key=lambda key: -tokens[key])
    kept = ordered if len(ordered) <= MAX_WORKERS + 1 else ordered[:MAX_WORKERS]
    found: dict[str, Bool] = {}
    for key in kept:
        name = _name(commits[keys.index(key)].worker)
        found[name if name not in found else f"{name} ({key[:6]})"] = np.array([one == key for one in keys])
    if len(kept) < len(ordered):
        found[f"{len(ordered) - len(kept):,} others"] = np.array([key not in kept for key in keys])
    return found


def _spread(edges: Float64, low: Float64, high: Float64, amounts: Float64) -> Float64:
    """Amounts spread evenly over their own [low, high), added up between edges: [bins]."""
    below = np.zeros(len(edges))
    length = np.maximum(high - low, 1e-9)
    for place, edge in enumerate(edges):
        below[place] = float((amounts * np.clip((edge - low) / length, 0, 1)).sum())
    return np.diff(below)


def _figures(name: str, commits: Sequence[Commit], chosen: Bool) -> WorkerFigures:
    mine = [commits[place] for place in np.flatnonzero(chosen).tolist()]
    seconds: dict[str, float] = {}
    for commit in mine:
        for stage, spent in commit.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + spent
    tokens, busy = sum(commit.num_tokens for commit in mine), sum(map(_busiest, mine))
    return WorkerFigures(
        name=name,
        num_shards=len(mine),
        num_rows=sum(commit.num_rows for commit in mine),
        num_tokens=tokens,
        seconds={stage: round(spent, 3) for stage, spent in seconds.items()},
        tokens_per_s=round(tokens / busy, 1) if busy else None,
    )


def _name(worker: dict[str, Any]) -> str:
    if "derived_from" in worker:
        return "rewritten from another output"
    parts = [str(worker[key]) for key in ("device", "runtime", "arithmetic") if worker.get(key)]
    if worker.get("max_tokens"):
        parts.append(f"{worker['max_tokens']:,} tokens a pass")
    return ", ".join(parts) or "unnamed"


def _busiest(commit: Commit) -> float:
    """Seconds of the stage that took longest; the stages of a shard run beside each other."""
    return max(commit.seconds.values(), default=0.0)
