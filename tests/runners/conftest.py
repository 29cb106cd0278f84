"""What the tests of the runners share: rows, and what an unbroken run in one process makes of them."""

from pathlib import Path

import crash_rig
import pytest
import warm_command


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """98 rows with ids."""
    return crash_rig.write_rows(tmp_path_factory.mktemp("rows") / "texts.parquet")


@pytest.fixture(scope="session")
def unbroken(tiny_engine: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 shards of 4 rows, made by one process without a fault."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    ended = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out))
    assert ended.code == 0, ended.err
    return out
