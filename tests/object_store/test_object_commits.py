"""One conditional write decides a shard, whatever is lost on the way and whoever comes late."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import obstore
import pytest
from shard_rig import COMMIT as RECORD

from extract.commits import (
    SHARD_TENS,
    BadRecord,
    commit_path,
    committed_among,
    committed_shards,
    each_commit,
    read_commit,
    read_commits,
    write_commit,
)
from extract.job import JobDirectory
from extract.publishing import commit_file
from extract.storage import locate, many_objects, object_path
from extract.storage.refusals import NoConditionalWrites, StoreRefused

COMMIT = replace(RECORD, num_bytes=len(b"state"), attempt="mine")


@pytest.fixture
def directory(place):
    return JobDirectory(place)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(object_path, "FIRST_PAUSE_S", 0.001)


def shard_file(tmp_path, content=b"state"):
    path = tmp_path / f"temporary-{len(list(tmp_path.iterdir()))}"
    path.write_bytes(content)
    return path


def failing(monkeypatch, *ways):
    """The next conditional writes go wrong: "before" the store has seen them, or "after" it has done them."""
    real, left = obstore.put, list(ways)

    def put(store, path, content, **options):
        way = left.pop(0) if left and options.get("mode") == "create" else None
        if way == "after":
            real(store, path, content, **options)
        if way is not None:
            raise obstore.exceptions.GenericError("Generic S3 error: error sending request: operation timed out")
        return real(store, path, content, **options)

    monkeypatch.setattr(obstore, "put", put)


def test_a_record_is_read_back_as_it_was_written(directory):
    assert write_commit(directory.commits, COMMIT)
    assert read_commit(commit_path(directory.commits, 12)) == COMMIT
    assert read_commits(directory.commits) == [COMMIT]


def test_many_records_come_in_the_order_of_shards(directory):
    for shard in (100_000, 2, 40, 99_999, 0):
        name = f"shard-{shard:05d}"
        write_commit(directory.commits, replace(COMMIT, shard=shard, data=name))
    assert [commit.shard for commit in read_commits(directory.commits)] == [0, 2, 40, 99_999, 100_000]


def test_only_so_many_requests_are_under_way_at_once(directory, monkeypatch):
    """However many records there are: neither requests nor answers pile up."""
    monkeypatch.setattr(many_objects, "REQUESTS_AT_ONCE", 4)
    for shard in range(40):
        write_commit(directory.commits, replace(COMMIT, shard=shard, data=f"shard-{shard:05d}"))
    asked, real = [], object_path.ObjectPath.read_bytes
    monkeypatch.setattr(object_path.ObjectPath, "read_bytes", lambda path: asked.append(path.name) or real(path))
    for taken, commit in enumerate(each_commit(directory.commits)):
        assert commit.shard == taken
        assert len(asked) <= taken + 1 + 4 + 1
    assert len(asked) == 40


def test_records_that_are_asked_for_are_found_without_a_listing(directory, monkeypatch):
    for shard in (2, 40, 41):
        write_commit(directory.commits, replace(COMMIT, shard=shard, data=f"shard-{shard:05d}"))
    monkeypatch.setattr(object_path.ObjectPath, "_objects", None)
    assert committed_among(directory.commits, range(0, 100, 2)) == {2, 40}


def test_a_long_listing_is_split_and_misses_nothing(place, monkeypatch):
    """With pages of ten names: numbers of five and of six digits, and names that are none of ours."""
    monkeypatch.setattr(many_objects, "PAGE_NAMES", 10)
    shards = {*range(0, 100_000, 2500), *range(100_000, 1_000_000, 22_222), 9, 99_999, 10_000}
    names = {f"shard-{shard:05d}.json" for shard in shards} | {"a", "shard", "shard-0", "shard-99x", "zzz"}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: (place / name).replace(b""), [*names, "shard-5/deeper"]))
    asked, real = [], object_path.ObjectPath.keys
    monkeypatch.setattr(object_path.ObjectPath, "keys", lambda path, after: asked.append(after) or real(path, after))
    found = list(many_objects.list_names(place, SHARD_TENS))
    assert len(found) == len(names) and {*found} == names
    assert len(asked) > 50
    assert committed_shards(place) == shards
    asked.clear()
    assert {*many_objects.list_names(place)} == names
    assert asked == [""]


def test_a_record_that_vanishes_is_named(directory):
    with pytest.raises(BadRecord) as refused:
        list(each_commit(directory.commits, [3]))
    assert str(refused.value).startswith(f"{directory.commits}/shard-00003.json: no such object")


def test_of_sixteen_writers_exactly_one_wins(directory):
    """One request at a time: moto looks and writes in two steps. Ceph's gateway is raced in earnest elsewhere."""
    one_at_a_time = threading.Lock()
    for shard in range(5):
        start, won = threading.Barrier(16), []

        def write(attempt, shard=shard, start=start, won=won):
            mine = replace(COMMIT, shard=shard, data=f"shard-{shard:05d}-x.arrow", attempt=attempt)
            start.wait()
            with one_at_a_time:
                first = write_commit(JobDirectory(locate(str(directory.root))).commits, mine)
            if first:
                won.append(attempt)

        threads = [threading.Thread(target=write, args=(str(n),)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [read_commit(commit_path(directory.commits, shard)).attempt] == won


@pytest.mark.parametrize("ways", [("before",), ("after",), ("before", "after"), ("before", "before", "before")])
def test_a_lost_answer_leaves_the_shard_to_who_wrote_it(ways, directory, tmp_path, monkeypatch, at_once):
    directory.root.probe()
    failing(monkeypatch, *ways)
    finished = commit_file(directory, shard_file(tmp_path), COMMIT)
    assert (finished.won, finished.commit) == (True, COMMIT)
    assert (directory.data / COMMIT.data).read_bytes() == b"state"


def test_a_lost_answer_to_a_lost_race_is_a_lost_race(directory, tmp_path, monkeypatch, at_once):
    other = replace(COMMIT, attempt="other", data="shard-00012-ffffffff.arrow")
    real = obstore.put

    def put(store, path, content, **options):
        if options.get("mode") == "create" and b"mine" in content:
            monkeypatch.setattr(obstore, "put", real)
            write_commit(directory.commits, other)
            raise obstore.exceptions.GenericError("503 Slow Down")
        return real(store, path, content, **options)

    directory.root.probe()
    monkeypatch.setattr(obstore, "put", put)
    finished = commit_file(directory, shard_file(tmp_path), COMMIT)
    assert (finished.won, finished.commit) == (False, other)
    assert not (directory.data / COMMIT.data).exists()


def test_a_store_that_never_answers_ends_the_attempts(directory, scheme, monkeypatch, at_once):
    directory.root.probe()
    failing(monkeypatch, *["before"] * 20)
    with pytest.raises(StoreRefused) as refused:
        write_commit(directory.commits, COMMIT)
    setting = {"s3": "AWS_ENDPOINT_URL", "gs": "the proxy, if there is one"}[scheme]
    assert str(refused.value) == (
        f"{directory.commits}/shard-00012.json: the store does not answer. Check the network and {setting}."
    )


def test_a_zombie_that_wakes_after_its_shard_was_redone_changes_nothing(directory, tmp_path):
    """It has uploaded its file, slept through another worker's commit, and then goes on."""
    zombie = replace(COMMIT, attempt="zombie", data="shard-00012-aaaaaaaa.arrow")
    (directory.data / zombie.data).publish(shard_file(tmp_path, b"zombi"))
    assert commit_file(directory, shard_file(tmp_path), COMMIT).won
    assert not write_commit(directory.commits, zombie)
    finished = commit_file(directory, shard_file(tmp_path, b"zombi"), zombie)
    assert (finished.won, finished.commit) == (False, COMMIT)
    assert (directory.data / COMMIT.data).read_bytes() == b"state"


def test_what_is_recorded_is_not_even_replaced_by_the_same_bytes(directory, tmp_path):
    assert commit_file(directory, shard_file(tmp_path), COMMIT).won
    before = (directory.data / COMMIT.data).stat()
    assert not commit_file(directory, shard_file(tmp_path), replace(COMMIT, attempt="again")).won
    assert (directory.data / COMMIT.data).stat() == before


def test_a_file_is_gone_from_here_once_it_is_there(directory, tmp_path):
    path = shard_file(tmp_path)
    commit_file(directory, path, COMMIT)
    assert not path.exists()


def test_a_large_file_goes_up_in_parts_and_comes_down_whole(place, tmp_path, monkeypatch):
    monkeypatch.setattr(object_path, "PART_BYTES", 5 * 2**20)
    content = bytes(range(256)) * 60_000  # 15 MB: three parts
    (place / "large").publish(shard_file(tmp_path, content))
    assert b"".join((place / "large").chunks()) == content


def test_an_upload_that_is_broken_off_is_never_visible(place, tmp_path, monkeypatch, at_once):
    class Torn:
        """A file whose disk fails in its middle."""

        def __init__(self):
            self.left = 3

        def read(self, size=-1):
            self.left -= 1
            if not self.left:
                raise OSError(5, "Input/output error")
            return bytes(5 * 2**20) if self.left > 0 else b""

        def seek(self, *where):
            return 0

        def tell(self):
            return 0

    store = place.bucket._client()
    with pytest.raises(Exception, match="Input/output error"):
        obstore.put(store, (place / "torn").key, Torn(), use_multipart=True, chunk_size=5 * 2**20)
    assert not (place / "torn").exists()
    assert list(place.walk()) == []


def test_a_store_that_ignores_the_condition_is_refused(place, monkeypatch):
    real = obstore.put

    def put(store, path, content, mode=None, **options):
        return real(store, path, content, **options)

    monkeypatch.setattr(obstore, "put", put)
    with pytest.raises(NoConditionalWrites):
        place.probe()
    assert list(place.walk()) == []


def test_the_probe_leaves_nothing(place):
    place.probe()
    assert list(place.walk()) == []
