"""Jobs on several processes: faults put into the workers, and the workers found by their command lines."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import crash_rig
import psutil

SABOTAGE = Path(__file__).parent / "runners" / "sabotage"


def sabotage(**settings: Any) -> None:
    """Put faults into the worker processes that this process starts; see `sabotage/sitecustomize.py`."""
    os.environ["EXTRACT_SABOTAGE"] = json.dumps(settings)
    sys.path.insert(0, str(SABOTAGE))


def with_faults(**settings: Any) -> list[tuple[str, dict[str, Any]]]:
    """For `warm_command.start(prepare=...)`."""
    return [("runner_rig:sabotage", settings)]


def workers_of(pid: int) -> list[psutil.Process]:
    """Worker processes of a run that are alive."""
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if is_worker(child)]


def is_worker(process: psutil.Process) -> bool:
    """Whether it is a living worker process."""
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and "extract.runners.worker_process" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def check_finished(out: Path, unbroken: Path) -> None:
    """The same bytes under the same names as an unbroken run, and nothing else."""
    assert crash_rig.content(out) == crash_rig.content(unbroken)
    assert crash_rig.names(out) == crash_rig.expected_names(out)
    assert crash_rig.stored_keys(out) == [f"row {n}" for n in range(crash_rig.NUM_ROWS)]
