"""The benchmark of reading back runs, and all three ways read the same states."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "bench" / "bench_read_back.py"


@pytest.fixture
def bench():
    spec = importlib.util.spec_from_file_location("bench_read_back", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_small_run_of_every_case_gives_ratios(bench, capsys):
    bench.main(["--megabytes", "1", "--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("device ") and lines[1].startswith("versions pyarrow")
    found = json.loads(lines[-1])["cases"]
    assert list(found) == list(bench.CASES)
    assert all(
        set(case["ratios"]) == {"numpy", "torch"} and min(case["ratios"].values()) > 0 for case in found.values()
    )


def test_ways_that_read_different_states_end_the_benchmark(bench, tmp_path, monkeypatch):
    case = bench.CASES["tokens float16 none"]
    bench.write(tmp_path / "out", case, 0.5)
    monkeypatch.setattr(bench, "plain", lambda files, spec: (1, 2))
    with pytest.raises(AssertionError):
        bench.measure(tmp_path / "out", case, 1)
