"""Rows that lie in an object store are the rows of the same files on a disk, read by ranges."""

import gzip
import json

import job_rig
import object_rig
import pyarrow as pa
import pyarrow.feather
import pytest

from extract.errors import SourceError
from extract.sources import open_source
from extract.sources.fingerprints import SourceChanged
from extract.spec import SourceSpec
from extract.storage import locate

ROWS = job_rig.texts(300)


@pytest.fixture(params=["parquet", "arrow", "jsonl", "jsonl.gz"])
def files(request, tmp_path):
    """Three files of a format, one below another directory, and what is not data."""
    folder = tmp_path / "rows"
    (folder / "more").mkdir(parents=True)
    for name, rows in {"a": ROWS[:100], "b": ROWS[100:200], "more/c": ROWS[200:]}.items():
        path = folder / f"{name}.{request.param}"
        if request.param == "parquet":
            job_rig.parquet(path, {"text": rows}, row_group_size=30)
        elif request.param == "arrow":
            pyarrow.feather.write_feather(pa.table({"text": rows}), path, chunksize=30)
        else:
            lines = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
            path.write_bytes(gzip.compress(lines) if request.param.endswith("gz") else lines)
    (folder / "README.md").write_text("rows")
    (folder / "_metadata.parquet").write_bytes(b"no rows")
    return folder


def read(path, start=0, stop=None) -> list[str]:
    source = open_source(SourceSpec(path=path))
    try:
        source.layout()
        batches = list(source.read(start, stop, 64))
        return [text for batch in batches for text in batch.column(0).to_pylist()]
    finally:
        source.close()


def test_a_prefix_a_glob_and_a_list_give_the_rows_in_order(files, place):
    object_rig.upload(files, place)
    suffix = "".join(next(files.glob("a.*")).suffixes)
    assert read(str(place)) == read(str(files)) == ROWS
    assert read(f"{place}/*{suffix}") == ROWS[:200]
    assert read(f"{place}/**/*{suffix}") == ROWS
    assert read((f"{place}/b{suffix}", f"{place}/[!b]{suffix}")) == ROWS[100:200] + ROWS[:100]


def test_any_range_of_rows_is_read(files, place):
    object_rig.upload(files, place)
    source = open_source(SourceSpec(path=str(place)))
    source.layout()
    for start, stop in [(250, 260), (95, 105), (0, 1), (299, None), (100, 200)]:
        found = [text for batch in source.read(start, stop, 64) for text in batch.column(0).to_pylist()]
        assert found == ROWS[start:stop]
    source.close()


def test_only_the_ranges_that_hold_the_rows_travel(place, tmp_path, monkeypatch):
    """A file of 40 row groups of a megabyte, of which one is asked for."""
    from extract.sources import parquet
    from extract.storage.arrow_files import RangeFile

    monkeypatch.setattr(parquet, "DECODE_BYTES", 2**21)
    rows = [f"{n:08d}" * 4096 for n in range(1280)]
    path = job_rig.parquet(
        tmp_path / "large.parquet", {"text": rows}, row_group_size=32, compression="none", use_dictionary=False
    )
    (place / "large.parquet").publish(path)
    travelled = []
    real = RangeFile.read
    monkeypatch.setattr(RangeFile, "read", lambda file, size=-1: travelled.append(len(got := real(file, size))) or got)
    assert read(f"{place}/large.parquet", 700, 701) == rows[700:701]
    assert sum(travelled) < path.stat().st_size / 8


def test_a_file_that_changed_since_the_plan_is_refused(place, tmp_path):
    path = job_rig.parquet(tmp_path / "a.parquet", {"text": ROWS})
    target = place / "a.parquet"
    target.publish(path)
    source = open_source(SourceSpec(path=str(target)))
    source.layout()
    target.publish(job_rig.parquet(path, {"text": [row.swapcase() for row in ROWS]}))
    with pytest.raises(SourceChanged):
        list(source.read(0, None, 64))


def test_the_fingerprint_is_the_name_the_size_and_the_tag(place, tmp_path):
    target = place / "a.parquet"
    target.publish(job_rig.parquet(tmp_path / "a.parquet", {"text": ROWS}))
    (entry,) = open_source(SourceSpec(path=str(place))).layout().fingerprint["files"]
    facts = target.stat()
    assert entry == {"name": "a.parquet", "size": facts.st_size, "rows": 300, "e_tag": facts.e_tag}


@pytest.mark.parametrize("name", ["gone.parquet", "gone/", "*.parquet"])
def test_what_is_not_there_is_said(name, place):
    with pytest.raises(SourceError) as refused:
        open_source(SourceSpec(path=f"{place}/{name}"))
    assert refused.value.exit_code == 3
    assert str(refused.value).startswith(f"{place}/{name}: no ")


def test_a_bucket_that_is_not_there_is_a_fault_of_the_source(settings, scheme):
    with pytest.raises(SourceError) as refused:
        open_source(SourceSpec(path=f"{scheme}://no-such-bucket/a.parquet"))
    advice = {"s3": "AWS_ENDPOINT_URL", "gs": "the proxy, if there is one"}[scheme]
    assert str(refused.value) == (
        f"{scheme}://no-such-bucket: no such bucket (NoSuchBucket). Create it, or check the name and {advice}."
    )
    assert locate(f"{scheme}://no-such-bucket/x").name == "x"
