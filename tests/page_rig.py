"""Pages of the documentation as what they hold: headings, links, commands to type, programs, settings, what is shown.

A page's code stands in fences with their language, or is indented by four spaces. The first line of a program or of
settings may be `# NAME.py`: the file that it is to be saved as.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *DOCS.glob("*.md")])
"""What users read."""

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
FENCE = re.compile(r"^( *)```(\w*)$(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^\n|\A)((?:^    .*\n|^\n)+)", re.MULTILINE)
SHELL = ("sh", "bash", "")


@dataclass(frozen=True)
class Block:
    """One piece of code: its language ("" where it is indented) and its lines."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name that its first line gives it."""
        found = re.match(r"# ([\w.-]+\.(?:py|toml))\n", self.text)
        return found[1] if found else None


def read(page: str) -> str:
    """A page by its path from the root of the checkout."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    """All code of a page, in order."""
    found = [(match.start(), Block(match[2], match[3].lstrip("\n"))) for match in FENCE.finditer(text)]
    outside = FENCE.sub(lambda match: re.sub(r"[^\n]", "#", match[0]), text)
    for match in INDENTED.finditer(outside):
        lines = [line.removeprefix("    ") for line in match[1].strip("\n").splitlines()]
        found.append((match.start(), Block("", "\n".join(lines) + "\n")))
    return [block for _, block in sorted(found, key=lambda one: one[0])]


def commands(block: Block) -> Iterator[list[str]]:
    """The command lines of a block in a shell's language, as words; comments and prompts left out, lines joined."""
    if block.language in SHELL:
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip(), comments=True) if line.strip().startswith(STARTS) else []
            if words:
                yield words[1:] if words[0] in ("exec", "$") else words


STARTS = ("extract ", "exec extract ", "$ extract ", "python ", "cd ", "make", "pip ", "git ", ". ", "echo ")


def inline_commands(text: str) -> list[list[str]]:
    """Every `extract ...` between backticks, as words."""
    prose = FENCE.sub("", text)
    return [found[1].split() for found in re.finditer(r"`(extract [^`]+)`", re.sub(r"\s+", " ", prose))]


def headings(text: str) -> list[str]:
    """Names by which a page's headings are linked: as GitHub makes them."""
    names: list[str] = []
    for line in FENCE.sub("", text).splitlines():
        if found := re.match(r"#{1,6} (.+)", line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found[1])
            name = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
            names.append(name if name not in names else f"{name}-{names.count(name)}")
    return names


def links(text: str) -> list[str]:
    """Targets of links and pictures."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    return [found[1] or found[2] for found in LINK.finditer(prose)]
