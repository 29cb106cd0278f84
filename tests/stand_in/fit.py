"""Whether a use of the vendor's packages fits a release, as far as that release was read."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from stand_in.call_sites import BUILDER, EXECUTOR, Name, Use, our_uses
from stand_in.facts import facts, signature

NOT_READ = "not read"
BY_MODELOPT = "tensorrt_llm.quantization.quantize_by_modelopt"

TWO_HOMES = [
    {("tensorrt_llm.bindings", "KVCacheType"), ("tensorrt_llm.llmapi.kv_cache_type", "KVCacheType")},
    {("tensorrt_llm.quantization", "quantize_and_export"), (BY_MODELOPT, "quantize_and_export")},
]
"""Names that moved: a release has one of them, and our code tries both."""

IN_SOME_RELEASES = {
    (BUILDER, "BuildConfig", "use_fused_mlp"): "0.16 and 0.17, where build() reads it; later only the plugin's",
    (EXECUTOR, "ExecutorConfig", "additional_output_names"): "names, until outputs became objects",
    (EXECUTOR, "ExecutorConfig", "additional_model_outputs"): "objects, since then",
}
"""Names that our code uses only where a release has them: keywords of a constructor, or attributes."""

TENSORRT = {"__version__", "TensorIOMode", "TensorLocation", "DataType"}
"""Names of `tensorrt` itself that the reference speaks of."""


def problem_of(use: Use, release: str, all_uses: list[Use]) -> str | None:
    """Why a use does not fit a release: `None` if it does, `NOT_READ` if nobody knows."""
    if use.problem:
        return use.problem
    module, name = use.name
    if module == "tensorrt":
        return None if name in TENSORRT else f"tensorrt.{name} is not among the names we may use"
    read = facts()["versions"][release]
    names = read["modules"].get(module, {})
    if name not in names:
        for homes in TWO_HOMES:
            if use.name in homes and not homes <= {other.name for other in all_uses}:
                return f"its other home, {' '.join(other for other, _ in homes - {use.name})}, is not tried"
        is_complete = not read["coverage"].startswith("PARTIAL") and module in read["modules"]
        is_complete &= not module.startswith("tensorrt_llm.bindings")  # only some names of these were transcribed
        return f"{module} has no {name}" if is_complete else NOT_READ
    if names[name]["kind"] == "mapping":
        return None  # whatever a dictionary has
    members = members_of(release, module, name)
    if use.attribute is None:
        return unbound(members.get("__init__", names[name]), use, names[name])
    found = members.get(use.attribute)
    if found is None:
        optional = (module, name, use.attribute) in IN_SOME_RELEASES
        whole = "fields" in names[name] or not read["coverage"].startswith("PARTIAL")
        return NOT_READ if optional or not whole else f"{name} has no {use.attribute}"
    return unbound(found, use, names[name])


def unbound(called: dict[str, Any], use: Use, owner: dict[str, Any]) -> str | None:
    """Why the arguments do not fit, if they do not."""
    if not (use.arguments or use.parameters):
        return None
    if "params" in called:
        takes = signature(called["params"])
    elif "fields" in owner:
        takes = signature([{"kind": "positional", "default": None, **field} for field in owner["fields"]])
    else:
        return NOT_READ
    number, keywords = use.arguments or (0, use.parameters)
    given = {name: None for name in keywords if (*use.name, name) not in IN_SOME_RELEASES}
    try:
        (takes.bind if use.arguments else takes.bind_partial)(*range(number), **given)
    except TypeError as error:
        return str(error)
    return None


@cache
def members_of(release: str, module: str, name: str) -> dict[str, dict[str, Any]]:
    """Methods, fields, enum members and constructor arguments, inherited ones too."""
    names = facts()["versions"][release]["modules"][module]
    read, found = names[name], dict[str, dict[str, Any]]()
    for base in read.get("bases", ()):
        if base in names:
            found |= members_of(release, module, base)
    found |= {param["name"]: {} for param in read.get("methods", {}).get("__init__", {}).get("params", ())}
    found |= {field["name"]: {} for field in read.get("fields", ())} | {
        member: {} for member in read.get("members", ())
    }
    return found | read.get("methods", {})


def findings(uses: list[Use], release: str) -> Iterator[str]:
    """Uses that do not fit a release, with the reason."""
    for use in uses:
        problem = problem_of(use, release, uses)
        if problem not in (None, NOT_READ):
            yield f"{use.where}: {use}: {problem}"


def table() -> str:
    """Every name that we use and the releases in which it, or something that we use of it, was not read."""
    uses, unread = our_uses(), dict[Name, set[str]]()
    for use in uses:
        found = (release for release in facts()["versions"] if problem_of(use, release, uses) == NOT_READ)
        unread.setdefault(use.name, set()).update(found)
    lines = [
        f"{'.'.join(name):<68} {', '.join(release for release in facts()['versions'] if release in unread[name])}\n"
        for name in sorted(unread)
    ]
    return "".join(["Names that we use, and the releases in which they were not read in full:\n", *lines])
