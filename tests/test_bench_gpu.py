"""The benchmark for cards runs here with tiny shapes: all parts, with no more than they need, and ends with JSON."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "bench" / "bench_gpu.py"

WITHOUT = ("zstandard", "numba", "llvmlite", "obstore", "datasets", "gguf", "plotly", "matplotlib")
"""Packages of the project that a machine with a card need not have."""

BLOCKED = f"""
import importlib.machinery, sys
finder = importlib.machinery.PathFinder
found = finder.find_spec
finder.find_spec = staticmethod(
    lambda name, *where: None if name.partition(".")[0] in {WITHOUT!r} else found(name, *where)
)
sys.argv = ["bench_gpu.py", *sys.argv[1:]]
sys.path.insert(0, {str(SCRIPT.parent)!r})
import runpy
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def bench(tmp_path: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """The script's exit code, what it printed, and its last line."""
    command = [sys.executable, "-c", BLOCKED, "--device", "cpu", "--tiny", "--scratch", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_part_runs_without_the_packages_that_a_bare_machine_lacks(tmp_path: Path) -> None:
    """Compiling is tried by tests/cuda/test_ahead_of_time.py; here it would take a minute for each way."""
    parts = "numbers,products,copies,ours: llama,ours: qwen3-1.7b,transformers: llama-1b,job,vllm"
    code, text, found = bench(tmp_path, "--seconds", "560", "--parts", parts)
    assert code == 0, text
    assert "failed" not in found
    assert found["missing"] == {}
    assert found["parts"]["vllm"]["skipped"] == "no card"
    engines = found["parts"]["numbers"]["engines"]
    assert found["parts"]["numbers"]["right"] and {name.split()[1] for name in engines} >= {
        "float32",
        "bfloat16",
        "fp8",
    }
    ours = found["parts"]["ours: llama-1b"]["engines"]
    for precision in ("bfloat16", "fp8"):
        assert min(ours[precision]["rates"].values()) > 0
    assert found["parts"]["transformers: llama-1b"]["full"]["tokens_per_s"] > 0
    assert {"last, zstd", "tokens, none"} <= found["parts"]["job"].keys()
    assert list(tmp_path.iterdir()) == []


def test_time_that_is_over_is_said_part_by_part(tmp_path: Path) -> None:
    code, text, found = bench(tmp_path, "--seconds", "0")
    assert code == 0
    assert found["parts"] == {}
    assert "cut off    numbers" in text and "ours: llama-8b" in found["cut_off"]


def test_without_a_card_or_tiny_shapes_it_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--device", "cpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "on a CPU only with --tiny: these models are made for a card\n"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


@pytest.mark.usefixtures("scripts")
def test_a_part_that_breaks_is_a_result_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bench_gpu
    import torch
    from gpu import card

    def breaks(bench: Any, deadline: Any) -> dict[str, Any]:
        deadline.affords(1e9, "what takes for ever")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cpu = torch.device("cpu")
    bench = bench_gpu.Bench(device=cpu, tiny=True, shapes={}, checked={}, scratch=tmp_path, vllm_python=sys.executable)
    results: dict[str, Any] = {"parts": {}, "cut_off": [], "missing": {}}
    end = time.monotonic() + 100
    with card.Watch(cpu) as watch:
        bench_gpu._run(bench_gpu.Part("breaks", 9.0, breaks), bench, results, end, watch)
        bench_gpu._run(bench_gpu.Part("lacks", 9.0, breaks, ("no_such_package",)), bench, results, end, watch)
        bench_gpu._run(bench_gpu.Part("late", 9.0, breaks), bench, results, time.monotonic(), watch)
    assert results["failed"] == ["breaks"]
    assert results["parts"]["breaks"]["failed"].startswith("RuntimeError: CUDA error")
    assert results["missing"] == {"lacks": "not installed: no_such_package"}
    assert results["cut_off"] == ["breaks: what takes for ever", "late"]
    assert "an illegal memory access" in capsys.readouterr().out


@pytest.mark.usefixtures("scripts")
def test_where_regions_cannot_be_compiled_the_plain_lines_are_measured_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from gpu import ours, shapes

    class Fails:
        def run(self, batch: Any, kind: str) -> None:
            raise RuntimeError("Failed to find C compiler")

        def close(self) -> None:
            closed.append(True)

    closed: list[bool] = []
    cpu, shape = torch.device("cpu"), shapes.TINY_CHECKED["llama-check"]
    ours.made(shape, cpu, tmp_path / "weights")
    real = ours.opened
    monkeypatch.setattr(
        ours, "opened", lambda *where, compiled: Fails() if compiled else real(*where, compiled=compiled)
    )
    engine, note = ours.working(tmp_path / "weights", shape, "bfloat16", cpu)
    assert closed == [True] and engine.runtime.contract.runtime.compile == "none"
    assert note == "not compiled: RuntimeError: Failed to find C compiler"
