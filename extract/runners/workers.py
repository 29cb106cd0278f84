"""`extract run --workers N`: several processes on this machine, each with its own engine, and one that watches them.

The watching one holds no shard, hands none out and computes nothing: workers claim shards as separate runs do. It
shows their progress, ends a worker that hangs, starts a new one in place of one that died, and finds out which shard is
to blame: what was in flight is tried again alone, and fails when it has taken workers with it too often.
"""

import os
import platform
import time
from multiprocessing.connection import Connection, wait

from extract.commits import commit_path, committed_shards, read_commit
from extract.engine.contract import Contract, EngineDoesNotFit
from extract.engine.device import visible_cards
from extract.errors import ExtractError, ShardsFailed, SpecError
from extract.progress import Counts
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
from extract.runners.patience import Patience
from extract.runners.session import Made, Session
from extract.runners.summary import first_reasons
from extract.runners.todo import MAX_ATTEMPTS
from extract.runners.worker_slots import WorkerSlot

MAX_DEATHS = 3
"""Of workers on one shard, and of workers in one place that had not even loaded their engine."""
LISTEN_S = 0.2
DIED, NOBODY = "worker", "no worker was left"
"""How the reasons begin that are not about what a shard holds."""


class TooManyWorkers(SpecError):
    """More workers than this machine has cards."""

    template = "{workers} workers were asked for; this engine needs a card for each, and there are {cards}. {advice}"


class WorkersDied(ShardsFailed):
    """Shards that no worker survived, or no worker that lives long enough to make any."""

    template = "{path}: shards are missing, for workers died: {details}. Run again to try them again."


def make_with_workers(session: Session, *, num_workers: int, patience: Patience) -> Made:
    """Make the shards that are missing, in worker processes."""
    return _Watch(session, num_workers, patience).make()


def threads_of_each(asked: int | None, contract: Contract, num_workers: int) -> int | None:
    """Threads of one worker's forward pass: as asked for, else its share; a card needs none."""
    if asked is not None or contract.device.type != "cpu":
        return asked
    return max(1, (contract.runtime.threads or len(os.sched_getaffinity(0))) // num_workers)


def cards_of_all(contract: Contract, num_workers: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each worker; TensorRT engines choose among all cards by their locks.

    Raises:
        TooManyWorkers: there are fewer cards.
        EngineDoesNotFit: there is none.
    """
    if contract.device.type == "cpu" or contract.runtime.name != "torch":
        return [None] * num_workers
    cards = visible_cards()
    if not cards:
        raise EngineDoesNotFit(
            path="--workers",
            field="device",
            expected="cuda",
            found="no CUDA device that torch can use",
            advice="extract doctor says why.",
        )
    if len(cards) < num_workers:
        raise TooManyWorkers(workers=num_workers, cards=len(cards), advice="Start one worker a card.")
    return list(cards[:num_workers])


class _Watch:
    """The state of one run with workers."""

    def __init__(self, session: Session, num_workers: int, patience: Patience) -> None:
        contract = session.plan.engine
        self._session, self._patience, self._made = session, patience, Made()
        self._threads = threads_of_each(session.plan.spec.run.threads, contract, num_workers)
        self._cards = cards_of_all(contract, num_workers)
        self._slots = [WorkerSlot(number) for number in range(num_workers)]
        self._suspects: set[int] = set()
        self._fatal: ExtractError | None = None
        self._told_to_stop = False
        session.progress.num_workers = num_workers

    def make(self) -> Made:
        """Until every worker has ended."""
        session = self._session
        session.progress.say(f"starting {len(self._slots)} workers, each loads {session.job.engine}")
        try:
            with session.making():
                for slot in self._slots:
                    self._start(slot)
                while listened := {slot.connection: slot for slot in self._slots if slot.connection is not None}:
                    for connection in wait(listened, LISTEN_S):
                        assert isinstance(connection, Connection)
                        self._hear(listened[connection])
                    if session.interrupts.stop.is_set():
                        self._tell_to_stop()
                    self._end_what_hangs()
        finally:
            for slot in self._slots:
                slot.kill()
        if session.interrupts.stop.is_set():
            raise KeyboardInterrupt
        if self._fatal is not None:
            raise self._fatal
        self._made.parts = tuple(slot.part(platform.node()) for slot in self._slots)
        self._note_what_is_missing()
        return self._made

    def _start(self, slot: WorkerSlot) -> None:
        slot.start(
            Assignment(
                spec=self._session.plan.spec,
                threads=self._threads,
                card=self._cards[slot.number],
                stripe=self._session.todo.stripe,
                alone=slot.alone,
                left_out=frozenset(self._session.todo.failed) | (frozenset(self._suspects) - frozenset(slot.alone)),
            )
        )

    def _hear(self, slot: WorkerSlot) -> None:
        assert slot.connection is not None
        try:
            message: Message = slot.connection.recv()
        except (EOFError, OSError):
            self._gone(slot)
            return
        session = self._session
        match message:
            case Ready(device):
                slot.is_ready(device)
            case Began(shard):
                slot.began(shard)
            case Committed(commit, won):
                slot.in_flight.discard(commit.shard)
                self._suspects.discard(commit.shard)
                session.todo.note(commit)
                if won:
                    slot.made(commit.num_rows)
                    self._made.add(commit)
            case Broke(shard, reason):
                slot.in_flight.discard(shard)
                session.todo.broke(shard, reason, most=MAX_ATTEMPTS)
                self._suspects.discard(shard)
                self._share_what_is_left_out()
            case Counted(counts):
                session.progress.add(counts, slot.heard(counts))
            case Said(text):
                session.progress.say(text)
            case Refused(error):
                self._fatal = self._fatal or error
                slot.in_flight.clear()
                self._tell_to_stop()
            case Ended():
                slot.in_flight.clear()

    def _gone(self, slot: WorkerSlot) -> None:
        """The pipe has ended: all is done, or the worker died."""
        in_flight, ready, ended_because = sorted(slot.in_flight), slot.ready, slot.ended_because
        code = slot.ended()
        if code == 0 or self._told_to_stop:
            return
        died = f"{DIED} {slot.number} " + (f"was ended: {ended_because}" if ended_because else f"died ({_cause(code)})")
        session = self._session
        session.progress.add(_only_rows(slot.committed_rows), _only_rows(slot.counts.rows))  # the rest is done again
        lost = [shard for shard in in_flight if not self._committed(slot, shard)]
        for shard in lost:
            if session.todo.broke(shard, died, most=MAX_DEATHS):
                self._suspects.discard(shard)
            else:
                self._suspects.add(shard)
        slot.alone = tuple(shard for shard in (*slot.alone, *lost) if shard in self._suspects)
        self._share_what_is_left_out()
        lost_shards = ", ".join(map(str, lost)) or "nothing"
        session.progress.say(f"{died}; in flight: {lost_shards}")
        if not ready:
            slot.deaths_before_ready += 1
            if slot.deaths_before_ready >= MAX_DEATHS:
                session.progress.say(f"worker {slot.number} died {MAX_DEATHS} times before it was ready; giving it up")
                self._made.error = WorkersDied(path=session.directory.root, details=died)
                return
        if session.todo.is_empty():
            return
        self._start(slot)

    def _end_what_hangs(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.connection is not None:
                reason = self._patience.lost_with(
                    loading=not slot.ready, has_work=bool(slot.in_flight), silent_s=now - slot.alive
                )
                if reason is not None:
                    slot.end(reason)

    def _committed(self, slot: WorkerSlot, shard: int) -> bool:
        """Whether a shard in flight was committed before its worker could say so."""
        path = commit_path(self._session.directory.commits, shard)
        if not path.exists():
            return False
        commit = read_commit(path)
        self._session.todo.note(commit)
        self._suspects.discard(shard)
        slot.made(commit.num_rows)
        self._made.add(commit)
        return True

    def _share_what_is_left_out(self) -> None:
        """Suspects are for the worker that tries them alone; what failed is for nobody."""
        for slot in self._slots:
            others = frozenset(self._suspects) - frozenset(slot.alone)
            slot.tell(LeaveOut(frozenset(self._session.todo.failed) | others))

    def _tell_to_stop(self) -> None:
        if not self._told_to_stop:
            self._told_to_stop = True
            for slot in self._slots:
                slot.tell(Stop())

    def _note_what_is_missing(self) -> None:
        """Shards that nobody made, because no worker was left: they failed, too."""
        session = self._session
        session.todo.done |= committed_shards(session.directory.commits)
        if all(slot.deaths_before_ready >= MAX_DEATHS for slot in self._slots):
            assert self._made.error is not None  # by the last of them
            if session.plan.num_shards is None:
                raise self._made.error
            session.todo.failed |= dict.fromkeys(session.todo.left(), NOBODY)
        if any(reason.startswith((DIED, NOBODY)) for reason in session.todo.failed.values()):
            self._made.error = WorkersDied(path=session.directory.root, details=first_reasons(session.todo.failed))


def _cause(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _only_rows(rows: float) -> Counts:
    return Counts(rows=rows)
