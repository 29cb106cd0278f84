"""A patch of a vendor's source, as data: where it goes, said by structure, and the lines that go there.

Knows nothing of files of the vendor. A place is a statement of a method, written as Python with `...` for what may
vary, and never a line number, so that one patch serves every release in which that method does its work in that order.
"""

import ast
from dataclasses import dataclass, field

from extract import assets
from extract.settings import parse, read_toml

MAX_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One of the things that a patch can do; a tree holds one of them at a time.

    Attributes:
        anchor: the statement after which the lines go.
        lines: without indentation; the first is a comment that names patch, version and kind.
    """

    name: str
    summary: str
    anchor: str
    lines: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 2 <= len(self.lines) <= MAX_LINES:
            raise ValueError(f"lines: 2 to {MAX_LINES} lines")
        if any(line != line.strip() or not line.isascii() or not line for line in self.lines):
            raise ValueError("lines: ASCII lines without indentation")
        if _statements("\n".join(self.lines)) is None:
            raise ValueError("lines: Python statements")
        if (_statements(self.anchor) or 0) != 1:
            raise ValueError("anchor: one Python statement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A patch.

    Attributes:
        version: of the patch itself; a tree that holds another one is refused.
        first_release: of the vendor's package, as `0.16`.
        last_release: its later bug fix releases included.
        file: below the folder that holds the vendor's package.
        guard: the method whose call is the condition of the `if` around the anchor.
        mark: how the first line begins, before version and kind.
        output_name: the name that is given to the tensor; nothing else may use it.
        order: statements and calls of the function, each there once, in this order.
        untouched: models that the patch does not reach, and what they are.
    """

    version: int
    summary: str
    first_release: str
    last_release: str
    file: str
    class_name: str
    function: str
    guard: str
    mark: str
    output_name: str
    order: tuple[str, ...]
    kinds: tuple[Kind, ...]
    untouched: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if not kind.lines[0].startswith(f"{self.mark} {self.version}, {kind.name} "):
                raise ValueError(f'kinds: lines that begin with "{self.mark} {self.version}, {kind.name} "')
        if any(_statements(step) != 1 for step in self.order):
            raise ValueError("order: Python statements or calls")

    @property
    def package(self) -> str:
        """The folder of the vendor's package: `tensorrt_llm`."""
        return self.file.partition("/")[0]

    @property
    def method(self) -> str:
        """Class and function, for messages."""
        return f"{self.class_name}.{self.function}"

    @property
    def releases(self) -> str:
        """In words: `0.16 to 1.2.x`."""
        return f"{self.first_release} to {self.last_release}.x"


@dataclass(frozen=True, slots=True)
class ShippedPatch:
    """A patch and its name."""

    name: str
    patch: Patch


def shipped_patches() -> tuple[ShippedPatch, ...]:
    """All patches that come with the package."""
    return tuple(ShippedPatch(name, load_patch(name)) for name in assets.names("patches"))


def load_patch(name: str) -> Patch:
    """A shipped patch by its name, or one from a file.

    Raises:
        SpecError: no such patch, or it is not valid.
    """
    path = assets.find("patches", name)
    return parse(Patch, read_toml(path), str(path))


def _statements(text: str) -> int | None:
    """How many there are; `None` if it is no Python."""
    try:
        return len(ast.parse(text).body)
    except SyntaxError:
        return None
