"""The version gate: is the vendor's package here, is it a release that we know, does it have every name as we use it?

Asked before anything expensive starts. By introspection, not by version alone: a vendor's build from source may call
itself anything. Compiled names have no signature; for them their presence is all that can be asked.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from extract.errors import EngineRefused
from extract.tensorrt.surface import FIRST_RELEASE, FIRST_RELEASE_WITHOUT, RELEASES, SURFACE, Needed, Purpose
from extract.tensorrt.vendor_output import vendor_output_on_stderr

PACKAGE = "tensorrt_llm"


class VendorMissing(EngineRefused):
    """The vendor's package is not installed, or does not import."""

    template = (
        "tensorrt-llm: {problem}. This needs TensorRT-LLM {releases} and an NVIDIA card, best in NVIDIA's own "
        "container of that release; extract doctor says what is there, docs/tensorrt-llm.md how to begin."
    )


class VendorRelease(EngineRefused):
    """A release outside those whose interface is known."""

    template = (
        "tensorrt-llm: release {found} is installed, {expected} expected: {why}. "
        "Install one of those, or build with --runtime torch."
    )


class VendorDiffers(EngineRefused):
    """The installed package lacks a name, or a parameter of one, that we use."""

    template = (
        "tensorrt-llm {release}: {problems}. Nothing was started. Releases {expected} were read to have them; "
        "install one, or build with --runtime torch."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorVersions:
    """What is installed."""

    tensorrt_llm: str
    tensorrt: str


def installed_release() -> str | None:
    """Version of the installed package, without importing it; `None`: not installed."""
    for name in ("tensorrt-llm", PACKAGE):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None else "of unknown version"


def check_vendor(*purposes: Purpose) -> VendorVersions:
    """Import the vendor's package and look at all that will be used of it.

    Args:
        purposes: what it is needed for.

    Raises:
        VendorMissing: it is not there, or does not import.
        VendorRelease: it is a release that has no engine builder, or is older than what is known.
        VendorDiffers: names or parameters are absent; all of them are named.
    """
    with vendor_output_on_stderr():  # the vendor greets, and lets its logger write, where results go
        return _checked(purposes)


def _checked(purposes: tuple[Purpose, ...]) -> VendorVersions:
    versions = _import_vendor()
    release = tuple(int(part) for part in re.findall(r"\d+", versions.tensorrt_llm)[:2])
    if release >= FIRST_RELEASE_WITHOUT:
        why = "newer ones have no engine builder, or were not read"
        raise VendorRelease(found=versions.tensorrt_llm, expected=RELEASES, why=why)
    if release < FIRST_RELEASE:
        raise VendorRelease(found=versions.tensorrt_llm, expected=RELEASES, why="older ones were not read")
    problems = [
        problem for needed in SURFACE if set(needed.purposes) & set(purposes) for problem in differences(needed)
    ]
    if problems:
        raise VendorDiffers(release=versions.tensorrt_llm, problems="; ".join(problems), expected=RELEASES)
    return versions


def differences(needed: Needed) -> Iterator[str]:
    """What the installed package lacks of one name."""
    found = find(needed)
    if found is None:
        yield f"{needed.name} is in none of {', '.join(needed.homes)}"
        return
    known = _parameters(found)
    for parameter in needed.parameters:
        if known is not None and parameter not in known:
            yield f"{needed.name} takes no {parameter}"
    for attribute in needed.attributes:
        if not _has(found, attribute):
            yield f"{needed.name} has no {attribute}"
    for method, parameters in needed.methods:
        if not hasattr(found, method):
            yield f"{needed.name} has no method {method}"
            continue
        known = _parameters(getattr(found, method))
        for parameter in parameters:
            if known is not None and parameter not in known:
                yield f"{needed.name}.{method} takes no {parameter}"


def find(needed: Needed) -> Any:
    """The name, from the first of its homes that has it; `None`: none has."""
    for home in needed.homes:
        try:
            module = importlib.import_module(home)
        except ImportError:
            continue
        if hasattr(module, needed.name):
            return getattr(module, needed.name)
    return None


def _import_vendor() -> VendorVersions:
    # Importing it loads compiled libraries, which fail in ways of their own where there is no driver.
    try:
        vendor = importlib.import_module(PACKAGE)
        tensorrt = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        raise VendorMissing(problem=f"{error.name} is not installed", releases=RELEASES) from None
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        problem = f"it is installed but does not import ({type(error).__name__}: {''.join(first)})"
        raise VendorMissing(problem=problem, releases=RELEASES) from None
    return VendorVersions(tensorrt_llm=str(vendor.__version__), tensorrt=str(tensorrt.__version__))


def _parameters(found: Any) -> set[str] | None:
    """Names that a callable takes; `None` where it does not say, or takes any."""
    if dataclasses.is_dataclass(found) or hasattr(found, "model_fields"):
        return None  # fields are asked for as attributes, and set one by one
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parameters):
        return None
    return {one.name for one in parameters}


def _has(found: Any, attribute: str) -> bool:
    """A member, a method, a property or a field; older plugin options are stored with an underscore before them."""
    fields = {
        *getattr(found, "model_fields", ()),
        *getattr(found, "__dataclass_fields__", ()),
        *getattr(found, "__annotations__", ()),
    }
    return hasattr(found, attribute) or attribute in fields or f"_{attribute}" in fields
