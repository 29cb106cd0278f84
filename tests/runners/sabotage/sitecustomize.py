"""Faults inside worker processes: Python runs this file at its start if it lies on PYTHONPATH.

`EXTRACT_SABOTAGE` holds a JSON object, or `@` and a file that may hold one when the package is imported; see `_FAULTS`.
Nothing of the package is imported before the process does so.
"""

import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def _only_once(path: str | None) -> bool:
    """Whether the fault strikes now: always, or for whoever creates the file first."""
    if path is None:
        return True
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _on_shards(module: Any, settings: dict[str, Any]) -> None:
    """`slow`: seconds for each shard; `dies`, `breaks`, `hangs`: shards; `once`: a file that says it has happened."""
    real = module.windows_of

    def windows_of(shard: int, *arguments: Any) -> Any:
        time.sleep(settings.get("slow", 0))
        if shard in settings.get("dies", ()) and _only_once(settings.get("once")):
            os.kill(os.getpid(), signal.SIGKILL)
        if shard in settings.get("breaks", ()):
            raise RuntimeError("a bit flipped")
        if shard in settings.get("hangs", ()) and _only_once(settings.get("once")):
            time.sleep(3600)
        yield from real(shard, *arguments)

    module.windows_of = windows_of


def _on_loading(module: Any, settings: dict[str, Any]) -> None:
    """`loading`: "dies" or "fails", on the nodes that `on` lists (by their label), or everywhere."""
    real = module.load_engine

    def load_engine(*arguments: Any, **options: Any) -> Any:
        how, nodes = settings.get("loading"), settings.get("on")
        if how and (nodes is None or os.environ.get("EXTRACT_TEST_NODE") in nodes):
            if how == "fails":
                raise RuntimeError("this card is broken")
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    module.load_engine = load_engine


_FAULTS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "extract.pipeline": _on_shards,
    "extract.runners.loading": _on_loading,
}


class _Saboteur(importlib.abc.MetaPathFinder):
    """Lets the usual finder find a module, and changes it once it has run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _FAULTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _FAULTS[name](module, _settings())

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _settings() -> dict[str, Any]:
    given = os.environ["EXTRACT_SABOTAGE"]
    if not given.startswith("@"):
        return dict(json.loads(given))
    try:
        with open(given[1:]) as file:
            return dict(json.load(file))
    except FileNotFoundError:
        return {}


if "EXTRACT_SABOTAGE" in os.environ:
    sys.meta_path.insert(0, _Saboteur())
