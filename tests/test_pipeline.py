"""The three stages: how far they run ahead, how they stop, and what a pass too large or a broken shard costs."""

import itertools
import threading
import time
from io import StringIO
from pathlib import Path

import pytest
from job_rig import (
    Engines,
    errors,
    ids_of,
    job,
    output_table,
    parquet,
    record_of,
    reference,
    run,
    runtime,
    stored,
    texts,
)

from extract.engine.contract import PassOutOfMemory, read_contract
from extract.jobs import open_job
from extract.pipeline import WINDOW_BYTES, WINDOW_TOKENS, Worker, _Stopped, ahead, computed, prepared, window_limits
from extract.progress import Progress
from extract.runners.local import SomeShardsFailed
from extract.verification import verify

ROWS = 60


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Path:
    return engines.engine("llama")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return parquet(tmp_path_factory.mktemp("rows") / "in.parquet", {"text": texts(ROWS)})


@pytest.fixture(scope="module")
def expected(engines: Engines) -> list:
    return reference(engines.checkpoint("llama"), ids_of(engines.checkpoint("llama"), texts(ROWS)), "last")


def out_of_memory_above(max_tokens: int, loaded, monkeypatch) -> list[tuple[int, int]]:
    """Let passes of more tokens fail; returns tokens and sequences of all that were tried."""
    plain, sizes = loaded.hidden_states, []

    def hidden_states(batch, kind):
        sizes.append((batch.num_tokens, batch.num_sequences))
        if batch.num_tokens > max_tokens:
            raise PassOutOfMemory(tokens=batch.num_tokens, sequences=batch.num_sequences, device="a small one")
        return plain(batch, kind)

    monkeypatch.setattr(loaded, "hidden_states", hidden_states)
    return sizes


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_pass_that_does_not_fit_halves_the_budget_once_and_says_so(engine, source, expected, tmp_path, monkeypatch):
    sizes = out_of_memory_above(200, runtime(str(engine)), monkeypatch)
    said = StringIO()
    spec = job(engine, source, tmp_path / "out", kind="last", max_tokens=400, rows_per_shard=30)
    run(spec, progress=Progress(stream=said))
    assert [tokens > 200 for tokens, _ in sizes] == [True] + [False] * (len(sizes) - 1)
    assert (
        f"a forward pass of {sizes[0][0]} tokens in {sizes[0][1]} sequences ran out of memory on a small one. "
        "Run again with a smaller --max-tokens. Going on with 200 tokens a pass."
    ) in said.getvalue().splitlines()
    assert [record_of(tmp_path / "out", shard).worker["max_tokens"] for shard in (0, 1)] == [200, 200]
    assert errors(stored(tmp_path / "out"), expected).max() <= 1e-5
    assert verify(tmp_path / "out").complete


def test_a_pass_that_does_not_fit_after_that_stops_the_run_with_what_to_do(engine, source, tmp_path, monkeypatch):
    out_of_memory_above(100, runtime(str(engine)), monkeypatch)
    spec = job(engine, source, tmp_path / "out", kind="last", max_tokens=400)
    with pytest.raises(PassOutOfMemory) as error:
        run(spec)
    assert str(error.value).endswith("Run again with a smaller --max-tokens.")
    assert error.value.exit_code == 8
    assert not list((tmp_path / "out" / "commits").iterdir())


def test_a_window_holds_a_full_pass_and_no_more_states_than_fit(engine, source, tmp_path):
    def limits(**options):
        opened = open_job(job(engine, source, tmp_path / "out", **options))
        opened.source.close()
        return window_limits(opened.plan)

    assert limits().max_tokens == WINDOW_TOKENS
    assert limits(kind="last").max_tokens == WINDOW_TOKENS
    assert WINDOW_BYTES // (4 * 64) > WINDOW_TOKENS  # for this width; a wide one is bounded by bytes
    assert limits().max_sequences == 8192


def test_one_long_row_among_thousands_costs_no_more_than_the_budget(engine, tmp_path, monkeypatch):
    """8,192 rows of which one has 32 tokens and the rest have 3: no pass is padded to the longest."""
    rows = [[5, 6, 7]] * 8192
    rows[4000] = list(range(4, 36))
    source = parquet(tmp_path / "in.parquet", {"ids": rows})
    sizes = out_of_memory_above(10**9, runtime(str(engine)), monkeypatch)
    run(job(engine, source, tmp_path / "out", kind="last", column="ids", input="input_ids", max_tokens=2048))
    tokens = [tokens for tokens, _ in sizes]
    assert max(tokens) <= 2048
    assert sum(tokens) == 3 * 8191 + 32
    assert len(tokens) == -(-sum(tokens) // 2048)


# --- shards that break ----------------------------------------------------------------------------------------------


def test_shards_that_break_twice_are_left_out_named_and_made_by_the_next_run(
    engine, source, expected, tmp_path, monkeypatch
):
    """Three of six shards break; the others are kept, and nothing calls the job complete."""
    loaded = runtime(str(engine))
    plain, broken = loaded.hidden_states, {1, 3, 4}
    opened = open_job(job(engine, source, tmp_path / "out", kind="last", rows_per_shard=10))
    opened.source.close()
    ids = {shard: tuple(ids_of_shard(opened, engine, shard)) for shard in broken}

    def hidden_states(batch, kind):
        if any(set(map(tuple, split(batch))) & set(found) for found in ids.values()):
            raise RuntimeError("the card fell off")
        return plain(batch, kind)

    monkeypatch.setattr(loaded, "hidden_states", hidden_states)
    spec = job(engine, source, tmp_path / "out", kind="last", rows_per_shard=10)
    said = StringIO()
    with pytest.raises(SomeShardsFailed) as error:
        run(spec, progress=Progress(stream=said))
    reason = "RuntimeError: the card fell off"
    assert str(error.value) == (
        f"{tmp_path / 'out'}: 3 of 6 shards failed twice and are missing: shard 1: {reason}; shard 3: {reason}; "
        f"shard 4: {reason}. Run again to try them again."
    )
    assert error.value.exit_code == 6
    assert [line for line in said.getvalue().splitlines() if "broke" in line].count(f"shard 3 broke: {reason}") == 2
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert verify(tmp_path / "out").notes == ("incomplete: shard 1 is missing; run the job again to go on",)
    monkeypatch.undo()
    summary = run(spec)
    assert (summary.num_shards_made, summary.num_shards_before) == (3, 3)
    assert errors(stored(tmp_path / "out"), expected).max() <= 1e-5


def split(batch) -> list[list[int]]:
    bounds = batch.cu_seqlens.tolist()
    return [batch.input_ids[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]


def ids_of_shard(opened, engine: Path, shard: int) -> list[tuple[int, ...]]:
    """Sequences of 20 tokens or more, which no other shard has."""
    start, stop = opened.plan.rows_of(shard)
    return [tuple(one) for one in ids_of(engine, texts(ROWS)[start:stop]) if len(one) >= 20]


def test_a_shard_that_breaks_once_is_tried_again(engine, source, expected, tmp_path, monkeypatch):
    loaded = runtime(str(engine))
    plain, calls = loaded.hidden_states, []

    def hidden_states(batch, kind):
        calls.append(batch.num_tokens)
        if len(calls) == 3:
            raise OSError("a hiccup")
        return plain(batch, kind)

    monkeypatch.setattr(loaded, "hidden_states", hidden_states)
    assert run(job(engine, source, tmp_path / "out", kind="last", rows_per_shard=10)).complete
    assert errors(stored(tmp_path / "out"), expected).max() <= 1e-5


# --- stages ---------------------------------------------------------------------------------------------------------


def worker_of(spec, loaded) -> Worker:
    opened = open_job(spec)
    return Worker(
        plan=opened.plan,
        source=opened.source,
        tokenizer=opened.tokenizer,
        runtime=loaded,
        progress=Progress(quiet=True),
        stop=threading.Event(),
    )


def test_states_come_in_row_order_whatever_the_passes_were(engine, source, expected, tmp_path):
    spec = job(engine, source, tmp_path / "out", kind="last", max_tokens=50, rows_per_shard=20)
    worker = worker_of(spec, runtime(str(engine)))
    items = list(computed(worker, prepared(worker, range(3))))
    worker.source.close()
    assert [item.window.shard for item in items] == [0, 1, 2]
    found = [state for item in items for state in item.states]
    assert errors(found, expected).max() <= 1e-5


def test_a_stop_is_seen_between_two_passes(engine, source, tmp_path, monkeypatch):
    spec = job(engine, source, tmp_path / "out", kind="last", max_tokens=50)
    loaded = runtime(str(engine))
    worker = worker_of(spec, loaded)
    plain, calls = loaded.hidden_states, []

    def hidden_states(batch, kind):
        calls.append(1)
        worker.stop.set()
        return plain(batch, kind)

    monkeypatch.setattr(loaded, "hidden_states", hidden_states)
    with pytest.raises(_Stopped):
        list(computed(worker, prepared(worker, range(1))))
    worker.source.close()
    assert len(calls) == 1


def test_what_runs_ahead_stays_within_its_depth():
    made = []

    def numbers():
        for number in range(100):
            made.append(number)
            yield number

    with ahead(numbers(), depth=2) as items:
        for expected_number in range(5):
            assert next(items) == expected_number
            time.sleep(0.02)
            assert len(made) <= expected_number + 1 + 2 + 1  # taken, two that wait, one in the hand


def test_what_runs_ahead_is_closed_when_nobody_wants_more_of_it():
    closed = threading.Event()

    def numbers():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    before = set(threading.enumerate())  # a test of reads that hang leaves a thread behind on purpose
    with ahead(numbers(), depth=2) as items:
        next(items)
    assert closed.wait(5)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "extract-ahead"]


def test_an_error_in_the_background_comes_out_where_its_item_would_have():
    def numbers():
        yield 1
        yield 2
        raise KeyError("three")

    with ahead(numbers(), depth=1) as items:
        assert [next(items), next(items)] == [1, 2]
        with pytest.raises(KeyError, match="three"):
            next(items)


def test_nothing_ahead_ends_at_once():
    with ahead(iter([]), depth=1) as items:
        assert list(items) == []


# --- a record says who made it --------------------------------------------------------------------------------------


def test_a_record_names_its_worker_and_where_the_time_went(engine, source, tmp_path):
    run(job(engine, source, tmp_path / "out", kind="last", max_tokens=100, max_sequences=9))
    record, contract = record_of(tmp_path / "out", 0), read_contract(engine)
    assert record.worker == {
        "engine": contract.engine_id,
        "device": contract.device.name,
        "runtime": f"torch {contract.runtime.version}",
        "arithmetic": runtime(str(engine)).arithmetic,
        "max_tokens": 100,
        "max_sequences": 9,
    }
    assert set(record.seconds) == {"read+tokenise", "forward", "write"}
    assert (record.first_row, record.num_rows, record.last) == (0, ROWS, True)
    assert output_table(tmp_path / "out").num_rows == ROWS
