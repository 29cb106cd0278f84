"""What is known of decoder families: which layout was found right for each, and why. Data and documentation only.

A build never looks here for its layout: it proves one on the checkpoint at hand (`torch_proof`), and a test holds this
table to what the proof finds. The one thing that the proof reads is `bound`, for families whose own float32 arithmetic
is less certain than the usual bound. The data lie in `families.json`, so that listing them imports nothing heavy.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

FLOAT32_BOUND = 1e-5
"""Relative error that a float32 row may have against the plain model, unless its family says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of transformers."""

    model_type: str
    layout: Literal["packed", "dense", "refused"]
    why: str = ""
    """Why not packed, or under which condition; empty for the plain case."""
    bound: float = FLOAT32_BOUND
    """Relative error of a row in float32 that still counts as right."""


def load_families() -> Mapping[str, Family]:
    """The table, in the order of names."""
    rows = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
    return MappingProxyType({name: Family(model_type=name, **row) for name, row in sorted(rows.items())})


FAMILIES: Mapping[str, Family] = load_families()


def float32_bound(model_type: str) -> float:
    """The bound of a family, the usual one if it is not in the table."""
    family = FAMILIES.get(model_type)
    return FLOAT32_BOUND if family is None else family.bound
