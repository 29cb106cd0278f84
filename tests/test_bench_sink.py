"""The benchmark of writing runs on any output, and its shards are the same bytes by any number of threads."""

import importlib.util
import json
from pathlib import Path

import pytest
import shard_rig

from extract.spec import StatesSpec

SCRIPT = Path(__file__).parent / "bench" / "bench_sink.py"


@pytest.fixture
def bench():
    spec = importlib.util.spec_from_file_location("bench_sink", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_small_run_gives_rates_of_stages_and_threads(bench, tmp_path, capsys):
    shard_rig.write_output(tmp_path / "out", StatesSpec())
    words = ["--output", str(tmp_path / "out"), "--megabytes", "1", "--rounds", "1", "--threads", "1", "3"]
    bench.main([*words, "--folder", str(tmp_path)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert list(found) == list(bench.CASES)
    for case in found.values():
        assert set(case["stages"]) == set(bench.STAGES)
        assert set(case["gb_per_s"]) == set(case["cores"]) == {"1", "3"}
        assert 0 < case["stored"] < 2


def test_shards_that_differ_by_the_number_of_threads_end_the_benchmark(bench, tmp_path, monkeypatch):
    shard_rig.write_output(tmp_path / "out", StatesSpec())
    rows, states = bench.real_states(tmp_path / "out", 0.1)
    monkeypatch.setattr(bench, "_shard", lambda *given: str(given[-1]))
    with pytest.raises(AssertionError, match="threads"):
        bench.measure(rows, states, StatesSpec(), tmp_path, [1, 2], 1)
