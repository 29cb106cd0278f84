"""Was this sample measured on a machine of its own? From /proc: CPU used by others, and time the hypervisor took.

A neighbour that takes a tenth of a core costs an engine up to a third of its speed, more where threads meet at
barriers, and not every engine the same; so a sample is judged by itself and not by how it looks beside the others.
"""

import os
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

MAX_FOREIGN_CPUS = 0.1
MAX_STEAL = 0.01

NOBODY = -1
"""A session that has no processes."""

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What was not the engine's own.

    Attributes:
        foreign_cpus: CPUs that other processes used, on average.
        steal: share of the machine's time that the hypervisor gave to others.
    """

    foreign_cpus: float
    steal: float

    @property
    def is_quiet(self) -> bool:
        """Neither is over its limit."""
        return self.foreign_cpus <= MAX_FOREIGN_CPUS and self.steal <= MAX_STEAL


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """Seconds since boot (machine) and since its start (one session of processes)."""

    busy: float
    stolen: float
    own: float

    def since(self, before: "CpuTimes", seconds: float) -> Disturbance:
        """What happened between two readings."""
        foreign = (self.busy - before.busy) - (self.own - before.own) - 2 / _TICKS  # both count whole ticks
        return Disturbance(
            foreign_cpus=round(max(0.0, foreign) / seconds, 3),
            steal=round((self.stolen - before.stolen) / seconds / (os.cpu_count() or 1), 4),
        )


def cpu_times(session: int) -> CpuTimes:
    """Now, with all processes of `session` as the engine's own."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) / _TICKS for field in fields[:8])
    own = sum(_seconds(process) for process in processes(session))
    return CpuTimes(busy=user + nice + system + irq + softirq, stolen=steal, own=own)


def processes(session: int) -> list[int]:
    """Ids of the processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and int(fields[3]) == session:
                found.append(int(entry.name))
    return found


def watched(command: list[str], directory: Path) -> tuple[subprocess.CompletedProcess[str], Disturbance]:
    """Run a command to its end; with who else was busy meanwhile."""
    before, own_before, started = cpu_times(NOBODY), os.times(), time.perf_counter()
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    now, own, seconds = cpu_times(NOBODY), os.times(), time.perf_counter() - started
    spent = sum(own[2:4]) - sum(own_before[2:4])  # it has ended: its time stands with this process's children
    return done, replace(now, own=now.own + spent).since(before, seconds)


def _stat(process: int) -> list[str]:
    """Fields of /proc/PID/stat after the name: state, parent, group, session, ...; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _seconds(process: int) -> float:
    fields = _stat(process)
    return sum(int(field) for field in fields[11:15]) / _TICKS if fields else 0.0  # with its ended children
