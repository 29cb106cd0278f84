"""Passes one window ahead: a runtime that takes them gives the same shards, in order, and nobody waits for nobody.

The runtime here is a real engine's, whose states come as late as they may: only when somebody waits for them.
"""

import threading
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from job_rig import Engines, job, parquet, runtime, texts
from test_pipeline import worker_of

from extract.engine.contract import AheadRuntime, PassOutOfMemory, layer_states
from extract.pipeline import ShardBroke, computed, prepared
from extract.runners import local
from extract.shards import values

ROWS = 60


class Late:
    """A batch whose states are computed when they are waited for, in the order of submission."""

    def __init__(self, owner: "LateRuntime", work: Any, finite: list[bool]) -> None:
        self.owner, self.work, self.finite = owner, work, finite
        owner.waiting.append(self)

    def wait(self) -> list[bool]:
        while self.work is not None:
            first = self.owner.waiting.popleft()
            first.work()
            first.work = None
        return self.finite


class LateRuntime:
    """A CPU engine that takes batches ahead, and says of some columns that they are finite, but for one batch."""

    def __init__(
        self,
        plain: Any,
        fails_at: int | None = None,
        error: Exception | None = None,
        known: Collection[int] = (),
        unsure_at: int | None = None,
    ) -> None:
        self.plain, self.contract = plain, plain.contract
        self.waiting: deque[Late] = deque()
        self.known, self.unsure_at = known, unsure_at
        self.most_waiting = self.submitted = 0
        self.fails_at, self.error = fails_at, error
        self.share = plain.share

    @property
    def arithmetic(self) -> str:
        return str(self.plain.arithmetic)

    def hidden_states(self, batch: Any, kind: Any) -> Any:
        return self.plain.hidden_states(batch, kind)

    def layer_states(self, batch: Any, kind: Any, layers: Any) -> Any:
        return layer_states(self.plain, batch, kind, layers)

    def submit(self, batch: Any, kind: Any, layers: Any, into: Any, rows: Any) -> Late:
        self.submitted += 1
        if self.submitted == self.fails_at:
            assert self.error is not None
            raise self.error

        def work() -> None:
            for array, states in zip(into, layer_states(self.plain, batch, kind, layers), strict=True):
                array[rows] = states

        sure = self.submitted != self.unsure_at
        pending = Late(self, work, [sure and column in self.known for column in range(len(into))])
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        return pending

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Path:
    return engines.engine("llama")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parquet(tmp_path_factory.mktemp("rows") / "in.parquet", {"text": texts(ROWS)})


def files(output: Path) -> list[str]:
    """Names of the shards' files, which are made of what is in them."""
    return sorted(path.name for path in (output / "data").iterdir())


def made(engine: Path, source: Path, output: Path, loaded: Any, **options: Any) -> list[str]:
    local.run(job(engine, source, output, max_tokens=100, rows_per_shard=10, **options), runtime=loaded)
    return files(output)


@pytest.mark.parametrize("kind", ["tokens", "last", "mean"])
def test_shards_are_the_same_bytes_ahead_and_one_by_one(engine: Path, source: Path, tmp_path: Path, kind: str) -> None:
    late = LateRuntime(runtime(str(engine)))
    assert isinstance(late, AheadRuntime)
    expected = made(engine, source, tmp_path / "plain", runtime(str(engine)), kind=kind)
    assert made(engine, source, tmp_path / "late", late, kind=kind) == expected
    assert len(expected) == 6
    assert late.submitted > 6 and not late.waiting


def test_layers_come_with_the_states(engine: Path, source: Path, tmp_path: Path) -> None:
    late, options = LateRuntime(runtime(str(engine))), {"kind": "last", "layers": (0, 2)}
    expected = made(engine, source, tmp_path / "plain", runtime(str(engine)), **options)
    assert made(engine, source, tmp_path / "late", late, **options) == expected


def test_the_next_window_is_begun_before_the_one_at_hand_is_finished(
    engine: Path, source: Path, tmp_path: Path
) -> None:
    late = LateRuntime(runtime(str(engine)))
    spec = job(engine, source, tmp_path / "out", kind="last", max_tokens=10**4, rows_per_shard=10)
    worker = worker_of(spec, late)
    done = computed(worker, prepared(worker, range(6)), lambda: True)
    assert [item.window.shard for item in done] == list(range(6))
    worker.source.close()
    assert (late.submitted, late.most_waiting) == (6, 2)


@pytest.mark.parametrize("option", [{"overlap": False}, {}], ids=["sequential", "nothing ready"])
def test_a_window_is_handed_on_when_the_next_one_is_not_there(
    engine: Path, source: Path, tmp_path: Path, option: dict[str, Any]
) -> None:
    """The next shard may be waiting for this one's commit."""
    late = LateRuntime(runtime(str(engine)))
    spec = job(engine, source, tmp_path / "out", kind="last", max_tokens=10**4, rows_per_shard=10, **option)
    worker, handed_on = worker_of(spec, late), threading.Event()
    handed_on.set()

    def windows() -> Any:
        for window in prepared(worker, range(6)):
            assert handed_on.is_set()
            handed_on.clear()
            yield window

    for item in computed(worker, windows(), lambda: bool(option)):
        assert item.window.shard < 6
        handed_on.set()
    worker.source.close()
    assert late.most_waiting == int(not option)


def test_a_window_that_breaks_takes_none_before_it_along(engine: Path, source: Path, tmp_path: Path) -> None:
    late = LateRuntime(runtime(str(engine)), fails_at=3, error=OSError("a hiccup"))
    spec = job(engine, source, tmp_path / "out", kind="last", max_tokens=10**4, rows_per_shard=10)
    worker, seen = worker_of(spec, late), []
    with pytest.raises(ShardBroke) as broken:
        for item in computed(worker, prepared(worker, range(6)), lambda: True):
            seen.append(item.window.shard)  # noqa: PERF401 - what came before the error counts
    worker.source.close()
    assert (seen, broken.value.shard) == ([0, 1], 2)


def test_a_job_whose_runtime_breaks_once_is_whole(engine: Path, source: Path, tmp_path: Path) -> None:
    expected = made(engine, source, tmp_path / "plain", runtime(str(engine)), kind="last")
    late = LateRuntime(runtime(str(engine)), fails_at=4, error=OSError("a hiccup"))
    assert made(engine, source, tmp_path / "late", late, kind="last") == expected


def test_a_pass_that_does_not_fit_is_begun_again_and_loses_nothing(engine: Path, source: Path, tmp_path: Path) -> None:
    full = PassOutOfMemory(tokens="100", sequences="9", device="a small one")
    late = LateRuntime(runtime(str(engine)), fails_at=4, error=full)
    local.run(job(engine, source, tmp_path / "late", kind="last", max_tokens=100, rows_per_shard=10), runtime=late)
    plain = runtime(str(engine))
    local.run(job(engine, source, tmp_path / "plain", kind="last", max_tokens=100, rows_per_shard=10), runtime=plain)
    assert files(tmp_path / "late") == files(tmp_path / "plain")  # the native kernels' bits do not depend on passes


def test_states_are_known_to_be_finite_where_every_batch_says_so(engine: Path, source: Path, tmp_path: Path) -> None:
    spec = job(engine, source, tmp_path / "out", kind="last", max_tokens=20, rows_per_shard=10, layers=(0, 2))

    def seen(loaded: Any) -> set[tuple[bool, ...]]:
        worker = worker_of(spec, loaded)
        found = {item.finite for item in computed(worker, prepared(worker, range(2)))}
        worker.source.close()
        return found

    assert seen(LateRuntime(runtime(str(engine)))) == {(False, False, False)}
    assert seen(LateRuntime(runtime(str(engine)), known={0, 1, 2})) == {(True, True, True)}
    assert seen(LateRuntime(runtime(str(engine)), known={0, 2}, unsure_at=2)) == {
        (False, False, False),
        (True, False, True),
    }
    assert seen(runtime(str(engine))) == {(False, False, False)}


def test_a_job_looks_only_at_states_that_are_not_known_to_be_finite(
    engine: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    look = values._all_finite
    monkeypatch.setattr(values, "_all_finite", lambda part: looked.append(len(part)) or look(part))
    options: Any = {"kind": "last", "layers": (0, 2), "dtype": "float32"}
    outputs, counts = [], []
    for known in ((), {0, 2}):
        looked.clear()
        late = LateRuntime(runtime(str(engine)), known=known)
        outputs.append(made(engine, source, tmp_path / str(len(known)), late, **options))
        counts.append(sum(looked))
    assert outputs[0] == outputs[1]
    assert counts[0] - counts[1] == 2 * ROWS
