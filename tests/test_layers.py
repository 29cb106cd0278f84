"""A whole job that stores other layers beside the final state: planned, run, killed, checked, made again, exported.

The reference is transformers' own base model on each row alone: its `output_hidden_states`, and for the last layer what
the final norm is fed.
"""

import functools
import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import crash_rig
import job_rig
import numpy as np
import pyarrow as pa
import pytest
import rig
import warm_command
from job_rig import LIMIT, job, output_table, parquet, run, texts
from test_layer_states import PICKED, told
from test_recomputation import scaled

import extract
from extract.derivation import Change, derive
from extract.engine.contract import NoLayerStates, layer_states, read_contract
from extract.engine.layer_numbers import LayersNotGiven, LayerTwice, NoSuchDecoderLayer, layer_numbers
from extract.engine.probe import relative_error, token_error
from extract.errors import BadValue
from extract.exporting.export import export
from extract.job import OtherJob, read_job
from extract.jobs import plan
from extract.output import open_output
from extract.records import TokenBatch
from extract.report import plan_text
from extract.report_page.gathering import gather
from extract.reprocessing import respec
from extract.runners.layer_trial import LayersOverflow, try_layers
from extract.shards.sink import NonFiniteStates
from extract.shards.views import NotStored
from extract.spec import StatesSpec
from extract.verification import BadShards, verify

LAYERS = (0, 2, 3)
"""Of three: the embeddings, one between, the last."""
ENGINES = (("llama", "auto"), ("llama", "transformers"), ("bloom", "auto"))
"""Our own decoder, a packed and a dense pass of transformers' model."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Texts, one of them missing, two alike, and a column that goes to the output."""
    found: list[Any] = texts(40)
    found[5], found[6] = None, found[7]
    return parquet(tmp_path_factory.mktemp("rows") / "in.parquet", {"text": found, "n": list(range(40))})


@pytest.fixture(scope="module")
def first(engines, rows, tmp_path_factory) -> Path:
    """A job with layers, of every token, in five shards; do not change its files."""
    out = tmp_path_factory.mktemp("first") / "out"
    run(job(engines.engine("llama"), rows, out, layers=(-1, 2, 0), rows_per_shard=8, carry=("n",)))
    return out


@functools.cache
def _told(checkpoint: str, ids: tuple[int, ...]) -> list[np.ndarray]:
    return [layer[0] for layer in told(job_rig._model(checkpoint), [list(ids)])]


def reference(checkpoint: Path, output: Path, layer: int, kind: str = "tokens") -> list[np.ndarray]:
    """What each row with tokens should hold of a layer: [L, H], or [1, H]."""
    ids = [one for one in job_rig.stored_ids(output) if one]
    return [PICKED[kind](_told(str(checkpoint), tuple(one))[layer]) for one in ids]


def held(output: Path, layer: int) -> list[np.ndarray]:
    """Decoded states of a layer, of each row that has some: [L, H], or [1, H]."""
    found = [row.layers[layer] for row in open_output(output) if row.states is not None]
    return [one if one.ndim == 2 else one[None] for one in found]


def assert_holds(output: Path, checkpoint: Path, kind: str, bound: float) -> None:
    for layer in LAYERS:
        assert rig.relative_error(held(output, layer), reference(checkpoint, output, layer, kind)) <= bound, layer


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokens", "last", "mean", "first"])
@pytest.mark.parametrize("name", ENGINES, ids="-".join)
def test_layers_of_every_kind_are_transformers_own_and_the_final_states_are_the_same_bytes(
    engines, rows, tmp_path, name, kind
):
    engine = engines.engine(*name)
    run(job(engine, rows, tmp_path / "out", kind=kind, layers=LAYERS, rows_per_shard=15))
    run(job(engine, rows, tmp_path / "without", kind=kind, rows_per_shard=15))
    assert_holds(tmp_path / "out", engines.checkpoint(name[0]), kind, 1e-5)
    with_layers, without = output_table(tmp_path / "out"), output_table(tmp_path / "without")
    plain = with_layers.select(without.schema.names).replace_schema_metadata(None)
    assert plain.equals(without.replace_schema_metadata(None))
    final = "hidden_states" if kind == "tokens" else "hidden_state"
    flat = [table.column(final).combine_chunks().flatten() for table in (with_layers, without)]
    assert flat[0].equals(flat[1])


@pytest.mark.parametrize("kind", ["tokens", "last", "mean"])
def test_rows_that_share_a_pass_and_their_tokens_get_each_its_own_layers(engines, kind):
    runtime = job_rig.runtime(str(engines.engine("llama")))
    one, other = rig.random_sequences([20, 9])
    sequences = [[*one, 9], other, one, [*one, 8, 7], other, one]

    def states(*given: list[int]) -> list[np.ndarray]:
        bounds = np.cumsum([0, *map(len, given)]).astype(np.int32)
        ids = np.concatenate(given).astype(np.int32)
        batch = TokenBatch(input_ids=ids, cu_seqlens=bounds, members=np.arange(len(given)))
        return list(runtime.layer_states(batch, kind, LAYERS))

    alone = [np.concatenate(column) for column in zip(*map(states, sequences), strict=True)]
    assert rig.relative_error(states(*sequences), alone) <= 1e-6


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 1e-3), ("bfloat16", 5e-3), ("int8", 2e-2)])
def test_layers_are_stored_in_the_type_of_the_final_state(engines, rows, tmp_path, dtype, bound):
    run(job(engines.engine("llama"), rows, tmp_path / "out", dtype=dtype, layers=LAYERS))
    assert_holds(tmp_path / "out", engines.checkpoint("llama"), "tokens", bound)
    schema = open_output(tmp_path / "out").schema
    expected = [name for n in LAYERS for name in (f"layer_{n}", f"layer_{n}_scale")]
    names = [name for name in schema.names if name.startswith("layer_")]
    assert names == (expected if dtype == "int8" else expected[::2])


def test_both_loops_and_any_size_of_a_pass_give_the_same_layers(engines, rows, tmp_path):
    engine = engines.engine("llama")
    run(job(engine, rows, tmp_path / "out", layers=LAYERS))
    run(job(engine, rows, tmp_path / "other", layers=LAYERS, overlap=False))
    assert crash_rig.content(tmp_path / "other") == crash_rig.content(tmp_path / "out")
    run(job(engine, rows, tmp_path / "small", layers=LAYERS, max_tokens=40, share=False))
    for layer in LAYERS:
        assert rig.relative_error(held(tmp_path / "small", layer), held(tmp_path / "out", layer)) <= 1e-5


# --- what a job says ------------------------------------------------------------------------------------------------


def test_numbers_count_from_either_end_and_a_plan_has_them_ascending(engines, rows, tmp_path):
    engine = engines.engine("llama")
    found = plan(job(engine, rows, tmp_path / "out", layers=(-1, 1, -4)))
    assert found.spec.states.layers == (0, 1, 3)
    assert (
        "layers     0, 1, 3 beside it, of the same shape and type: the residual stream after so many decoder layers"
        in plan_text(found).splitlines()
    )
    assert "float16" not in plan_text(found)
    found = plan(job(engine, rows, tmp_path / "out", layers=(1,), dtype="float16"))
    assert "a residual stream may exceed float16's 65,504" in plan_text(found)


def test_a_layer_that_is_not_there_or_there_twice_is_refused_with_the_number_of_layers(engines, rows, tmp_path):
    engine = engines.engine("llama")
    for asked in ((4,), (-5,), (1, 99)):
        with pytest.raises(NoSuchDecoderLayer) as error:
            plan(job(engine, rows, tmp_path / "out", layers=asked))
        assert str(error.value) == (
            f"states.layers: {asked[-1]} is none of this engine's layers. It has 3: say 1 to 3, 0 for the embeddings, "
            "or -1 (the last layer) to -4."
        )
    for asked in ((2, 2), (2, -2)):
        with pytest.raises(LayerTwice, match=rf"{asked[0]} and {asked[1]} are one layer of the engine's 3\."):
            plan(job(engine, rows, tmp_path / "out", layers=asked))


def test_an_engine_of_tensorrt_is_refused_before_it_is_loaded(engines):
    contract = read_contract(engines.engine("llama"))
    vendor = replace(contract, runtime=replace(contract.runtime, name="tensorrt-llm"))
    assert layer_numbers((), vendor) == ()
    with pytest.raises(LayersNotGiven, match="puts out the state after the final norm alone"):
        layer_numbers((1,), vendor)


def test_a_runtime_without_layers_says_so(engines):
    class Final:
        contract = read_contract(engines.engine("llama"))

    with pytest.raises(NoLayerStates, match="torch on cpu"):
        layer_states(Final(), None, "tokens", (1,))  # type: ignore[arg-type]


def test_unit_length_and_layers_do_not_go_together(engines, rows, tmp_path):
    with pytest.raises(ValueError, match=r"^layers: none with normalize = true"):
        job(engines.engine("llama"), rows, tmp_path / "out", kind="last", normalize=True, layers=(1,))


def test_embeddings_of_unit_length_take_no_layers(engines, rows, tmp_path):
    states = StatesSpec(kind="last", dtype="float32", layers=(1,))
    with pytest.raises(
        BadValue, match=r"states\.layers is \[1\], expected no layers beside an embedding of unit length"
    ):
        extract.embed(engines.checkpoint("llama"), str(rows), tmp_path / "out", normalize=True, states=states)


def test_a_report_says_that_layers_are_stored_and_draws_the_final_states(first):
    found = gather(first)
    setting = next(setting for setting in found.settings if setting.name == "Other layers")
    assert (setting.value, setting.note[-35:]) == ("0, 2, 3", "; no figure on this page is of them")
    assert found.states is not None
    norms = [np.linalg.norm(row.states, axis=1) for row in open_output(first) if row.states is not None]
    assert found.states.norm_quantiles[-1] == pytest.approx(np.concatenate(norms).max(), rel=1e-4)


def test_the_plan_counts_the_bytes_of_layers(engines, rows, tmp_path):
    engine = engines.engine("llama")
    for layers in ((), LAYERS):
        spec = job(engine, rows, tmp_path / f"out-{len(layers)}", layers=layers, compression="none")
        expected = plan(spec).estimate.num_bytes
        run(spec)
        found = sum(path.stat().st_size for path in (tmp_path / f"out-{len(layers)}" / "data").iterdir())
        assert abs(expected - found) <= 0.1 * found


def test_layers_are_part_of_a_jobs_identity_only_where_some_are_asked_for(engines, rows, tmp_path):
    engine = engines.engine("llama")
    run(job(engine, rows, tmp_path / "out"))
    stored = tmp_path / "out" / "job.json"
    table = json.loads(stored.read_bytes())
    assert "layers" not in table["identity"]["states"]
    assert b"layer" not in b"".join(read_job(tmp_path / "out").schema.metadata)
    del table["spec"]["states"]["layers"]  # as a version wrote it that knew no layers
    stored.write_text(json.dumps(table))
    assert run(job(engine, rows, tmp_path / "out")).num_shards_made == 0
    with pytest.raises(OtherJob, match=r"whose states\.layers is null; you asked for \[1\]"):
        run(job(engine, rows, tmp_path / "out", layers=(1,)))


def test_a_resume_may_name_the_same_layers_otherwise_and_no_others(engines, rows, first):
    engine = engines.engine("llama")
    spec = job(engine, rows, first, layers=(0, 2, 3), rows_per_shard=8, carry=("n",))
    assert run(spec).num_shards_made == 0
    with pytest.raises(OtherJob, match=r"states\.layers"):
        run(replace(spec, states=replace(spec.states, layers=(0, 2))))


def test_the_schema_says_where_each_column_was_taken(first):
    schema = open_output(first).schema
    assert schema.names[-4:] == ["hidden_states", "layer_0", "layer_2", "layer_3"]
    for n in LAYERS:
        assert schema.field(f"layer_{n}").metadata == {
            b"extract.dtype": b"float32",
            b"extract.position": f"residual_after_layer_{n}".encode(),
            b"extract.width": b"64",
        }
        assert schema.field(f"layer_{n}").type == schema.field("hidden_states").type
    assert schema.metadata[b"extract.position"] == b"post_final_norm"
    assert schema.metadata[b"extract.layers"] == b"0,2,3"
    assert b"layer_0, layer_2, layer_3 likewise" in schema.metadata[b"extract.read"]


def test_a_carried_column_may_not_have_a_layers_name(engines, tmp_path):
    source = parquet(tmp_path / "in.parquet", {"text": ["a"], "layer_2": [1]})
    with pytest.raises(extract.errors.SpecError, match='column "layer_2" would appear twice'):
        plan(job(engines.engine("llama"), source, tmp_path / "out", layers=(2,), carry=("layer_2",)))


# --- states that cannot be stored -----------------------------------------------------------------------------------


class Spoilt:
    """An engine whose layer 2 is far too large for float16 in every row of the longest length."""

    def __init__(self, engine: Path) -> None:
        self._runtime = job_rig.runtime(str(engine))
        self.contract, self.arithmetic = self._runtime.contract, self._runtime.arithmetic

    def hidden_states(self, batch, kind):
        return self._runtime.hidden_states(batch, kind)

    def layer_states(self, batch, kind, layers):
        found = self._runtime.layer_states(batch, kind, layers)
        for start, length in zip(batch.cu_seqlens[:-1], batch.lengths, strict=True):
            if length == LIMIT:
                found[1 + layers.index(2)][start + 3, 7] = 1e6
        return found

    def close(self):
        pass


def test_a_layer_that_cannot_be_stored_marks_its_row_and_no_other(engines, rows, tmp_path):
    from extract.runners import local

    engine = engines.engine("llama")
    spec = job(engine, rows, tmp_path / "out", layers=LAYERS, dtype="float16")
    local.run(spec, runtime=Spoilt(engine))  # type: ignore[arg-type]
    found = list(open_output(tmp_path / "out"))
    assert {row.num_tokens for row in found if row.outcome == "non_finite"} == {LIMIT}
    assert {row.outcome for row in found if row.num_tokens == LIMIT} == {"non_finite"}
    assert {len(row.layers) for row in found if 0 < row.num_tokens < LIMIT} == {3}
    assert all(row.states is None and not row.layers for row in found if row.outcome == "non_finite")
    assert job_rig.record_of(tmp_path / "out", 0).overflowed == sum(row.num_tokens == LIMIT for row in found)
    verify(tmp_path / "out")
    spec = job(engine, rows, tmp_path / "stops", layers=LAYERS, dtype="float16", on_non_finite="error")
    with pytest.raises(NonFiniteStates, match=r"token 3 of layer_2: 1 of 64 values cannot be stored as float16"):
        local.run(spec, runtime=Spoilt(engine))  # type: ignore[arg-type]


class Huge(Spoilt):
    """An engine whose layer 2 is too large for float16 at the first token of every row but those of some length."""

    fits = 0

    def layer_states(self, batch, kind, layers):
        found = self._runtime.layer_states(batch, kind, layers)
        if kind == "tokens" and batch.num_tokens != self.fits:
            found[1 + layers.index(2)][batch.cu_seqlens[:-1], 7] = 98_538
        return found


def test_layers_that_the_stored_type_never_holds_are_refused_before_a_row_is_computed(engines):
    engine = engines.engine("llama")
    huge = Huge(engine)
    spec = StatesSpec(layers=(1, 2), dtype="float16")
    with pytest.raises(LayersOverflow) as error:
        try_layers(huge, spec)  # type: ignore[arg-type]
    assert str(error.value) == (
        "states.layers: the states after layer 2 reach 98,538 in each of the engine's probe texts, more than float16 "
        "holds (65,504), so rows would end without states. Choose --dtype bfloat16 or float32."
    )
    for other in (replace(spec, dtype="bfloat16"), replace(spec, kind="last"), replace(spec, layers=())):
        try_layers(huge, other)  # type: ignore[arg-type]
    huge.fits = len(huge.contract.probe.sequences[0].input_ids)
    try_layers(huge, spec)  # type: ignore[arg-type]


def test_a_run_tries_the_layers_that_it_stores(engines, rows, tmp_path, monkeypatch):
    from extract.runners import loading, local

    tried: list[Any] = []
    monkeypatch.setattr(loading, "try_layers", lambda runtime, states: tried.append(states.layers))
    local.run(job(engines.engine("llama"), rows, tmp_path / "out", layers=(-1,)))
    assert tried == [(3,)]


# --- kill, verify, make again ---------------------------------------------------------------------------------------


def test_a_killed_job_with_layers_ends_as_an_unbroken_one(tiny_engine, tmp_path):
    source = crash_rig.write_rows(tmp_path / "rows.parquet")
    options = ("--layers", "1,-1")
    assert warm_command.call(*crash_rig.arguments(tiny_engine, source, tmp_path / "whole", *options)).code == 0
    command = warm_command.start(*crash_rig.arguments(tiny_engine, source, tmp_path / "out", *options))
    command.until(lambda: crash_rig.num_commits(tmp_path / "out") >= 4)
    assert command.kill().code == -signal.SIGKILL
    before = crash_rig.committed(tmp_path / "out")
    resumed = warm_command.call(*crash_rig.arguments(tiny_engine, source, tmp_path / "out", *options))
    assert resumed.code == 0, resumed.err
    assert crash_rig.content(tmp_path / "out") == crash_rig.content(tmp_path / "whole")
    assert crash_rig.committed(tmp_path / "out").items() >= before.items()
    assert open_output(tmp_path / "out").layers == (1, 3)


@pytest.mark.parametrize(
    "states",
    [{"kind": "tokens", "dtype": "float32"}, {"kind": "tokens", "dtype": "int8"}, {"kind": "mean", "dtype": "float16"}],
    ids=lambda states: "-".join(states.values()),
)
def test_recomputing_finds_every_column_right(engines, rows, tmp_path, states):
    run(job(engines.engine("llama"), rows, tmp_path / "out", layers=LAYERS, **states))
    found = verify(tmp_path / "out", recompute=30)
    assert found.recomputed == 30
    assert not found.notes


@pytest.mark.parametrize("layer", LAYERS)
def test_recomputing_finds_a_layer_that_is_a_little_off(first, tmp_path, layer):
    import shutil

    shutil.copytree(first, tmp_path / "out")
    factors = np.ones(64, np.float32)
    factors[9] = 1.02
    job_rig.rewrite_shard(tmp_path / "out", 1, lambda table: scaled(table, f"layer_{layer}", factors))
    verify(tmp_path / "out")
    with pytest.raises(BadShards, match=rf"row \d+, layer {layer}: differs from the plain model"):
        verify(tmp_path / "out", recompute=40)


def test_an_error_of_a_token_does_not_vanish_beside_a_token_that_is_far_larger():
    expected = np.ones((3, 8), np.float32)
    expected[0, 2] = 26_000
    found = expected.copy()
    found[1, 5] += 0.01
    assert relative_error(found, expected) < 1e-6
    assert token_error(found, expected) == pytest.approx(0.01, rel=1e-3)
    found[1, 5] = np.nan
    assert token_error(found, expected) == float("inf")


def plain_model_off_by(monkeypatch: pytest.MonkeyPatch, size: float, chosen: Any) -> None:
    """Move one channel of layer 2 of the plain model, in rows whose first token `chosen` likes."""
    from extract.engine.torch_runtime import PlainModel

    plain = PlainModel.layer_states

    def moved(self, input_ids, layers):
        found = plain(self, input_ids, layers)
        if chosen(input_ids):
            found[1 + list(layers).index(2)][-1, 9] += size * np.abs(found[1 + list(layers).index(2)][-1]).max()
        return found

    monkeypatch.setattr(PlainModel, "layer_states", moved)


def test_one_row_where_float32_is_amplified_is_said_and_is_no_problem(first, monkeypatch):
    some = next(row.input_ids.tolist() for row in open_output(first) if row.states is not None)
    plain_model_off_by(monkeypatch, 2e-4, lambda ids: list(ids) == some)
    found = verify(first, recompute=20)
    assert [note for note in found.notes if "the model amplifies the rounding of float32 there" in note]
    plain_model_off_by(monkeypatch, 2e-3, lambda ids: list(ids) == some)
    with pytest.raises(BadShards, match=r"row 0, layer 2: differs from the plain model by 2\.\de-03"):
        verify(first, recompute=20)


def test_an_engine_that_is_off_in_many_rows_is_not_excused(first, monkeypatch):
    plain_model_off_by(monkeypatch, 2e-4, lambda ids: True)
    with pytest.raises(BadShards, match=r"\d+ of 20 rows .* too many for amplified rounding"):
        verify(first, recompute=20)


def test_a_layer_with_too_few_states_is_found_without_a_model(first, tmp_path):
    import shutil

    shutil.copytree(first, tmp_path / "out")

    def shortened(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index("layer_2")
        lists = table.column("layer_2").combine_chunks()
        cut = pa.array([None if one is None else one[:-1] for one in lists.to_pylist()], lists.type)
        return table.set_column(place, table.schema.field("layer_2"), cut)

    job_rig.rewrite_shard(tmp_path / "out", 1, shortened)
    with pytest.raises(BadShards, match="than its tokens and outcome say in layer_2"):
        verify(tmp_path / "out")


def test_a_cast_and_a_pool_change_every_column_alike(engines, first, tmp_path):
    derive(first, tmp_path / "cast", Change(dtype="bfloat16"))
    assert_holds(tmp_path / "cast", engines.checkpoint("llama"), "tokens", 5e-3)
    verify(tmp_path / "cast", recompute=20)
    for pool in ("last", "mean", "first"):
        derive(first, tmp_path / pool, Change(pool=pool, dtype="float32", rows_per_shard=7))
        assert_holds(tmp_path / pool, engines.checkpoint("llama"), pool, 1e-5)
        verify(tmp_path / pool, recompute=20)
    assert open_output(tmp_path / "mean").layers == LAYERS


def test_shards_that_are_computed_again_hold_the_same_layers(first, tmp_path):
    run(respec(first, tmp_path / "again", shards="1,3"))
    chosen = output_table(first).filter(
        pa.compute.is_in(output_table(first)["row"], output_table(tmp_path / "again")["row"])
    )
    assert output_table(tmp_path / "again").replace_schema_metadata(None).equals(chosen.replace_schema_metadata(None))


# --- reading --------------------------------------------------------------------------------------------------------


def test_layers_are_read_by_row_by_batch_as_a_table_and_as_a_frame(first):
    output = open_output(first)
    assert output.layers == LAYERS
    row = output.row(3)
    assert list(row.layers) == list(LAYERS)
    assert np.array_equal(output.states(3, layer=2), row.layers[2])
    assert np.array_equal(output.states(3), row.states)
    assert output.row(5).layers == {}
    assert output.states(5, layer=2) is None
    batch = next(output.batches())
    assert np.array_equal(batch.layer(2).state(3), row.layers[2])
    assert batch.layer(2).torch().shape == batch.layer(2).values.shape
    frame = output.to_pandas()
    assert np.array_equal(frame["layer_3"][3], row.layers[3])
    assert output.to_pandas(["layer_2"]).columns.tolist() == ["layer_2"]
    with pytest.raises(NotStored, match=r"no states of layer 1 \(layers beside the final state: 0, 2, 3\)"):
        output.states(3, layer=1)


def test_decoded_tables_hold_layers_as_float32(engines, rows, tmp_path):
    run(job(engines.engine("llama"), rows, tmp_path / "out", dtype="int8", layers=(2,)))
    output = open_output(tmp_path / "out")
    table = output.table(decoded=True)
    assert table.schema.names[-2:] == ["hidden_states", "layer_2"]
    assert np.allclose(table.column("layer_2")[3].as_py(), output.states(3, layer=2))


def test_streamed_layers_are_those_of_a_job(engines, rows, first):
    engine = engines.engine("llama")
    given = [None if n == 5 else text for n, text in enumerate(texts(40))]
    given[6] = given[7]
    stream = extract.stream(engine, given, layers=(2, -1), rows_per_batch=11, runtime=job_rig.runtime(str(engine)))
    found = [row for batch in stream for row in batch]
    assert found[5].layers == {}
    expected = list(open_output(first))
    for layer in (2, 3):
        pairs = [
            (one.layers[layer], other.layers[layer]) for one, other in zip(found, expected, strict=True) if other.layers
        ]
        assert rig.relative_error(*map(list, zip(*pairs, strict=True))) <= 1e-6
    with pytest.raises(NoSuchDecoderLayer):
        extract.stream(engine, given, layers=(7,))


def test_the_command_takes_layers_and_inspect_shows_them(tiny_engine, first, tmp_path):
    source = crash_rig.write_rows(tmp_path / "rows.parquet")
    planned = warm_command.call("plan", "--engine", tiny_engine, "--data", source, "--layers", "-1", "--json")
    assert json.loads(planned.out)["spec"]["states"]["layers"] == [3]
    refused = warm_command.call("plan", "--engine", tiny_engine, "--data", source, "--layers", "1;2")
    assert refused.code == 2
    assert "'1;2' is not a list of whole numbers such as 2,15,-1." in refused.err
    shown = warm_command.call("inspect", first, "--row", 3)
    assert re.search(r"layer_2 +list<item: fixed_size_list", shown.out)
    assert "first_values of layer_2" in shown.out


# --- exports --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half(engines, rows, tmp_path_factory) -> Path:
    """The same job in bfloat16."""
    out = tmp_path_factory.mktemp("half") / "out"
    run(job(engines.engine("llama"), rows, out, layers=LAYERS, rows_per_shard=8, dtype="bfloat16", carry=("n",)))
    return out


def stored(output: Path, layer: int) -> np.ndarray:
    """All stored numbers of a layer, bfloat16 as its bits."""
    batches = [batch.layer(layer) for batch in open_output(output).batches()]
    return np.concatenate([batch.values for batch in batches])


def test_parquet_npy_and_safetensors_hold_the_layers(half, tmp_path):
    import pyarrow.parquet as pq
    from safetensors.numpy import load_file

    export(half, tmp_path / "parquet", kind="parquet")
    table = pq.read_table(tmp_path / "parquet" / "data")
    for layer in LAYERS:
        lists = table.column(f"layer_{layer}").combine_chunks()
        assert np.array_equal(lists.flatten().flatten().to_numpy().reshape(-1, 64), stored(half, layer))
    export(half, tmp_path / "npy", kind="npy")
    assert np.array_equal(np.load(tmp_path / "npy" / "layer_2.npy"), stored(half, 2))
    export(half, tmp_path / "cast", kind="safetensors", cast="float32")
    parts = [load_file(path) for path in sorted((tmp_path / "cast").glob("*.safetensors"))]
    assert np.array_equal(np.concatenate([part["layer_3"] for part in parts]), np.concatenate(held(half, 3)))


def test_drafters_get_the_layers_that_a_job_stored(half, tmp_path):
    import torch
    from safetensors.torch import load_file

    export(half, tmp_path / "speculators", kind="speculators", layers=("0", "2", "3"), loss_mask="all")
    sample = load_file(tmp_path / "speculators" / "hidden_states" / "hs_3.safetensors")
    for place, layer in enumerate(LAYERS):
        assert np.array_equal(sample["hidden_states"][:, place].float().numpy(), held(half, layer)[3])
    export(half, tmp_path / "specforge", kind="specforge", layers=("0", "2", "3"), loss_mask="all")
    sample = torch.load(tmp_path / "specforge" / "rows_0-5000" / "data_3.ckpt", weights_only=True)
    side_by_side = np.concatenate([held(half, layer)[3] for layer in LAYERS], axis=1)
    assert np.array_equal(sample["aux_hidden_state"][0].float().numpy(), side_by_side)


def test_saelens_gets_one_layer_under_the_name_of_its_hook(half, first, tmp_path):
    import datasets

    made = export(half, tmp_path / "to", kind="saelens", layers=("2",), context=4)
    assert (made.record["hook_name"], made.record["layer"]) == ("blocks.1.hook_resid_post", "layer_2")
    cached = datasets.load_from_disk(str(tmp_path / "to")).with_format("numpy")
    ends = np.cumsum([0, *(len(one) for one in held(half, 2))])
    whole = np.concatenate(held(half, 2))
    assert np.array_equal(cached[0]["blocks.1.hook_resid_post"], whole[:4])
    assert ends[-1] == len(whole)
    made = export(first, tmp_path / "embeddings", kind="saelens", layers=("0",), context=4)
    assert made.record["hook_name"] == "blocks.0.hook_resid_pre"
    for asked, message in ((("1",), "holds no states of layer 1"), (("0", "2"), "asked for 2 layers at once")):
        with pytest.raises(extract.errors.SpecError, match=message):
            export(half, tmp_path / "no", kind="saelens", layers=asked)


@pytest.mark.parametrize("kind", ["hf", "parquet", "npy", "safetensors"])
def test_a_cast_export_casts_the_layers(half, tmp_path, kind):
    made = export(half, tmp_path / "to", kind=kind, cast="float16")
    assert made.record["states"]["layers"] == ["layer_0", "layer_2", "layer_3"]
    if kind == "hf":
        import datasets

        found = datasets.load_from_disk(str(tmp_path / "to")).with_format("arrow")[3:4]
        for layer in LAYERS:
            expected = open_output(half).states(3, layer=layer)
            assert np.allclose(found.column(f"layer_{layer}")[0].as_py(), expected, rtol=1e-3)


def test_a_value_of_layers_that_is_no_list_is_refused():
    from extract.settings import parse

    with pytest.raises(BadValue, match="expected a list of whole numbers"):
        parse(StatesSpec, {"layers": "2"}, "job.toml [states]")
