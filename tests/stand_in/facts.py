"""Fields, parameters and enum members of the vendor's classes, from the facts that the call-site test reads too.

A release that was not read in full takes the nearest earlier one that has the name, else the nearest later one.
"""

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

from stand_in.state import STATE, version

FACTS = Path(__file__).parent.parent / "data" / "tensorrt_llm_api.json"
BINDINGS_1X = "1.x-executor-bindings"
MODULE_OF_BINDINGS = "tensorrt_llm.bindings.executor"
OUTPUTS_BECAME_OBJECTS = "0.20.0"
"""From here on ExecutorConfig takes additional outputs as objects, as the later of the two readings of the bindings."""

KINDS = {
    "positional": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword_only": inspect.Parameter.KEYWORD_ONLY,
    "keyword-only": inspect.Parameter.KEYWORD_ONLY,
    "var_positional": inspect.Parameter.VAR_POSITIONAL,
    "var_keyword": inspect.Parameter.VAR_KEYWORD,
}


@cache
def facts() -> dict[str, Any]:
    """The whole file."""
    return json.loads(FACTS.read_text())


def place_in_time(name: str) -> tuple[int, int, int]:
    """Where an entry of the facts stands among the releases."""
    return version(OUTPUTS_BECAME_OBJECTS if name == BINDINGS_1X else name)


def entry(module: str, name: str) -> dict[str, Any]:
    """What is known of a name in the pretended release."""
    having = [
        release for release, read in facts()["versions"].items() if name in read["modules"].get(module, {})
    ]  # oldest first
    assert having, f"{module}.{name} is in no release of the facts"
    having.sort(key=place_in_time)
    earlier = [release for release in having if place_in_time(release) <= version(STATE.release)]
    return facts()["versions"][(earlier or having[:1])[-1]]["modules"][module][name]


def fields(module: str, name: str) -> dict[str, Any]:
    """Name -> default of a class's fields; a symbolic default comes as `{"expr"|"factory": text}`."""
    return {field["name"]: field.get("default") for field in entry(module, name)["fields"]}


def signature(params: list[dict[str, Any]]) -> inspect.Signature:
    """Parameters as Python binds them, `self` left out; symbolic defaults become `None`."""
    found = []
    for param in params:
        default = inspect.Parameter.empty
        if "default" in param:
            default = None if isinstance(param["default"], dict) else param["default"]
        kind = KINDS[param["kind"]]
        found.append(inspect.Parameter(param["name"], kind, default=default))
    return inspect.Signature(found)


def strict_class(name: str, module: str = MODULE_OF_BINDINGS) -> type:
    """A class that takes exactly the documented arguments of its constructor and keeps them as attributes."""
    bound = signature(entry(module, name)["methods"]["__init__"]["params"])

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        found = bound.bind(*args, **kwargs)
        found.apply_defaults()
        vars(self).update(found.arguments)

    properties = {param: property(lambda self, param=param: vars(self)[param]) for param in bound.parameters}
    return type(name, (), {**properties, "__init__": __init__, "__module__": module})
