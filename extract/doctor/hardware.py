"""What this machine has: CPU and the kernels that compute on it, memory, disk, and the cards that the driver shows."""

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extract.cpu.kernels import Precision

PRECISIONS: "tuple[Precision, ...]" = ("float32", "bfloat16", "int8")
SMI_FIELDS = ("name", "memory.total", "memory.free", "driver_version", "compute_cap", "mig.mode.current")
SMI_S = 10.0
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The CPU.

    Attributes:
        instruction_set: as contracts name it, or why it is not known.
        threads: that this process may use.
        quota: CPUs that a container may use at a time; `None`: no limit.
        compiler: path of a C++ compiler, or `None`.
        kernels: precision -> which kernels compute it and why, in words.
    """

    name: str
    instruction_set: str
    threads: int
    all_threads: int
    quota: float | None
    compiler: str | None
    kernels: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Memory, or a directory and its disk.

    Attributes:
        path: empty for memory.
        total_bytes: `None`: not known.
        free_bytes: memory that could be had without swapping; of a disk, what may still be written.
        limit_bytes: of a container; `None`: none.
        problem: why it cannot be used; empty if it can.
    """

    path: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    limit_bytes: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiCard:
    """A card as the driver shows it."""

    name: str
    total_bytes: int | None
    free_bytes: int | None
    driver: str
    compute_capability: str
    mig: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Smi:
    """What `nvidia-smi` says; a problem if it says nothing."""

    problem: str = ""
    cards: tuple[SmiCard, ...] = ()


def this_cpu() -> Cpu:
    """The CPU, without torch and without compiling anything."""
    from extract.cpu.cpu_flags import cpu_flags, cpu_name
    from extract.cpu.native_library import find_compiler

    known = bool(cpu_flags()) or platform.machine().lower() not in ("x86_64", "amd64")
    return Cpu(
        name=cpu_name(),
        instruction_set=_tried(_instruction_set) if known else "not known without torch",
        threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        all_threads=os.cpu_count() or 1,
        quota=_cpu_quota(),
        compiler=find_compiler(),
        kernels={precision: _tried(functools.partial(_kernels, precision)) for precision in PRECISIONS},
    )


def memory() -> Space:
    """From `/proc/meminfo` and the limit of a container, where there are such."""
    facts = {}
    for line in _lines("/proc/meminfo"):
        name, _, value = line.partition(":")
        facts[name] = value.removesuffix("kB").strip()
    sizes = {name: int(value) * 1024 for name, value in facts.items() if value.isdigit()}
    limits = [*_lines("/sys/fs/cgroup/memory.max"), *_lines("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    limit = next((int(one) for one in limits if one.isdigit()), None)
    total = sizes.get("MemTotal")
    return Space(
        total_bytes=total,
        free_bytes=sizes.get("MemAvailable"),
        limit_bytes=limit if limit is not None and (total is None or limit < total) else None,
    )


def disk(path: Path) -> Space:
    """The disk that a directory is on, or will be; with a problem if nothing can be written there."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        usage = shutil.disk_usage(there)
    except OSError as error:
        return Space(path=str(path), problem=f"cannot be looked at: {error.strerror}")
    problem = "" if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"
    return Space(path=str(path), total_bytes=usage.total, free_bytes=usage.free, problem=problem)


def nvidia_smi() -> Smi:
    """The cards that the driver shows, asked of its own program; that takes a moment, and longer on many cards."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Smi(problem="no nvidia-smi on PATH")
    for count in (len(SMI_FIELDS), 4):  # older drivers do not know the last ones
        command = [program, f"--query-gpu={','.join(SMI_FIELDS[:count])}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SMI_S, check=False)
        except subprocess.TimeoutExpired:
            return Smi(problem=f"nvidia-smi did not answer within {SMI_S:g} s")
        except OSError as error:
            return Smi(problem=f"nvidia-smi cannot be run: {error.strerror}")
        if done.returncode == 0:
            rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
            return Smi(cards=tuple(_card(row + [""] * (len(SMI_FIELDS) - len(row))) for row in rows))
    said = (done.stdout + done.stderr).strip().splitlines()
    return Smi(problem=f"nvidia-smi ended with {done.returncode}: {said[0][:200] if said else 'no message'}")


def _card(row: list[str]) -> SmiCard:
    sizes = [int(float(part)) * MIB if part.replace(".", "", 1).isdigit() else None for part in row[1:3]]
    return SmiCard(
        name=row[0],
        total_bytes=sizes[0],
        free_bytes=sizes[1],
        driver=row[3],
        compute_capability=row[4],
        mig=row[5] if row[5] in ("Enabled", "Disabled") else "",
    )


def _tried(asked: Callable[[], str]) -> str:
    try:
        return asked()
    except Exception as error:  # a broken numpy or cache may raise anything; it is named under the packages too
        return f"not known ({type(error).__name__}: {str(error)[:100]})"


def _instruction_set() -> str:
    from extract.engine.device import cpu_level

    return cpu_level()


def _kernels(precision: "Precision") -> str:
    from extract.cpu.implementations import kernels_here

    return kernels_here(precision)


def _cpu_quota() -> float | None:
    for line in _lines("/sys/fs/cgroup/cpu.max"):
        quota, _, period = line.partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            return int(quota) / int(period)
    return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
