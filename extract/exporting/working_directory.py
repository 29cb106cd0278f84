"""The directory that an export is written in, hidden beside the final name, which it gets when everything is in it.

Nothing half-written ever has the final name. Whoever is killed leaves `.NAME.exporting`: the same command goes on from
the last part that is recorded there, another one is refused. A lock keeps two processes from the same export.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from extract.claims import Claims
from extract.errors import ResumeRefused
from extract.exporting.target import Part
from extract.job import first_difference
from extract.store import clear_write_errors, make_directory, replace_file, sync_directory

RECORD = "export.json"


class ExportExists(ResumeRefused):
    """The final name is taken by something else."""

    template = "{path}: {problem}. Choose another directory with -o, or remove this one."


class OtherExport(ResumeRefused):
    """An unfinished export of something else lies beside the final name."""

    template = (
        "{path}: an unfinished export whose {field} is {found}; you asked for {expected}. "
        "Ask for the same again to go on with it, or remove it."
    )


class ExportIsBusy(ResumeRefused):
    """Another process writes this very export."""

    template = "{path}: another process is writing this export. Wait for it, or choose another directory with -o."


class WorkingDirectory:
    """Holds `request.json`, `parts/` and `files/`, which becomes the export."""

    def __init__(self, final: Path, identity: dict[str, Any]) -> None:
        self.final = final
        self.root = final.resolve().parent / f".{final.resolve().name}.exporting"
        self.files = self.root / "files"
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._claims: Claims | None = None

    def finished(self) -> dict[str, Any] | None:
        """The record of the same export, if it is complete under its final name.

        Raises:
            ExportExists: something else is there.
        """
        if not self.final.exists() or (self.final.is_dir() and not any(self.final.iterdir())):
            return None
        record = self.final / RECORD
        if not record.is_file():
            raise ExportExists(path=self.final, problem="something is there that is no export")
        try:
            found: dict[str, Any] = json.loads(record.read_bytes())
            difference = first_difference(found["identity"], self._identity)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ExportExists(path=self.final, problem=f"its {RECORD} cannot be read") from None
        if difference is not None:
            field, was, asked = difference
            raise ExportExists(
                path=self.final, problem=f"an export is there whose {field} is {was}; you asked for {asked}"
            )
        return found

    def open(self, shared: Sequence[str]) -> list[Part]:
        """Make the directory, or go on with it; what no recorded part wrote is removed.

        Args:
            shared: files that stay although no part owns them.

        Returns:
            the parts that are done.

        Raises:
            OtherExport, ExportIsBusy: see there.
        """
        with clear_write_errors(self.root):
            make_directory(self.root)
            self._claims = Claims(self.root / ".claims")
            if not self._claims.claim(0):
                raise ExportIsBusy(path=self.final)
            request = self.root / "request.json"
            if request.exists():
                difference = first_difference(json.loads(request.read_bytes()), self._identity)
                if difference is not None:
                    field, found, expected = difference
                    raise OtherExport(path=self.root, field=field, found=found, expected=expected)
            else:
                replace_file(request, json.dumps(self._identity).encode())
            (self.root / "parts").mkdir(exist_ok=True)
            self.files.mkdir(exist_ok=True)
            parts = [Part(**_part(path)) for path in sorted((self.root / "parts").glob("part-*.json"), key=_number)]
            owned = {*shared, *(name for part in parts for name in part.files)}
            for path in self.files.rglob("*"):
                if path.is_file() and str(path.relative_to(self.files)) not in owned:
                    path.unlink()
        return parts

    def record(self, part: Part, shared: Sequence[str]) -> None:
        """Make a part's files durable, then say that it is done."""
        sync_files(self.files, [*part.files, *shared])
        replace_file(self.root / "parts" / f"part-{part.shard:05d}.json", json.dumps(asdict(part)).encode())

    def publish(self, record: dict[str, Any], files: Sequence[str]) -> None:
        """Write the record and give everything its final name."""
        sync_files(self.files, files)
        replace_file(self.files / RECORD, json.dumps({**record, "identity": self._identity}, indent=1).encode())
        with clear_write_errors(self.final):
            for folder in (self.files, *(path for path in self.files.rglob("*") if path.is_dir())):
                sync_directory(folder)
            self.files.rename(self.final.resolve())
            sync_directory(self.root.parent)
        self.remove()

    def remove(self) -> None:
        """Drop the working directory; nothing in it is needed any more."""
        self.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def close(self) -> None:
        """Let another process go on."""
        if self._claims is not None:
            self._claims.close()
            self._claims = None


def sync_files(folder: Path, names: Sequence[str]) -> None:
    """Make files below a folder survive a power failure."""
    with clear_write_errors(folder):
        for name in names:
            handle = os.open(folder / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def new_file(path: Path) -> Path:
    """A path whose folder is there, for a file of a part."""
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def append(path: Path, place: int, write: Callable[[Any], None]) -> int:
    """Let `write` append to a file from byte `place` on, dropping what a killed process left there.

    Returns:
        where the file ends now.
    """
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(place)
            file.seek(place)
            write(file)
            return file.tell()


def _part(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_bytes())
    table["files"] = tuple(table["files"])
    return table


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))
