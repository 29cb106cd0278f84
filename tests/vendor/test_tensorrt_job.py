"""Whole jobs with an engine of TensorRT-LLM, by the command line: nothing in them knows which vendor computes."""

import json

import job_rig
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import extract
from vendor_rig import LIMIT, vendor

from extract.tensorrt.session_runtime import SessionRuntime

SIZES = ("--max-input-tokens", LIMIT, "--pass-tokens", 256, "--max-sequences", 16)
JOB = ("--id-column", "key", "--dtype", "float32", "--reserve-bytes", 0, "--rows-per-shard", 20)


def rows_of(path):
    """60 rows: null, empty, one character, far too long, and texts in between."""
    texts = [None, "", "a", " ".join(job_rig.texts(40)), *job_rig.texts(56)]
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()), "key": list(range(100, 160))}), path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return rows_of(tmp_path_factory.mktemp("data") / "rows.parquet")


@pytest.fixture(scope="module")
def engine(vendor_engines):
    return vendor_engines.engine(text=True)


def run(capsys, engine, data, output, *options):
    return extract(capsys, "run", "--engine", engine, "--data", data, "-o", output, *JOB, "--quiet", *options)


def same_bytes(one, other):
    """Whether two outputs hold the same shards."""
    shards = [{path.name: path.read_bytes() for path in (output / "data").iterdir()} for output in (one, other)]
    return shards[0] == shards[1] and len(shards[0]) == 3


def test_a_job_from_the_checkpoint_to_its_inspection(vendor_engines, data, tmp_path, capsys):
    checkpoint, engine, output = vendor_engines.checkpoint(), tmp_path / "engine", tmp_path / "out"
    with vendor(noisy=True):
        build = ("build", checkpoint, "-o", engine, "--runtime", "tensorrt-llm", *SIZES)
        dry = extract(capsys, *build, "--dry-run", "--json")
        assert (dry.code, json.loads(dry.out)["pass_tokens"]) == (0, 256)
        built = extract(capsys, *build, "--json")
        assert built.code == 0, built.err
        assert json.loads(built.out)["runtime"]["name"] == "tensorrt-llm"
        planned = extract(capsys, "plan", "--engine", engine, "--data", data, "-o", output, *JOB, "--json")
        assert planned.code == 0, planned.err
        assert json.loads(planned.out)["estimate"]["num_rows"] == 60
        ran = run(capsys, engine, data, output, "--json")
        assert ran.code == 0, ran.err
        assert json.loads(ran.out)["complete"] is True
        status = extract(capsys, "status", output)
        assert (status.code, "complete" in status.out) == (0, True)
        verified = extract(capsys, "verify", output, "--recompute", 20, "--reference", checkpoint)
        assert verified.code == 0, verified.err + verified.out
        for directory in (engine, output):
            assert extract(capsys, "inspect", directory).code == 0
        fidelity = extract(capsys, "fidelity", engine, "--reference", checkpoint, "--data", data, "--quiet", "--json")
        assert fidelity.code == 0, fidelity.err
        before = job_rig.snapshot(output)
        again = run(capsys, engine, data, output)
        assert again.code == 0
        assert job_rig.snapshot(output) == before


def test_outcomes_ids_and_states_are_those_of_the_torch_runtime(engine, data, tiny_engine, tmp_path, capsys):
    with vendor():
        assert run(capsys, engine, data, tmp_path / "vendor").code == 0
    assert run(capsys, tiny_engine, data, tmp_path / "torch").code == 0
    one, other = (job_rig.output_table(tmp_path / name) for name in ("vendor", "torch"))
    assert set(one["outcome"].to_pylist()) == {"null", "empty", "ok", "truncated"}
    for column in one.column_names:
        if column != "hidden_states":
            assert one[column].to_pylist() == other[column].to_pylist(), column
    for row, (found, expected) in enumerate(
        zip(one["hidden_states"].to_pylist(), other["hidden_states"].to_pylist(), strict=True)
    ):
        assert (found is None) == (expected is None), row
        if found is not None:
            found, expected = np.array(found), np.array(expected)
            assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max(), row


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_pooled_states_are_those_of_the_torch_runtime(kind, engine, data, tiny_engine, tmp_path, capsys):
    with vendor():
        assert run(capsys, engine, data, tmp_path / "vendor", "--kind", kind).code == 0
    assert run(capsys, tiny_engine, data, tmp_path / "torch", "--kind", kind).code == 0
    one, other = (job_rig.output_table(tmp_path / name)["hidden_state"].to_pylist() for name in ("vendor", "torch"))
    assert [row is None for row in one] == [row is None for row in other]
    found, expected = (np.array([row for row in rows if row is not None]) for rows in (one, other))
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("calls", [1, 3])
def test_a_job_that_breaks_halfway_goes_on_to_the_same_bytes(calls, engine, data, tmp_path, capsys, monkeypatch):
    with vendor():
        assert run(capsys, engine, data, tmp_path / "whole").code == 0
        states, made = SessionRuntime.hidden_states, []

        def breaking(self, batch, kind):
            made.append(1)
            if len(made) > calls + 1:  # the probe's replay is the first
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return states(self, batch, kind)

        with monkeypatch.context() as patch:
            patch.setattr(SessionRuntime, "hidden_states", breaking)
            ended = run(capsys, engine, data, tmp_path / "broken")
            assert ended.code != 0
            assert "CUDA error" in ended.err
        assert run(capsys, engine, data, tmp_path / "broken").code == 0
    assert same_bytes(tmp_path / "whole", tmp_path / "broken")


def test_an_interrupted_job_goes_on_to_the_same_bytes(engine, data, tmp_path, capsys, monkeypatch):
    with vendor():
        assert run(capsys, engine, data, tmp_path / "whole").code == 0
        states, made = SessionRuntime.hidden_states, []

        def interrupted(self, batch, kind):
            made.append(1)
            if len(made) == 3:
                raise KeyboardInterrupt
            return states(self, batch, kind)

        with monkeypatch.context() as patch:
            patch.setattr(SessionRuntime, "hidden_states", interrupted)
            assert run(capsys, engine, data, tmp_path / "broken").code == 130
        assert run(capsys, engine, data, tmp_path / "broken").code == 0
    assert same_bytes(tmp_path / "whole", tmp_path / "broken")


def test_two_tiers_of_a_checkpoint_do_not_mix_in_one_output(engine, vendor_engines, data, tmp_path, capsys):
    other = vendor_engines.engine(text=True, pass_tokens=128)
    with vendor():
        assert run(capsys, engine, data, tmp_path / "out", "--rows", "0-19").code == 0
        ended = run(capsys, other, data, tmp_path / "out", "--rows", "0-19")
    assert ended.code == 5
    assert "engine" in ended.err


def test_an_engine_of_last_tokens_serves_no_other_kind(vendor_engines, data, tmp_path, capsys):
    engine = vendor_engines.engine(text=True, states="last")
    with vendor():
        ended = run(capsys, engine, data, tmp_path / "out")
        assert ended.code == 2
        assert not (tmp_path / "out").exists()
        assert run(capsys, engine, data, tmp_path / "out", "--kind", "last").code == 0


def test_tiers_are_built_by_one_command_and_those_that_are_there_are_kept(vendor_engines, tmp_path, capsys):
    tiers = tmp_path / "tiers"
    build = ("build", vendor_engines.checkpoint(tokenizer=None), "-o", tiers, "--runtime", "tensorrt-llm", "--tiers")
    sizes = ("--max-input-tokens", 32, "--pass-tokens", 16384, "--max-sequences", 512)
    with vendor():
        assert extract(capsys, *build, *sizes, "--quiet").code == 0
        names = ["tokens-16384", "tokens-8192"]
        assert sorted(path.name for path in tiers.iterdir()) == names
        before = job_rig.snapshot(tiers)
        assert extract(capsys, *build, *sizes, "--quiet").code == 0
        assert job_rig.snapshot(tiers) == before
