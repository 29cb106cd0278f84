"""The hot loop: windows -> token batches -> hidden states -> shard files, one shard after the other.

Three stages, each a plain generator: `prepared` (read and tokenise), `computed` (forward passes), `written` (encode,
compress, commit). Chained directly they are the sequential twin; with `ahead` between them the first two run in
background threads beside the last one. Both give the same bytes, because windows and batches depend on the shard alone.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from extract.engine.contract import AheadRuntime, PassOutOfMemory, Pending, Runtime, layer_states
from extract.errors import EngineRefused, ExtractError
from extract.packing import TokenBudget, pack, token_positions
from extract.planning import Plan, carried_columns
from extract.progress import Progress
from extract.records import States
from extract.shard_windows import Window, WindowLimits, windows_of
from extract.sources.base import Source
from extract.text.tokens import RowTokenizer

T = TypeVar("T")

WINDOW_BYTES = 128 * 2**20
WINDOW_TOKENS = 65_536
GRACE_S = 5.0


class AnotherEngineLoaded(EngineRefused):
    """The engine in memory is not the one that the job names: its numbers would carry the wrong name."""

    template = (
        "the engine that is loaded has id {found}, the engine of the job has id {expected}. "
        "Load the engine of the job, or name the loaded one in the job spec."
    )


class ShardBroke(Exception):
    """Something unforeseen broke one shard; the others can go on. Never leaves the runner."""

    def __init__(self, shard: int, reason: str) -> None:
        super().__init__(reason)
        self.shard, self.reason = shard, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What one process needs to make shards: the plan, and the parts it names, opened."""

    plan: Plan
    source: Source
    tokenizer: RowTokenizer
    runtime: Runtime
    progress: Progress
    stop: threading.Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A window with its states: [T, H] in row order for kind "tokens", else [sequences with tokens, H].

    Attributes:
        layers: the same of each of `states.layers`, in their order.
        finite: of the final states and of each layer's: whether all of them are known to be finite.
    """

    window: Window
    states: States
    layers: tuple[States, ...] = ()
    finite: tuple[bool, ...] = ()
    seconds: float
    max_tokens: int


def window_limits(plan: Plan) -> WindowLimits:
    """How much is sorted and held at once: at least one full pass, else what WINDOW_BYTES of final states allow.

    Layers do not count, so that the passes, and the final states to the last bit, are the same with and without them.
    """
    width_bytes = 4 * plan.engine.output.width if plan.spec.states.kind == "tokens" else 1
    held = min(WINDOW_TOKENS, WINDOW_BYTES // width_bytes)
    max_tokens, max_sequences = plan.spec.run.max_tokens, plan.spec.run.max_sequences
    assert max_tokens is not None and max_sequences is not None  # resolved by make_plan
    return WindowLimits(max_tokens=max(max_tokens, held), max_sequences=max(max_sequences, 8192))


def prepared(worker: Worker, shards: Iterable[int]) -> Iterator[Window]:
    """Read and tokenise the shards, window by window."""
    limits, carried = window_limits(worker.plan), carried_columns(worker.plan.spec.source)
    at = worker.plan.record.position_of
    for shard in shards:
        start, stop = worker.plan.rows_of(shard)
        with blaming(shard):
            for window in windows_of(shard, start, stop, worker.source, worker.tokenizer, limits, carried, at):
                worker.progress.spent("read+tokenise", window.seconds)
                yield window
                if window.at_end and worker.plan.num_rows is None:
                    return


def computed(
    worker: Worker, windows: Iterable[Window], ready: Callable[[], bool] = lambda: False
) -> Iterator[Computed]:
    """Run the forward passes of each window; out of memory halves the token budget once and says so.

    Args:
        worker: whose runtime computes.
        windows: prepared ones.
        ready: whether the next window is there already. A runtime that can is then given its passes before the states
            of the window at hand are down. Nobody waits for a window while another one could be handed on: the next
            shard may come only after that one's commit.
    """
    passes = _Passes(worker)
    begun: deque[_Begun] = deque()
    for window in _when_ready(iter(windows), ready if passes.ahead else lambda: True):
        failure: Exception | None = None
        if window is not None:
            try:
                begun.append(passes.begin(window, alone=not begun))
            except (ExtractError, ShardBroke) as error:  # not of the windows before it
                failure = error
        while begun and (window is None or failure is not None or len(begun) > int(passes.ahead)):
            first = begun.popleft()
            yield passes.finish(first, begun[0].window if begun else None)
        if failure is not None:
            raise failure


def _when_ready(windows: Iterator[Window], ready: Callable[[], bool]) -> Iterator[Window | None]:
    """The windows, and `None` whenever the next one is not there yet, and at the end."""
    while True:
        if not ready():
            yield None
        window = next(windows, None)
        yield window
        if window is None:
            return


@dataclass(slots=True, kw_only=True)
class _Begun:
    """A window whose passes were begun."""

    window: Window
    states: list[States]
    pending: list[tuple[Pending, int]]
    """What each batch that is not done is waited for by, and its tokens."""
    max_tokens: int


class _Passes:
    """The passes of one worker's windows.

    Attributes:
        ahead: a window may be begun before the one before it is finished.
    """

    def __init__(self, worker: Worker) -> None:
        run, contract = worker.plan.spec.run, worker.plan.engine
        assert run.max_tokens is not None and run.max_sequences is not None  # resolved by make_plan
        self._worker, self._runtime = worker, worker.runtime
        self._budget = TokenBudget(
            max_tokens=run.max_tokens,
            max_sequences=run.max_sequences,
            equal_length=contract.runtime.layout == "dense",
            shared=run.share and contract.runtime.decoder == "own",
        )
        self._halved = False
        self._clock = time.perf_counter()
        self.ahead = run.overlap and isinstance(worker.runtime, AheadRuntime)

    def begin(self, window: Window, *, alone: bool) -> _Begun:
        """Give the runtime a window's passes; `alone`: no other window is under way."""
        if alone:
            self._now(window)
        with blaming(window.shard):
            try:
                return self._begun(window)
            except PassOutOfMemory as error:
                if self._halved:
                    raise
                self._halved = True
                largest = min(self._budget.max_tokens, self._worker.plan.engine.limits.pass_tokens or 2**63)
                self._budget = replace(self._budget, max_tokens=max(1, largest // 2))
                self._worker.progress.say(f"{error} Going on with {self._budget.max_tokens:,} tokens a pass.")
                return self._begun(window)

    def finish(self, begun: _Begun, following: Window | None) -> Computed:
        """Wait for a window's states; `following` is the one that is under way then."""
        progress = self._worker.progress
        finite = (bool(begun.pending),) * len(begun.states)
        with blaming(begun.window.shard):
            for pending, num_tokens in begun.pending:
                clock = time.perf_counter()
                finite = tuple(map(min, finite, pending.wait()))
                progress.spent("forward", time.perf_counter() - clock)
                progress.advance(tokens=num_tokens)
        seconds = time.perf_counter() - self._clock
        if following is not None:
            self._now(following)
        states, *layers = begun.states
        return Computed(
            window=begun.window,
            states=states,
            layers=tuple(layers),
            finite=finite,
            seconds=seconds,
            max_tokens=begun.max_tokens,
        )

    def _now(self, window: Window) -> None:
        """From here on time is this window's."""
        self._worker.progress.begin_window(window.piece.new_rows, len(window.piece.rows.input_ids))
        self._clock = time.perf_counter()

    def _begun(self, window: Window) -> _Begun:
        """States hold the final ones, then those of each layer that is asked for."""
        worker, rows = self._worker, window.piece.rows
        kind, layers = worker.plan.spec.states.kind, worker.plan.spec.states.layers
        dtype = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[worker.plan.engine.output.dtype]
        if kind == "mean":
            dtype = np.float32
        has_tokens = np.diff(rows.offsets) > 0
        place = np.cumsum(has_tokens) - 1
        count = len(rows.input_ids) if kind == "tokens" else int(np.count_nonzero(has_tokens))
        states = [np.empty((count, worker.plan.engine.output.width), dtype) for _ in range(1 + len(layers))]
        pending: list[tuple[Pending, int]] = []
        for batch in pack(rows, self._budget):
            if worker.stop.is_set():
                raise _Stopped
            where = token_positions(rows.offsets, batch.members) if kind == "tokens" else place[batch.members]
            clock = time.perf_counter()
            if self.ahead and isinstance(self._runtime, AheadRuntime):
                pending.append((self._runtime.submit(batch, kind, layers, states, where), batch.num_tokens))
                worker.progress.spent("forward", time.perf_counter() - clock)
                continue
            for kept, found in zip(states, layer_states(self._runtime, batch, kind, layers), strict=True):
                kept[where] = found
            worker.progress.spent("forward", time.perf_counter() - clock)
            worker.progress.advance(tokens=batch.num_tokens)
        return _Begun(window=window, states=states, pending=pending, max_tokens=self._budget.max_tokens)


@contextmanager
def blaming(shard: int) -> Iterator[None]:
    """Say which shard an unforeseen error belongs to; our own errors already say what is wrong, and stop the run."""
    try:
        yield
    except (ExtractError, _Stopped):
        raise
    except Exception as error:
        raise ShardBroke(shard, f"{type(error).__name__}: {error}") from error


class _Stopped(Exception):
    """Leaves the stages; the runner turns it into `StopRequested`."""


def run_stages(
    worker: Worker, shards: Iterable[int], write: Callable[[Iterable[Computed]], Iterator[T]]
) -> Iterator[T]:
    """The three stages over some shards; `write` turns computed windows into commits, in the calling thread.

    Raises:
        AnotherEngineLoaded: the worker's runtime is not the plan's engine.
        KeyboardInterrupt: the worker's `stop` was set; the shard in flight is dropped.
    """
    found, expected = worker.runtime.contract.engine_id, worker.plan.engine.engine_id
    if found != expected:
        raise AnotherEngineLoaded(found=found[:16], expected=expected[:16])
    try:
        if worker.plan.spec.run.overlap:
            with (
                ahead(prepared(worker, shards), depth=2) as windows,
                ahead(computed(worker, windows, windows.ready), depth=1) as done,
            ):
                yield from write(done)
        else:
            yield from write(computed(worker, prepared(worker, shards)))
    except _Stopped:
        raise KeyboardInterrupt from None


class ahead(Iterator[T]):
    """Run an iterator in a background thread, at most `depth` items ahead of who consumes it.

    An exception of the iterator comes out of `next`. Leaving the `with` block stops the thread and closes the iterator,
    also when it waits for room.
    """

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._items = iter(items)
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="extract-ahead", daemon=True)

    def __enter__(self) -> "ahead[T]":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leaving.set()
        # Who interrupts twice does not wait for a read that hangs; the thread never writes, so it may be left behind.
        self._thread.join(GRACE_S if kind is KeyboardInterrupt else None)

    def ready(self) -> bool:
        """Whether `next` would not wait."""
        return not self._queue.empty()

    def __next__(self) -> T:
        item, error = self._queue.get()
        if error is not None:
            raise error
        return item  # type: ignore[return-value]

    def _fill(self) -> None:
        try:
            for item in self._items:
                if not self._put(item, None):
                    break
            else:
                self._put(None, StopIteration())
        except BaseException as error:
            self._put(None, error)
        finally:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()

    def _put(self, item: T | None, error: BaseException | None) -> bool:
        while not self._leaving.is_set():
            try:
                self._queue.put((item, error), timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
