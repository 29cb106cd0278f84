"""The interface of a card over this machine's own memory: nothing is late, nothing is pinned, no stream exists.

The plain twin of `extract.tensorrt.cuda_card`. What runs on a card runs here by the same code, in order; that is how it
is tried where there is none, and it is slower than our CPU decoder, so no engine is built for it.
"""

from collections.abc import Callable
from typing import Any

import torch

from extract.engine.contract import Device


class HostEvent:
    """See `extract.tensorrt.card.Event`; it has happened."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostStream:
    """See `extract.tensorrt.card.Stream`; work is done when it is given."""

    handle = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def run(self, work: Callable[[], Any]) -> Any:
        """Call `work()`."""
        return work()

    def record(self) -> HostEvent:
        """An event that has happened."""
        return HostEvent()

    def wait(self, event: HostEvent) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostCard:
    """See `extract.tensorrt.card.Card`."""

    def __init__(self, device: Device, total_bytes: int) -> None:
        self.device, self.total_bytes = device, total_bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory."""
        return torch.empty(shape, dtype=dtype)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory."""
        return torch.empty(shape, dtype=dtype)

    def stream(self) -> HostStream:
        """A stream."""
        return HostStream()

    def close(self) -> None:
        """Nothing to give up."""
