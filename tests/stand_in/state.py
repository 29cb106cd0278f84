"""What the stand-in pretends to be at the moment: a release of the vendor's package, and the card in the machine.

Both are read by the packages when they are imported or called. The environment carries the release into processes that
a test starts.
"""

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stand_in.card import StandInCard

RELEASE_VARIABLE = "EXTRACT_STAND_IN_RELEASE"


@dataclass
class State:
    """The release, the card if there is one, and whether an import writes to stdout."""

    release: str = os.environ.get(RELEASE_VARIABLE, "1.2.1")
    card: "StandInCard | None" = None
    noisy: bool = False

    def needs_card(self) -> "StandInCard":
        """The card. Raises what CUDA says where there is none."""
        if self.card is None:
            raise RuntimeError("CUDA error: no CUDA-capable device is detected (stand-in: no card)")
        return self.card


STATE = State()


def version(release: str) -> tuple[int, int, int]:
    """Major, minor and patch: (0, 17, 0) for 0.17.0.dev2024121700."""
    numbers = [int(number) for number in re.findall(r"\d+", release)[:3]]
    return tuple([*numbers, 0, 0, 0][:3])  # type: ignore[return-value]


def at_least(release: str) -> bool:
    """Whether the pretended release is that one or later."""
    return version(STATE.release) >= version(release)
