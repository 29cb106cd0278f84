"""A vendor's package on disk: where it is, which release it is, and whether a patch is for that release.

Reads files and imports nothing of the vendor's: importing would need the very machine that the tree is built for.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from extract.errors import ExtractError
from extract.patching.patch import Patch


class PatchRefused(ExtractError):
    """A vendor's source tree is not one that the patch is for; nothing in it was changed."""

    exit_code = 4


class NoVendorTree(PatchRefused):
    """The directory holds no package that can be patched."""

    template = (
        "{tree}: {problem}. Give the root of the source tree, the site-packages directory, or the {package} folder "
        "itself with --tree."
    )


class ReleaseNotCovered(PatchRefused):
    """A release that the patch is not for."""

    template = "{path}: {found}, and the patch is for {releases}. Nothing was changed."


@dataclass(frozen=True, slots=True)
class VendorTree:
    """A vendor's package.

    Attributes:
        package: its folder.
        release: as its files say; `None` if they do not.
    """

    package: Path
    release: str | None

    def file(self, patch: Patch) -> Path:
        """The file that the patch changes."""
        return self.package.parent.joinpath(self.package.name, *patch.file.split("/")[1:])


def open_tree(directory: Path, patch: Patch) -> VendorTree:
    """Find the package in or at `directory`.

    Raises:
        NoVendorTree: there is none, or it lacks the file that the patch changes.
    """
    inside = patch.file.partition("/")[2]
    places = [directory / patch.package, directory]
    for package in places:
        if (package / inside).is_file():
            return VendorTree(package, release_of(package))
    if not directory.is_dir():
        problem = "no such directory"
    elif package_only := next((place for place in places if (place / "version.py").is_file()), None):
        release = release_of(package_only)
        problem = f"{patch.package} {release or 'of unknown release'} without {inside}"
        if release is not None and not covers(patch, release):
            problem += f" (the patch is for {patch.releases})"
    else:
        problem = f"no {patch.file} and no {inside}"
    raise NoVendorTree(tree=directory, problem=problem, package=patch.package)


def check_release(tree: VendorTree, patch: Patch) -> None:
    """Refuse a release that the patch is not for.

    Raises:
        ReleaseNotCovered: it is another one, or unknown.
    """
    if tree.release is None:
        found = f"no release is named in {patch.package}/version.py or in METADATA"
    elif not covers(patch, tree.release):
        found = f"this is {patch.package} {tree.release}"
    else:
        return
    raise ReleaseNotCovered(path=tree.package, found=found, releases=patch.releases)


def covers(patch: Patch, release: str) -> bool:
    """Whether a release is one that the patch is for, by its first two numbers."""
    return _numbers(patch.first_release) <= _numbers(release) <= _numbers(patch.last_release)


def release_of(package: Path) -> str | None:
    """`__version__` of version.py, or what the metadata beside an installed package says."""
    try:
        for node in ast.parse((package / "version.py").read_bytes()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
                return str(ast.literal_eval(node.value))
    except (OSError, SyntaxError, ValueError):
        pass  # the metadata may still know
    for metadata in sorted(package.parent.glob(f"{package.name}-*.dist-info/METADATA")):
        try:
            text = metadata.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if found := re.search(r"^Version: *(\S+)", text, re.MULTILINE):
            return found[1]
    return None


def _numbers(release: str) -> tuple[int, ...]:
    found = re.match(r"v?(\d+)\.(\d+)", release)
    return tuple(map(int, found.groups())) if found else ()
