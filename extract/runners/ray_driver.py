"""`extract run --on ray`: a driver hands shard numbers to workers on a cluster and watches over them.

Each worker has the shard in work and the next one, so that it reads while it computes. Nothing but numbers and small
records passes through Ray: workers read the source and write shards themselves. A call that does not come back means
"outcome unknown": the worker is killed, replaced, and its shards are handed out again, each alone, for nobody knows
which one was to blame; if one was committed after all, the next attempt finds the record. A driver that dies costs the
shards in flight.
"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from extract.errors import ExtractError, ShardsFailed
from extract.progress import Counts, Progress
from extract.runners.dispatch import Dispatch
from extract.runners.ray_actor import Loaded, Outcome
from extract.runners.ray_cluster import MAX_OUTSTANDING, Cluster, Lost
from extract.runners.ray_places import Places, RaySettings
from extract.runners.ray_slots import RaySlot
from extract.runners.session import Made, Session, StreamHasNoShards, run_job
from extract.runners.summary import Summary, first_reasons
from extract.spec import JobSpec

WAIT_S = 0.5


class ShardsLost(ShardsFailed):
    """Shards that failed on every attempt, or a cluster on which no worker can run."""

    template = "{path}: {failed} of {shards} shards are missing: {details}. Run again to try them again."


def run_on_ray(spec: JobSpec, settings: RaySettings, *, progress: Progress | None = None) -> Summary:
    """Run a job on a Ray cluster, or go on with it.

    Args:
        spec: the job; its paths must lead to the same files on every node.
        settings: how the cluster is used.
        progress: where to show how far it is.

    Raises:
        RayMissing, NoCluster: there is nothing to run on.
        StreamHasNoShards: the source is a stream of unknown length.
        ShardsFailed: the rest is done, but some shards failed on every attempt.
        ResumeRefused, OutOfSpace, Interrupted: as `run`.
    """
    return run_job(with_whole_paths(spec), progress, partial(_make_on_ray, settings=settings))


def with_whole_paths(spec: JobSpec) -> JobSpec:
    """Workers start in another directory: relative paths become absolute, addresses and names of datasets stay."""
    source = spec.source
    paths = tuple(
        path if "://" in path or (source.format == "hf" and not Path(path).exists()) else str(Path(path).absolute())
        for path in source.paths
    )
    return replace(
        spec,
        source=replace(source, path=paths if isinstance(source.path, tuple) else paths[0]),
        engine=_whole(spec.engine),
        other_engines=tuple(str(_whole(path)) for path in spec.other_engines),
        output=_whole(spec.output),
    )


def _whole(path: str | None) -> str | None:
    return path if path is None or "://" in path else str(Path(path).absolute())


def _make_on_ray(session: Session, *, settings: RaySettings) -> Made:
    if session.plan.num_shards is None:
        raise StreamHasNoShards(what="--on ray")
    session.progress.say(f"connecting to ray at {settings.address or 'this machine'}")
    with Cluster(settings.address) as cluster:
        session.interrupts.listen()  # importing Ray takes SIGTERM
        return _Driver(session, settings, cluster).make()


class _Driver:
    """Hands out shards, and hears what becomes of them."""

    def __init__(self, session: Session, settings: RaySettings, cluster: Cluster) -> None:
        self._session, self._settings, self._cluster = session, settings, cluster
        self._made = Made()
        self._dispatch = Dispatch(
            session.todo.left(), max_attempts=settings.max_attempts, straggler_factor=settings.straggler_factor
        )
        self._places = Places(session, cluster, settings)

    def make(self) -> Made:
        """Until every shard is committed or has failed."""
        session = self._session
        stop = session.interrupts.stop
        try:
            with session.making():
                while self._dispatch.num_open and not stop.is_set():
                    if not self._places.fill(self._dispatch.num_open):
                        self._give_up()
                    self._hand_out()
                    self._ask_for_counts()
                    self._hear(WAIT_S)
                    self._end_what_hangs()
                if stop.is_set():
                    self._wind_down()
                    raise KeyboardInterrupt
        finally:
            self._places.end()
        self._made.parts = tuple(slot.part() for slot in self._places.slots if slot.num_starts)
        if self._dispatch.failed:
            session.todo.failed |= self._dispatch.failed
            self._made.error = self._lost()
        return self._made

    def _lost(self) -> ShardsLost:
        failed = self._session.todo.failed
        return ShardsLost(
            path=self._session.directory.root,
            failed=len(failed),
            shards=self._session.plan.num_shards,
            details=first_reasons(failed),
        )

    def _give_up(self) -> None:
        """No worker can run anywhere, and nothing will change that."""
        failure = self._places.last_failure
        if isinstance(failure, ExtractError):
            raise failure
        self._session.todo.failed |= dict.fromkeys(self._session.todo.left(), failure)
        raise self._lost()

    def _replace(self, slot: RaySlot, reason: str, *, counts: bool = True, culprit: int | None = None) -> None:
        """The worker is lost or useless: end it, and let its shards be handed out again.

        Args:
            slot: its place.
            reason: for the report.
            counts: as an attempt at its shards.
            culprit: the one of its shards that is known to be the reason; the others have not failed.
        """
        progress, shards = self._session.progress, slot.shards
        about = shards if culprit is None else (culprit,)
        what = f", shard{'s' * (len(about) > 1)} {', '.join(map(str, about))}" if about else ""
        progress.say(f"worker {slot.number} on {slot.node.name}{what}: {reason}")
        progress.add(Counts(rows=slot.committed_rows), Counts(rows=slot.counts.rows))  # the rest is done again
        self._places.lost(slot, reason, counts=counts)
        for shard in reversed(shards):
            self._lose(shard, slot, reason, counts=counts and shard in about)

    def _lose(self, shard: int, slot: RaySlot, reason: str, *, counts: bool = True) -> None:
        if self._dispatch.lost(shard, slot.node.node_id, reason, counts=counts):
            self._session.progress.say(f"shard {shard} has failed {self._settings.max_attempts} times and is left out")

    def _hand_out(self) -> None:
        """First to those who have nothing to do, then a second shard to those who have one."""
        now = time.monotonic()
        ready = [slot for slot in self._places.slots if slot.loaded is not None]
        for slot in ready:
            if not slot.making:
                slot.alive = now
                self._hand(slot, self._dispatch.take(slot.node.node_id, now))
        num_workers = len(self._places.living)
        for slot in ready:
            if 0 < len(slot.making) < MAX_OUTSTANDING:
                self._hand(slot, self._dispatch.take_ahead(slot.shards[0], slot.node.node_id, num_workers, now))

    def _hand(self, slot: RaySlot, shard: int | None) -> None:
        if shard is not None:
            slot.making[slot.handle.make.remote(shard)] = shard

    def _ask_for_counts(self) -> None:
        now = time.monotonic()
        for slot in self._places.slots:
            if slot.making and slot.counting is None and now - slot.asked > self._settings.count_every_s:
                slot.asked = now
                slot.counting = slot.handle.counts.remote()

    def _hear(self, timeout_s: float) -> None:
        out: dict[Any, RaySlot] = {}
        for slot in self._places.slots:
            out |= {call: slot for call in (slot.loading, slot.counting, *slot.making) if call is not None}
        if not out:
            time.sleep(min(timeout_s, 0.2))
        answers = [(call, self._cluster.result(call)) for call in self._cluster.wait(list(out), timeout_s)]
        for call, answer in sorted(answers, key=lambda pair: isinstance(pair[1], Lost)):  # what is known comes first
            slot = out[call]
            if call in (slot.loading, slot.counting) or call in slot.making:  # else its worker was ended a moment ago
                self._came_back(slot, call, answer)

    def _came_back(self, slot: RaySlot, call: Any, answer: Loaded | ExtractError | Outcome | Counts | Lost) -> None:
        if call == slot.counting:
            slot.counting = None
        match answer:
            case Counts():
                if answer.tokens >= slot.counts.tokens:  # else it was overtaken by the end of a shard
                    self._session.progress.add(answer, slot.heard(answer))
            case Loaded():
                slot.is_ready(answer)
            case Outcome():
                if answer.counts.tokens >= slot.counts.tokens:
                    self._session.progress.add(answer.counts, slot.heard(answer.counts))
                self._made_or_not(slot, call, answer)
            case Lost(reason, preempted):
                self._replace(slot, reason, counts=not preempted)
            case ExtractError():
                self._replace(slot, str(answer))
                self._places.last_failure = answer

    def _made_or_not(self, slot: RaySlot, call: Any, outcome: Outcome) -> None:
        shard, commit, now = slot.making[call], outcome.commit, time.monotonic()
        if commit is None:
            self._broke(slot, call, outcome)
            return
        del slot.making[call]
        slot.broke_in_a_row = 0
        for following in slot.shards[:1]:
            self._dispatch.began(following, now)
        self._session.todo.note(commit)
        self._dispatch.done(shard, now)
        if outcome.won:
            slot.made(commit.num_rows)
            self._made.add(commit)

    def _broke(self, slot: RaySlot, call: Any, outcome: Outcome) -> None:
        """The worker lives; whether its engine can still be trusted is another question."""
        reason, error = outcome.reason or "?", outcome.error
        if error is not None and error.exit_code not in OF_THIS_WORKER:
            raise error
        slot.broke_in_a_row += 1
        if error is not None:  # which does not say what shard it is about
            self._replace(slot, reason)
        elif slot.node.num_gpus or slot.broke_in_a_row > 1:  # a card's context is poisoned by one error
            self._replace(slot, reason, culprit=slot.making[call])
        else:
            shard = slot.making.pop(call)
            self._session.progress.say(f"shard {shard} broke on {slot.node.name}: {reason}")
            self._lose(shard, slot, reason)

    def _end_what_hangs(self) -> None:
        now, patience = time.monotonic(), self._settings.patience
        for slot in self._places.slots:
            reason = patience.lost_with(
                loading=slot.loading is not None, has_work=bool(slot.making), silent_s=now - slot.alive
            )
            if reason is not None:
                self._replace(slot, reason)

    def _wind_down(self) -> None:
        """Let workers drop what is in flight; who does not answer is killed a little later."""
        out = {call: slot for slot in self._places.slots for call in slot.making}
        for slot in self._places.slots:
            if slot.making:
                slot.handle.stop.remote()
        deadline = time.monotonic() + self._settings.stop_timeout_s
        while out and time.monotonic() < deadline:
            for call in self._cluster.wait(list(out), WAIT_S):
                del out[call]
                answer = self._cluster.result(call)
                if isinstance(answer, Outcome) and answer.commit is not None and answer.won:
                    self._made.add(answer.commit)


OF_THIS_WORKER = (4, 8)
"""Exit codes of errors that another worker may not meet: an engine that does not fit, a pass out of memory."""
