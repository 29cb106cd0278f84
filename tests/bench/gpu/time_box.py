"""Time that is given out to parts, and how long work takes on a device. Knows nothing of what is measured.

A part gets a deadline, asks before each thing it begins, and names what it left out: a report with holes that are named
is worth more than one that never came.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Deadline:
    """When a part has to be done, and what it cut off."""

    end: float
    cut_off: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def affords(self, seconds: float, what: str) -> bool:
        """Whether `what`, which takes about so long, may begin; what may not is remembered."""
        if self.left >= seconds:
            return True
        self.cut_off.append(what)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one thing."""

    median: float
    fastest: float
    slowest: float
    runs: int


def on_device(device: Any, work: Callable[[], object]) -> float:
    """Seconds of `work` on the device's own clock (events), or on the host's for a CPU."""
    import torch

    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    work()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3


def on_host(device: Any, work: Callable[[], object]) -> float:
    """Seconds until everything that `work` began is done, on the host's clock."""
    import torch

    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def timed(
    measure: Callable[[], float], *, at_least_s: float, runs: int = 3, most: int = 50, deadline: Deadline | None = None
) -> Timing:
    """Warm up once, then measure until there are `runs` runs and `at_least_s` seconds of them, or time is over."""
    measure()
    found: list[float] = []
    while (len(found) < runs or sum(found) < at_least_s) and len(found) < most:
        if found and deadline is not None and deadline.left < max(found):
            break
        found.append(measure())
    return Timing(median=statistics.median(found), fastest=min(found), slowest=max(found), runs=len(found))
