"""Put a patch's lines into a source and take them out again; every other byte stays, and a file changes whole or not.

What is written is compared with the source's syntax tree first: without the new statements it must be the old one.
"""

import ast
import contextlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from extract.patching.patch import Kind, Patch
from extract.patching.source_place import StructureNotKnown, find_place
from extract.patching.vendor_tree import PatchRefused


class OtherPatch(PatchRefused):
    """The tree holds this patch in another version, or changed by hand."""

    template = (
        "{path}: line {line} holds {found}, and this is version {version} with its kinds {kinds}. Revert it with the "
        "release of extract that applied it, or restore the vendor's file. Nothing was changed."
    )


class SourceNotWritten(PatchRefused):
    """The vendor's file cannot be read or replaced."""

    template = "{path}: {problem}. Nothing was changed."


@dataclass(frozen=True, slots=True)
class Patched:
    """What a source holds of a patch.

    Attributes:
        kind: `None`: the source is not patched.
        original: the source without the patch.
    """

    kind: Kind | None
    original: bytes


def patched_as(path: Path, source: bytes, patch: Patch) -> Patched:
    """Which kind of a patch a source holds, exactly as it would be applied.

    Raises:
        OtherPatch: something of ours, but not exactly this, or not exactly there.
    """
    lines = source.splitlines(keepends=True)
    marked = [number for number, line in enumerate(lines) if line.strip().startswith(patch.mark.encode())]
    if not marked:
        return Patched(None, source)
    for kind in patch.kinds:
        original = b"".join(lines[: marked[0]] + lines[marked[0] + len(kind.lines) :])
        alone = len(marked) == 1 and kind.lines[0].encode() == lines[marked[0]].strip()
        with contextlib.suppress(StructureNotKnown):  # then it is no place where we put these lines
            if alone and with_patch(path, original, patch, kind) == source:
                return Patched(kind, original)
    first = lines[marked[0]].strip().decode(errors="replace")
    number = re.match(rf"{re.escape(patch.mark)} (\d+)", first)
    found = "this patch twice" if len(marked) > 1 else "lines of this patch that were changed or moved"
    if number and int(number[1]) != patch.version:
        found = f"version {number[1]} of this patch"
    kinds = ", ".join(kind.name for kind in patch.kinds)
    raise OtherPatch(path=path, line=marked[0] + 1, found=found, version=patch.version, kinds=kinds)


def with_patch(path: Path, source: bytes, patch: Patch, kind: Kind) -> bytes:
    """An unpatched source with the lines of one kind put in, indented and ended as the anchor is.

    Raises:
        StructureNotKnown: the place cannot be found for sure.
    """
    place = find_place(path, source, patch, kind)
    lines = source.splitlines(keepends=True)
    first, last = place.anchor.lineno - 1, (place.anchor.end_lineno or place.anchor.lineno) - 1
    indentation = lines[first][: place.anchor.col_offset]
    ending = lines[last][len(lines[last].rstrip(b"\r\n")) :]
    added = [indentation + line.encode("ascii") + ending for line in kind.lines]
    changed = b"".join(lines[: last + 1] + added + lines[last + 1 :])
    if not _differs_only_there(source, changed, place.number, place.anchor, kind):
        raise StructureNotKnown(path=path, problem=f"the lines do not fit behind line {last + 1}")
    return changed


def _differs_only_there(source: bytes, changed: bytes, number: int, anchor: ast.stmt, kind: Kind) -> bool:
    """Whether the changed source is the old one with the new statements behind the anchor."""
    try:
        tree = ast.parse(changed)
    except (SyntaxError, ValueError):
        return False
    new = ast.parse("\n".join(kind.lines)).body
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and len(node.body) > number and node.body[number].lineno == anchor.lineno:
            there = node.body[number + 1 : number + 1 + len(new)]
            del node.body[number + 1 : number + 1 + len(new)]
            same = [ast.dump(statement) for statement in there] == [ast.dump(statement) for statement in new]
            return same and ast.dump(tree) == ast.dump(ast.parse(source))
    return False


def read_source(path: Path) -> bytes:
    """The bytes of a vendor's file.

    Raises:
        SourceNotWritten: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceNotWritten(path=path, problem=f"cannot be read: {error.strerror}") from None


def replace_source(path: Path, content: bytes) -> None:
    """Write the file whole in place of the old one, with its mode and owner; links to it are followed.

    A file that shares its storage with others, as package managers make them, is not changed for the others.

    Raises:
        SourceNotWritten: the directory or the disk does not allow it; the old file stays.
    """
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        about = path.stat()
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(PermissionError):  # only the superuser may give a file away
                os.chown(temporary, about.st_uid, about.st_gid)
            temporary.chmod(about.st_mode & 0o7777)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SourceNotWritten(path=path, problem=f"cannot be written: {error.strerror}") from None
