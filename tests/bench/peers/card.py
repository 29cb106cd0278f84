"""What the numbers were measured on: device, instruction sets, versions, commit, date."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from peers.engine_process import ROOT

FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
"""Instructions that decide how fast matrices multiply."""


def card(threads: int) -> dict[str, Any]:
    """The machine and this checkout; engines add their own versions."""
    info = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(fields.get("flags", "").split())
    family = f"family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": f"{fields.get('model name', platform.machine())}, {family}",
        "cpus": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_gib": round(memory / 2**30, 1),
        "flags": [flag for flag in FLAGS if flag in flags],
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _commit() -> str:
    """Short hash, with a plus if the package or the benchmark differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "extract", "tests/bench")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")
