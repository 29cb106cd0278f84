"""The benchmark for cards runs here with tiny shapes: all parts, with no more than they need, and ends with JSON."""

import json
import subprocess
import sys
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
    assert found["parts"]["vllm"] == {"skipped": "no card", "seconds": 0.0, "card": {}}
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
