"""Engines that were built on the way to something else, kept in the user's cache and found again.

A folder's name stands for all that an engine depends on: weights, tokenizer files, recipe, machine, versions.
One that is removed is built again, with the same id: jobs that it began still go on. Nothing here removes any, but for
a folder that holds no engine any more.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from extract.canonical import digest, file_digest
from extract.engine.contract import FORMAT_VERSION, read_contract
from extract.engine.recipe import Recipe
from extract.errors import EngineRefused
from extract.storage.local_copies import cache_folder
from extract.store import CannotWrite

if TYPE_CHECKING:
    from extract.engine.checkpoint import Checkpoint


def cached_engine(
    opened: "Checkpoint", checkpoint: str | Path, recipe: Recipe, *, revision: str | None, say: Callable[[str], None]
) -> tuple[Path, str]:
    """An engine of a checkpoint for this machine, and in words whether it was there.

    Args:
        opened: the checkpoint.
        checkpoint: as it is named to a build.
        recipe: how to build it, if need be.
        revision: of a hub id.
        say: called with a line whenever a step begins.

    Raises:
        CheckpointRefused, EngineRefused, OutOfSpace: as of `build`.
    """
    from extract.engine.builder import OutputExists, build

    path = cache_folder() / "built" / f"{opened.name.replace('/', '--')}-{_key(opened, recipe)}"
    if path.exists():
        with suppress(EngineRefused):
            read_contract(path)
            return path, "built before, used again"
        say(f"{path}: what is there is no engine any more; building it again")
        shutil.rmtree(path)
    say(f"building an engine, once for this checkpoint, recipe and machine: {path}")
    try:
        build(checkpoint, path, recipe, revision=revision, say=say)
    except (OutputExists, CannotWrite):  # another process was faster, or there is a fault
        with suppress(EngineRefused):
            read_contract(path)
            return path, "built by another process, used again next time"
        raise
    return path, "built now, used again next time"


def _key(opened: "Checkpoint", recipe: Recipe) -> str:
    from extract.engine.checkpoint_tokenizer import tokenizer_files
    from extract.engine.device import this_device

    device = this_device(recipe.device)
    tokenizer = [] if opened.kind == "gguf" else tokenizer_files(opened.tokenizer_dir)
    made_of = {
        "checkpoint": opened.sha256,
        "tokenizer": {path.name: file_digest(path) for path in tokenizer},
        "recipe": asdict(recipe),
        "device": [device.type, device.name, device.instruction_set, device.compute_capability],
        "versions": [FORMAT_VERSION, *(version(name) for name in ("torch", "transformers", "tokenizers"))],
    }
    return digest(made_of)[:16]
