"""Which format a source has, from what is on disk; a name that is nothing on disk may be a Hugging Face dataset.

The disk always wins over the hub: a dataset named like an existing path is never fetched.
"""

import re
from pathlib import Path
from typing import Literal

from extract.errors import SourceError
from extract.sources.files import (
    EXTENSIONS,
    FileFormat,
    NoFiles,
    NoSuchFile,
    directory_files,
    format_of,
    glob_files,
    is_glob,
)
from extract.sources.objects import object_files
from extract.spec import SourceSpec
from extract.storage import Place, is_address

SAVED_DATASET = ("state.json", "dataset_dict.json")
"""What `save_to_disk` leaves: one of these beside or above its .arrow files."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class UnknownFormat(SourceError):
    """A file whose name does not say what it is."""

    template = '{path}: the name does not say which format this is. Set format to "parquet", "arrow" or "jsonl".'


class MixedFormats(SourceError):
    """Files of several formats in one source."""

    template = (
        "{first} is {first_format} and {second} is {second_format}; a source has one format. Set format, or path."
    )


class UnknownScheme(SourceError):
    """An address of a kind that is not read."""

    template = "{path}: addresses of this kind are not read. Give a path, s3://, gs://, or name a Hugging Face dataset."


def choose_format(spec: SourceSpec) -> FileFormat | Literal["hf"]:
    """The format that `spec` asks for; "auto" is resolved, and never returned.

    Raises:
        NoSuchFile: a path that names nothing, and is no dataset name either.
        NoFiles: a directory or glob without any file of a known format.
        UnknownFormat: a file whose extension is not known.
        MixedFormats: files of more than one format.
    """
    for path in spec.paths:
        if "://" in path and not is_address(path) and not Path(path).exists():
            raise UnknownScheme(path=path)
    if spec.format != "auto":
        return spec.format
    if len(spec.paths) == 1 and (is_saved_dataset(Path(spec.paths[0])) or looks_like_hub_name(spec.paths[0])):
        return "hf"
    first: tuple[Place, FileFormat] | None = None
    for path in spec.paths:
        for file, form in _known_files(path):
            if first is not None and form != first[1]:
                raise MixedFormats(first=first[0], first_format=first[1], second=file, second_format=form)
            first = first or (file, form)
    assert first is not None
    return first[1]


def is_saved_dataset(path: Path) -> bool:
    """Written by `save_to_disk`, one dataset or a dictionary of splits."""
    return any((path / marker).is_file() for marker in SAVED_DATASET)


def looks_like_hub_name(path: str) -> bool:
    """`name` or `organisation/name`, nothing on disk, and not the name of a data file that is missing."""
    return not Path(path).exists() and format_of(Path(path)) is None and _HUB_NAME.fullmatch(path) is not None


def _known_files(path: str) -> list[tuple[Place, FileFormat]]:
    if is_address(path):
        files = object_files(path)
        if not files and not is_glob(path):
            raise NoSuchFile(path=path)
        if [str(file) for file in files] == [path] and format_of(files[0]) is None:
            raise UnknownFormat(path=path)
    elif is_glob(path):
        files = glob_files(path)
    elif Path(path).is_dir():
        files = directory_files(Path(path))
    elif Path(path).is_file():
        form = format_of(Path(path))
        if form is None:
            raise UnknownFormat(path=path)
        return [(Path(path), form)]
    else:
        raise NoSuchFile(path=path)
    known = [(file, form) for file in files if (form := format_of(file)) is not None]
    if not known:
        found = f"{len(files):,} files of no known format" if files else "no files"
        raise NoFiles(path=path, found=found, extensions=", ".join(EXTENSIONS))
    return known
