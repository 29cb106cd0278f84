"""Commit records: written once, read back as they were, refused by name if they are anything else."""

import errno
import hashlib
import json
import os
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from shard_rig import COMMIT

from extract import publishing
from extract.canonical import canonical_json
from extract.commits import (
    MAX_RECORD_BYTES,
    BadRecord,
    commit_path,
    committed_among,
    committed_shards,
    each_commit,
    read_commit,
    read_commits,
    shard_name,
    write_commit,
)


@pytest.fixture
def commits(tmp_path):
    (tmp_path / "commits").mkdir()
    return tmp_path / "commits"


@settings(deadline=None)
@given(
    shard=some.integers(0, 10**9),
    rows=some.integers(0, 2**62),
    last=some.booleans(),
    outcomes=some.dictionaries(some.sampled_from(["ok", "null", "empty"]), some.integers(0, 2**62)),
    seconds=some.dictionaries(some.text(max_size=9), some.floats(0, 1e9)),
)
def test_a_record_is_read_back_as_it_was_written(shard, rows, last, outcomes, seconds, tmp_path_factory):
    commits = tmp_path_factory.mktemp("commits")
    commit = replace(
        COMMIT, shard=shard, num_rows=rows, last=last, outcomes=outcomes, seconds=seconds, data=f"{shard_name(shard)}-0"
    )
    assert write_commit(commits, commit)
    assert read_commit(commit_path(commits, shard)) == commit
    assert committed_shards(commits) == {shard} == committed_among(commits, [shard, shard + 1])


def test_a_second_record_of_a_shard_is_not_written(commits):
    assert write_commit(commits, COMMIT)
    assert not write_commit(commits, replace(COMMIT, attempt="another"))
    assert read_commit(commit_path(commits, 12)) == COMMIT


def test_names_sort_as_numbers_do_up_to_99999_and_stay_unique():
    assert [shard_name(shard) for shard in (0, 12, 99_999, 100_000)] == [
        "shard-00000",
        "shard-00012",
        "shard-99999",
        "shard-100000",
    ]


def test_records_come_in_the_order_of_shards(commits):
    for shard in (100_000, 2, 99_999, 0):
        write_commit(commits, replace(COMMIT, shard=shard, data=f"{shard_name(shard)}-0"))
    assert [commit.shard for commit in read_commits(commits)] == [0, 2, 99_999, 100_000]


def test_files_that_are_no_records_are_not_counted(commits):
    write_commit(commits, COMMIT)
    for name in (
        ".shard-00003.json.12-ab",
        "shard-3.json",
        "shard-00003.json~",
        "shard-0000x.json",
        "shard-00004",
        "x",
    ):
        (commits / name).write_text("{}")
    assert committed_shards(commits) == {12}
    assert committed_shards(commits / "not-there") == committed_among(commits / "not-there", [12]) == set()


def message(path, problem) -> str:
    job = path.parent.parent
    return f"{path}: {problem}. Restore it from a copy, or make the shard again: extract verify --repair {job}"


def refusal(path) -> str:
    with pytest.raises(BadRecord) as refused:
        read_commit(path)
    assert refused.value.exit_code == 7
    return str(refused.value)


def test_a_record_that_is_not_json_is_named(commits):
    path = commit_path(commits, 12)
    path.write_bytes(b"\x00" * 100)
    assert refusal(path) == message(path, "cannot be read (Expecting value: line 1 column 1 (char 0))")


def test_a_record_cut_short_is_named(commits):
    write_commit(commits, COMMIT)
    path = commit_path(commits, 12)
    content = path.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 2):
        path.write_bytes(content[:length])
        assert refusal(path).startswith(f"{path}: cannot be read (")


def test_a_record_with_an_unknown_key_is_named(commits):
    path = commit_path(commits, 12)
    path.write_text(json.dumps({**asdict(COMMIT), "num_token": 1}))
    assert refusal(path) == message(path, "unknown key \"num_token\". Did you mean 'num_tokens'?")


def test_a_record_without_a_key_is_named(commits):
    path = commit_path(commits, 12)
    table = asdict(COMMIT)
    del table["sha256"]
    path.write_text(json.dumps(table))
    assert refusal(path) == message(path, "sha256 is missing, expected a string")


def test_a_record_of_another_shard_is_named(commits):
    path = commit_path(commits, 3)
    path.write_text(json.dumps(asdict(COMMIT)))
    assert refusal(path) == message(path, "it is the record of shard 12")


@pytest.mark.parametrize("data", ["../../etc/passwd", "/etc/passwd", "shard-00012/../x", "shard-00013-0.arrow", ""])
def test_a_record_that_points_elsewhere_is_refused(data, commits):
    path = commit_path(commits, 12)
    path.write_text(json.dumps({**asdict(COMMIT), "data": data}))
    assert refusal(path) == message(path, f"its data name {data!r} is not one of this shard")


@pytest.mark.parametrize("key", ["attempt", "doubled_bos", "overflowed", "seconds", "num_rows", "check"])
def test_a_flipped_bit_anywhere_in_a_record_is_seen(key, commits):
    write_commit(commits, COMMIT)
    path = commit_path(commits, 12)
    raw = path.read_bytes()
    place = raw.index(f'"{key}":'.encode()) + len(key) + 4
    path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
    with pytest.raises(BadRecord):
        read_commit(path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_token": 1}, "unknown key \"num_token\". Did you mean 'num_tokens'?"),
        ({"sha256": 5}, "sha256 is 5, expected a string"),
        ({"num_rows": True}, "num_rows is true, expected a whole number"),
        ({"shard": 11, "data": "shard-00011-0"}, "it is the record of shard 11"),
        ({"data": "shard-00012/../x"}, "its data name 'shard-00012/../x' is not one of this shard"),
    ],
)
def test_a_right_digest_saves_nothing_that_is_not_a_record_of_this_shard(changes, problem, commits):
    path = commit_path(commits, 12)
    path.write_bytes(sealed({**asdict(COMMIT), **changes}))
    assert refusal(path) == message(path, problem)


def sealed(table: dict) -> bytes:
    """A record of these values with the digest that `extract` would give it."""
    body = canonical_json(table)
    return body[:-1] + b',"check":"' + hashlib.sha256(body).hexdigest()[:16].encode() + b'"}\n'


@pytest.mark.parametrize("laid_out", ["as written", "indented", "in another order"])
def test_a_record_means_the_same_however_it_is_laid_out(laid_out, commits):
    """What was not written by `write_commit` is looked at value by value."""
    path, table = commit_path(commits, 12), asdict(COMMIT)
    path.write_bytes(
        {
            "as written": sealed(table),
            "indented": json.dumps(table, indent=1).encode(),
            "in another order": json.dumps(dict(reversed(table.items()))).encode(),
        }[laid_out]
    )
    assert read_commit(path) == COMMIT
    assert [*each_commit(commits)] == read_commits(commits) == [COMMIT]


def test_a_record_without_a_digest_is_believed(commits):
    write_commit(commits, COMMIT)
    path = commit_path(commits, 12)
    table = json.loads(path.read_bytes())
    del table["check"]
    path.write_text(json.dumps(table))
    assert read_commit(path) == COMMIT


def test_a_record_of_absurd_size_is_not_read(commits):
    path = commit_path(commits, 12)
    path.write_bytes(b" " * (MAX_RECORD_BYTES + 1))
    assert refusal(path) == message(path, "1,048,577 bytes, absurdly many for a record")


# --- publishing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path, commits):
    (tmp_path / "data").mkdir()
    return SimpleNamespace(root=tmp_path, data=tmp_path / "data", commits=commits)


def finished_file(directory, content: bytes = b"states"):
    path = directory.root / "temporary"
    path.write_bytes(content)
    return path


def test_a_finished_file_gets_its_name_and_its_record(directory):
    finished = publishing.commit_file(directory, finished_file(directory), COMMIT)
    assert (finished.won, finished.commit) == (True, COMMIT)
    assert (directory.data / COMMIT.data).read_bytes() == b"states"
    assert not (directory.root / "temporary").exists()


def test_who_comes_second_drops_its_file_and_takes_the_first_ones_record(directory):
    publishing.commit_file(directory, finished_file(directory), COMMIT)
    before = (directory.data / COMMIT.data).stat()
    late = replace(COMMIT, attempt="late")
    finished = publishing.commit_file(directory, finished_file(directory), late)
    assert (finished.won, finished.commit) == (False, COMMIT)
    after = (directory.data / COMMIT.data).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not (directory.root / "temporary").exists()


def test_who_is_overtaken_while_publishing_removes_only_other_bytes(directory, monkeypatch):
    real = publishing.publish
    other = replace(COMMIT, attempt="other", data="shard-00012-99999999.arrow")

    def overtaken(temporary, path):
        (directory.data / other.data).write_bytes(b"other states")
        assert write_commit(directory.commits, other)
        real(temporary, path)

    monkeypatch.setattr(publishing, "publish", overtaken)
    finished = publishing.commit_file(directory, finished_file(directory), COMMIT)
    assert (finished.won, finished.commit) == (False, other)
    assert [path.name for path in directory.data.iterdir()] == [other.data]


def test_a_record_that_this_very_attempt_made_counts_as_won(directory, monkeypatch):
    """A network file system may answer "there already" to a repeated request that had succeeded the first time."""
    real = os.link

    def link_and_say_no(temporary, path):
        real(temporary, path)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link_and_say_no)
    finished = publishing.commit_file(directory, finished_file(directory), COMMIT)
    assert (finished.won, finished.commit) == (True, COMMIT)
    assert (directory.data / COMMIT.data).exists()
