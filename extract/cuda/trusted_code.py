"""Whose compiled code runs here: what a build on this machine wrote, or what somebody named by its digest.

An engine is otherwise data, and reading data must never run code. So compiled code in an engine that came from
elsewhere is not opened until EXTRACT_TRUST_CODE names it: digests (or their first 12 digits) between commas, as the
refusal shows them. A fleet sets it once, beside the name of the engine.
"""

import os
from pathlib import Path

from extract.errors import EngineRefused
from extract.store import clear_write_errors, replace_file

VARIABLE = "EXTRACT_TRUST_CODE"
SHORTEST = 12
"""Fewest digits of a digest that name it."""


class CodeNotTrusted(EngineRefused):
    """Compiled code of unknown origin."""

    template = (
        "{path}: the engine holds compiled code (sha256 {found}) that was not made on this machine, and code can do "
        "anything. If you trust who built it, set {variable}={found}; if not, build the engine again from its weights."
    )


def trust(sha256: str, folder: Path) -> None:
    """Remember code that this machine made; `folder` is this user's cache."""
    mark = _mark(sha256, folder)
    with clear_write_errors(mark):
        mark.parent.mkdir(parents=True, exist_ok=True)
    replace_file(mark, b"")


def check_trusted(path: Path, sha256: str, folder: Path) -> None:
    """Refuse code that neither this machine made nor the user named.

    Raises:
        CodeNotTrusted: with the digest to name.
    """
    named = [one.strip().lower() for one in os.environ.get(VARIABLE, "").split(",")]
    if any(len(one) >= SHORTEST and sha256.startswith(one) for one in named) or _mark(sha256, folder).is_file():
        return
    raise CodeNotTrusted(path=path, found=sha256[:SHORTEST], variable=VARIABLE)


def _mark(sha256: str, folder: Path) -> Path:
    return folder / "compiled" / sha256
