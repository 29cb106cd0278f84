"""Small jobs whose output lies in an object store, and the same content as from a directory."""

import hashlib
import json
import shutil
from pathlib import Path

from extract.storage import ObjectPath


def content(place: ObjectPath) -> dict[str, str]:
    """sha256 by name of the shard files and the manifest; see `crash_rig.content`."""
    return {
        path.key.removeprefix(f"{place.key}/"): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in [*(place / "data").iterdir(), place / "manifest.json"]
    }


def everything(place: ObjectPath) -> dict[str, tuple[float, str]]:
    """Time and tag of every object."""
    return {str(path): (facts.st_mtime, facts.e_tag) for path, facts in place.walk()}


def committed(place: ObjectPath) -> dict[str, tuple[float, str]]:
    """Time and tag of every commit record and of the file that it names; see `crash_rig.committed`."""
    found = everything(place)
    records = [path for path, _ in (place / "commits").walk()]
    files = [place / "data" / json.loads(record.read_bytes())["data"] for record in records]
    return {str(path): found.get(str(path), (0.0, "gone")) for path in (*records, *files)}


def upload(directory: Path, place: ObjectPath) -> None:
    """Copy a directory, as any tool would: its files, hidden ones too."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            (place / path.relative_to(directory).as_posix()).replace(path.read_bytes())


def download(place: ObjectPath, directory: Path) -> Path:
    """Copy an output back to a directory."""
    shutil.rmtree(directory, ignore_errors=True)
    for path, _ in place.walk():
        target = directory / path.key.removeprefix(f"{place.key}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return directory


def attempts(place: ObjectPath) -> dict[str, str]:
    """Attempt id by record."""
    return {path.name: json.loads(path.read_bytes())["attempt"] for path in (place / "commits").iterdir()}
