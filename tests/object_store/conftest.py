"""An S3 server for a whole run; for each test a prefix, a cache and a folder for temporary files of its own."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import moto_rig
import pytest

from extract.storage import ObjectPath, locate

BUCKET = "states"


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """Address of the server, with an empty bucket."""
    with moto_rig.moto_server() as address:
        moto_rig.create_bucket(address, BUCKET)
        yield address


@pytest.fixture
def settings(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment of somebody who uses the server, with nothing in his cache."""
    for name, value in {**moto_rig.KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("EXTRACT_CACHE", str(tmp_path / "cache"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def address(settings: None) -> str:
    """A prefix that nobody has used."""
    return f"s3://{BUCKET}/{secrets.token_hex(6)}/job"


@pytest.fixture
def place(address: str) -> ObjectPath:
    """The same, located."""
    found = locate(address)
    assert isinstance(found, ObjectPath)
    return found
