"""Commands as a user gives them: in this process, which is fast, or in one of their own, which is the real thing."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rig


@dataclass(frozen=True)
class Ended:
    """A command that came to its end."""

    code: int
    out: str
    err: str


def extract(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """Run `extract ARGUMENTS` in this process; an exception that is no exit of a command comes through."""
    from extract.cli import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    code = caught.value.code
    return Ended(0 if code is None else int(code), captured.out, captured.err)


def spawn(*arguments: object, python: str | None = None, environment: Mapping[str, str] | None = None) -> Ended:
    """Run `extract ARGUMENTS`, or `python -c PYTHON ARGUMENTS`, in a process of its own."""
    start = ["-m", "extract"] if python is None else ["-c", python]
    ended = subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "default", **(environment or {})},
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def write_rows(path: Path, texts: list[str | None] | None = None) -> Path:
    """A Parquet file of texts (20 passages, unless some are given) with an id column `key`."""
    texts = list(rig.passages(20)) if texts is None else texts
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()), "key": list(range(len(texts)))}), path)
    return path
