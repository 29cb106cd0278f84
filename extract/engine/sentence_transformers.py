"""Directories in the layout of sentence-transformers: where the decoder is, and what of the pipeline is not applied.

`modules.json` lists a pipeline: a transformer, pooling, perhaps normalisation and projections. Hidden states are the
transformer's alone; the rest is named in notes, because a reader may expect the pipeline's embeddings.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

from extract.errors import CheckpointRefused

MODULES = "modules.json"


class BadModules(CheckpointRefused):
    """A modules.json that leads nowhere."""

    template: ClassVar[str] = "{path}: {problem}. Fetch the whole checkpoint, or give the transformer's own directory."


def transformer_directory(directory: Path) -> tuple[Path, tuple[str, ...]]:
    """The directory that holds config and weights, and notes; `directory` itself when there is no modules.json.

    Raises:
        BadModules: modules.json does not parse, names no transformer, or points outside of the checkpoint.
    """
    listing = directory / MODULES
    if not listing.is_file():
        return directory, ()
    try:
        modules = [(str(module["type"]), str(module.get("path", ""))) for module in json.loads(listing.read_bytes())]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadModules(path=listing, problem=f"not a list of modules ({error!r})") from None
    transformers = [path for kind, path in modules if kind.rsplit(".", 1)[-1] == "Transformer"]
    if len(transformers) != 1:
        raise BadModules(path=listing, problem=f"{len(transformers)} transformers found, 1 expected")
    inner = directory / transformers[0]
    if not inner.is_dir() or not inner.resolve().is_relative_to(directory.resolve()):
        raise BadModules(
            path=listing, problem=f'its transformer is in "{transformers[0]}", which is not a directory here'
        )
    others = [kind.rsplit(".", 1)[-1] for kind, _ in modules if kind.rsplit(".", 1)[-1] != "Transformer"]
    notes = [f"sentence-transformers: not applied: {', '.join(others)}"] if others else []
    prompts = _settings(directory / "config_sentence_transformers.json").get("prompts")
    if isinstance(prompts, dict) and any(prompts.values()):
        shown = ", ".join(f"{name}={text!r}"[:80] for name, text in prompts.items() if text)
        notes.append(f"sentence-transformers: prompts are not applied, choose one as prefix: {shown}")
    return inner, tuple(notes)


def _settings(path: Path) -> dict[str, Any]:
    """The pipeline's settings; they only feed notes, so a file that does not parse counts as empty."""
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
