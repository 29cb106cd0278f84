"""Engines that the stand-in of TensorRT-LLM builds and runs, each built once, on a card made of CPU memory.

    with vendor("1.2.1") as card:
        runtime = load_runtime(engines.engine("1.2.1"))

A build and a load claim that card and no other; closing it opens it for the next, as a card does.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rig
from stand_in.card import StandInCard
from stand_in.rig import RELEASES, stand_in

from extract.engine.builder import build
from extract.engine.recipe import Recipe
from extract.records import TokenBatch

LATEST = "1.2.1"
OF_BOTH_KINDS = ("0.17.0.dev2024121700", LATEST)
"""Settings as dataclasses and a cache type bound from C++, or validated settings that drop what they do not know."""
LIMIT = 32
PASS = 256
SEQUENCES = 16
KINDS = ("tokens", "last", "first", "mean")

__all__ = ["RELEASES", "StandInCard", "stand_in"]


@contextlib.contextmanager
def vendor(release: str = LATEST, *, card: StandInCard | None = None, **options: Any) -> Iterator[StandInCard]:
    """The stand-in of a release in this process, with the card that builds and runs will find."""
    from extract.tensorrt import cuda_card

    with stand_in(release, card=card, **options) as found, pytest.MonkeyPatch.context() as patch:
        assert found is not None

        def claim(wanted: Any, path: object) -> StandInCard:
            if wanted is not None and not cuda_card.alike(found.device, wanted):
                raise cuda_card._other_card(path, wanted, [found.device])
            found.closed = False
            return found

        patch.setattr(cuda_card, "claim_card", claim)
        yield found


def recipe(**settings: Any) -> Recipe:
    """A small engine: rows of at most 32 tokens, passes of at most 256 and of 16 sequences."""
    given = {"max_input_tokens": LIMIT, "pass_tokens": PASS, "max_sequences": SEQUENCES, **settings}
    return Recipe(runtime="tensorrt-llm", **given)


class VendorEngines:
    """Checkpoints and engines by what they are, made when they are first asked for. Do not change their files."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def checkpoint(self, family: str = "llama", **settings: Any) -> Path:
        """A tiny checkpoint."""
        path = self._root / "-".join([family, *(f"{key}-{value}" for key, value in settings.items())])
        if not path.exists():
            rig.tiny_checkpoint(path, family, **settings)
        return path

    def engine(self, release: str = LATEST, family: str = "llama", *, text: bool = False, **settings: Any) -> Path:
        """An engine of a release, with a tokenizer if it is for `text`; call it outside of any other stand-in."""
        name = "-".join([family, release, *(f"{key}-{value}" for key, value in settings.items())])
        path = self._root / f"engine-{name}{'-text' if text else ''}"
        if not path.exists():
            checkpoint = self.checkpoint(family, **({} if text else {"tokenizer": None}))
            with vendor(release):
                build(checkpoint, path, recipe(**settings))
        return path

    def vendor_checkpoint(self) -> Path:
        """The tiny Llama in the vendor's format, in float32, without a word of where it came from."""
        path = self._root / "vendor-llama"
        if not path.exists():
            with vendor():
                from tensorrt_llm.models.automodel import AutoModelForCausalLM

                model = AutoModelForCausalLM.from_hugging_face(str(self.checkpoint()), dtype="float32")
                model.save_checkpoint(output_dir=str(path), save_config=True)
        return path


def batch_of(sequences: Sequence[Sequence[int]]) -> TokenBatch:
    """Sequences end to end."""
    bounds = [0, *itertools.accumulate(map(len, sequences))]
    return TokenBatch(
        input_ids=np.array([token for sequence in sequences for token in sequence], np.int32),
        cu_seqlens=np.array(bounds, np.int32),
        members=np.arange(len(sequences), dtype=np.int64),
    )


def pooled(states: Sequence[np.ndarray], kind: str) -> np.ndarray:
    """What each kind of output is, from states [L, H] of each row."""
    if kind == "tokens":
        return np.concatenate(states)
    one = {"last": lambda row: row[-1], "first": lambda row: row[0], "mean": lambda row: row.mean(0)}[kind]
    return np.stack([one(row) for row in states])


def left_behind(directory: Path) -> list[str]:
    """Names in a directory, hidden ones too."""
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def vendor_settings_of(engine: Path) -> dict[str, Any]:
    """The build settings that the vendor wrote beside its engine."""
    settings: dict[str, Any] = json.loads((engine / "config.json").read_bytes())["build_config"]
    return settings
