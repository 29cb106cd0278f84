"""One object of a bucket, or all that lie under a prefix, with the words that `pathlib.Path` has for them.

There are no directories: one is there as soon as something lies in it. No request shows half an object, so what is
written here needs no temporary name; a large file goes up in parts and becomes visible as a whole or not at all.
"""

import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from extract.storage.bucket import Bucket
from extract.storage.refusals import NoConditionalWrites, StoreRefused, broke_off, is_final

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

PART_BYTES = 16 * 2**20
PARTS_AT_ONCE = 4
ATTEMPTS = 6
"""Of a write whose answer was lost, beside what the client itself repeats."""
FIRST_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What a store says of an object, under the names of `os.stat_result`; `e_tag` changes when the content does."""

    st_size: int
    st_mtime: float
    e_tag: str


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """An address: a bucket and a key without slashes at its ends."""

    bucket: Bucket
    key: str

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The last extension of the name."""
        return Path(self.name).suffix

    @property
    def parent(self) -> "ObjectPath":
        """What this lies in."""
        return ObjectPath(self.bucket, self.key.rpartition("/")[0])

    def resolve(self) -> "ObjectPath":
        """Itself: there are no links."""
        return self

    def is_symlink(self) -> bool:
        """Never."""
        return False

    # --- reading ----------------------------------------------------------------------------------------------------

    def stat(self) -> ObjectFacts:
        """Size, time and tag.

        Raises:
            FileNotFoundError: no such object.
        """
        import obstore

        found = self._read(lambda client: obstore.head(client, self.key))
        return _facts(found)

    def is_file(self) -> bool:
        """Whether there is such an object."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    exists = is_file

    def is_dir(self) -> bool:
        """Whether anything lies under it."""
        return next(self._objects(chunk=1), None) is not None

    def read_bytes(self) -> bytes:
        """The whole object.

        Raises:
            FileNotFoundError: no such object.
        """
        import obstore

        return self._read(lambda client: bytes(obstore.get(client, self.key).bytes()))

    def chunks(self) -> Iterator[bytes]:
        """The whole object, piece by piece; where it breaks off, it goes on from there."""
        position, left, tag = 0, ATTEMPTS, None
        while True:
            try:
                got = self._got(position, tag)
                tag = got.meta["e_tag"]
                for chunk in self._pieces(got):
                    position, left = position + len(chunk), ATTEMPTS
                    yield chunk
            except StoreRefused as error:
                left -= 1
                if not left or not broke_off(error.__cause__):
                    raise
            else:
                return

    def _got(self, position: int, tag: str | None) -> Any:
        """The object from there on, as long as it has this tag."""
        import obstore

        options: Any = {"range": {"offset": position}, "if_match": tag} if position else None
        return self._read(lambda client: obstore.get(client, self.key, options=options))

    def _pieces(self, got: Any) -> Iterator[bytes]:
        stream = iter(got.stream(min_chunk_size=2**20))
        while (chunk := self._ask(lambda client: next(stream, None))) is not None:
            yield bytes(chunk)

    def opened(self, buffer_bytes: int = 2**20) -> Any:
        """A binary file that asks for the ranges that are read, `buffer_bytes` at least at a time."""
        import obstore

        return self._read(lambda client: obstore.open_reader(client, self.key, buffer_size=buffer_bytes))

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Objects right under it, and prefixes that further ones lie under."""
        import obstore

        prefix = f"{self.key}/" if self.key else None
        found = self._read(lambda client: obstore.list_with_delimiter(client, prefix))
        for key in (*(entry["path"] for entry in found["objects"]), *found["common_prefixes"]):
            yield ObjectPath(self.bucket, key.rstrip("/"))

    def glob(self, pattern: str) -> Iterator["ObjectPath"]:
        """Objects right under it with such a name."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def walk(self) -> Iterator[tuple["ObjectPath", ObjectFacts]]:
        """All objects under it, however deep, sorted by key."""
        found = sorted(self._objects(), key=lambda entry: entry["path"])
        return ((ObjectPath(self.bucket, entry["path"]), _facts(entry)) for entry in found)

    def keys(self, after: str = "") -> Iterator[str]:
        """Keys of all objects under it, however deep; only those that sort after a name, if it is given."""
        return (entry["path"] for entry in self._objects(after=after))

    # --- writing ----------------------------------------------------------------------------------------------------

    def create(self, content: bytes) -> bool:
        """Create the object if it is absent; the store decides between all who try.

        An answer that was lost is asked for again: whoever finds an object compares what it holds, for it may be this
        very call's.

        Returns:
            True if this call created it, False if it is there.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        def attempt() -> bool:
            try:
                self._ask(lambda client: obstore.put(client, self.key, content, mode="create"))
            except AlreadyExistsError as error:
                if not self.exists():  # two at once, and neither was taken
                    again = "Run the same command again."
                    raise StoreRefused(path=self, problem="others write it too", advice=again) from error
                return False
            return True

        return self._again(attempt, done=lambda: False if self.exists() else None)

    def replace(self, content: bytes) -> None:
        """Write the object, in place of what was there."""
        import obstore

        self._again(lambda: self._ask(lambda client: obstore.put(client, self.key, content, use_multipart=False)))

    def publish(self, file: Path) -> None:
        """Copy a finished local file here; its name is made from its content, so replacing changes nothing.

        Raises:
            StoreRefused: also when the store holds another number of bytes afterwards.
        """
        import obstore

        size = file.stat().st_size

        def upload() -> None:
            self._ask(
                lambda client: obstore.put(
                    client,
                    self.key,
                    file,
                    use_multipart=size > PART_BYTES,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_AT_ONCE,
                )
            )
            found = self.stat().st_size
            if found != size:
                problem = f"{found:,} bytes arrived, {size:,} were sent"
                raise StoreRefused(path=self, problem=problem, advice="Run the same command again.")

        self._again(upload)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object; one that is not there is no error to every store."""
        import obstore

        attempts = 0

        def remove() -> bool:
            """Whether it was there, or an earlier attempt may have removed it."""
            nonlocal attempts
            attempts += 1
            try:
                self._ask(lambda client: obstore.delete(client, self.key))
            except FileNotFoundError:
                return attempts > 1
            return True

        if not self._again(remove) and not missing_ok:
            raise FileNotFoundError(str(self))

    def rename(self, target: "ObjectPath") -> None:
        """Copy, then remove: a store knows no other way, so both may be there for a moment."""
        import obstore

        self._again(lambda: self._ask(lambda client: obstore.copy(client, self.key, target.key)))
        self.unlink()

    def mkdir(self, exist_ok: bool = True) -> None:
        """Nothing: whatever lies under it makes it be there."""

    def probe(self) -> None:
        """See that the store creates a name only once.

        Raises:
            NoConditionalWrites: it does not.
        """
        trial = self / f".probe-{secrets.token_hex(8)}"
        try:
            trial.create(b"first")  # nobody else knows the name: one that is there is this very call's, its answer lost
            if trial.create(b"second") or trial.read_bytes() != b"first":
                raise NoConditionalWrites(path=self)
        finally:
            with suppress(StoreRefused):  # the first error is the one to tell; and what may be left is a few bytes
                trial.unlink(missing_ok=True)

    def _objects(self, chunk: int = 1000, after: str = "") -> Iterator[Any]:
        import obstore
        from obstore.exceptions import BaseError

        prefix = f"{self.key}/" if self.key else None
        offset = f"{prefix or ''}{after}" if after else None
        listing: Any = None

        def page(client: "ObjectStore") -> Any:
            """The next one; a listing that broke off begins again behind what was seen."""
            nonlocal listing
            try:
                listing = listing or iter(obstore.list(client, prefix, offset=offset, chunk_size=chunk))
                return next(listing, None)
            except BaseError:
                listing = None
                raise

        while (entries := self._read(page)) is not None:
            yield from entries
            offset = entries[-1]["path"] if entries else offset

    def _ask(self, request: "Callable[[ObjectStore], T]") -> T:
        return self.bucket.ask(self, request)

    def _read(self, request: "Callable[[ObjectStore], T]") -> T:
        return self.bucket.ask(self, request, reads=True)

    def _again(self, attempt: Callable[[], T], done: Callable[[], T | None] = lambda: None) -> T:
        """Try until it is done, by this process or as `done` finds it, or it cannot be."""
        pause = FIRST_PAUSE_S
        for left in reversed(range(ATTEMPTS)):
            try:
                return attempt()
            except (StoreRefused, FileNotFoundError) as error:
                if not left or is_final(error.__cause__ or error):
                    raise
                time.sleep(pause * random.uniform(0.5, 1.5))  # so that many workers do not come back at once
                pause *= 2
                found = done()
                if found is not None:
                    return found
        raise AssertionError("the last attempt returns or raises")


def _facts(entry: Any) -> ObjectFacts:
    return ObjectFacts(entry["size"], entry["last_modified"].timestamp(), entry["e_tag"] or "")
