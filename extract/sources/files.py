"""Which files a source is made of, in which order.

Order is by name within each directory or glob, and as given over the list; it never depends on what the file system
lists first. A directory is read with its subdirectories, and means its data files: names that begin with "_" or "." and
files of no known format (a README, a checksum) are passed over. Knows extensions, never contents.
"""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pyarrow as pa

from extract.errors import SourceError
from extract.sources.objects import is_object_glob, object_files, unreachable
from extract.storage import ObjectPath, Place, is_address
from extract.storage.refusals import StoreRefused

FileFormat = Literal["parquet", "arrow", "jsonl"]

EXTENSIONS: dict[str, FileFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".ndjson.zst": "jsonl",
}


class NoSuchFile(SourceError):
    """A path that names nothing."""

    template = "{path}: no such file or directory."


class NoFiles(SourceError):
    """A directory or glob without data files."""

    template = "{path}: {found}, expected files that end in {extensions}."


class DuplicateFile(SourceError):
    """One file listed twice."""

    template = "{path}: listed twice in the source; its rows would be read twice. Name each file once."


class UnreadableDirectory(SourceError):
    """A directory whose files cannot be listed: without them, rows would be missing in silence."""

    template = "{path}: cannot be listed: {problem}. Allow it, or name the files that are to be read."


class UnreadableFile(SourceError):
    """A file that is not what its name says, or is damaged."""

    template = "{path}: cannot be read as {format}: {problem}. Replace the file, or leave it out of the source."


def format_of(path: Place) -> FileFormat | None:
    """The format that a file's extension stands for."""
    name = path.name.lower()
    return next((form for extension, form in EXTENSIONS.items() if name.endswith(extension)), None)


def is_glob(path: str) -> bool:
    """A pattern, unless a file of exactly this name exists."""
    if is_address(path):
        return is_object_glob(path)
    return glob.has_magic(path) and not Path(path).exists()


def list_files(paths: tuple[str, ...], wanted: FileFormat) -> tuple[Place, ...]:
    """The files that `paths` stand for, in reading order.

    A path that names a file is taken whatever its extension is; directories give their files of format `wanted`, and so
    do globs unless nothing they match has a known extension.

    Raises:
        NoSuchFile: a path that names nothing.
        NoFiles: a directory or a glob without files of the format.
        DuplicateFile: one file reached twice.
    """
    listed: list[Place] = []
    for path in paths:
        if is_address(path) and not is_glob(path):
            listed += _need(_named(object_files(path), path, wanted), path, wanted)
        elif is_glob(path):
            matches = object_files(path) if is_address(path) else glob_files(path)
            known = [match for match in matches if format_of(match) is not None]
            listed += _need(
                [match for match in known if format_of(match) == wanted] if known else matches, path, wanted
            )
        elif Path(path).is_dir():
            files = directory_files(Path(path))
            listed += _need([file for file in files if format_of(file) == wanted], path, wanted)
        elif Path(path).is_file():
            listed.append(Path(path))
        else:
            raise NoSuchFile(path=path)
    seen: set[str] = set()
    for file in listed:
        absolute = str(file) if isinstance(file, ObjectPath) else _absolute(file)
        if absolute in seen:
            raise DuplicateFile(path=file)
        seen.add(absolute)
    return tuple(listed)


def directory_files(directory: Path) -> list[Place]:
    """Files under a directory, sorted by relative name; linked directories are followed, each directory once.

    Raises:
        UnreadableDirectory: the directory, or one below it, cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise UnreadableDirectory(path=error.filename, problem=error.strerror)

    found: list[Path] = []
    visited: set[str] = set()
    for root, directories, files in os.walk(directory, onerror=refuse, followlinks=True):
        real = os.path.realpath(root)
        if real in visited:
            directories.clear()
            continue
        visited.add(real)
        directories[:] = sorted(name for name in directories if not _is_hidden(name))
        found += [Path(root, name) for name in files if not _is_hidden(name)]
    return [*sorted(found, key=lambda file: file.relative_to(directory).as_posix())]


def glob_files(pattern: str) -> list[Place]:
    """Files that match, sorted by name. Hidden and "_" names count only where the pattern spells them so."""
    parts = Path(pattern).parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    spelled = any(_is_hidden(part) for part in parts[fixed:])
    matches = [Path(match) for match in _glob(pattern, spelled)]
    files = {match for match in matches if match.is_file()}
    if not spelled:
        files = {file for file in files if not any(_is_hidden(part) for part in file.parts[fixed:])}
    return [*sorted(files, key=lambda file: file.as_posix())]


def names_below_root(files: tuple[Place, ...]) -> tuple[str, ...]:
    """Each file's name relative to the directory or prefix that holds them all, with forward slashes."""
    absolute = [Path(f"/{file.key}" if isinstance(file, ObjectPath) else _absolute(file)) for file in files]
    root = Path(os.path.commonpath([file.parent for file in absolute]))
    return tuple(file.relative_to(root).as_posix() for file in absolute)


@contextmanager
def reading(path: Place, format: str) -> Iterator[None]:
    """Turn what pyarrow and the file system raise on a bad file into one error that names the file.

    Raises:
        UnreadableFile: in place of any such error.
        UnreachableSource: an object store cannot be asked.
    """
    try:
        yield
    except StoreRefused as refused:
        raise unreachable(refused) from refused
    except (pa.ArrowException, OSError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise UnreadableFile(path=path, format=format, problem=lines[0][:300].rstrip(".")) from error


def _glob(pattern: str, include_hidden: bool) -> list[str]:
    return glob.glob(pattern, recursive=True, include_hidden=include_hidden)  # noqa: PTH207 - follows linked directories


def _absolute(file: Path) -> str:
    return os.path.abspath(file)  # noqa: PTH100 - resolve() would follow links, two of which may be meant


def _named(files: list[Place], path: str, wanted: FileFormat) -> list[Place]:
    """What an address stands for: the object of that name, whatever its extension, or those under it of a format."""
    if len(files) == 1 and str(files[0]) == path:
        return files
    if not files:
        raise NoSuchFile(path=path)
    return [file for file in files if format_of(file) == wanted]


def _need(files: list[Place], path: str, wanted: FileFormat) -> list[Place]:
    if not files:
        extensions = ", ".join(extension for extension, form in EXTENSIONS.items() if form == wanted)
        raise NoFiles(path=path, found=f"no {wanted} files", extensions=extensions)
    return files


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))
