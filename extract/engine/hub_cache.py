"""A hub name (`org/name`) to a directory: the local cache first, the hub only when something is missing there.

The commit that was found is returned and noted, so a branch that moves later does not go unseen. Pickled weights are
fetched only when they are allowed and there is nothing better.
"""

import json
import re
from pathlib import Path
from typing import ClassVar

from extract.errors import CheckpointRefused

_HUB_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?$")
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_NOT_FILES = ["consolidated*", "original/*", "onnx/*", "openvino/*", "*.msgpack", "*.h5"]


class NoSuchCheckpoint(CheckpointRefused):
    """Neither a file or directory, nor a hub name that can be had."""

    template: ClassVar[str] = "{name}: {problem}. {advice}"


def is_hub_name(source: str) -> bool:
    """Whether a string has the form of a hub name: `name` or `org/name`."""
    return bool(_HUB_NAME.match(source)) and ".." not in source and "--" not in source


def fetch_from_hub(name: str, *, revision: str | None = None, allow_pickle: bool = False) -> tuple[Path, str]:
    """Directory and commit of a hub checkpoint; works offline when the local cache holds it.

    Raises:
        NoSuchCheckpoint: not in the cache, and the hub cannot be reached or does not have it.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    def snapshot(patterns: list[str], local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_NOT_FILES,
                local_files_only=local_files_only,
            )
        )

    try:
        directory = snapshot(_FILES, True)
        if _is_complete(directory, allow_pickle):
            return directory, directory.name
    except (LocalEntryNotFoundError, FileNotFoundError):
        directory = None
    try:
        directory = snapshot(_FILES, False)
        if allow_pickle and not any(directory.rglob("*.safetensors")):
            directory = snapshot([*_FILES, "*.bin"], False)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        if directory is not None:
            return directory, directory.name  # what is missing is said by whoever reads the directory
        wanted = f"{name}, revision {revision}," if revision else name
        reason = str(error).strip().splitlines() or [type(error).__name__]
        problem = (
            f"no such directory, and {wanted} is not in the local hub cache ({constants.HF_HUB_CACHE}) and could not "
            f"be fetched ({reason[0][:200].rstrip('.')})"
        )
        advice = f"Give a checkpoint directory, or fetch it where the hub can be reached: hf download {name}"
        raise NoSuchCheckpoint(name=name, problem=problem, advice=advice) from error
    return directory, directory.name


def _is_complete(directory: Path, allow_pickle: bool) -> bool:
    """Whether a snapshot has a config and all its weights; a partial one holds only what somebody once needed."""
    if not any(directory.rglob("config.json")):
        return False
    indices = list(directory.rglob("*.safetensors.index.json"))
    if indices:
        try:
            shards = {
                index.parent / name
                for index in indices
                for name in json.loads(index.read_bytes())["weight_map"].values()
            }
        except (ValueError, KeyError, AttributeError, TypeError):
            return False
        return all(shard.is_file() for shard in shards)
    patterns = ["*.safetensors", "*.bin"] if allow_pickle else ["*.safetensors"]
    return any(any(directory.rglob(pattern)) for pattern in patterns)
