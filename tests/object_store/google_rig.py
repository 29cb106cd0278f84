"""A stand-in for Google Cloud Storage on loopback: those requests of its XML API that the client library makes.

Written from Google's reference of that API. It knows one bucket and one bearer token, takes every condition of a write
under one lock, and refuses, as a fault of a test, any request, header or parameter that it does not know: so no test
passes because something was ignored.
"""

import hashlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET, TOKEN = "states", "not-a-secret"
KNOWN_HEADERS = {
    *("authorization", "accept", "user-agent", "host", "content-length", "content-type", "range"),
    *("x-goog-if-generation-match", "x-goog-copy-source", "if-match", "if-none-match"),
}
PAGE = 7
"""Names in a page of a listing, few so that listings have several; Google's has a thousand."""


@dataclass(frozen=True)
class Stored:
    """An object: each write makes a new generation."""

    content: bytes
    generation: int
    modified: str = field(default_factory=lambda: formatdate(usegmt=True))

    @property
    def tag(self) -> str:
        """Of the content."""
        return f'"{hashlib.md5(self.content).hexdigest()}"'


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Google:
    """The bucket; `strange` lists requests that it does not know."""

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.strange: list[str] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def write(self, key: str, content: bytes, generation: str | None) -> Stored:
        """Put an object: always, or only over this generation; "0" is none."""
        with self._lock:
            there = self.objects.get(key)
            if generation is not None and int(generation) != (there.generation if there else 0):
                raise Refused(412, "PreconditionFailed")
            self.objects[key] = Stored(content, next(self._numbers))
            return self.objects[key]

    def read(self, key: str) -> Stored:
        """An object."""
        try:
            return self.objects[key]
        except KeyError:
            raise Refused(404, "NoSuchKey") from None

    def delete(self, key: str) -> None:
        """Remove an object that is there."""
        with self._lock:
            self.read(key)
            del self.objects[key]

    def begin_upload(self) -> str:
        """Of an object in parts."""
        name = f"upload-{next(self._numbers)}"
        self.uploads[name] = {}
        return name

    def list(self, prefix: str, delimiter: str, after: str) -> tuple[list[tuple[str, Stored | None]], bool]:
        """A page of keys with their objects, and of common prefixes, behind `after`; and whether more follow."""
        found: dict[str, Stored | None] = {}
        for key, stored in sorted(self.objects.items()):
            if key.startswith(prefix):
                head, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                found |= {prefix + head + mark: None} if mark else {key: stored}
        names = [name for name in sorted(found) if name > after]
        return [(name, found[name]) for name in names[:PAGE]], len(names) > PAGE


class Handler(BaseHTTPRequestHandler):
    """HTTP in front of a `Google`."""

    protocol_version = "HTTP/1.1"
    wbufsize = 2**16  # header and content in one packet
    google: Google

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        address = urlsplit(self.path)
        bucket, _, key = address.path.removeprefix("/").partition("/")
        given = dict(parse_qsl(address.query, keep_blank_values=True))
        try:
            strange = {name.lower() for name in self.headers} - KNOWN_HEADERS
            if strange:
                raise self._strange(f"headers {sorted(strange)}")
            if self.headers["authorization"] != f"Bearer {TOKEN}":
                raise Refused(401, "AuthenticationRequired")
            if unquote(bucket) != BUCKET:
                raise Refused(404, "NoSuchBucket")
            self._do(unquote(key), given, body)
        except Refused as refused:
            self._send(refused.status, f"<Error><Code>{refused.code}</Code></Error>".encode())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def _do(self, key: str, given: dict[str, str], body: bytes) -> None:
        match self.command, key, sorted(given):
            case "GET", "", _:
                self._list(given)
            case "GET" | "HEAD", _, []:
                self._read(self.google.read(key))
            case "PUT", _, [] if "x-goog-copy-source" in self.headers:
                source = unquote(self.headers["x-goog-copy-source"]).partition("/")[2]
                copied = self.google.write(key, self.google.read(source).content, self._condition())
                self._send(200, f"<CopyObjectResult><ETag>{escape(copied.tag)}</ETag></CopyObjectResult>".encode())
            case "PUT", _, []:
                self._send(200, b"", self.google.write(key, body, self._condition()))
            case "DELETE", _, []:
                self.google.delete(key)
                self._send(204)
            case "POST", _, ["uploads"]:
                name = f"<UploadId>{self.google.begin_upload()}</UploadId>"
                self._send(200, f"<InitiateMultipartUploadResult>{name}</InitiateMultipartUploadResult>".encode())
            case "PUT", _, ["partNumber", "uploadId"]:
                self._upload(given)[int(given["partNumber"])] = body
                self._send(200, b"", Stored(body, 0))
            case "POST", _, ["uploadId"]:
                self._complete(key, given, body)
            case "DELETE", _, ["uploadId"]:
                self.google.uploads.pop(given["uploadId"], None)
                self._send(204)
            case _:
                raise self._strange(f"{self.command} {self.path}")

    def _condition(self) -> str | None:
        value = self.headers["x-goog-if-generation-match"]
        return None if value is None else str(value)

    def _read(self, stored: Stored) -> None:
        asked = self.headers["range"]
        if asked is None:
            self._send(200, stored.content, stored)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        size = len(stored.content)
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= stop:
            raise Refused(416, "InvalidRange")
        where = {"content-range": f"bytes {start}-{stop - 1}/{size}"}
        self._send(206, stored.content[start:stop], stored, where)

    def _list(self, given: dict[str, str]) -> None:
        unknown = given.keys() - {"list-type", "prefix", "delimiter", "continuation-token", "max-keys", "start-after"}
        if unknown or given.get("list-type") != "2":
            raise self._strange(f"listing with {given}")
        after = given.get("continuation-token") or given.get("start-after", "")
        page, more = self.google.list(given.get("prefix", ""), given.get("delimiter", ""), after)
        parts = [f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>"] if more else []
        for name, stored in page:
            if stored is None:
                parts.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
                continue
            facts = f"<Size>{len(stored.content)}</Size><LastModified>{_iso(stored.modified)}</LastModified>"
            parts.append(f"<Contents><Key>{escape(name)}</Key>{facts}<ETag>{escape(stored.tag)}</ETag></Contents>")
        self._send(200, f"<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode())

    def _upload(self, given: dict[str, str]) -> dict[int, bytes]:
        try:
            return self.google.uploads[given["uploadId"]]
        except KeyError:
            raise Refused(404, "NoSuchUpload") from None

    def _complete(self, key: str, given: dict[str, str], body: bytes) -> None:
        parts = self._upload(given)
        listed = ({child.tag: child.text for child in part} for part in ElementTree.fromstring(body))
        asked = [(int(part["PartNumber"] or 0), part["ETag"]) for part in listed]
        if asked != [(number, Stored(parts[number], 0).tag) for number in sorted(parts)]:
            raise Refused(400, "InvalidPart")
        stored = self.google.write(key, b"".join(parts[number] for number, _ in asked), self._condition())
        del self.google.uploads[given["uploadId"]]
        result = f"<CompleteMultipartUploadResult><ETag>{escape(stored.tag)}</ETag></CompleteMultipartUploadResult>"
        self._send(200, result.encode())

    def _strange(self, what: str) -> Refused:
        self.google.strange.append(what)
        return Refused(501, "NotImplemented")

    def _send(
        self, status: int, content: bytes = b"", stored: Stored | None = None, more: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        headers = {"content-length": str(len(content)), **(more or {})}
        if stored is not None:
            headers |= {"etag": stored.tag, "x-goog-generation": str(stored.generation)}
            headers |= {"last-modified": stored.modified}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def _iso(date: str) -> str:
    from email.utils import parsedate_to_datetime

    return parsedate_to_datetime(date).strftime("%Y-%m-%dT%H:%M:%S.000Z")


@contextmanager
def google_server() -> Iterator[tuple[str, Google]]:
    """Its endpoint, and the bucket to look into, while the block runs."""
    google = Google()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"google": google}))
    server.daemon_threads = True  # clients keep their connections open
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", google
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def settings(endpoint: str) -> dict[str, str]:
    """The environment of somebody who uses it."""
    return {"GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": TOKEN}
