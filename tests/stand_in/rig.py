"""Put the stand-in where `import tensorrt_llm` finds it, for one test.

    with stand_in("1.2.1", card=StandInCard()) as card:
        ...

Afterwards no module of it is left, so that the next test may choose another release, or none at all.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stand_in.card import StandInCard
from stand_in.state import RELEASE_VARIABLE, STATE

PACKAGES = Path(__file__).parent / "packages"
NAMES = ("tensorrt", "tensorrt_llm")
RELEASES = ("0.16.0", "0.17.0.dev2024121700", "0.18.2", "0.21.0", "1.0.0", "1.1.0", "1.2.1")


@contextlib.contextmanager
def stand_in(
    release: str = "1.2.1", *, card: StandInCard | None = None, with_card: bool = True, noisy: bool = False
) -> Iterator[StandInCard | None]:
    """The stand-in of a release, with a card in the machine or without.

    Args:
        release: of `tensorrt_llm`.
        card: the card; a fresh one if it is `None`.
        with_card: whether there is a card at all.
        noisy: whether importing the package writes a line to stdout, as compiled packages like to.
    """
    if with_card and card is None:
        card = StandInCard()
    before = STATE.release, STATE.card, STATE.noisy, os.environ.get(RELEASE_VARIABLE)
    _forget()
    with tempfile.TemporaryDirectory() as installed:
        metadata = Path(installed) / f"tensorrt_llm-{release}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {release}\n")
        sys.path[:0] = paths = [str(PACKAGES), installed]
        STATE.release, STATE.card, STATE.noisy = release, card if with_card else None, noisy
        os.environ[RELEASE_VARIABLE] = release
        try:
            yield STATE.card
        finally:
            for path in paths:
                sys.path.remove(path)
            _forget()
            STATE.release, STATE.card, STATE.noisy, variable = before
            os.environ.pop(RELEASE_VARIABLE)
            if variable is not None:
                os.environ[RELEASE_VARIABLE] = variable


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]
    sys.path_importer_cache.pop(str(PACKAGES), None)
