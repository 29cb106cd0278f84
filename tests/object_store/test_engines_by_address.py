"""An engine by its address is fetched once, checked, and used like one that was there."""

import json
import shutil
import threading

import job_rig
import object_rig
import pytest

from extract.engine import fetching
from extract.engine.contract import EngineChanged, NotAnEngine, read_contract
from extract.engine.fetching import local_engine
from extract.engine.runtimes import load_runtime


@pytest.fixture
def stored(tiny_engine, place):
    object_rig.upload(tiny_engine, place)
    return place


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_lies_in_the_cache_under_its_id(stored, tiny_engine, tmp_path):
    found = local_engine(str(stored))
    assert found == tmp_path / "cache" / "engines" / read_contract(tiny_engine).engine_id
    assert files(found).keys() <= files(tiny_engine).keys()
    assert all(files(tiny_engine)[name] == content for name, content in files(found).items())
    assert [path.name for path in found.parent.iterdir() if path.is_dir()] == [found.name]


def test_it_is_fetched_once(stored, monkeypatch):
    found = local_engine(str(stored))
    monkeypatch.setattr(fetching, "_fetch", None)
    assert local_engine(str(stored)) == found


def test_a_job_with_it_gives_what_a_job_with_the_directory_gives(stored, tiny_engine, tmp_path):
    rows = job_rig.parquet(tmp_path / "rows.parquet", {"text": job_rig.texts(20)})
    job_rig.run(job_rig.job(tiny_engine, rows, tmp_path / "one"))
    from extract.runners.local import run

    run(job_rig.job(str(stored), rows, tmp_path / "other"))
    assert job_rig.output_table(tmp_path / "one").equals(job_rig.output_table(tmp_path / "other"))
    written = json.loads((tmp_path / "other" / "job.json").read_bytes())
    assert str(tmp_path / "cache") not in json.dumps(written)


def test_many_that_want_it_at_once_get_the_same(stored):
    found, start = [], threading.Barrier(6)

    def fetch():
        start.wait()
        found.append(local_engine(str(stored)))

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(found)) == 1
    load_runtime(found[0], threads=1).close()
    assert [path.name for path in found[0].parent.iterdir() if path.is_dir()] == [found[0].name]


def test_a_damaged_file_is_named_and_nothing_is_kept(stored, tmp_path):
    name = read_contract(local_engine(str(stored))).files[0].name
    shutil.rmtree(tmp_path / "cache")
    (stored / name).replace((stored / name).read_bytes()[:-1] + b"?")
    with pytest.raises(EngineChanged) as refused:
        local_engine(str(stored))
    assert str(refused.value).startswith(f"{stored}: engine file {name} has sha256 ")
    assert [path for path in (tmp_path / "cache" / "engines").iterdir() if path.is_dir()] == []


def test_a_missing_file_is_named(stored, tmp_path):
    name = read_contract(local_engine(str(stored))).files[0].name
    shutil.rmtree(tmp_path / "cache")
    (stored / name).unlink()
    with pytest.raises(EngineChanged, match=name):
        local_engine(str(stored))


def test_a_copy_that_was_cut_short_is_fetched_again(stored):
    found = local_engine(str(stored))
    name = read_contract(found).files[0].name
    (found / name).write_bytes(b"cut")
    assert local_engine(str(stored)) == found
    load_runtime(found, threads=1).close()


def test_an_address_without_a_contract_is_no_engine(place):
    with pytest.raises(NotAnEngine) as refused:
        local_engine(str(place))
    assert str(refused.value) == (
        f"{place}: not an engine directory (it holds no contract.json). Build one: extract build CHECKPOINT -o {place}"
    )
