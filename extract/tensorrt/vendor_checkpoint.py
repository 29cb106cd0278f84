"""A checkpoint in the vendor's own format: its files, its identity, and which checkpoint it was made from.

`extract quantize` leaves a small record beside the vendor's files. With it a build finds the unquantised model, to
compare with and to take the tokenizer from, and knows whether it is still the same.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from extract.canonical import canonical_json, digest, file_digest
from extract.errors import CheckpointRefused, ExtractError
from extract.settings import parse
from extract.tensorrt.model_shape import CONFIG, ModelShape, is_vendor_config

ORIGIN_FILE = "extract-origin.json"
MAX_BYTES = 2**20


class SplitCheckpoint(CheckpointRefused):
    """A vendor checkpoint that was split for several cards."""

    template = (
        "{path}: split into {found} ranks, 1 expected: an engine runs on one card, and more cards run more workers. "
        "Convert or quantise it with tp_size and pp_size 1."
    )


class VendorWeightsMissing(CheckpointRefused):
    """A vendor checkpoint without its weights."""

    template = "{path}: it holds no {name}. Copy or convert the checkpoint again."


class NoReference(CheckpointRefused):
    """Nothing says which checkpoint a vendor checkpoint was made from."""

    template = "{path}: {problem}. Say where the unquantised checkpoint lies: --reference CHECKPOINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which checkpoint a vendor checkpoint was made from, how, and where that lay."""

    name: str
    sha256: str
    path: str
    made: str


def is_vendor_checkpoint(directory: Path) -> bool:
    """Whether `directory` is in the vendor's format, judged by its config."""
    try:
        config = json.loads((directory / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and is_vendor_config(config)


def vendor_identity(directory: Path, shape: ModelShape) -> str:
    """sha256 over names and bytes of config and weights.

    Raises:
        SplitCheckpoint, VendorWeightsMissing: it cannot be built from.
    """
    if shape.world_size != 1:
        raise SplitCheckpoint(path=directory, found=shape.world_size)
    weights = directory / "rank0.safetensors"
    if not weights.is_file():
        raise VendorWeightsMissing(path=directory, name=weights.name)
    return digest({path.name: file_digest(path) for path in (directory / CONFIG, weights)})


def write_origin(directory: Path, origin: Origin) -> None:
    """Write the record that `read_origin` reads."""
    (directory / ORIGIN_FILE).write_bytes(canonical_json(asdict(origin)) + b"\n")


def read_origin(directory: Path) -> Origin | None:
    """The record, or `None` where there is none.

    Raises:
        NoReference: it is there and cannot be read.
    """
    path = directory / ORIGIN_FILE
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("absurdly large")
        return parse(Origin, json.loads(path.read_bytes()), str(path))
    except (ValueError, RecursionError, ExtractError) as error:
        raise NoReference(path=directory, problem=f"{ORIGIN_FILE} cannot be read ({error})") from None
