"""An engine by its address: fetched once a machine into the user's cache, checked file by file, used like any other.

The folder in the cache is named by the engine's id, the digest of its contract, so it can never be another engine. It
gets its name when it is whole. Of several processes that want it, one fetches and the others wait; where the file
system has no locks, several fetch and one folder stays.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from extract.engine.contract import CONTRACT_FILE, Contract, EngineChanged, EngineFile, NotAnEngine, read_contract
from extract.errors import EngineRefused
from extract.storage import ObjectPath, Place, locate
from extract.storage.local_copies import cache_folder, download
from extract.storage.refusals import StoreRefused
from extract.store import clear_write_errors


class UnreachableEngine(EngineRefused):
    """An engine in an object store cannot be fetched."""

    template = "{path}: {problem}. {advice}"


def local_engine(place: str | Place) -> Path:
    """The directory of an engine: the one that was named, or a copy of what lies at the address.

    Raises:
        NotAnEngine, EngineChanged, UnreachableEngine: nothing there, or not what its contract says.
        DiskFull, CannotWrite: the cache has no room.
    """
    found = locate(place)
    if isinstance(found, Path):
        return found
    try:
        return _fetched(found, cache_folder() / "engines")
    except StoreRefused as refused:
        facts = refused.facts
        raise UnreachableEngine(path=facts["path"], problem=facts["problem"], advice=facts["advice"]) from refused


def _fetched(address: ObjectPath, folder: Path) -> Path:
    with clear_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    working = folder / f".{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with clear_write_errors(working):
            working.mkdir()
        contract = _contract(address, working)
        engine = folder / contract.engine_id
        if _is_whole(engine, contract):
            return engine
        with _only_one(folder / f".{contract.engine_id}.lock"):
            if not _is_whole(engine, contract):
                for file in contract.files:
                    _fetch(address, file, working)
                _publish(working, engine, contract)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return engine


def _contract(address: ObjectPath, working: Path) -> Contract:
    try:
        content = (address / CONTRACT_FILE).read_bytes()
    except FileNotFoundError:
        raise NotAnEngine(path=address, problem=f"it holds no {CONTRACT_FILE}") from None
    with clear_write_errors(working):
        (working / CONTRACT_FILE).write_bytes(content)
    try:
        return read_contract(working)
    except NotAnEngine as error:
        raise NotAnEngine(path=address, problem=error.facts["problem"]) from None


def _is_whole(engine: Path, contract: Contract) -> bool:
    """By sizes; whoever loads it hashes every file."""
    sizes = {file.name: file.size for file in contract.files}
    with suppress(OSError):
        return all((engine / name).stat().st_size == size for name, size in sizes.items())
    return False


def _fetch(address: ObjectPath, file: EngineFile, working: Path) -> None:
    name = file.name
    if Path(name).name != name:
        raise EngineChanged(path=address, name=name, field="state", found="elsewhere", expected="present")
    try:
        found, _ = download(address / name, working / name)
    except FileNotFoundError:
        raise EngineChanged(path=address, name=name, field="state", found="missing", expected="present") from None
    if file.block_bytes is not None:
        found = file.digest_of(working / name)
    if found != file.sha256:
        raise EngineChanged(path=address, name=name, field="sha256", found=found[:12], expected=file.sha256[:12])


def _publish(working: Path, engine: Path, contract: Contract) -> None:
    """Give the folder its name, unless another process was faster; what is damaged there makes room."""
    for _ in range(2):
        try:
            working.rename(engine)
        except OSError:
            if _is_whole(engine, contract):
                return
            aside = working.with_name(f"{working.name}-damaged")
            with clear_write_errors(engine):
                engine.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            return


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """While this process alone fetches; the kernel drops the lock of one that dies."""
    with clear_write_errors(path), path.open("w") as lock:
        with suppress(OSError):
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield
