"""`from extract import ...`: the functions behind the commands, used as their docstrings say."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from job_rig import Engines, errors, parquet, texts

import extract


def test_the_names_are_those_of_the_commands_and_what_they_take():
    expected = (
        "JobSpec Recipe RunSpec SourceSpec StatesSpec TextSpec build embed export fidelity load_job load_runtime "
        "open_output plan quantize rank_layers run stream tune verify write_report"
    )
    assert " ".join(extract.__all__) == expected
    for name in extract.__all__:
        assert getattr(extract, name).__doc__


def test_editors_and_type_checkers_see_the_same_names():
    source = ast.parse(Path(extract.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in source.body if isinstance(node, ast.If)]
    assert sorted(alias.asname for node in block.body for alias in node.names) == extract.__all__
    assert {*extract.__all__} <= {*dir(extract)}


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError) as error:
        getattr(extract, "extract")  # noqa: B009
    assert str(error.value) == "module 'extract' has no attribute 'extract'"


def test_a_checkpoint_becomes_an_engine_an_output_and_arrays(engines: Engines, tmp_path):
    """The four lines of the README, from Python."""
    from extract import JobSpec, build, load_job, open_output, plan, run, verify
    from extract.engine.recipe import Recipe

    contract = build(engines.checkpoint("llama"), tmp_path / "engine", Recipe(dtype="float32", device="cpu"))
    assert contract.limits.max_input_tokens == 128
    rows = parquet(tmp_path / "rows.parquet", {"text": texts(20)})
    (tmp_path / "job.toml").write_text(
        f"engine = {json.dumps(str(tmp_path / 'engine'))}\noutput = {json.dumps(str(tmp_path / 'out'))}\n"
        f'[source]\npath = {json.dumps(str(rows))}\n[states]\ndtype = "float32"\nreserve_bytes = 0\n'
    )
    spec = load_job(tmp_path / "job.toml")
    assert isinstance(spec, JobSpec)
    assert plan(spec).estimate.num_rows == 20
    summary = run(spec)
    assert (summary.complete, summary.totals.num_rows) == (True, 20)
    assert verify(tmp_path / "out", recompute=5).worst <= 1e-5
    output = open_output(tmp_path / "out")
    assert output.width == 64
    assert output.row(7).states.shape == (output.row(7).num_tokens, 64)
    assert np.array_equal(output.states(7), output.row(7).states)
    assert output[7].row == 7
    assert [row.row for row in output] == list(range(20))
    assert isinstance(output.table(), pa.Table)
    assert sum(batch.num_rows for batch in output.batches()) == 20
    assert run(spec).num_shards_made == 0  # nothing is left to do


def test_a_loaded_engine_can_be_handed_to_several_runs(engines: Engines, tmp_path):
    from extract import JobSpec, open_output, run
    from extract.engine.runtimes import load_runtime
    from extract.spec import SourceSpec, StatesSpec

    runtime = load_runtime(engines.engine("llama"), threads=1)
    rows = parquet(tmp_path / "rows.parquet", {"text": texts(20)})
    for name in ("one", "two"):
        run(
            JobSpec(
                source=SourceSpec(path=str(rows)),
                engine=str(engines.engine("llama")),
                output=str(tmp_path / name),
                states=StatesSpec(kind="last", dtype="float32", reserve_bytes=0),
            ),
            runtime=runtime,
        )
    one, two = ([row.states for row in open_output(tmp_path / name)] for name in ("one", "two"))
    assert errors(one, two).max() == 0


def test_every_result_is_plain_values(engines: Engines, tmp_path):
    from extract import JobSpec, plan, run, verify
    from extract.spec import SourceSpec, StatesSpec

    spec = JobSpec(
        source=SourceSpec(path=str(parquet(tmp_path / "rows.parquet", {"text": texts(5)}))),
        engine=str(engines.engine("llama")),
        output=str(tmp_path / "out"),
        states=StatesSpec(reserve_bytes=0),
    )
    for result in (plan(spec), run(spec), verify(tmp_path / "out")):
        assert json.loads(json.dumps(result.as_json()))


def test_importing_the_package_imports_nothing_heavy_and_planning_no_torch(engines: Engines, tmp_path):
    rows = parquet(tmp_path / "rows.parquet", {"text": texts(5)})
    script = f"""
import sys
import extract
heavy = {{"torch", "transformers", "datasets", "pyarrow", "numpy", "tokenizers"}}
print(sorted(heavy & set(sys.modules)))
from extract import JobSpec, plan
from extract.spec import SourceSpec
plan(JobSpec(source=SourceSpec(path={str(rows)!r}), engine={str(engines.engine("llama"))!r}, output="out"))
print(sorted({{"torch", "transformers", "datasets"}} & set(sys.modules)))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=_environment(), check=False
    )
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == ["[]", "[]"]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(extract.__file__).parent.parent)}
