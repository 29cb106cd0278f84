"""The shard writer: every row once, exact numbers, bounded batches, stable bytes, clear failures."""

import dataclasses
import hashlib
import math
import resource

import numpy as np
import pyarrow as pa
import pytest
import shard_rig as rig
from hypothesis import given, settings
from hypothesis import strategies as st

from extract.errors import OutOfSpace
from extract.records import OUTCOME_CODE, Outcome
from extract.shards.schema import output_schema
from extract.shards.sink import NonFiniteStates, ShardWriter, ZeroState
from extract.shards.values import as_float32, value_type
from extract.spec import StatesSpec
from extract.store import CannotWrite

KINDS = ("tokens", "last", "mean", "first")
DTYPES = ("float16", "float32", "bfloat16", "int8")


def stored_states(table, spec):
    """List of float32 states (or None) of each row, through Python lists: slow, and shares nothing with the reader."""
    name = "hidden_states" if spec.kind == "tokens" else "hidden_state"
    numpy_type = value_type(spec.dtype).storage
    scales = table[name + "_scale"].to_pylist() if spec.dtype == "int8" else [None] * len(table)
    found = []
    for values, scale in zip(table[name].to_pylist(), scales, strict=True):
        if values is None:
            assert scale is None
            found.append(None)
            continue
        array = np.array(values, numpy_type).reshape(-1, rig.WIDTH)
        scale = None if scale is None else np.array(scale, np.float32).reshape(-1)
        decoded = value_type(spec.dtype).decode(array, scale)
        found.append(decoded if spec.kind == "tokens" else decoded[0])
    return found


def expected_states(rows, states, spec):
    """The same list from the states given, through the stored type."""
    encoded = value_type(spec.dtype).encode(states)
    decoded, found, place = value_type(spec.dtype).decode(encoded.values, encoded.scales), [], 0
    for length in np.diff(rows.offsets):
        count = int(length) if spec.kind == "tokens" else min(1, int(length))
        part = decoded[place : place + count]
        found.append(None if not count else part if spec.kind == "tokens" else part[0])
        place += count
    return found


def same(one, other):
    return len(one) == len(other) and all(
        (a is None) == (b is None) and (a is None or a.tobytes() == b.tobytes())
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("computed_in", ["float32", "float16", "bfloat16"])
def test_what_is_written_is_what_was_computed(tmp_path, kind, dtype, computed_in):
    spec = StatesSpec(kind=kind, dtype=dtype)
    rows = rig.token_rows()
    states = rig.random_states(rows, kind, dtype=computed_in)
    rig.write_shard(tmp_path / "s.arrow", spec, rows, states, first_row=1000)
    table = rig.read_shard(tmp_path / "s.arrow")
    assert table["row"].to_pylist() == list(range(1000, 1000 + len(rig.LENGTHS)))
    assert table["num_tokens"].to_pylist() == list(rig.LENGTHS)
    assert table["outcome"].to_pylist() == ["ok" if length else "empty" for length in rig.LENGTHS]
    ids = np.split(rows.input_ids, rows.offsets[1:-1])
    assert table["input_ids"].to_pylist() == [part.tolist() if len(part) else None for part in ids]
    assert same(stored_states(table, spec), expected_states(rows, states, spec))


def test_an_engines_own_type_is_stored_bit_for_bit(tmp_path):
    rows = rig.token_rows()
    for dtype in ("float16", "bfloat16", "float32"):
        states = rig.random_states(rows, dtype=dtype)
        rig.write_shard(tmp_path / dtype, StatesSpec(dtype=dtype), rows, states)
        column = rig.read_shard(tmp_path / dtype)["hidden_states"].combine_chunks()
        assert column.values.values.to_numpy().tobytes() == states.tobytes()


def test_id_and_carried_columns_are_copied_in_order(tmp_path):
    rig.write_shard(tmp_path / "s.arrow", StatesSpec())
    table = rig.read_shard(tmp_path / "s.arrow")
    source = rig.carried(len(rig.LENGTHS))
    assert table["id"].to_pylist() == source.column("key").to_pylist()
    assert table["meta.url"].to_pylist() == source.column("meta.url").to_pylist()
    assert table["score"].to_pylist() == source.column("score").to_pylist()


@pytest.mark.parametrize("ids", [["a", "a", "x/y", "..", "", "i" * 300, None], [*range(6), None]])
def test_ids_of_any_shape_are_kept_as_they_are(tmp_path, ids):
    source = pa.record_batch({"key": pa.array(ids), "meta.url": pa.array([None] * 7, pa.string()), "score": [0.0] * 7})
    rig.write_shard(tmp_path / "s.arrow", StatesSpec(), source=source, id_type=source.schema.field(0).type)
    assert rig.read_shard(tmp_path / "s.arrow")["id"].to_pylist() == ids
    assert [path.name for path in tmp_path.iterdir()] == ["s.arrow"]


def test_a_job_without_extra_columns_needs_none_from_the_source(tmp_path):
    source = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
    facts = rig.write_shard(tmp_path / "s.arrow", StatesSpec(), source=source, with_columns=False)
    assert facts.num_rows == len(rig.LENGTHS)
    assert rig.read_shard(tmp_path / "s.arrow").column_names[:2] == ["row", "outcome"]


def test_chunks_repeat_their_rows_columns(tmp_path):
    spec = StatesSpec()
    rows = rig.token_rows((4, 4, 2, 0, 3), source_index=[0, 0, 0, 1, 2], chunk=[0, 1, 2, 0, 0])
    facts = rig.write_shard(tmp_path / "s.arrow", spec, rows, chunked=True, first_row=10)
    table = rig.read_shard(tmp_path / "s.arrow")
    assert table["row"].to_pylist() == [10, 10, 10, 11, 12]
    assert table["chunk"].to_pylist() == [0, 1, 2, 0, 0]
    assert table["id"].to_pylist() == ["id/0", "id/0", "id/0", "id/1", "id/2"]
    assert facts.num_tokens == 13
    assert facts.num_tokens_original == 4 + 0 + 3


def test_selected_rows_keep_their_positions_in_the_source(tmp_path):
    spec = StatesSpec()
    writer = ShardWriter(tmp_path / "s.arrow", rig.schema_for(spec, chunked=True), spec, rig.WIDTH, 0)
    rows = rig.token_rows((4, 2, 3), source_index=[0, 0, 1], chunk=[0, 1, 0])
    writer.write(rows, rig.carried(2), np.array([5, 2**40]), rig.random_states(rows))
    writer.close()
    assert rig.read_shard(tmp_path / "s.arrow")["row"].to_pylist() == [5, 5, 2**40]


DICTIONARY = pa.array(["x", "y", None]).dictionary_encode()
JSON = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", None, "[1]"]))


@pytest.mark.parametrize(
    "column",
    [
        DICTIONARY,
        pa.ListArray.from_arrays([0, 1, 1, 3], DICTIONARY),
        pa.StructArray.from_arrays([DICTIONARY], ["x"]),
        JSON,
        pa.ListArray.from_arrays([0, 1, 1, 3], JSON),
        pa.array(["a", None, "bb"], pa.string_view()),
        pa.array([[{"role": "user", "content": "hi"}], [], None]),
        pa.array([[("a", "b")], None, []], pa.map_(pa.string(), pa.string())),
        pa.array([["a", "b"], None, ["c", "d"]], pa.list_(pa.string(), 2)),
        pa.array([[1.5], None, []], pa.large_list(pa.float16())),
        pa.array([1, None, 3], pa.timestamp("us", "UTC")),
        pa.array([True, None, False]),
        pa.nulls(3),
    ],
    ids=lambda column: str(column.type),
)
def test_carried_columns_of_any_type_keep_their_values(tmp_path, column):
    spec = StatesSpec(kind="last")
    source = pa.record_batch({"key": column, "value": column})
    schema = output_schema(spec, rig.WIDTH, column.type, [pa.field("value", column.type)], True, {})
    writer = ShardWriter(tmp_path / "s.arrow", schema, spec, rig.WIDTH, 0)
    rows = rig.token_rows((1, 2, 0, 3), source_index=[0, 1, 1, 2], chunk=[0, 0, 1, 0])
    writer.write(rows, source, np.arange(3), rig.random_states(rows, "last"))
    writer.close()
    table = rig.read_shard(tmp_path / "s.arrow")
    wanted = [column.to_pylist()[row] for row in (0, 1, 1, 2)]
    assert table["id"].to_pylist() == wanted
    assert table["value"].to_pylist() == wanted


def test_the_facts_are_those_of_the_file(tmp_path):
    path = tmp_path / "s.arrow"
    facts = rig.write_shard(path, StatesSpec(), rig.not_counted(rig.token_rows(), 5))
    data = path.read_bytes()
    assert facts.sha256 == hashlib.sha256(data).hexdigest()
    assert facts.num_bytes == len(data)
    assert facts.num_rows == 7
    assert facts.outcomes == {"ok": 5, "empty": 2}
    assert facts.num_tokens == sum(rig.LENGTHS)
    assert facts.num_tokens_original == sum(rig.LENGTHS) - 128
    assert rig.read_shard(path)["num_tokens_original"].to_pylist() == [3, 0, 1, 5, 0, None, 2]


@pytest.mark.parametrize("compression", ["zstd", "lz4", "none"])
def test_the_same_windows_give_the_same_bytes(tmp_path, compression):
    spec = StatesSpec(compression=compression, kind="last")
    assert rig.write_shard(tmp_path / "a", spec) == rig.write_shard(tmp_path / "b", spec)


def test_the_compression_asked_for_is_the_one_used(tmp_path):
    rows = rig.token_rows([128] * 20)
    states = np.zeros((len(rows.input_ids), rig.WIDTH), np.float32)
    sizes = {
        name: rig.write_shard(tmp_path / name, StatesSpec(compression=name), rows, states).num_bytes
        for name in ("zstd", "lz4", "none")
    }
    assert sizes["zstd"] < sizes["none"] / 5
    assert sizes["lz4"] < sizes["none"] / 5


def test_the_compression_level_asked_for_is_the_one_used(tmp_path):
    rows = rig.token_rows([128] * 20)
    states = np.resize(rig.random_states(rows).round(1), (len(rows.input_ids), rig.WIDTH))
    low, high = (
        rig.write_shard(tmp_path / str(level), StatesSpec(compression_level=level), rows, states).num_bytes
        for level in (1, 19)
    )
    assert high < low


def test_a_shard_without_rows_is_a_file_with_the_schema(tmp_path):
    spec = StatesSpec()
    schema = rig.schema_for(spec)
    writer = ShardWriter(tmp_path / "s.arrow", schema, spec, rig.WIDTH, 0)
    writer.write(rig.token_rows(()), rig.carried(0), np.arange(0), np.zeros((0, rig.WIDTH), np.float32))
    facts = writer.close()
    assert (facts.num_rows, facts.num_batches, facts.outcomes) == (0, 0, {})
    assert rig.read_shard(tmp_path / "s.arrow").schema.equals(schema, check_metadata=True)


def test_rows_without_tokens_alone_make_a_batch(tmp_path):
    for kind in KINDS:
        spec = StatesSpec(kind=kind)
        rig.write_shard(tmp_path / kind, spec, rig.token_rows((0, 0, 0)))
        assert stored_states(rig.read_shard(tmp_path / kind), spec) == [None, None, None]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 128), min_size=1, max_size=60),
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
    st.integers(2**16, 2**18),
)
def test_batches_stay_within_their_bytes_and_hold_every_row_once(tmp_path_factory, lengths, kind, dtype, limit):
    spec = dataclasses.replace(StatesSpec(kind=kind, dtype=dtype), record_batch_bytes=limit)
    rows = rig.token_rows(lengths)
    states = rig.random_states(rows, kind, width=320)
    path = tmp_path_factory.mktemp("bounded") / "s.arrow"
    facts = rig.write_shard(path, spec, rows, states, width=320)
    with pa.ipc.open_file(path) as file:
        batches = [file.get_batch(n) for n in range(file.num_record_batches)]
    assert facts.num_batches == len(batches)
    assert [row for batch in batches for row in batch.column("row").to_pylist()] == list(range(len(lengths)))
    assert all(batch.num_rows >= 1 for batch in batches)
    assert all(batch.num_rows == 1 or batch.nbytes <= limit for batch in batches)


@pytest.mark.parametrize("kind", ["last", "mean", "first"])
def test_the_width_of_null_states_counts_too(tmp_path, kind):
    spec = StatesSpec(kind=kind, dtype="float32", record_batch_bytes=2**16)
    rig.write_shard(tmp_path / "s.arrow", spec, rig.token_rows([0] * 2000 + [1]))
    with pa.ipc.open_file(tmp_path / "s.arrow") as file:
        assert all(file.get_batch(n).nbytes <= 2**16 for n in range(file.num_record_batches))


def test_long_carried_texts_split_batches_too(tmp_path):
    spec = StatesSpec(kind="last", record_batch_bytes=2**16)
    source = pa.record_batch({"key": ["k"] * 7, "meta.url": ["u" * 40_000] * 7, "score": [0.0] * 7})
    facts = rig.write_shard(tmp_path / "s.arrow", spec, source=source)
    assert facts.num_batches == 7
    assert rig.read_shard(tmp_path / "s.arrow")["meta.url"].to_pylist() == ["u" * 40_000] * 7


def test_lists_of_texts_are_counted_by_their_bytes(tmp_path):
    spec = StatesSpec(kind="last", record_batch_bytes=2**16)
    lists = pa.array([["t" * 100] * n for n in (1, 2, 900, 1, 0, 1, 1)])
    source = pa.record_batch({"key": ["k"] * 7, "meta.url": ["u"] * 7, "score": lists})
    schema = output_schema(spec, rig.WIDTH, pa.string(), list(source.schema)[1:], False, {})
    writer = ShardWriter(tmp_path / "s.arrow", schema, spec, rig.WIDTH, 0)
    rows = rig.token_rows()
    writer.write(rows, source, np.arange(len(rows.outcome)), rig.random_states(rows, "last"))
    assert writer.close().num_batches == 3
    assert rig.read_shard(tmp_path / "s.arrow")["score"].to_pylist() == lists.to_pylist()


@pytest.mark.slow
def test_chunks_of_a_700_mb_text_do_not_overflow_an_offset(tmp_path):
    text = pa.array(["t" * 700_000_000])
    rows = rig.token_rows((2, 2, 2, 2), source_index=[0, 0, 0, 0], chunk=[0, 1, 2, 3])
    source = pa.record_batch({"key": ["k"], "meta.url": text, "score": [0.0]})
    facts = rig.write_shard(tmp_path / "s.arrow", StatesSpec(kind="last"), rows, source=source, chunked=True)
    assert (facts.num_rows, facts.num_batches) == (4, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_a_bad_state_is_recorded_without_states_and_others_are_kept(tmp_path, kind, dtype):
    spec = StatesSpec(kind=kind, dtype=dtype)
    rows = rig.token_rows()
    states = rig.random_states(rows, kind)
    good = expected_states(rows, states, spec)
    states[4 if kind == "tokens" else 2, 3] = math.nan  # row 3: its first token, or its only state
    facts = rig.write_shard(tmp_path / "s.arrow", spec, rows, states)
    table = rig.read_shard(tmp_path / "s.arrow")
    assert facts.outcomes == {"ok": 4, "empty": 2, "non_finite": 1}
    assert facts.overflowed == 0
    assert table["outcome"][3].as_py() == "non_finite"
    assert table["num_tokens"][3].as_py() == 5
    assert table["input_ids"][3].as_py() == [4, 5, 6, 7, 8]
    assert same(stored_states(table, spec), [*good[:3], None, *good[4:]])


def test_a_state_beyond_float16_is_counted_as_overflow_and_fits_bfloat16(tmp_path):
    rows = rig.token_rows()
    states = rig.random_states(rows)
    states[3, 0] = 1e6  # row 2: a single token
    narrow = rig.write_shard(tmp_path / "a", StatesSpec(dtype="float16"), rows, states)
    wide = rig.write_shard(tmp_path / "b", StatesSpec(dtype="bfloat16"), rows, states)
    assert (narrow.outcomes["non_finite"], narrow.overflowed) == (1, 1)
    assert ("non_finite" in wide.outcomes, wide.overflowed) == (False, 0)


def test_the_first_fault_of_a_row_decides_what_it_is_called(tmp_path):
    rows = rig.token_rows()
    states = rig.random_states(rows)
    states[0, 0], states[1, 0] = 1e6, math.nan  # row 0: its first and second token
    assert rig.write_shard(tmp_path / "a", StatesSpec(), rows, states).overflowed == 1
    states[0, 0], states[1, 0] = math.nan, 1e6
    assert rig.write_shard(tmp_path / "b", StatesSpec(), rows, states).overflowed == 0


def strict_writer(tmp_path, spec):
    return ShardWriter(tmp_path / "s.arrow", rig.schema_for(spec), spec, rig.WIDTH, 42, "error")


def test_on_non_finite_error_names_shard_row_token_and_counts(tmp_path):
    rows = rig.token_rows()
    states = rig.random_states(rows)
    states[6, [1, 2, 5]] = math.nan, math.nan, -math.inf  # row 3, its third token
    states[8, 0] = math.nan
    writer = strict_writer(tmp_path, StatesSpec())
    with pytest.raises(NonFiniteStates) as refused:
        writer.write(rows, rig.carried(7), np.arange(344_098, 344_105), states)
    writer.abort()
    assert str(refused.value) == (
        "shard 00042, row 344101, token 2: 3 of 48 values cannot be stored as float16 "
        "(2 NaN, 1 inf, 0 beyond 65504). Nothing was written for this shard. "
        "The model itself computed them: build the engine with dtype float32 or bfloat16, "
        'or set text.on_non_finite = "record" to go on without such rows.'
    )
    assert refused.value.exit_code == 6
    assert not list(tmp_path.iterdir())


def test_on_non_finite_error_tells_overflow_from_the_models_own_infinity(tmp_path):
    spec = StatesSpec(kind="last")
    rows = rig.token_rows()
    states = rig.random_states(rows, "last")
    states[1, :4] = 70_000  # row 2
    writer = strict_writer(tmp_path, spec)
    with pytest.raises(NonFiniteStates) as refused:
        writer.write(rows, rig.carried(7), np.arange(7), states)
    writer.abort()
    assert str(refused.value) == (
        "shard 00042, row 2, state: 4 of 48 values cannot be stored as float16 "
        "(0 NaN, 0 inf, 4 beyond 65504). Nothing was written for this shard. "
        'Store states.dtype = "bfloat16" or "float32", or set text.on_non_finite = "record" to go on without such rows.'
    )


def test_states_are_not_normalised_unless_asked(tmp_path):
    rows = rig.token_rows()
    states = rig.random_states(rows, "last") * 7
    for normalize in (False, True):
        spec = StatesSpec(kind="last", dtype="float32", normalize=normalize)
        rig.write_shard(tmp_path / str(normalize), spec, rows, states)
        found = [state for state in stored_states(rig.read_shard(tmp_path / str(normalize)), spec) if state is not None]
        wanted = states / np.linalg.norm(states, axis=1, keepdims=True) if normalize else states
        assert np.allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("computed_in", ["float32", "float16", "bfloat16"])
def test_normalised_states_have_length_one_from_any_engine(tmp_path, computed_in):
    spec = StatesSpec(kind="mean", dtype="float32", normalize=True)
    rows = rig.token_rows()
    states = rig.random_states(rows, "mean", dtype=computed_in)
    rig.write_shard(tmp_path / "s.arrow", spec, rows, states)
    found = [state for state in stored_states(rig.read_shard(tmp_path / "s.arrow"), spec) if state is not None]
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    directions = as_float32(states) / np.linalg.norm(as_float32(states), axis=1, keepdims=True)
    assert np.allclose(found, directions, atol=1e-6)


def test_a_state_of_zeros_has_no_unit_length(tmp_path):
    spec = StatesSpec(kind="last", normalize=True)
    rows = rig.token_rows()
    states = rig.random_states(rows, "last")
    states[1] = 0
    facts = rig.write_shard(tmp_path / "s.arrow", spec, rows, states)
    assert facts.outcomes == {"ok": 4, "empty": 2, "non_finite": 1}
    writer = strict_writer(tmp_path, spec)
    with pytest.raises(ZeroState) as refused:
        writer.write(rows, rig.carried(7), np.arange(7), states)
    writer.abort()
    assert str(refused.value) == (
        "shard 00042, row 2: a state of zeros has no unit length. Nothing was written for this shard. "
        'Set states.normalize = false, or text.on_non_finite = "record" to go on without such rows.'
    )


def test_outcomes_of_the_tokeniser_pass_through(tmp_path):
    rows = rig.token_rows((2, 0, 0, 0, 0, 3))
    names = [Outcome.TRUNCATED, Outcome.NULL, Outcome.BAD_TEXT, Outcome.TOO_LONG, Outcome.EMPTY, Outcome.OK]
    rows = dataclasses.replace(rows, outcome=np.array([OUTCOME_CODE[name] for name in names], np.uint8))
    facts = rig.write_shard(tmp_path / "s.arrow", StatesSpec(), rows)
    assert rig.read_shard(tmp_path / "s.arrow")["outcome"].to_pylist() == [str(name) for name in names]
    assert facts.outcomes == {str(name): 1 for name in names}


def test_every_batch_and_shard_has_the_same_outcome_dictionary(tmp_path):
    spec = StatesSpec(record_batch_bytes=2**16)
    rows = rig.token_rows([128] * 20)
    rig.write_shard(tmp_path / "a", spec, rows)
    rig.write_shard(tmp_path / "b", spec, rig.token_rows((0, 0)))
    chunks = [chunk for name in "ab" for chunk in rig.read_shard(tmp_path / name)["outcome"].chunks]
    assert len(chunks) > 2
    assert len({tuple(chunk.dictionary.to_pylist()) for chunk in chunks}) == 1


def test_an_abandoned_shard_leaves_no_file(tmp_path):
    spec = StatesSpec()
    writer = ShardWriter(tmp_path / "s.arrow", rig.schema_for(spec), spec, rig.WIDTH, 0)
    rows = rig.token_rows()
    writer.write(rows, rig.carried(7), np.arange(7), rig.random_states(rows))
    writer.abort()
    writer.abort()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("threads", [1, 3])
def test_a_full_disk_is_named_as_such(tmp_path, threads):
    spec = StatesSpec(dtype="float32", compression="none", record_batch_bytes=2**16)
    rows = rig.token_rows([128] * 20)
    writer = ShardWriter(tmp_path / "s.arrow", rig.schema_for(spec), spec, rig.WIDTH, 0, threads=threads)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OutOfSpace) as refused:
            writer.write(rows, rig.carried(20), np.arange(20), rig.random_states(rows))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.abort()
    assert refused.value.exit_code == 8
    problem, _, advice = str(refused.value).partition(" (ulimit -f) or the file system can hold (")
    assert problem == f"{tmp_path / 's.arrow'}: a file larger than this process may write"
    assert advice.endswith(" bytes free). What is committed stays: make room, then run the same command again.")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_named(tmp_path):
    spec = StatesSpec()
    path = tmp_path / "gone" / "s.arrow"
    with pytest.raises(CannotWrite) as refused:
        ShardWriter(path, rig.schema_for(spec), spec, rig.WIDTH, 0)
    assert str(refused.value) == (
        f"{path}: cannot be written: No such file or directory. Choose another place with -o."
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_stays_flat_over_many_windows(tmp_path, threads):
    spec = StatesSpec(dtype="float16", compression="none")
    rows = rig.token_rows([128] * 64)
    states = rig.random_states(rows, width=256)
    writer = ShardWriter(tmp_path / "s.arrow", rig.schema_for(spec, width=256), spec, 256, 0, threads=threads)
    source = rig.carried(64)
    writer.write(rows, source, np.arange(len(rows.outcome)), states)
    before = pa.total_allocated_bytes()
    for window in range(1, 20):
        writer.write(rows, source, np.arange(64) + window * 64, states)
    assert pa.total_allocated_bytes() - before < 2**20
    assert writer.close().num_rows == 20 * 64
