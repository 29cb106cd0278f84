"""Large files of an engine are hashed by blocks, side by side, and no change of a byte gets past that."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from job_rig import Engines, edit_contract

from extract.canonical import blocks_digest, digest, file_digest
from extract.engine import contract as contracts
from extract.engine.contract import EngineChanged, check_files, describe_file, read_contract

BLOCK = 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(number * 7 % 251 for number in range(4 * BLOCK + 1)))
    return path


@pytest.fixture
def engine(engines: Engines, tmp_path: Path) -> Path:
    shutil.copytree(engines.engine("llama"), tmp_path / "engine")
    return tmp_path / "engine"


@pytest.fixture
def by_blocks(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on; the engine was built before."""
    monkeypatch.setattr(contracts, "LARGE_BYTES", 4000)
    monkeypatch.setattr(contracts, "BLOCK_BYTES", BLOCK)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_it_is_the_digest_of_the_digests_of_blocks_however_many_threads_there_are(path: Path, threads: int) -> None:
    content = path.read_bytes()
    blocks = [hashlib.sha256(content[start : start + BLOCK]).digest() for start in range(0, len(content), BLOCK)]
    assert blocks_digest(path, BLOCK, threads) == hashlib.sha256(b"".join(blocks)).hexdigest()


def test_blocks_may_be_larger_than_what_is_read_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = blocks_digest(path, BLOCK)
    monkeypatch.setattr("extract.canonical.READ_BYTES", 300)
    assert blocks_digest(path, BLOCK) == expected


def test_every_byte_and_the_order_of_blocks_count(path: Path) -> None:
    content, expected = path.read_bytes(), blocks_digest(path, BLOCK)
    changed = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(0, len(content), BLOCK // 2)]
    changed += [content[BLOCK : 2 * BLOCK] + content[:BLOCK] + content[2 * BLOCK :], content[:-1], content + b"\0"]
    for one in changed:
        path.write_bytes(one)
        assert blocks_digest(path, BLOCK) != expected


def test_small_files_keep_one_digest(path: Path) -> None:
    found = describe_file(path)
    assert found.block_bytes is None and found.sha256 == file_digest(path)


@pytest.mark.usefixtures("by_blocks")
def test_an_engine_with_a_large_file_loads_and_a_changed_byte_of_it_is_refused(engine: Path) -> None:
    contract = read_contract(engine)
    files = tuple(describe_file(engine / file.name) for file in contract.files)
    edit_contract(engine, files=[dataclasses.asdict(file) for file in files])
    large = next(file for file in files if file.name == "model.safetensors")
    assert large.block_bytes == BLOCK
    check_files(engine, read_contract(engine))
    content = bytearray((engine / large.name).read_bytes())
    content[-1] ^= 1
    (engine / large.name).write_bytes(content)
    with pytest.raises(EngineChanged) as refused:
        check_files(engine, read_contract(engine))
    assert str(refused.value).startswith(f"{engine}: engine file model.safetensors has sha256 ")


def test_what_is_not_said_of_a_file_changes_no_id(engine: Path) -> None:
    """Engines that were built before a file could have blocks keep their ids."""
    contract = read_contract(engine)
    table = dataclasses.asdict(contract)
    for measured in ("measured", "proof", "fidelity", "probe"):
        del table[measured]
    said = json.loads(
        json.dumps(table), object_pairs_hook=lambda pairs: {key: value for key, value in pairs if value is not None}
    )
    assert all("block_bytes" not in file for file in said["files"])
    assert contract.engine_id == digest(said)
