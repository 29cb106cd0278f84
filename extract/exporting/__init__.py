"""An output as the files that other tools read, made without a model: one module a target, one shape for all of them.

Nothing here computes a state: a target gets rows as they are stored (or cast, as `extract reprocess --cast` casts
them) and writes them in its own words. Targets are imported when they are asked for.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extract.exporting.target import Target

TARGETS = {
    "parquet": "extract.exporting.parquet",
    "npy": "extract.exporting.npy",
    "safetensors": "extract.exporting.safetensors",
    "hf": "extract.exporting.hf",
    "lance": "extract.exporting.lance",
    "speculators": "extract.exporting.speculators",
    "specforge": "extract.exporting.specforge",
    "saelens": "extract.exporting.saelens",
}


def target_class(kind: str) -> "type[Target]":
    """The class that writes exports of a kind, the only one whose module is imported."""
    found: type[Target] = importlib.import_module(TARGETS[kind]).TARGET
    return found
