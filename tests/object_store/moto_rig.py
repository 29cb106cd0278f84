"""A moto server on loopback: S3 in memory, in a process of its own, with every condition of a write honoured."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_REGION": "us-east-1"}
START_S = 60


@contextmanager
def moto_server() -> Iterator[str]:
    """Its endpoint, while the block runs."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Until something listens there."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), 0.5).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the server does not listen")


def create_bucket(endpoint: str, name: str) -> None:
    """Make a bucket, as its owner would."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=KEYS["AWS_REGION"],
        aws_access_key_id=os.environ.get("AWS_ACCESS_KEY_ID", KEYS["AWS_ACCESS_KEY_ID"]),
        aws_secret_access_key=os.environ.get("AWS_SECRET_ACCESS_KEY", KEYS["AWS_SECRET_ACCESS_KEY"]),
    )
    client.create_bucket(Bucket=name)
    client.close()
