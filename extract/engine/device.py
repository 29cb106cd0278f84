"""What this machine computes on, and whether an engine committed to a device may run here. Imports torch."""

import platform
from functools import lru_cache
from pathlib import Path

from extract.engine.contract import Contract, Device, EngineDoesNotFit

CPU_LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16")
"""Instruction sets by what they add; a CPU has all before its own."""


BUILD_FOR_CPU = "Build for the CPU: --device cpu"


def this_device(kind: str, asked_by: object = "recipe", advice: str = BUILD_FOR_CPU) -> Device:
    """The device of this machine: "cpu", "cuda", or "auto" for a card where there is one.

    Args:
        kind: as a recipe or a contract names it.
        asked_by: what needs it, for the message.
        advice: what to do without it, for the message.

    Raises:
        EngineDoesNotFit: "cuda" without a usable card.
    """
    import torch

    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return Device(type="cpu", name=_cpu_name(), instruction_set=cpu_level())
    if not torch.cuda.is_available():
        raise EngineDoesNotFit(
            path=asked_by,
            field="device",
            expected="cuda",
            found="no CUDA device that torch can use",
            advice=advice,
        )
    major, minor = torch.cuda.get_device_capability()
    return Device(type="cuda", name=torch.cuda.get_device_name(), compute_capability=f"{major}.{minor}")


@lru_cache(maxsize=1)
def cpu_level() -> str:
    """The highest of CPU_LEVELS that this CPU has; other architectures give their own name."""
    import torch

    if platform.machine().lower() not in ("x86_64", "amd64"):
        return platform.machine().lower()
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        has_bf16 = "avx512_bf16" in _cpu_flags()
        return "avx512_bf16" if has_bf16 else "avx512"
    return "avx2" if capability.startswith("AVX2") else "baseline"


def computes_in(device: Device, dtype: str) -> bool:
    """Whether the device has arithmetic for `dtype` that is faster than float32's."""
    if dtype == "float32":
        return True
    if device.type == "cuda":
        return dtype == "float16" or float(device.compute_capability or 0) >= 8.0
    return dtype == "bfloat16" and device.instruction_set in ("avx512_bf16", "aarch64", "arm64")


def check_device(path: Path, contract: Contract) -> None:
    """Refuse an engine committed to another kind of device or to instructions that this CPU lacks.

    Raises:
        EngineDoesNotFit: with found, expected and what to do.
    """
    needed = contract.device
    advice = "Build an engine for this machine: extract build CHECKPOINT -o ENGINE"
    here = this_device(needed.type, path, advice)
    if needed.type == "cuda" and here.compute_capability != needed.compute_capability:
        raise EngineDoesNotFit(
            path=path,
            field="compute capability",
            expected=needed.compute_capability,
            found=here.compute_capability,
            advice=advice,
        )
    if needed.type == "cpu" and not _has(here.instruction_set, needed.instruction_set):
        raise EngineDoesNotFit(
            path=path,
            field="instruction set",
            expected=needed.instruction_set,
            found=here.instruction_set,
            advice=advice,
        )


def _has(found: str | None, needed: str | None) -> bool:
    if found in CPU_LEVELS and needed in CPU_LEVELS:
        return CPU_LEVELS.index(found) >= CPU_LEVELS.index(needed)
    return found == needed


def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _cpu_flags() -> set[str]:
    for line in _cpu_info().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _cpu_name() -> str:
    for line in _cpu_info().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
