"""What this CPU is, from `/proc/cpuinfo` where there is one: model, flags. No torch."""

import platform
from functools import cache
from pathlib import Path


@cache
def cpu_flags() -> frozenset[str]:
    """Names of the instruction set extensions, as Linux writes them; empty elsewhere."""
    for line in _info():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


@cache
def cpu_name() -> str:
    """The model, as the CPU names itself."""
    for line in _info():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_identity() -> str:
    """What code compiled for this CPU depends on."""
    return " ".join([platform.machine(), cpu_name(), *sorted(cpu_flags())])


def _info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
