"""What the project asks for, and what of it is installed: versions from metadata, nothing imported."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "extract-hidden-states"

WITHOUT = {
    "datasets": "all but Hugging Face datasets as a source",
    "gguf": "all but GGUF files as checkpoints",
    "jinja2": "all but chats as input",
    "matplotlib": "all but the picture that extract tune draws",
    "obstore": "all but inputs, engines and outputs in object stores",
    "plotly": "all but extract report",
}
"""What still goes without a package that only one thing needs; without any other, nothing does."""

MODULES = {"pylance": "lance", "umap-learn": "umap"}
"""What is imported, where it is not the distribution's own name."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package and the versions that will do.

    Attributes:
        name: of the distribution.
        wanted: as `>=2.0,<3`; may be empty.
        extra: the optional part of the project that asks for it; empty: all of it does.
    """

    name: str
    wanted: str
    extra: str = ""

    @property
    def module(self) -> str:
        """What is imported."""
        return MODULES.get(self.name) or self.name.replace("-", "_").lower()

    @property
    def install(self) -> str:
        """What to type."""
        return f'pip install "{self.name}{self.wanted}"'

    def allows(self, version: str) -> bool:
        """Whether a version will do, by its numbers; what is behind them is not compared."""
        return all(_allows(part, version) for part in self.wanted.split(",") if part)


def requirements() -> list[Requirement]:
    """From pyproject.toml in a checkout, where the installed metadata may be older, else from that metadata."""
    file = Path(__file__).parent.parent.parent / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] == DISTRIBUTION:
            extras = project.get("optional-dependencies", {})
            listed = [(line, "") for line in project["dependencies"]]
            return _parsed([*listed, *((line, extra) for extra, lines in extras.items() for line in lines)])
    except (OSError, ValueError, KeyError):
        pass  # not a checkout
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    extra = re.compile(r"extra *== *['\"]([^'\"]+)")
    return _parsed([(line, found[1] if (found := extra.search(line)) else "") for line in lines])


def installed_version(name: str) -> str | None:
    """Of a distribution; `None` if it is not installed, or its metadata are gone."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError, ValueError, OSError):
        return None


def _parsed(lines: list[tuple[str, str]]) -> list[Requirement]:
    found = []
    for line, extra in lines:
        matched = re.match(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)", line)
        if matched:
            found.append(Requirement(matched[1], re.sub(r"\s", "", matched[2]), extra))
    return found


def _allows(part: str, version: str) -> bool:
    matched = re.match(r"(>=|<=|==|!=|<|>)([\d.]+)$", part)
    if matched is None:
        return True  # of a form that the project does not use
    least, found = _numbers(matched[2], version)
    return {
        ">=": found >= least,
        "<=": found <= least,
        "==": found == least,
        "!=": found != least,
        "<": found < least,
        ">": found > least,
    }[matched[1]]


def _numbers(*versions: str) -> Iterator[list[int]]:
    """The release numbers of versions, made equally long."""
    numbers = [
        [int(part) for part in (re.match(r"\d+(\.\d+)*", version) or [""])[0].split(".") if part]
        for version in versions
    ]
    length = max(map(len, numbers))
    yield from (one + [0] * (length - len(one)) for one in numbers)
