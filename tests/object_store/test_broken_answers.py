"""Answers that break off in their middle, or are lost, are asked for again: they cost no job and blame no store."""

import os

import proxy_rig
import pytest

from extract.storage import bucket, locate, object_path
from extract.storage.arrow_files import RangeFile
from extract.storage.refusals import StoreRefused

LARGE = bytes(range(256)) * 16_384  # 4 MB


class Cuts:
    """How many of the next answers go wrong, and how."""

    def __init__(self):
        self.left, self.command, self.kind = 0, "GET", "cut download"

    def __call__(self, command, headers):
        if command != self.command or not self.left:
            return ""
        self.left -= 1
        return self.kind


@pytest.fixture
def cuts(settings, scheme, monkeypatch):
    """What goes wrong on the way to the store from now on."""
    monkeypatch.setattr(bucket, "PAUSE_S", 0.001)
    name = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL"}[scheme]
    found = Cuts()
    with proxy_rig.proxy(os.environ[name], fault=found) as front:
        monkeypatch.setenv(name, front)
        yield found


@pytest.fixture
def objects(cuts, place):
    """Twelve objects, more than one page of a listing of Google's."""
    for number in range(12):
        (place / f"{number:02d}").replace(b"%d " % number * 100)
    (place / "large").replace(LARGE)
    return locate(str(place))  # a client that has not met the store


READS = {
    "a whole object": lambda place: (place / "03").read_bytes(),
    "an object in pieces": lambda place: b"".join((place / "large").chunks()),
    "a range": lambda place: _range(place),
    "names": lambda place: [path.name for path, _ in place.walk()],
    "names behind another one": lambda place: [key.rpartition("/")[2] for key in place.keys("04")],
    "what lies right under it": lambda place: sorted(path.name for path in place.iterdir()),
}


def _range(place):
    with RangeFile(place / "large") as file:
        file.seek(1_000_000)
        return file.read(100) + file.read(2_000_000)


@pytest.mark.parametrize("read", READS)
def test_an_answer_that_breaks_off_is_asked_for_again(read, objects, cuts):
    cuts.left = 3
    found = READS[read](objects)
    assert cuts.left == 0
    assert found == READS[read](objects)


def test_a_long_object_goes_on_where_it_broke_off(objects, cuts):
    cuts.left = 8  # each brings half of what is left
    assert b"".join((objects / "large").chunks()) == LARGE
    assert cuts.left == 0


def test_a_store_that_breaks_off_for_ever_is_said(objects, cuts):
    cuts.left = 1000
    with pytest.raises(StoreRefused):
        (objects / "03").read_bytes()
    assert cuts.left <= 1000 - bucket.ANSWERS


@pytest.mark.parametrize("kind", ["reset", "answer lost"])
def test_a_removal_whose_answer_is_lost_is_done_again(kind, objects, cuts, monkeypatch):
    monkeypatch.setattr(object_path, "FIRST_PAUSE_S", 0.001)
    cuts.left, cuts.command, cuts.kind = 4, "DELETE", kind
    (objects / "03").unlink()
    assert cuts.left == 0
    assert not (objects / "03").exists()


def test_a_lost_answer_is_no_store_without_conditions(cuts, place):
    cuts.left, cuts.command, cuts.kind = 1, "PUT", "answer lost"
    place.probe()
    assert cuts.left == 0
    assert list(place.walk()) == []
