"""The local cache of the Hugging Face hub: where it is, what it holds, and whether the hub may be asked at all."""

import os
from dataclasses import dataclass
from pathlib import Path

from extract.doctor.hardware import Space, disk

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """The cache.

    Attributes:
        offline: the variables that forbid asking the hub.
    """

    space: Space
    num_models: int
    num_datasets: int
    offline: tuple[str, ...]


def hub() -> Hub:
    """Read from the environment as `huggingface_hub` does, which need not be there."""
    path = _cache()
    try:
        names = [entry.name for entry in path.iterdir()]
    except OSError:
        names = []
    return Hub(
        space=disk(path),
        num_models=sum(name.startswith("models--") for name in names),
        num_datasets=sum(name.startswith("datasets--") for name in names),
        offline=tuple(name for name in OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")),
    )


def _cache() -> Path:
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "huggingface" / "hub"
