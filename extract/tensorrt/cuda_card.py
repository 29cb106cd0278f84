"""A CUDA card through torch, and which of a machine's cards a worker takes.

One worker computes on one card: an engine plans for all of its memory. The claim is a lock on a small file of this
machine, so that several workers started alike spread over the cards, and a killed one leaves its card free.
"""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch

from extract.engine.contract import Device, EngineDoesNotFit
from extract.tensorrt.card import Event

LOCKS = "extract-cards"


class CudaStream:
    """See `extract.tensorrt.card.Stream`."""

    def __init__(self, index: int) -> None:
        cuda: Any = torch.cuda  # its classes are not annotated
        self._stream = cuda.Stream(device=index)
        self._event = cuda.Event
        self.handle: int = self._stream.cuda_stream

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def run(self, work: Callable[[], Any]) -> Any:
        """Queue what `work` does."""
        with torch.cuda.stream(self._stream):
            return work()

    def record(self) -> Event:
        """An event behind all that is queued."""
        event = self._event()
        event.record(self._stream)
        return cast("Event", event)

    def wait(self, event: Event) -> None:
        """Begin what follows after the event."""
        self._stream.wait_event(cast("torch.cuda.Event", event))

    def synchronize(self) -> None:
        """Wait for all that is queued."""
        self._stream.synchronize()


class CudaCard:
    """See `extract.tensorrt.card.Card`."""

    def __init__(self, index: int, device: Device, lock: IO[str] | None) -> None:
        self.device = device
        self.total_bytes: int = torch.cuda.get_device_properties(index).total_memory
        self._index, self._lock = index, lock
        torch.cuda.set_device(index)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the card."""
        return torch.empty(shape, dtype=dtype, device=f"cuda:{self._index}")

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Page-locked memory on the host."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def stream(self) -> CudaStream:
        """A new stream."""
        return CudaStream(self._index)

    def close(self) -> None:
        """Give up the claim."""
        if self._lock is not None:
            self._lock.close()


def claim_card(wanted: Device | None, path: object) -> CudaCard:
    """Take the first free card that fits.

    Args:
        wanted: what an engine is committed to; `None`: any card.
        path: what needs it, for the message.

    Raises:
        EngineDoesNotFit: no card, none of that kind, or all of them taken by other workers.
    """
    if not torch.cuda.is_available():
        raise EngineDoesNotFit(
            path=path,
            field="device",
            expected="cuda" if wanted is None else f"cuda ({wanted.name})",
            found="no CUDA device that torch can use",
            advice="extract doctor says why.",
        )
    found = [(index, _device(index)) for index in range(torch.cuda.device_count())]
    fitting = [(index, device) for index, device in found if wanted is None or alike(device, wanted)]
    if not fitting:
        assert wanted is not None
        raise _other_card(path, wanted, [device for _, device in found])
    for index, device in fitting:
        claimed, lock = _claim(index)
        if claimed:
            return CudaCard(index, device, lock)
    raise EngineDoesNotFit(
        path=path,
        field="a free card of kind",
        expected=fitting[0][1].name,
        found=f"{len(fitting)} of them, each taken by another worker",
        advice="Start one worker a card.",
    )


def alike(device: Device, wanted: Device) -> bool:
    """A TensorRT engine runs on the very kind of card that it was built on."""
    return next(_differences(device, wanted), None) is None


def _differences(device: Device, wanted: Device) -> Iterator[tuple[str, object, object]]:
    for field, name in (("compute_capability", "compute capability"), ("name", "card"), ("num_sms", "multiprocessors")):
        found, expected = getattr(device, field), getattr(wanted, field)
        if expected is not None and found != expected:
            yield name, found, expected


def _other_card(path: object, wanted: Device, found: list[Device]) -> EngineDoesNotFit:
    field, one, expected = next(_differences(found[0], wanted))
    return EngineDoesNotFit(
        path=path,
        field=field,
        expected=expected,
        found=one if len(found) == 1 else " and ".join(sorted({device.name for device in found})),
        advice="A TensorRT engine runs on the kind of card that it was built on. Build one for this card: "
        "extract build CHECKPOINT --runtime tensorrt-llm -o ENGINE",
    )


def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        type="cuda",
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        num_sms=properties.multi_processor_count,
        cuda=torch.version.cuda,
        driver=_driver(),
    )


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    words = text.split("\n", 1)[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _claim(index: int) -> tuple[bool, IO[str] | None]:
    """Lock a card's file; where no file can be locked, cards are taken unclaimed."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / LOCKS
    unique = str(getattr(torch.cuda.get_device_properties(index), "uuid", index))
    try:
        folder.mkdir(exist_ok=True)
        lock = (folder / f"{unique}.lock").open("a", encoding="ascii")
    except OSError:
        return True, None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return False, None
    except OSError:
        lock.close()
        return True, None
    return True, lock
