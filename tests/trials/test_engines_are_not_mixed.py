"""The numbers of one engine never stand under the name of another, also where the caller loaded the engine."""

import number_rig
import pytest
import rig
from job_rig import job, parquet, runtime, stored

from extract.pipeline import AnotherEngineLoaded
from extract.runners import local


def test_an_engine_in_memory_that_is_not_the_jobs_is_refused_before_compute(subjects, tmp_path):
    """Other weights of the same shape and tokenizer, and the same weights through the other decoder."""
    twin = rig.tiny_checkpoint(tmp_path / "twin", "llama", seed=1)
    other = number_rig.build_engine(twin, tmp_path / "engine")
    source = parquet(tmp_path / "in.parquet", {"text": ["one", "two"]})
    spec = job(subjects.engine("llama-own"), source, tmp_path / "out")
    for engine in (other, subjects.engine("llama-transformers")):
        loaded = runtime(str(engine))
        with pytest.raises(AnotherEngineLoaded) as error:
            local.run(spec, runtime=loaded)
        expected = runtime(str(subjects.engine("llama-own"))).contract.engine_id
        assert str(error.value) == (
            f"the engine that is loaded has id {loaded.contract.engine_id[:16]}, the engine of the job has id "
            f"{expected[:16]}. Load the engine of the job, or name the loaded one in the job spec."
        )
        assert error.value.exit_code == 4
        assert not list((tmp_path / "out" / "commits").iterdir())
    local.run(spec, runtime=runtime(str(subjects.engine("llama-own"))))
    assert len(stored(tmp_path / "out")) == 2
