"""The commit protocol on a file system: one winner, whole content, nothing left behind, errors that say what to do."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from extract.store import (
    CannotWrite,
    DiskFull,
    NoHardLinks,
    clear_write_errors,
    create_once,
    free_bytes,
    publish,
    replace_file,
)

RACERS = 16


def test_of_racing_threads_exactly_one_creates_a_name_and_its_content_is_whole(tmp_path):
    for round_number in range(10):
        path = tmp_path / f"{round_number}.json"
        contents = [bytes([65 + racer]) * 50_000 for racer in range(RACERS)]
        start, won = threading.Barrier(RACERS), []

        def race(racer, path=path, contents=contents, start=start, won=won):
            start.wait()
            if create_once(path, contents[racer]):
                won.append(racer)

        threads = [threading.Thread(target=race, args=(racer,)) for racer in range(RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert path.read_bytes() == contents[won[0]]
        assert path.stat().st_nlink == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(f"{n}.json" for n in range(10))


def test_of_racing_processes_exactly_one_creates_a_name(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from extract.store import create_once\n"
        "folder, racer = Path(sys.argv[1]), int(sys.argv[2])\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(sum(create_once(folder / str(n), f'{racer} {n}'.encode() * 5000) << n for n in range(20)))\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(racer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for racer in range(8)
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [int(racer.communicate(timeout=120)[0]) for racer in racers]
    assert sum(won) == 2**20 - 1, "a name was created by nobody, or by two"
    for n in range(20):
        (winner,) = (racer for racer in range(8) if won[racer] >> n & 1)
        assert (tmp_path / str(n)).read_bytes() == f"{winner} {n}".encode() * 5000
    assert len(list(tmp_path.iterdir())) == 20


def test_what_is_there_is_never_touched(tmp_path):
    path = tmp_path / "record.json"
    assert create_once(path, b"first")
    before = path.stat()
    assert not create_once(path, b"second, and longer")
    assert path.read_bytes() == b"first"
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_dangling_link_counts_as_there(tmp_path):
    path = tmp_path / "record.json"
    path.symlink_to(tmp_path / "nowhere")
    assert not create_once(path, b"content")
    assert not (tmp_path / "nowhere").exists()


def test_content_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = []
    for name in ("fsync", "link"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name: (order.append(name), real(*a))[1])
    create_once(tmp_path / "record.json", b"content")
    assert order == ["fsync", "link", "fsync"]  # the file, its name, the directory


def test_a_replaced_file_is_whole_at_any_time(tmp_path):
    path = tmp_path / "manifest.json"
    versions = [bytes([65 + n]) * 40_000 for n in range(4)]
    replace_file(path, versions[0])
    stop, seen = threading.Event(), set()

    def read():
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        for version in versions:
            replace_file(path, version)
    stop.set()
    reader.join()
    assert seen <= set(versions)
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"]


def test_publishing_gives_a_file_its_name(tmp_path):
    temporary, path = tmp_path / "temporary", tmp_path / "data.arrow"
    temporary.write_bytes(b"content")
    inode = temporary.stat().st_ino
    publish(temporary, path)
    assert (path.stat().st_ino, path.read_bytes(), temporary.exists()) == (inode, b"content", False)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_file_system_without_hard_links_is_refused_and_named(number, tmp_path, monkeypatch):
    def link(*names):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(NoHardLinks) as refused:
        create_once(tmp_path / "record.json", b"content")
    assert str(refused.value) == (
        f"{tmp_path}: this file system offers no hard links ({os.strerror(number)}), which commit records need. "
        "Choose an output directory on a local disk or NFS."
    )
    assert not list(tmp_path.iterdir())


def test_a_temporary_file_that_was_swept_away_by_the_winner_is_a_lost_race(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    real = os.link

    def swept(temporary, name):
        Path(name).write_bytes(b"the winner's")
        Path(temporary).unlink()
        real(temporary, name)

    monkeypatch.setattr(os, "link", swept)
    assert not create_once(path, b"the loser's")
    assert path.read_bytes() == b"the winner's"


def test_a_directory_that_vanished_is_an_error(tmp_path):
    with pytest.raises(CannotWrite) as refused:
        create_once(tmp_path / "gone" / "record.json", b"content")
    assert str(refused.value) == (
        f"{tmp_path / 'gone' / 'record.json'}: cannot be written: No such file or directory. "
        "Choose another place with -o."
    )


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EFBIG, "a file larger than this process may write (ulimit -f) or the file system can hold"),
    ],
)
@pytest.mark.parametrize("write", [create_once, replace_file])
def test_a_lack_of_space_is_named_and_leaves_nothing(write, number, problem, tmp_path, monkeypatch):
    def fsync(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "file.json"
    with pytest.raises(DiskFull) as refused:
        write(path, b"content")
    assert refused.value.exit_code == 8
    assert str(refused.value) == (
        f"{path}: {problem} ({refused.value.facts['free']:,} bytes free). What is committed stays: make room, then run "
        "the same command again."
    )
    assert not list(tmp_path.iterdir())


def test_other_errors_pass_through(tmp_path):
    with pytest.raises(ZeroDivisionError), clear_write_errors(tmp_path):
        raise ZeroDivisionError


def test_free_space_of_a_directory_to_be_is_that_of_its_nearest_parent(tmp_path):
    assert abs(free_bytes(tmp_path / "not" / "there") - free_bytes(tmp_path)) < 2**30
