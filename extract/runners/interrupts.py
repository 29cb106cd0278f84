"""What SIGINT and SIGTERM do to a run: the first one asks for a clean stop, the second one stops at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from extract.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(Interrupted):
    """A signal asked the run to stop."""

    template = (
        "interrupted: {committed} shards are committed in {path}; what was in flight was dropped. "
        "Run the same command again to go on."
    )


class Interrupts:
    """While shards are made, the first signal sets `stop` and the second one breaks off; else the first one does."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._gentle = False

    @contextmanager
    def gentle(self) -> Iterator[None]:
        """While shards are made."""
        self._gentle = True
        try:
            yield
        finally:
            self._gentle = False

    def listen(self) -> None:
        """Take the signals, again if a library has taken them since; only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.stop.is_set() or not self._gentle:
            raise KeyboardInterrupt
        self.stop.set()


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Both signals go to `Interrupts`, where this is the main thread; elsewhere nothing can be caught."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    interrupts.listen()
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
