"""Which objects a source is made of: an address of one, of a prefix, or a glob over keys.

Order is by key. As in a directory, names that begin with "_" or "." are passed over under a prefix, and so is what has
no known format. A listing is the only request; whether an address is an object or a prefix is seen from it.
"""

import re

from extract.errors import SourceError
from extract.storage import ObjectPath, Place, locate
from extract.storage.refusals import StoreRefused

MAGIC = re.compile(r"[*?\[]")
_TOKEN = re.compile(r"\*\*/|\*\*|\[[^\]]+\]|.", re.DOTALL)
_WILDCARDS = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class UnreachableSource(SourceError):
    """A source in an object store cannot be read."""

    template = "{path}: {problem}. {advice}"


def unreachable(refused: StoreRefused) -> UnreachableSource:
    """The same refusal, said of a source."""
    facts = refused.facts
    return UnreachableSource(path=facts["path"], problem=facts["problem"], advice=facts["advice"])


def is_object_glob(address: str) -> bool:
    """Whether its key holds wildcards."""
    return MAGIC.search(address) is not None


def object_files(address: str) -> list[Place]:
    """The objects that an address stands for, hidden ones left out unless they are spelled; empty if there are none.

    Raises:
        UnreachableSource: no such bucket, no permission, no answer.
    """
    try:
        if is_object_glob(address):
            return list(_matching(address))
        place = locate(address)
        assert isinstance(place, ObjectPath)  # the caller asks for addresses only
        if place.key and place.is_file():
            return [place]
        return [path for path, _ in place.walk() if not _is_hidden(path.key.removeprefix(place.key))]
    except StoreRefused as refused:
        raise unreachable(refused) from refused


def _matching(address: str) -> list[Place]:
    """`*` and `?` stay within a part of the key, `**` goes through parts."""
    head = address[: MAGIC.search(address).start()].rpartition("/")[0]  # type: ignore[union-attr]
    root = locate(head)
    assert isinstance(root, ObjectPath)
    pattern = address.removeprefix(f"{root.bucket.url}/")
    compiled = re.compile("".join(map(_as_regex, _TOKEN.findall(pattern))))
    spelled = _is_hidden(pattern.removeprefix(root.key))
    found = [path for path, _ in root.walk() if compiled.fullmatch(path.key)]
    return [path for path in found if spelled or not _is_hidden(path.key.removeprefix(root.key))]


def _as_regex(token: str) -> str:
    if token[0] == "[" and len(token) > 1:
        return token.replace("[!", "[^", 1)
    return _WILDCARDS.get(token) or re.escape(token)


def _is_hidden(key: str) -> bool:
    return any(part.startswith((".", "_")) for part in key.split("/"))
