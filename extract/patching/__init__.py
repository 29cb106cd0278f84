"""Apply, revert and check a patch of a vendor's source tree, for who builds that tree. Our own builds need none of it.

A tree holds one kind of a patch at a time, or none. Applying and reverting say what they found and do nothing twice.
"""

import difflib
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from extract.errors import BadValue
from extract.patching.patch import Kind, Patch
from extract.patching.reach import Reach, reach_of
from extract.patching.rewriting import patched_as, read_source, replace_source, with_patch
from extract.patching.vendor_tree import PatchRefused, check_release, open_tree

DEFAULT_PATCH = "tensorrt-llm/hidden-states"


class OtherKind(PatchRefused):
    """The tree is patched with another kind of the patch."""

    template = (
        "{path}: it is patched already, with kind {found}, and kind {asked} is asked for. Nothing was changed. First: "
        "extract patch revert --tree {tree}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What was done to a vendor's tree, or would be.

    Attributes:
        action: "apply" or "revert".
        path: the file.
        kind: what is applied or reverted; `None` where there was nothing to revert.
        changed: whether the file was not already so.
        written: false in a dry run.
        diff: unified, with the file's own line endings; empty if nothing changes.
    """

    action: Literal["apply", "revert"]
    path: str
    release: str | None
    kind: str | None
    changed: bool
    written: bool
    diff: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """How a vendor's tree stands to a patch.

    Attributes:
        kind: what it is patched with; `None` if it is not, or not with this version.
        applicable: kinds that can be applied, or are.
        problem: why the tree is refused; empty if it is not.
        reach: which models the patch misses.
    """

    path: str
    release: str | None
    kind: str | None
    applicable: tuple[str, ...]
    problem: str
    reach: Reach


def apply(directory: Path, patch: Patch, kind_name: str, *, dry_run: bool = False) -> Change:
    """Put the lines in. A tree that has them stays as it is.

    Args:
        directory: root of the vendor's source tree, a site-packages directory, or the package folder.
        patch: what to apply.
        kind_name: one of its kinds.
        dry_run: change nothing.

    Raises:
        PatchRefused: the tree is not one that the patch is for.
    """
    kind = _kind(patch, kind_name)
    tree = open_tree(directory, patch)
    path = tree.file(patch)
    source = read_source(path)
    found = patched_as(path, source, patch)
    if found.kind is None:
        check_release(tree, patch)
    elif found.kind is not kind:
        raise OtherKind(path=path, found=found.kind.name, asked=kind.name, tree=directory)
    changed = source if found.kind else with_patch(path, source, patch, kind)
    return _change("apply", path, tree.release, kind.name, patch, source, changed, dry_run)


def revert(directory: Path, patch: Patch, *, dry_run: bool = False) -> Change:
    """Take the lines out, of whichever kind they are; the file is then, byte for byte, what it was.

    Raises:
        PatchRefused: no tree, or lines of ours that this patch would not have put there.
    """
    tree = open_tree(directory, patch)
    path = tree.file(patch)
    source = read_source(path)
    found = patched_as(path, source, patch)
    kind = found.kind.name if found.kind else None
    return _change("revert", path, tree.release, kind, patch, source, found.original, dry_run)


def check(directory: Path, patch: Patch) -> Check:
    """Look at a tree and change nothing.

    Raises:
        NoVendorTree: there is none.
    """
    tree = open_tree(directory, patch)
    path = tree.file(patch)
    applicable, problem, kind = [], "", None
    try:
        source = read_source(path)
        found = patched_as(path, source, patch)
        kind = found.kind.name if found.kind else None
        check_release(tree, patch)
        for one in patch.kinds:
            with_patch(path, found.original, patch, one)
            applicable.append(one.name)
    except PatchRefused as error:
        problem = str(error).removeprefix(f"{path}: ").removeprefix(f"{tree.package}: ")
        problem = problem.removesuffix(" Nothing was changed.")
    return Check(
        path=str(path),
        release=tree.release,
        kind=kind,
        applicable=tuple(applicable),
        problem=problem,
        reach=reach_of(tree.package, patch),
    )


def _kind(patch: Patch, name: str) -> Kind:
    for kind in patch.kinds:
        if kind.name == name:
            return kind
    known = ", ".join(f'"{kind.name}"' for kind in patch.kinds)
    raise BadValue(where="options", key="kind", found=f'"{name}"', expected=f"one of {known}")


def _change(
    action: Literal["apply", "revert"],
    path: Path,
    release: str | None,
    kind: str | None,
    patch: Patch,
    old: bytes,
    new: bytes,
    dry_run: bool,
) -> Change:
    if new != old and not dry_run:
        replace_source(path, new)
    return Change(
        action=action,
        path=str(path),
        release=release,
        kind=kind,
        changed=new != old,
        written=new != old and not dry_run,
        diff=unified_diff(old, new, patch.file),
    )


def unified_diff(old: bytes, new: bytes, name: str) -> str:
    """As `diff -u` and `git diff` print it, for `patch -p1` in the root of the tree."""
    encoding = tokenize.detect_encoding(io.BytesIO(old).readline)[0]
    before, after = (
        [line.decode(encoding, "replace") for line in side.splitlines(keepends=True)] for side in (old, new)
    )
    lines = difflib.unified_diff(before, after, fromfile=f"a/{name}", tofile=f"b/{name}")
    return "".join(line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n" for line in lines)
