"""What an object store or the way to it says no to, each as one line with what to do.

Client libraries and servers say these things in many words, so they are told apart by the codes that all of them carry.
A message never holds more than the place, the code and the names of settings: no key, no header, no signature.
"""

import re
from typing import NamedTuple

from extract.errors import ExtractError, OutOfSpace


class ForkedProcess(ExtractError):
    """A process that was forked from one that had used a store."""

    exit_code = 2
    template = (
        "{path}: this process was forked from one that had used an object store, whose client does not live through "
        'that. Start worker processes afresh: multiprocessing_context="spawn" of a DataLoader, or '
        'multiprocessing.get_context("spawn").'
    )


class StoreRefused(ExtractError):
    """An object store cannot be used as asked."""

    exit_code = 2
    template = "{path}: {problem}. {advice}"


class StoreFull(OutOfSpace):
    """An object store takes no more."""

    template = (
        "{path}: the store takes no more ({code}). What is committed stays: make room, then run the same command again."
    )


class NoConditionalWrites(ExtractError):
    """A store that overwrites what it was asked to create only if absent."""

    exit_code = 2
    template = (
        "{path}: this store overwrites what it was asked to create only if absent, so two workers could both commit "
        "one shard. Choose a store that refuses (AWS S3, Google Cloud Storage, Ceph, MinIO), or a directory with -o."
    )


class _Kind(NamedTuple):
    """One thing that goes wrong: codes and words that show it, and what is said of it."""

    shown_by: str
    problem: str
    advice: str


_SETTINGS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
_ENDPOINT = {"s3": "AWS_ENDPOINT_URL", "gs": "the proxy, if there is one"}

_KINDS = (
    _Kind("RequestTimeTooSkewed", "this machine's clock differs too much from the store's", "Set the clock (NTP)."),
    _Kind("NoSuchBucket|bucket does not exist", "no such bucket", "Create it, or check the name and {endpoint}."),
    _Kind(
        r"169\.254\.|metadata\.google|NoCredentials|CredentialsNotLoaded|no valid credential",
        "no credentials were found",
        "Set {settings}.",
    ),
    _Kind(
        "SignatureDoesNotMatch|InvalidAccessKeyId|ExpiredToken|InvalidToken|401 Unauthorized|invalid_grant",
        "the credentials are refused",
        "Check {settings}.",
    ),
    _Kind("AccessDenied|403 Forbidden|PermissionDenied", "no permission", "Allow it, or check {settings}."),
    _Kind(
        "PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|redirect without LOCATION",
        "the bucket lies in another region or behind another endpoint",
        "Set AWS_REGION and {endpoint} to the bucket's.",
    ),
    _Kind(
        r"dns error|Connect|[Cc]onnection (refused|reset|closed)|error sending request|timed out|tcp connect",
        "the store does not answer",
        "Check the network and {endpoint}.",
    ),
    _Kind(
        "Header missing|Got invalid|NotImplemented|404 Not Found|405 Method|501 Not|400 Bad Request|HTTP error",
        "what answers there does not behave as an object store",
        "Check {endpoint}.",
    ),
)
_FULL = r"QuotaExceeded|InsufficientCapacity|507 Insufficient|XMinioStorageFull"
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_STATUS = re.compile(r"status code: (\d{3} [A-Z][A-Za-z ]{2,40})")


def refusal(path: object, error: BaseException) -> ExtractError:
    """The error to raise for what the client library said about a place."""
    text, scheme = str(error), str(path).partition("://")[0]
    found = _CODE.search(text) or _STATUS.search(text)
    code = "" if found is None else found[1]
    if re.search(_FULL, text):
        return StoreFull(path=path, code=code)
    for kind in _KINDS:
        if re.search(kind.shown_by, text):
            said = f" ({code})" if code else ""
            advice = kind.advice.format(settings=_SETTINGS[scheme], endpoint=_ENDPOINT[scheme])
            return StoreRefused(path=path, problem=kind.problem + said, advice=advice)
    first = (text.splitlines() or [type(error).__name__])[0][:200].rstrip(".")
    return StoreRefused(path=path, problem=first, advice="What is committed stays: run the same command again.")


def broke_off(error: BaseException | None) -> bool:
    """Whether the store had begun to answer, and the rest of its answer did not come."""
    return error is not None and "body error" in str(error)


def is_final(error: BaseException) -> bool:
    """Whether trying again cannot help: the store understood and said no."""
    return re.search(r"\b(400 Bad|401 Un|403 For|405 Met|NoSuchBucket)", str(error)) is not None
