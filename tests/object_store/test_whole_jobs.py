"""A job to an object store gives what the same job gives to a directory, and can be worked with like it."""

import crash_rig
import job_rig
import numpy as np
import object_rig
import pytest

from extract.output import open_output
from extract.spec import JobSpec
from extract.status import status
from extract.storage import locate
from extract.verification import verify


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return crash_rig.write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture(scope="module")
def embedded(tiny_engine, rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("embedded") / "out"
    job_rig.run(spec_of(tiny_engine, rows, out))
    return out


def spec_of(engine, rows, out, **settings) -> JobSpec:
    options = {"rows_per_shard": crash_rig.ROWS_PER_SHARD, "id_column": "key", **settings}
    return job_rig.job(engine, rows, out, **options)


def test_a_job_to_an_object_store_gives_what_one_to_a_directory_gives(tiny_engine, rows, embedded, address, place):
    summary = job_rig.run(spec_of(tiny_engine, rows, address))
    assert (summary.path, summary.num_shards_made) == (address, crash_rig.NUM_SHARDS)
    assert object_rig.content(place) == crash_rig.content(embedded)


def test_it_reads_back_like_a_directory(tiny_engine, rows, embedded, address):
    job_rig.run(spec_of(tiny_engine, rows, address))
    remote, local = open_output(address), open_output(embedded)
    assert remote.table().equals(local.table())
    assert np.array_equal(remote.states(57), local.states(57))
    assert verify(locate(address)).complete
    assert status(locate(address)).complete
