"""Object stores for a whole run, S3's and Google's; for each test a prefix, a cache and temporary files of its own."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import google_rig
import moto_rig
import pytest

from extract.storage import ObjectPath, locate

BUCKET = google_rig.BUCKET


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """Address of an S3 server, with an empty bucket."""
    with moto_rig.moto_server() as address:
        moto_rig.create_bucket(address, BUCKET)
        yield address


@pytest.fixture(scope="session")
def google() -> Iterator[dict[str, str]]:
    """Settings of a stand-in for Google's store; a request that it does not know is a fault."""
    with google_rig.google_server() as (address, server):
        yield google_rig.settings(address)
    assert server.strange == []


@pytest.fixture(params=["s3", "gs"])
def scheme(request: pytest.FixtureRequest) -> str:
    """Which store; a module that is about one of them says so."""
    return str(request.param)


@pytest.fixture
def settings(scheme: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment of somebody who uses the store, with nothing in his cache."""
    if scheme == "gs":
        environment = request.getfixturevalue("google")
    else:
        environment = {**moto_rig.KEYS, "AWS_ENDPOINT_URL": request.getfixturevalue("endpoint")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("EXTRACT_CACHE", str(tmp_path / "cache"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def address(settings: None, scheme: str) -> str:
    """A prefix that nobody has used."""
    return f"{scheme}://{BUCKET}/{secrets.token_hex(6)}/job"


@pytest.fixture
def place(address: str) -> ObjectPath:
    """The same, located."""
    found = locate(address)
    assert isinstance(found, ObjectPath)
    return found
