"""What a driver is, and how it is spoken to: one JSON object a line, requests on stdin, answers on stdout.

A driver runs in its peer's own environment, so this module knows only the standard library and numpy. The clock stands
here, around `Driver.run` alone: ids lie in memory before it starts, and it ends when every state lies in host memory as
numpy sees it. Whatever comes after (float32 copies, row order, the .npy file) is for the comparison, and not timed.

    {"do": "prepare", "settings": {...}}    make what is made once per checkpoint; in a process of its own
    {"do": "load", "settings": {...}}       -> {"versions": {...}}
    {"do": "run", "job": {...}}             -> {"seconds": 1.2, "passes": 1, "tokens": 640, "rows": 8, ...}
"""

import ctypes
import itertools
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Rows = Sequence[npt.NDArray[Any]]
"""One array a row: [L, H] for kind "tokens", else [H]."""

_PR_SET_PDEATHSIG = 1

Kind = Literal["tokens", "last", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One thing to run.

    Attributes:
        ids: an .npz file with `offsets` int64 [N + 1] and `input_ids` int32 [T].
        kind: which states.
        options: of the driver, such as the order of the rows.
        limit: only the first rows.
        output: where the states go as float32 .npy, [T, H] or [N, H]; `None`: nowhere.
        at_least_s: run again until so much time was measured: a short run is mostly chance.
    """

    ids: str
    kind: Kind = "tokens"
    options: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    output: str | None = None
    at_least_s: float = 0.0


class NotPossible(Exception):
    """This engine cannot do that, and says why; it is left out by name."""


class Driver(Protocol):
    """One peer."""

    def prepare(self, settings: dict[str, Any]) -> None:
        """Make what is made once per checkpoint (a conversion, a quantisation, a filled cache)."""

    def load(self, settings: dict[str, Any]) -> dict[str, str]:
        """Load the model; returns the versions of what runs it."""

    def run(self, sequences: Sequence[Ids], kind: Kind, options: dict[str, Any]) -> Any:
        """States of all sequences in host memory, in any form. Timed."""

    def rows(self, result: Any) -> Rows:
        """What `run` returned as one float32 array a row, in the order given. Not timed."""


def serve(driver: Driver) -> None:
    """Answer requests until stdin ends. Whatever libraries print goes to stderr."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # held still, it would outlive the benchmark for ever
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    server = _Server(driver)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = server.answer(request)
        except NotPossible as reason:
            answer = {"ok": False, "not_possible": str(reason)}
        except Exception as error:
            traceback.print_exc()
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        answers.write(json.dumps(answer) + "\n")


class _Server:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._peak_memory = 0  # bytes; as long as nothing was copied for a comparison
        self._has_compared = False

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "prepare":
            self._driver.prepare(request["settings"])
            return {"ok": True}
        if request["do"] == "load":
            return {"ok": True, "versions": self._driver.load(request["settings"])}
        return {"ok": True} | self._run(Job(**request["job"]))

    def _run(self, job: Job) -> dict[str, Any]:
        sequences = read_ids(job.ids)[: job.limit]
        passes, seconds = 0, 0.0
        while passes == 0 or seconds < job.at_least_s:
            result = None  # of the pass before: its memory is free again
            started = time.perf_counter()
            result = self._driver.run(sequences, job.kind, job.options)
            seconds += time.perf_counter() - started
            passes += 1
        if not self._has_compared:
            self._peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if job.output is not None:
            self._has_compared = True
            rows = [np.atleast_2d(row) for row in self._driver.rows(result)]
            np.save(job.output, np.concatenate(rows).astype(np.float32, copy=False))
        return {
            "seconds": seconds,
            "passes": passes,
            "tokens": sum(len(sequence) for sequence in sequences),
            "rows": len(sequences),
            "peak_memory": self._peak_memory,
        }


def write_ids(path: str, sequences: Sequence[Sequence[int]]) -> None:
    """Write the .npz file that `Job.ids` names."""
    lengths = [len(sequence) for sequence in sequences]
    np.savez(
        path,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        input_ids=np.concatenate([np.asarray(sequence, np.int32) for sequence in sequences]),
    )


def read_ids(path: str) -> list[Ids]:
    """One int32 [L] array a row."""
    with np.load(path) as file:
        offsets, input_ids = file["offsets"], file["input_ids"]
    return [input_ids[start:stop] for start, stop in itertools.pairwise(offsets)]


def fixed_batches(lengths: Sequence[int], size: int, *, sort: bool) -> list[list[int]]:
    """Row numbers of batches of `size` rows: in the order given, or longest first."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row]) if sort else list(range(len(lengths)))
    return [order[start : start + size] for start in range(0, len(order), size)]


def padded(sequences: Sequence[Ids], members: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`input_ids` and `attention_mask`, both int64 [B, L], padded on the right with id 0."""
    longest = max(len(sequences[row]) for row in members)
    input_ids = np.zeros((len(members), longest), np.int64)
    mask = np.zeros((len(members), longest), np.int64)
    for place, row in enumerate(members):
        input_ids[place, : len(sequences[row])] = sequences[row]
        mask[place, : len(sequences[row])] = 1
    return input_ids, mask


def of_kind(states: Any, length: int, kind: Kind) -> Any:
    """States of one row out of its padded ones [L, H]; works on numpy and torch. Mean in the states' own type."""
    if kind == "tokens":
        return states[:length]
    return states[length - 1] if kind == "last" else states[:length].mean(0)
