"""A resume computes the rows that are left and no other, whatever the caches of `datasets` hold of the first run."""

import json

import crash_rig
import pytest
import warm_command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory that `datasets` loads, and so caches."""
    folder = tmp_path_factory.mktemp("folder")
    lines = [json.dumps({"text": text, "key": f"row {n}"}) for n, text in enumerate(crash_rig.texts())]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def tokens_in(out):
    records = [json.loads(path.read_bytes()) for path in (out / "commits").glob("shard-*.json")]
    return sum(record["num_tokens"] for record in records)


@pytest.mark.parametrize("options", [(), ("--streaming",)], ids=["cached", "streamed"])
def test_a_resume_after_half_of_the_job_computes_the_other_half_alone(
    options, folder, tiny_engine, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    arguments = [*crash_rig.arguments(tiny_engine, folder, out), "--format", "hf", *options]
    command = warm_command.start(*arguments)
    command.until(lambda: crash_rig.num_commits(out) >= crash_rig.NUM_SHARDS // 2)
    command.kill()
    before, done = crash_rig.committed(out), tokens_in(out)
    ended = warm_command.call(*arguments)
    assert ended.code == 0, ended.err
    assert ended.summary["tokens_computed"] == ended.summary["totals"]["num_tokens"] - done
    assert ended.summary["totals"]["num_rows"] == crash_rig.NUM_ROWS
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before


def test_a_kill_in_one_large_file_costs_one_shard_in_flight_for_each_stage(tiny_engine, tmp_path):
    """Not the file: 50,000 rows in one row group, killed at about 60 %."""
    rows = crash_rig.write_rows(tmp_path / "rows.parquet", [f"row {n % 97}" for n in range(50_000)])
    out = tmp_path / "out"
    arguments = [*crash_rig.arguments(tiny_engine, rows, out, "--kind", "last"), "--rows-per-shard", "1000"]
    command = warm_command.start(*arguments)
    command.until(lambda: crash_rig.num_commits(out) >= 30)
    command.kill()
    done = crash_rig.num_commits(out)
    ended = warm_command.call(*arguments)
    assert ended.code == 0, ended.err
    assert ended.summary["num_shards_before"] == done >= 30
    assert ended.summary["num_shards_made"] == 50 - done
    assert ended.summary["tokens_computed"] < ended.summary["totals"]["num_tokens"] * (50 - done + 1) / 50
