"""Several engines of one job: a worker takes the first that fits, the job knows them all, each shard says its own."""

import shutil

import crash_rig
import job_rig
import pytest

from extract.engine.contract import EngineDoesNotFit, read_contract
from extract.job import OtherJob, read_job
from extract.output import open_output
from extract.planning import EnginesDiffer
from extract.runners.finalizing import finalize_output
from extract.runners.local import run
from extract.runners.stripes import run_stripe
from extract.verification import BadShards, verify


@pytest.fixture(scope="module")
def here(engines):
    """Two engines of one checkpoint that this machine can run."""
    return engines.engine("llama", "own"), engines.engine("llama", "transformers")


@pytest.fixture(scope="module")
def elsewhere(here, tmp_path_factory):
    """The same engine, for a CPU that this machine has not."""
    path = tmp_path_factory.mktemp("elsewhere") / "engine"
    shutil.copytree(here[0], path)
    job_rig.edit_contract(path, device={"instruction_set": "of the future"})
    return path


def job(engines, rows, out, **settings):
    from dataclasses import replace

    first, *others = map(str, engines)
    settings = {"fingerprint": "any", "rows_per_shard": 10, "kind": "last", **settings}
    return replace(job_rig.job(first, rows, out, **settings), other_engines=tuple(others))


def ids(engines):
    return sorted(read_contract(engine).engine_id for engine in engines)


def test_the_first_engine_that_fits_makes_the_shards_and_they_say_so(here, elsewhere, rows, tmp_path):
    out = tmp_path / "out"
    assert run(job([elsewhere, here[0]], rows, out)).complete
    assert list(read_job(out).engine_ids) == ids([elsewhere, here[0]])
    made_by = {job_rig.record_of(out, shard).worker["engine"] for shard in range(10)}
    assert made_by == {read_contract(here[0]).engine_id}
    assert verify(out, recompute=5).recomputed == 5


def test_the_order_of_the_engines_does_not_matter_and_their_set_does(here, elsewhere, rows, tmp_path):
    out = tmp_path / "out"
    assert run(job([elsewhere, here[0]], rows, out)).num_shards_made == 10
    again = run(job([here[0], elsewhere], rows, out))
    assert (again.num_shards_made, again.complete) == (0, True)
    with pytest.raises(OtherJob):
        run(job([here[0]], rows, out))


def test_workers_with_different_engines_make_one_output(here, rows, tmp_path):
    out = tmp_path / "out"
    run_stripe(job(here, rows, out), 0, 2)
    run_stripe(job(here[::-1], rows, out), 1, 2)
    assert finalize_output(out).totals.num_rows == crash_rig.NUM_ROWS
    made_by = [job_rig.record_of(out, shard).worker["engine"] for shard in range(10)]
    assert made_by == [read_contract(here[shard % 2]).engine_id for shard in range(10)]
    assert verify(out).complete
    assert len(list(open_output(out))) == crash_rig.NUM_ROWS


def test_a_shard_of_an_engine_that_is_not_the_jobs_is_named(here, rows, tmp_path):
    out = tmp_path / "out"
    run(job(here, rows, out))
    job_rig.edit_record(out, 3, worker={"engine": "f" * 64})
    with pytest.raises(BadShards, match="engine ffffffffffffffff made it, which is none of the job's"):
        verify(out)


def test_copies_of_one_engine_are_the_job_of_that_engine(here, rows, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(here[0], copy)
    run(job([here[0], copy], rows, tmp_path / "a", fingerprint="exact"))
    run(job([here[0]], rows, tmp_path / "b", fingerprint="exact"))
    assert crash_rig.content(tmp_path / "a") == crash_rig.content(tmp_path / "b")


def test_several_engines_are_refused_unless_any_is_asked_for(here, rows, tmp_path):
    with pytest.raises(EnginesDiffer) as refused:
        run(job(here, rows, tmp_path / "out", fingerprint="exact"))
    found, expected = (read_contract(engine).engine_id[:16] for engine in here[::-1])
    assert str(refused.value) == (
        f"the engines of the job differ: id is {found}, the first one's is {expected}. Give one engine, or allow "
        "several with --fingerprint any, if other low bits are fine."
    )


def test_engines_of_two_checkpoints_are_refused(here, engines, rows, tmp_path):
    with pytest.raises(EnginesDiffer, match=r"checkpoint\.sha256 is .*Build them from one checkpoint in one precision"):
        run(job([here[0], engines.engine("gpt2")], rows, tmp_path / "out"))


def test_where_none_fits_the_first_ones_reason_is_told(elsewhere, rows, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(elsewhere, other)
    job_rig.edit_contract(other, device={"instruction_set": "of the past"})
    with pytest.raises(EngineDoesNotFit, match="of the future"):
        run(job([elsewhere, other], rows, tmp_path / "out"))
