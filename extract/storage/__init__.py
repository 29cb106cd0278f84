"""Where an output, an engine or a source lies: a path of the file system, or an address in an object store.

`pathlib.Path` is the one implementation and `ObjectPath` the other: it has the same words for what both can do (`/`,
`exists`, `read_bytes`, `unlink`, ...). What differs, creating a name only once and publishing a file, is in
`extract.store`. The client library is imported only where an address is used.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from extract.errors import SpecError
from extract.storage.bucket import Bucket
from extract.storage.object_path import ObjectFacts, ObjectPath
from extract.storage.scratch import make_scratch_folder, scratch_folder

__all__ = [
    "BadAddress",
    "ObjectFacts",
    "ObjectPath",
    "Place",
    "is_address",
    "locate",
    "make_scratch_folder",
    "scratch_folder",
]

Place = Path | ObjectPath

SCHEMES = ("s3", "gs")


class BadAddress(SpecError):
    """An address that cannot be used."""

    template = "{address}: {problem}. Give a path, file:///PATH, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX."


def is_address(text: str) -> bool:
    """Whether a text names something in an object store."""
    return text.partition("://")[0].lower() in SCHEMES and "://" in text


def locate(place: str | Place) -> Place:
    """The place that a path or an address names.

    Raises:
        BadAddress: another scheme, no bucket, or one that carries a password: it would be copied into `job.json`.
    """
    if not isinstance(place, str) or "://" not in place:
        return Path(place) if isinstance(place, str) else place
    parts = urlsplit(place)
    if "@" in parts.netloc:
        shown = f"{parts.scheme}://...{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise BadAddress(address=shown, problem="user names and passwords do not belong into an address")
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    if parts.scheme not in SCHEMES:
        raise BadAddress(address=place, problem=f'addresses of the scheme "{parts.scheme}" are not known here')
    bucket, _, key = place.partition("://")[2].partition("/")
    segments = [segment for segment in key.split("/") if segment]
    if not bucket or any(segment in (".", "..") for segment in segments):
        raise BadAddress(address=place, problem="it names no bucket, or a relative path in one")
    return ObjectPath(Bucket(f"{parts.scheme}://{bucket}"), "/".join(segments))
