"""Whether packages import, found out in other processes: one that raises, hangs or ends Python is a fact."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """How the import of a package went.

    Attributes:
        problem: why it does not import; empty if it does.
        known: false if it was not tried, or did not end in time.
        version: as the module says.
        facts: of torch, what it says of CUDA.
    """

    problem: str = ""
    known: bool = True
    version: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def try_imports(lanes: Iterable[list[str]], seconds: float) -> dict[str, Import]:
    """Import each list of modules in a process of its own, all at once, and wait for at most so long."""
    end = time.monotonic() + seconds
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda names: _lane(names, end, seconds), [list(lane) for lane in lanes if lane]))
    return {name: one for lane in done for name, one in lane.items()}


def _lane(names: list[str], end: float, seconds: float) -> dict[str, Import]:
    """One list, in as many processes as it takes: after one that a package ended, the next goes on behind it."""
    found: dict[str, Import] = {}
    while left := [name for name in names if name not in found]:
        lines, ended = _run(left, end)
        for line in lines:
            if "end" in line:
                found[line["end"]] = Import(
                    problem=line["problem"], version=line["version"], facts=line.get("cuda") or {}
                )
        begun = next((line["begin"] for line in reversed(lines) if "begin" in line), None)
        if ended is None:  # out of time
            for name in left:
                if name not in found:
                    late = f"was still importing after {seconds:g} s" if name == begun else "was not tried in time"
                    found[name] = Import(problem=f"{late} (extract doctor --seconds {4 * seconds:g})", known=False)
        elif begun is None:
            found |= {name: Import(problem=ended) for name in left}
        elif begun not in found:
            found[begun] = Import(problem=f"importing it {ended}")
    return found


def _run(names: list[str], end: float) -> tuple[list[dict[str, Any]], str | None]:
    """The lines of one process and, in words, how it ended; `None`: it was stopped when time was up."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", "-m", "extract.doctor.import_trial", *names]
    with tempfile.TemporaryFile() as report:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=report, stderr=subprocess.DEVNULL, env=environment
            )
        except OSError as error:
            return [], f"no Python process can be started ({error.strerror})"
        ended: str | None
        try:
            code = process.wait(timeout=max(0.0, end - time.monotonic()))
            ended = f"ends the Python process ({f'signal {-code}' if code < 0 else f'code {code}'})"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = None
        report.seek(0)
        lines = report.read().decode(errors="replace").split("\n")
    return [json.loads(line) for line in lines[:-1]], ended
