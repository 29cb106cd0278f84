"""One bucket of an object store and the client that speaks to it.

Settings and credentials come from the environment, as other tools read them, and are kept nowhere. Until the store has
answered once, a request is given up after seconds, so that a wrong endpoint is said at once; after that the client
tries for minutes, for a store that restarts must not end a job.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from extract.storage.refusals import ForkedProcess, broke_off, is_final, refusal

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

HASTY: dict[str, Any] = {"max_retries": 2, "retry_timeout": timedelta(seconds=8)}
PATIENT: dict[str, Any] = {
    "max_retries": 20,
    "retry_timeout": timedelta(seconds=170),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=10), "base": 2},
}
ANSWERS, PAUSE_S = 6, 0.2
"""How often an answer is asked for that breaks off: the client library repeats only what it got nothing of."""
CONNECT_S = 5
REQUEST_S = 120


@dataclass(slots=True, eq=False)
class Bucket:
    """A bucket by its address, such as `s3://name`; two of the same address are the same bucket."""

    url: str
    _clients: "dict[str, ObjectStore]" = field(default_factory=dict, repr=False)
    _met: bool = field(default=False, repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bucket) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __reduce__(self) -> tuple[type["Bucket"], tuple[str]]:
        """Another process makes its own connections, with its own environment."""
        return Bucket, (self.url,)

    def ask(self, place: object, request: "Callable[[ObjectStore], T]", *, reads: bool = False) -> T:
        """Do one request.

        Args:
            place: the address that a message names.
            request: gets the client.
            reads: it may be done again, and is, where its answer breaks off.

        Raises:
            FileNotFoundError: no such object, in a bucket that is there.
            StoreRefused, StoreFull: anything else; with `__cause__` as the client raised it.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            answer = _whole(request, self._client()) if reads else request(self._client())
        except AlreadyExistsError:
            self._met = True
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise refusal(self.url, error) from error
            self._see_bucket()
            raise FileNotFoundError(str(place)) from None
        except (BaseError, OSError) as error:
            raise refusal(place, error) from error
        self._met = True
        return answer

    def _see_bucket(self) -> None:
        """A missing object and a missing bucket look the same to some requests; to a listing they do not."""
        if self._met:
            return
        import obstore
        from obstore.exceptions import BaseError

        try:
            prefix = "extract-looks-for-the-bucket"
            _whole(lambda client: next(iter(obstore.list(client, prefix=prefix, chunk_size=1)), None), self._client())
        except (BaseError, OSError) as error:
            if "NoSuchBucket" in str(error) or not is_final(error):  # listing may be forbidden where reading is not
                raise refusal(self.url, error) from error
        self._met = True

    def _client(self) -> "ObjectStore":
        check_not_forked(self.url)
        kind = "patient" if self._met else "hasty"
        if kind not in self._clients:
            self._clients[kind] = _connect(self.url, PATIENT if self._met else HASTY)
        return self._clients[kind]


def _whole(request: "Callable[[ObjectStore], T]", client: "ObjectStore") -> T:
    from obstore.exceptions import BaseError

    for _ in range(ANSWERS - 1):
        try:
            return request(client)
        except (BaseError, OSError) as error:
            if not broke_off(error):
                raise
        time.sleep(PAUSE_S * random.uniform(0.5, 1.5))
    return request(client)


def check_not_forked(place: object) -> None:
    """Refuse to wait for threads of the client that are not there: a request in such a process would never end.

    Raises:
        ForkedProcess: this process was forked after the client's threads had been started.
    """
    if _process_of_the_client() != os.getpid():
        raise ForkedProcess(path=place)


@cache
def _process_of_the_client() -> int:
    """The process that made the first request; whoever is forked from it later inherits this answer."""
    return os.getpid()


def _connect(url: str, retries: dict[str, Any]) -> "ObjectStore":
    """A client for the bucket alone: keys are whole."""
    from obstore.store import from_url

    options: dict[str, Any] = {"client_options": client_options(), "retry_config": retries}
    if url.startswith("s3:"):  # objects are removed one by one, which every store can
        options["config"] = {"disable_bulk_delete": True}
    return from_url(url, **options)


def client_options() -> dict[str, Any]:
    """How long to wait; and plain HTTP only where an endpoint is written so."""
    endpoints = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL")
    plain = any(os.environ.get(name, "").startswith("http://") for name in endpoints)
    return {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=REQUEST_S),
        "allow_http": plain,
    }
