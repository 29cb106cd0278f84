"""Finds the recipes, patches and job specs that come with the package: in the wheel, or beside it in a checkout."""

from pathlib import Path

from extract.errors import SpecError

KINDS = {"engines": "recipe", "patches": "patch", "jobs": "job spec"}
"""Each folder, and what one of its files is called."""


class NoSuchAsset(SpecError):
    """A name that is neither a file nor a shipped recipe or job."""

    template = "{name}: no such file, and no {kind} of that name comes with extract ({known})."


def folder(kind: str) -> Path:
    """Where the shipped files of a kind lie."""
    package = Path(__file__).parent
    shipped = package / "_data" / kind
    return shipped if shipped.is_dir() else package.parent / kind


def names(kind: str) -> list[str]:
    """Names of the shipped files, without `.toml`: `llama/float32`, `demo`."""
    root = folder(kind)
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.toml"))


def find(kind: str, name: str) -> Path:
    """A file by its path, or else a shipped one by its name.

    Raises:
        NoSuchAsset: neither.
    """
    given = Path(name)
    if given.is_file() or given.suffix == ".toml":
        return given
    if name in names(kind):
        return folder(kind) / f"{name}.toml"
    raise NoSuchAsset(name=name, kind=KINDS[kind], known=", ".join(names(kind)) or "none do")
