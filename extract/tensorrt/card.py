"""One CUDA card as the runtimes see it: memory on the card, pinned memory beside it, and streams of copies and passes.

A small interface in front of torch.cuda, because order is the whole difficulty here: everything that a stream is given
happens later, in that stream's own order, and only events order streams among each other. The tests run the same
runtime on a card of their own that puts work off as long as it may.
"""

from typing import TYPE_CHECKING, Any, Protocol

from extract.engine.contract import Device

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait, on the host, until the stream has got there."""


class Stream(Protocol):
    """A queue of work on the card.

    Attributes:
        handle: the raw CUDA stream, as TensorRT takes it.
    """

    handle: int

    def copy(self, target: "torch.Tensor", source: "torch.Tensor") -> None:
        """Queue a copy between tensors of equal shape and type; pinned memory on the host side, and both kept alive."""

    def run(self, work: Any) -> Any:
        """Call `work()` so that the torch operations in it are queued here, and return what it returns."""

    def record(self) -> Event:
        """An event behind all that is queued so far."""

    def wait(self, event: Event) -> None:
        """What is queued from here on begins after the event."""

    def synchronize(self) -> None:
        """Wait, on the host, until all that is queued is done."""


class Card(Protocol):
    """A card that this process computes on.

    Attributes:
        device: as a contract names it.
        total_bytes: memory of the card.
    """

    device: Device
    total_bytes: int

    def empty(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
        """Uninitialised memory on the card. Raises torch.OutOfMemoryError."""

    def pinned(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
        """Uninitialised page-locked memory on the host."""

    def stream(self) -> Stream:
        """A new stream."""

    def close(self) -> None:
        """Let other workers have the card."""
