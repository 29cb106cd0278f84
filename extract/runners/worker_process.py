"""A worker of `extract run --workers`: a process that is given one descriptor, and told the rest over that pipe.

A process of its own from the start rather than a fork: threads, CUDA and locks do not survive one. It is in a session
of its own, so that Ctrl-C reaches the run that started it and nobody else; when that run is gone, the pipe ends, and so
does the worker.
"""

import os
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from extract.errors import ExtractError
from extract.progress import Progress
from extract.runners.messages import (
    Assignment,
    Began,
    Broke,
    Committed,
    Counted,
    Ended,
    LeaveOut,
    Message,
    Ready,
    Refused,
    Said,
    Stop,
)
from extract.runners.todo import Todo

COUNT_EVERY_S = 0.3
GRACE_S = 5.0
"""What a worker may take to drop what is in flight; a read that hangs is left to hang."""


class Pipe:
    """The worker's end: threads take turns, and nobody minds if the other end is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._turn = connection, threading.Lock()

    def tell(self, message: Message) -> None:
        """Say something."""
        with self._turn, suppress(OSError):  # who is alone ends by the thread that listens
            self._connection.send(message)

    def began(self, shard: int) -> None:
        """See `shard_loop.Watcher`."""
        self.tell(Began(shard))

    def broke(self, shard: int, reason: str) -> None:
        """See `shard_loop.Watcher`."""
        self.tell(Broke(shard, reason))


class ToldProgress(Progress):
    """Counters that are shown elsewhere."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(quiet=True)
        self._pipe = pipe

    def say(self, message: str) -> None:
        """Pass it on."""
        self._pipe.tell(Said(message))


class Listener:
    """Takes orders in a thread of its own; `stop` is set when the worker should end, or is the last one left alive."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.stop = threading.Event()
        self.todo: Todo | None = None
        self.in_danger = True
        """Nothing would be lost by ending at once: the engine is still being loaded."""

    def listen(self) -> None:
        """Until the pipe ends."""
        try:
            while not isinstance(order := self._connection.recv(), Stop):
                if isinstance(order, LeaveOut) and self.todo is not None:
                    self.todo.left_out = order.shards
        except (EOFError, OSError):
            pass
        self.stop.set()
        if not self.in_danger:
            threading.Event().wait(GRACE_S)
        os._exit(130)


def main(descriptor: int) -> None:
    """Work until nothing is left."""
    connection = Connection(descriptor)
    assignment: Assignment = connection.recv()
    if assignment.card is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = assignment.card  # read when torch is first asked for a card
    pipe, listener = Pipe(connection), Listener(connection)
    try:
        _work(assignment, pipe, listener, connection)
        pipe.tell(Ended())
    except ExtractError as error:
        pipe.tell(Refused(error))
    except KeyboardInterrupt:
        pass


def _work(assignment: Assignment, pipe: Pipe, listener: Listener, connection: Connection) -> None:
    from extract.claims import Claims
    from extract.job import JobDirectory
    from extract.jobs import open_job
    from extract.pipeline import Worker
    from extract.runners.loading import load_engine
    from extract.runners.shard_loop import make_what_is_left
    from extract.storage import locate

    assert assignment.spec.output is not None  # the run has opened it
    directory = JobDirectory(locate(assignment.spec.output))
    job = open_job(assignment.spec)
    todo = Todo(job.plan, directory, assignment.stripe)
    todo.left_out = assignment.left_out
    listener.todo = todo
    threading.Thread(target=listener.listen, name="extract-orders", daemon=True).start()
    progress = ToldProgress(pipe)
    loaded = load_engine(job, lambda message: None, threads=assignment.threads)
    listener.in_danger = False
    pipe.tell(Ready(loaded.plan.engine.device.name))
    threading.Thread(target=_keep_counting, args=(progress, pipe), name="extract-counts", daemon=True).start()
    worker = Worker(
        plan=loaded.plan,
        source=job.source,
        tokenizer=job.tokenizer,
        runtime=loaded.runtime,
        progress=progress,
        stop=listener.stop,
    )
    claims = Claims(directory.claims)
    try:
        for among in (*((shard,) for shard in assignment.alone), None):
            wait = among is None and assignment.stripe is None
            for finished in make_what_is_left(worker, directory, todo, claims, pipe, among=among, wait=wait):
                pipe.tell(Committed(finished.commit, finished.won))
    finally:
        pipe.tell(Counted(progress.counts()))
        claims.close()
        job.source.close()


def _keep_counting(progress: Progress, pipe: Pipe) -> None:
    pause = threading.Event()
    while not pause.wait(COUNT_EVERY_S):
        pipe.tell(Counted(progress.counts()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
