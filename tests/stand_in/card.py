"""A card made of CPU memory: its streams do their work as late as they may, so that a missing wait shows as numbers.

A real card may be late or not; a test can only trust code that is right on the latest card. So nothing that a stream is
given happens before somebody synchronises with it, and then no more than is needed. Fresh memory holds NaN (or a large
odd integer), memory is counted and runs out, and tensors on the card are told from tensors beside it.

Torch operations inside `Stream.run` are caught one by one: a view is taken at once, everything else gets memory for its
result at once and is computed with the rest of the queue; `.item()` and its like wait, as on a real card.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from extract.engine.contract import Device

Work = Callable[[], None]
Where = Literal["card", "pinned", "host", "freed"]


class DeviceFault(RuntimeError):
    """Illegal memory access and the like: the card is of no use afterwards."""


@dataclass
class Region:
    """Memory that the card handed out."""

    where: Literal["card", "pinned"]
    nbytes: int
    buffer: "weakref.ref[np.ndarray]"


class StandInEvent:
    """A point in a stream's work."""

    def __init__(self, stream: "StandInStream", position: int) -> None:
        self.stream, self.position = stream, position

    def synchronize(self) -> None:
        """Do the stream's work up to here."""
        self.stream.do_until(self.position)
        self.stream.card.check()

    def query(self) -> bool:
        """Whether the stream has got here; asking moves nothing."""
        return self.stream.done >= self.position


class StandInStream:
    """A queue of work that is put off until somebody waits for it."""

    def __init__(self, card: "StandInCard", handle: int) -> None:
        self.card, self.handle = card, handle
        self.queue: deque[Work] = deque()
        self.done = 0

    @property
    def position(self) -> int:
        """Pieces of work given so far."""
        return self.done + len(self.queue)

    def enqueue(self, work: Work) -> None:
        """Put work at the end."""
        self.card.check()
        with self.card.lock:
            self.queue.append(work)

    def do_until(self, position: int) -> None:
        """Do the first `position` pieces of work, unless the card broke before."""
        with self.card.lock, _disable_current_modes(), torch.no_grad():
            while self.done < position and self.queue and self.card.broken is None:
                work = self.queue.popleft()
                self.done += 1
                try:
                    work()
                except DeviceFault as fault:
                    self.card.broken = str(fault)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy; the memory beside the card must be pinned, else it is an error here (CUDA would wait)."""
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(f"copy of {tuple(source.shape)} {source.dtype} to {tuple(target.shape)} {target.dtype}")
        places = {self.card.where(target), self.card.where(source)}
        if not places <= {"card", "pinned"} or "card" not in places:
            raise ValueError(f"copy between {self.card.where(source)} and {self.card.where(target)} memory")
        self.enqueue(lambda: _silent_copy(target, source))

    def run(self, work: Callable[[], Any]) -> Any:
        """Call `work()` with its torch operations put into this queue."""
        with _Late(self):
            return work()

    def record(self) -> StandInEvent:
        """An event behind all that is queued so far."""
        return StandInEvent(self, self.position)

    def wait(self, event: StandInEvent) -> None:
        """What comes later begins after the event."""
        self.enqueue(lambda: event.stream.do_until(event.position))

    def synchronize(self) -> None:
        """Do everything queued."""
        self.do_until(self.position)
        self.card.check()


class _Late(TorchDispatchMode):
    """Puts torch operations into a stream's queue; see the module's docstring."""

    def __init__(self, stream: StandInStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        card, returns = self.stream.card, func._schema.returns
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            self.stream.synchronize()
            return tree_map(card.adopt, func(*args, **kwargs))
        if func._schema.is_mutable:
            self.stream.enqueue(lambda: func(*args, **kwargs))
            written = [
                kwargs.get(argument.name, args[place] if place < len(args) else None)
                for place, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            return written[0] if len(returns) == 1 else None if not returns else tuple(written)
        if any(value.alias_info is not None for value in returns):
            return func(*args, **kwargs)

        def meta(value: Any) -> Any:
            return value.to("meta") if isinstance(value, torch.Tensor) else value

        shapes = func(*tree_map(meta, args), **{**tree_map(meta, kwargs), **_on_meta(kwargs)})
        found = tree_map(lambda value: card.like(value) if isinstance(value, torch.Tensor) else value, shapes)

        def later() -> None:
            tree_map(lambda to, value: _silent_copy(to, value), found, func(*args, **kwargs))

        self.stream.enqueue(later)
        return found


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if kwargs.get("device") is not None else {}


def _silent_copy(target: Any, source: Any) -> Any:
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    return target


class StandInCard:
    """A card; see `extract.tensorrt.card.Card`.

    Args:
        total_bytes: after which `empty` and the packages run out of memory.
        compute_capability: as the packages see it.
        num_sms: multiprocessors.
        name: as a contract names it.
    """

    def __init__(
        self,
        total_bytes: int = 4 * 2**30,
        *,
        compute_capability: str = "9.0",
        num_sms: int = 132,
        name: str = "Stand-in card",
    ) -> None:
        self.device = Device(
            type="cuda",
            name=name,
            compute_capability=compute_capability,
            num_sms=num_sms,
            cuda="13.0",
            driver="580.0",
        )
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.closed = False
        self.broken: str | None = None
        self.lock = threading.RLock()
        self._regions: dict[int, Region] = {}
        self._streams: weakref.WeakValueDictionary[int, StandInStream] = weakref.WeakValueDictionary()
        self._handles = itertools.count(0x7F0000001000, 0x1000)

    def check(self) -> None:
        """Raise what broke the card, again and again, as CUDA does."""
        if self.broken is not None:
            raise DeviceFault(f"CUDA error: {self.broken}")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the card, filled with NaN or a large odd integer. Raises torch.OutOfMemoryError."""
        return self._allocate(shape, dtype, "card")

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Page-locked memory on the host, filled the same way."""
        return self._allocate(shape, dtype, "pinned")

    def stream(self) -> StandInStream:
        """A new stream."""
        self.check()
        stream = StandInStream(self, next(self._handles))
        self._streams[stream.handle] = stream
        return stream

    def close(self) -> None:
        """Let others have the card."""
        self.closed = True

    def stream_of(self, handle: int) -> StandInStream:
        """The stream behind a raw handle."""
        stream = self._streams.get(handle)
        if stream is None:
            raise RuntimeError(f"CUDA error: invalid resource handle (stand-in: no stream {handle!r})")
        return stream

    def where(self, tensor: torch.Tensor) -> Where:
        """Whose memory a tensor lies in."""
        region = self.region(tensor.untyped_storage().data_ptr())
        if region is None:
            return "host"
        return region.where if region.buffer() is not None else "freed"

    def region(self, address: int) -> Region | None:
        """What was handed out at the beginning of that storage."""
        return self._regions.get(address)

    def take(self, nbytes: int) -> None:
        """Count memory that is not a tensor: weights and workspaces. Raises torch.OutOfMemoryError."""
        with self.lock:
            if self.used_bytes + nbytes > self.total_bytes:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {nbytes:,} bytes on the stand-in card, which has "
                    f"{self.total_bytes:,} of which {self.total_bytes - self.used_bytes:,} are free."
                )
            self.used_bytes += nbytes

    def give(self, nbytes: int) -> None:
        """Undo `take`."""
        with self.lock:
            self.used_bytes -= nbytes

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory on the card of a tensor's shape, strides left aside."""
        return self.empty(tuple(tensor.shape), tensor.dtype)

    def adopt(self, value: Any) -> Any:
        """A result that torch has put beside the card, on the card."""
        return self.like(value).copy_(value) if isinstance(value, torch.Tensor) else value

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, where: Literal["card", "pinned"]) -> torch.Tensor:
        self.check()
        if self.closed:
            raise RuntimeError("the card was closed")
        nbytes = max(1, int(np.prod(shape, dtype=np.int64))) * dtype.itemsize
        if where == "card":
            self.take(nbytes)
        with _disable_current_modes():
            buffer = np.empty(nbytes, dtype=np.uint8)
            address = buffer.ctypes.data
            held = nbytes if where == "card" else 0
            self._regions[address] = Region(where, nbytes, weakref.ref(buffer))
            weakref.finalize(buffer, self._forget, address, held).atexit = False
            flat = torch.from_numpy(buffer).view(dtype)
            _poison(flat)
            return flat[: int(np.prod(shape, dtype=np.int64))].view(shape)

    def _forget(self, address: int, nbytes: int) -> None:
        with self.lock:
            self.used_bytes -= nbytes
            self._regions.pop(address, None)


def _poison(flat: torch.Tensor) -> None:
    if flat.dtype.is_floating_point and flat.dtype.itemsize > 1:
        flat.fill_(float("nan"))
    elif flat.dtype is not torch.bool:
        flat.view(torch.uint8).fill_(0x5A)
