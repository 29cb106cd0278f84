"""Several threads that encode, compress and hash beside the one that writes: the same file, facts and errors."""

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shard_rig as rig

from extract.shards.hashed_file import PIECES_BEHIND, HashedFile
from extract.shards.in_order import in_order
from extract.shards.sink import NonFiniteStates, ShardWriter
from extract.spec import StatesSpec


def hash_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "extract-hash"]


def test_results_come_in_the_order_of_the_items_whoever_is_faster() -> None:
    def work(item: int) -> int:
        time.sleep(0.01 * (item % 3 == 0))
        return item * 2

    assert list(in_order(work, range(20), 4)) == list(in_order(work, range(20), 1)) == [2 * item for item in range(20)]


def test_few_items_are_worked_on_ahead() -> None:
    begun: list[int] = []
    results = in_order(lambda item: begun.append(item) or item, range(100), 3)
    for expected in range(5):
        assert next(results) == expected
        assert len(begun) <= expected + 1 + 3
    results.close()  # type: ignore[attr-defined]
    assert len(begun) <= 9


def test_an_error_comes_out_where_its_result_would_have() -> None:
    def work(item: int) -> int:
        if item == 4:
            raise KeyError(item)
        return item

    seen: list[int] = []
    with pytest.raises(KeyError):
        for one in in_order(work, range(10), 3):
            seen += [one]
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("ahead", [False, True])
def test_the_hash_is_of_every_byte_in_order(tmp_path: Path, ahead: bool) -> None:
    pieces = [np.random.default_rng(number).bytes(1 + 997 * number % 4096) for number in range(5 * PIECES_BEHIND)]
    file = HashedFile(tmp_path / "file", ahead=ahead)
    for piece in pieces:
        assert file.write(piece) == len(piece)
    file.sync_and_close()
    whole = b"".join(pieces)
    assert (file.sha256, file.num_bytes) == (hashlib.sha256(whole).hexdigest(), len(whole))
    assert (tmp_path / "file").read_bytes() == whole
    assert not hash_threads()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_file_that_is_dropped_leaves_no_thread(tmp_path: Path, ahead: bool) -> None:
    file = HashedFile(tmp_path / "file", ahead=ahead)
    file.write(b"abc")
    file.drop()
    file.drop()
    assert not hash_threads()


def written(path: Path, spec: Any, threads: int, states: Any = None) -> Any:
    """A shard of three windows in many record batches."""
    rows = rig.token_rows(rig.LENGTHS * 40)
    states = rig.random_states(rows, spec.kind, dtype="bfloat16") if states is None else states
    layers = [rig.random_states(rows, spec.kind, dtype="bfloat16", seed=layer) for layer in spec.layers]
    num_rows = len(rig.LENGTHS) * 40
    writer = ShardWriter(path, rig.schema_for(spec), spec, states.shape[1], 7, "error", threads=threads)
    try:
        for window in range(3):
            writer.write(rows, rig.carried(num_rows), np.arange(num_rows) + window * num_rows, states, layers)
            writer.write(rig.token_rows(()), rig.carried(0), np.arange(0), states[:0], [each[:0] for each in layers])
        return writer.close()
    except BaseException:
        writer.abort()
        raise


@pytest.mark.parametrize("compression", ["zstd", "lz4", "none"])
@pytest.mark.parametrize(
    "states",
    [
        {"dtype": "float16"},
        {"dtype": "bfloat16", "layers": (0, 2)},
        {"dtype": "int8", "layers": (1,)},
        {"dtype": "float32", "kind": "last", "layers": (3,)},
        {"dtype": "float16", "kind": "first", "input_ids": False},
        {"dtype": "bfloat16", "kind": "mean", "normalize": True},
    ],
    ids=lambda states: " ".join(map(str, states.values())),
)
def test_a_shard_is_the_same_bytes_with_any_number_of_threads(tmp_path: Path, states: Any, compression: Any) -> None:
    spec = StatesSpec(**states, compression=compression, record_batch_bytes=2**16)
    one, many = written(tmp_path / "one", spec, 1), written(tmp_path / "many", spec, 3)
    assert one == many
    assert one.num_batches >= 3 * (5 if spec.kind == "tokens" else 1)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()
    assert hashlib.sha256((tmp_path / "many").read_bytes()).hexdigest() == many.sha256


def test_a_state_that_cannot_be_stored_is_refused_by_name_with_any_number_of_threads(tmp_path: Path) -> None:
    rows = rig.token_rows(rig.LENGTHS * 40)
    states = rig.random_states(rows).copy()
    states[len(states) // 2, 3] = np.nan
    messages = []
    for threads in (1, 3):
        with pytest.raises(NonFiniteStates) as error:
            written(tmp_path / "s", StatesSpec(record_batch_bytes=2**16), threads, states)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
