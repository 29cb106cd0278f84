"""Who works on which shard: locks that the kernel drops with the process that held them."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from extract.claims import END_OF_JOB, Claims

HOLDER = """
import sys
from pathlib import Path
from extract.claims import Claims
claims = Claims(Path(sys.argv[1]))
print(*(claims.claim(int(shard)) for shard in sys.argv[2:]), flush=True)
for line in sys.stdin:
    claims.release(int(line))
    print("released", flush=True)
"""


class Holder:
    """Another process that holds some shards."""

    def __init__(self, path: Path, *shards: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), *map(str, shards)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.granted = [word == "True" for word in self.process.stdout.readline().split()]

    def release(self, shard: int) -> None:
        self.process.stdin.write(f"{shard}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "released\n"

    def kill(self) -> None:
        self.process.kill()
        with self.process:  # closes its pipes and waits for it
            pass


@pytest.fixture
def claims(tmp_path):
    made = Claims(tmp_path / ".claims")
    yield made
    made.close()


@pytest.fixture
def hold(tmp_path):
    holders = []

    def start(*shards: int) -> Holder:
        holders.append(Holder(tmp_path / ".claims", *shards))
        return holders[-1]

    yield start
    for holder in holders:
        holder.kill()


def test_a_shard_that_another_process_holds_is_not_granted(claims, hold):
    assert hold(3, 100_000).granted == [True, True]
    assert [claims.claim(shard) for shard in (2, 3, 4, 99_999, 100_000)] == [True, False, True, True, False]
    assert claims.supported


def test_a_process_may_claim_again_what_it_holds(claims):
    assert claims.claim(7)
    assert claims.claim(7)


def test_a_released_shard_can_be_taken_and_the_others_not(claims, hold):
    holder = hold(3, 4)
    holder.release(3)
    assert (claims.claim(3), claims.claim(4)) == (True, False)


def test_what_a_killed_process_held_is_free(claims, hold):
    holder = hold(3)
    assert not claims.claim(3)
    holder.kill()
    assert claims.claim(3)


def test_closing_releases_everything(tmp_path, hold):
    claims = Claims(tmp_path / ".claims")
    assert claims.claim(0) and claims.claim(1)
    assert hold(0, 1).granted == [False, False]
    claims.close()
    assert hold(0, 1).granted == [True, True]


def test_the_end_of_a_job_is_waited_for(claims, hold):
    holder = hold(END_OF_JOB)
    holder.process.stdin.close()  # it ends, and its locks with it
    claims.wait_for_end_of_job()
    assert hold(END_OF_JOB).granted == [False]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_where_locks_do_not_work_every_claim_is_granted(number, claims, hold, monkeypatch):
    hold(3)

    def lockf(*arguments):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    assert claims.claim(3)
    assert not claims.supported
    claims.release(3)
    claims.wait_for_end_of_job()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EAGAIN])
def test_both_ways_to_say_held_are_understood(number, claims, monkeypatch):
    def lockf(*arguments):
        raise OSError(number, "held")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    assert not claims.claim(3)
    assert claims.supported


def test_the_file_of_claims_stays_empty(claims, tmp_path):
    claims.claim(1_000_000)
    assert (tmp_path / ".claims").stat().st_size == 0
