"""What this machine computes on, and whether an engine committed to a device may run here.

Asks torch about cards only, and about a CPU where the system does not list its flags: importing it costs a second.
"""

import os
import platform
from functools import lru_cache
from pathlib import Path

from extract.cpu.cpu_flags import cpu_flags, cpu_name
from extract.engine.contract import Contract, Device, EngineDoesNotFit

CPU_LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16")
"""Instruction sets by what they add; a CPU has all before its own."""

FP8_CAPABILITY = 8.9
"""Compute capability of the first cards that multiply FP8 numbers."""

BUILD_FOR_CPU = "Build for the CPU: --device cpu"


def this_device(kind: str, asked_by: object = "recipe", advice: str = BUILD_FOR_CPU, needed: str = "cuda") -> Device:
    """The device of this machine: "cpu", "cuda", or "auto" for a card where there is one.

    Args:
        kind: as a recipe or a contract names it.
        asked_by: what needs it, for the message.
        advice: what to do without it, for the message.
        needed: the card that is asked for, for the message.

    Raises:
        EngineDoesNotFit: "cuda" without a usable card.
    """
    if kind == "cpu":
        return Device(type="cpu", name=cpu_name(), instruction_set=cpu_level())
    import torch

    if kind == "auto":
        return this_device("cuda" if torch.cuda.is_available() else "cpu", asked_by, advice)
    if not torch.cuda.is_available():
        raise EngineDoesNotFit(
            path=asked_by,
            field="device",
            expected=needed,
            found="no CUDA device that torch can use",
            advice=advice,
        )
    major, minor = torch.cuda.get_device_capability()
    return Device(type="cuda", name=torch.cuda.get_device_name(), compute_capability=f"{major}.{minor}")


def visible_cards() -> list[str]:
    """The cards that this process may use, by the names that CUDA_VISIBLE_DEVICES takes. Starts nothing on them."""
    import torch

    count = torch.cuda.device_count()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(card) for card in range(count)] if chosen is None else chosen.split(",")[:count]


@lru_cache(maxsize=1)
def cpu_level() -> str:
    """The highest of CPU_LEVELS that this CPU has; other architectures give their own name."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return platform.machine().lower()
    flags = cpu_flags() or _flags_of_torch()
    if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}:
        return "avx512_bf16" if "avx512_bf16" in flags else "avx512"
    return "avx2" if flags >= {"avx2", "fma"} else "baseline"


def computes_in(device: Device, dtype: str) -> bool:
    """Whether the device has arithmetic for `dtype` that is faster than float32's."""
    if dtype == "float32":
        return True
    if dtype == "int8":
        return device.type == "cpu"
    if dtype == "fp8":
        return device.type == "cuda" and float(device.compute_capability or 0) >= FP8_CAPABILITY
    if device.type == "cuda":
        return dtype == "float16" or float(device.compute_capability or 0) >= 8.0
    return dtype == "bfloat16" and device.instruction_set in ("avx512_bf16", "aarch64", "arm64")


def check_device(path: Path, contract: Contract) -> None:
    """Refuse an engine committed to another kind of device or to instructions that this CPU lacks.

    Raises:
        EngineDoesNotFit: with found, expected and what to do.
    """
    needed = contract.device
    build = "extract build CHECKPOINT -o ENGINE"
    advice = f"Build an engine for this machine: {build}"
    no_card = f"extract doctor says why. Or build one for this machine: {build}"
    here = this_device(needed.type, path, no_card, f"cuda ({needed.name})")
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


def _flags_of_torch() -> frozenset[str]:
    """What torch found, where the system lists no flags."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
    return frozenset({"avx2", "fma"}) if capability.startswith("AVX2") else frozenset()
