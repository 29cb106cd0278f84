"""One place for a worker process: started, heard, ended, and started again after it died."""

import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from extract.progress import Counts
from extract.runners.messages import Assignment, Order
from extract.runners.summary import WorkerPart

MODULE = "extract.runners.worker_process"


class WorkerSlot:
    """A worker process and what it has said.

    Attributes:
        connection: the run's end of the pipe; `None` when no process is there.
        in_flight: shards that the living process has taken and not finished.
        ready: whether the living process has loaded its engine.
        alone: shards that the next process makes one at a time.
        alive: when the living process last showed progress, or began to do something (monotonic seconds).
        ended_because: why the living process was killed from here; `None`: it was not.
        deaths_before_ready: in a row.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.connection: Connection | None = None
        self.in_flight: set[int] = set()
        self.ready = False
        self.alone: tuple[int, ...] = ()
        self.deaths_before_ready = 0
        self.alive = 0.0
        self.ended_because: str | None = None
        self.counts = Counts()
        self.committed_rows = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = self._num_shards = self._num_rows = 0
        self._device = "?"
        self._since = 0.0
        self._earlier = Counts()
        self._seconds = 0.0

    def start(self, assignment: Assignment) -> None:
        """Start a process."""
        ours, theirs = socket.socketpair()
        settings = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if assignment.threads is not None:
            settings["RAYON_NUM_THREADS"] = str(assignment.threads)  # of the tokenizer
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno())],  # -P: no module of the current directory
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2 if sys.stderr is not None else subprocess.DEVNULL,  # stdout is for the command's own result
                start_new_session=True,
                env={**os.environ, **settings},
            )
        self.connection = Connection(ours.detach())
        self.in_flight, self.ready, self.counts, self.committed_rows = set(), False, Counts(), 0
        self.alive, self.ended_because = time.monotonic(), None
        self._num_starts += 1
        self.connection.send(assignment)

    def tell(self, order: Order) -> None:
        """Give an order; one that died does not hear it."""
        if self.connection is not None:
            try:
                self.connection.send(order)
            except OSError:
                return  # its death is noticed where it is listened to

    def is_ready(self, device: str) -> None:
        """The engine is loaded."""
        self.ready, self.deaths_before_ready = True, 0
        self._device, self._since = device, time.perf_counter()
        self.alive = time.monotonic()

    def began(self, shard: int) -> None:
        """It has taken a shard."""
        if not self.in_flight:
            self.alive = time.monotonic()
        self.in_flight.add(shard)

    def heard(self, counts: Counts) -> Counts:
        """New counts; returns those before. Any change is a sign of life."""
        before = self.counts
        if counts != before:
            self.alive = time.monotonic()
        self.counts = counts
        return before

    def made(self, rows: int) -> None:
        """It has committed a shard."""
        self._num_shards += 1
        self._num_rows += rows
        self.committed_rows += rows

    def ended(self) -> int:
        """The pipe has ended: wait for the process.

        Returns:
            Its exit code, minus the signal that killed it.
        """
        assert self.connection is not None and self._process is not None
        self.connection.close()
        self.connection = None
        if self.ready:
            self._seconds += time.perf_counter() - self._since
        self._earlier = _sum(self._earlier, self.counts)
        return self._process.wait()

    def end(self, reason: str) -> None:
        """Kill the process, and let its pipe tell when it is gone: a read that hangs in the kernel dies later."""
        if self.ended_because is None and self._process is not None:
            self.ended_because = reason
            self._process.kill()

    def kill(self) -> None:
        """At once."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def part(self, node: str) -> WorkerPart:
        """What this place did, by however many processes."""
        forward = self._earlier.seconds[1]
        seconds = max(self._seconds, 1e-9)
        return WorkerPart(
            worker=self.number,
            node=node,
            device=self._device,
            num_starts=self._num_starts,
            num_shards=self._num_shards,
            num_rows=self._num_rows,
            num_tokens=self._earlier.tokens,
            seconds=round(self._seconds, 3),
            tokens_per_s=round(self._earlier.tokens / seconds, 1),
            idle_share=round(max(0.0, 1 - forward / seconds), 4) if self._seconds else 0.0,
        )


def _sum(one: Counts, other: Counts) -> Counts:
    return Counts(
        rows=one.rows + other.rows,
        tokens=one.tokens + other.tokens,
        bytes_written=one.bytes_written + other.bytes_written,
        seconds=tuple(a + b for a, b in zip(one.seconds, other.seconds, strict=True)),
    )
