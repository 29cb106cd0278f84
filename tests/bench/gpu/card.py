"""What was measured on: card, driver, versions, what else runs there; and clock, power and heat while parts run.

`nvidia-smi` is asked where it is, and never told anything: clocks and power limits stay as they are.
"""

import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "pyarrow",
    "tokenizers",
    "zstandard",
    "numba",
    "safetensors",
    "flash-attn",
    "vllm",
)

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
REASONS = ("clocks_event_reasons.active",)
"""Why a card is slower than it could be; older drivers have another name for it, and then nothing is said."""
STANDING = ("name", "driver_version", "memory.total", "memory.used", "power.limit", "clocks.max.sm", "mig.mode.current")


def versions() -> dict[str, str | None]:
    """Installed packages by what their metadata says; `None`: missing."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def about(device: Any, root: Path) -> dict[str, Any]:
    """Everything that a figure needs beside it."""
    import torch

    found: dict[str, Any] = {
        "device": str(device),
        "host": f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs",
        "host_memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "commit": _git(root, "rev-parse", "--short", "HEAD") or "unknown",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "versions": versions(),
        "compiler": shutil.which("g++") or shutil.which("c++"),
        "warnings": [],
    }
    if device.type != "cuda":
        return found
    facts = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    found |= {
        "card": facts.name,
        "compute_capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "l2_mib": round(getattr(facts, "L2_cache_size", 0) / 2**20, 1),
        "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
        "smi": _smi(STANDING, device),
        "clock_events": _smi(REASONS, device),
    }
    others = processes(device)
    if others:
        found["warnings"].append(f"other processes use this card: {', '.join(others)}; speeds are lower bounds")
    if free < 0.9 * total and not others:
        found["warnings"].append(f"{(total - free) / 2**30:.1f} GiB of the card are taken by something unseen")
    return found


def processes(device: Any) -> list[str]:
    """Other processes that compute on the card, as `nvidia-smi` lists them."""
    answer = _run(
        "nvidia-smi", f"--id={_index(device)}", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"
    )
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return [line for line in lines if line.split(",")[0].strip() != str(os.getpid()) and line[0].isdigit()]


class Watch:
    """Reads clock, power and heat twice a second in a `with` block; nothing where there is no `nvidia-smi`."""

    def __init__(self, device: Any) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._seen: list[tuple[float, list[str]]] = []
        if device.type == "cuda" and shutil.which("nvidia-smi"):
            command = ["nvidia-smi", f"--id={_index(device)}", f"--query-gpu={','.join(FIELDS)}"]
            command += ["--format=csv,noheader,nounits", "--loop-ms=500"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)

    def since(self, moment: float) -> dict[str, float]:
        """Medians since a `time.monotonic()`, and the lowest clock of the multiprocessors."""
        rows = [row for at, row in self._seen if at >= moment]
        found: dict[str, float] = {}
        for place, name in enumerate(FIELDS):
            values = [value for row in rows if (value := _number(row[place])) is not None]
            if values:
                found[name] = statistics.median(values)
                if name == "clocks.sm":
                    found["clocks.sm.least"] = min(values)
        return found

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == len(FIELDS):
                self._seen.append((time.monotonic(), cells))


def _smi(fields: tuple[str, ...], device: Any) -> dict[str, str]:
    answer = _run("nvidia-smi", f"--id={_index(device)}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    cells = [cell.strip() for cell in answer.split(",")]
    return dict(zip(fields, cells, strict=True)) if len(cells) == len(fields) else {}


def _index(device: Any) -> str:
    """The card as `nvidia-smi` knows it: it counts all cards, this process only those it may see."""
    number = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = [one.strip() for one in visible.split(",") if one.strip()]
    return chosen[number] if number < len(chosen) else str(number)


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _git(root: Path, *words: str) -> str:
    return _run("git", "-C", str(root), *words).strip()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
