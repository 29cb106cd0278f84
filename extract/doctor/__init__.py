"""`doctor`: look at this machine and say what it can do. Nothing is computed, compiled, downloaded or changed.

Everything that may be broken is asked in a way that survives it: packages are imported in processes of their own, the
rest comes from metadata, files and the driver's own program.
"""

import importlib.util
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from extract.doctor.facts import UNKNOWN_VERSION, Card, Cuda, Facts, Package, Python
from extract.doctor.hardware import disk, memory, nvidia_smi, this_cpu
from extract.doctor.hub import hub
from extract.doctor.imports import Import, try_imports
from extract.doctor.readiness import Runtime, runtimes
from extract.doctor.wanted_packages import (
    DISTRIBUTION,
    WITHOUT,
    Requirement,
    installed_version,
    requirements,
)

SECONDS = 30.0
LEAST_PYTHON = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Without it a CUDA build of some gigabytes comes."""

VENDOR = {
    "tensorrt-llm": ("tensorrt_llm", ("tensorrt-llm",)),
    "tensorrt": ("tensorrt", ("tensorrt", "tensorrt-cu12", "tensorrt-cu13")),
    "nvidia-modelopt": ("modelopt", ("nvidia-modelopt",)),
}
"""Name -> the module, and the distributions that may bring it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found, and the verdicts.

    Attributes:
        ready: whether the torch runtime is, on the CPU at least.
    """

    ready: bool
    runtimes: tuple[Runtime, ...]
    facts: Facts


def doctor(seconds: float = SECONDS) -> Diagnosis:
    """Look at this machine.

    Args:
        seconds: the longest wait for packages to import; a large package on a cold disk takes its time.
    """
    wanted = requirements()
    present = {name: module for name, (module, _) in VENDOR.items() if _is_there(module)}
    ours = [one.module for one in wanted if not one.extra and _is_there(one.module)]
    extras = [one.module for one in wanted if one.extra and _is_there(one.module)]
    lanes = [
        [module for module in ours if module == "torch"],
        [module for module in ours if module != "torch"],
        extras,
        # alone and in this order: each brings the next, and all of them bring torch
        [present[name] for name in ("tensorrt", "nvidia-modelopt", "tensorrt-llm") if name in present],
    ]
    with ThreadPoolExecutor() as pool:
        asked_smi = pool.submit(nvidia_smi)
        imports = try_imports(lanes, seconds)
        smi = asked_smi.result()
    facts = Facts(
        python=_python(),
        packages=tuple(_package(one, imports, bool(smi.cards)) for one in wanted),
        cpu=this_cpu(),
        memory=memory(),
        cache=disk(_kernel_cache()),
        smi=smi,
        cuda=_cuda(imports.get("torch")),
        hub=hub(),
        vendor={name: _vendor(name, imports) for name in VENDOR},
    )
    verdicts = runtimes(facts)
    return Diagnosis(ready=verdicts[0].ready, runtimes=verdicts, facts=facts)


def _python() -> Python:
    least = ".".join(map(str, LEAST_PYTHON))
    old = sys.version_info[:2] < LEAST_PYTHON
    return Python(
        version=platform.python_version(),
        wanted=least,
        platform=f"{sys.platform} {platform.machine()}",
        prefix=sys.prefix,
        project=installed_version(DISTRIBUTION) or "not installed",
        problem=f"Python {platform.python_version()}, {least} or newer is needed" if old else "",
    )


def _package(wanted: Requirement, imports: dict[str, Import], has_card: bool) -> Package:
    installed = installed_version(wanted.name)
    tried = imports.get(wanted.module)
    version = installed or (tried.version if tried else None)
    command = wanted.install
    problem = ""
    if tried is None:
        problem = "not installed" if installed is None else f"{installed} is installed, but there is no such module"
    elif not tried.known:
        problem, command = tried.problem, ""
    elif tried.problem:
        problem = f"does not import ({tried.problem})"
        command = command.replace("install", "install --force-reinstall", 1)
    elif version and not wanted.allows(version):
        problem = f"{version} is installed, {wanted.wanted} is wanted"
    if wanted.name == "torch" and command and not has_card:
        command += f" --index-url {CPU_INDEX}"
    return Package(
        name=wanted.name,
        wanted=wanted.wanted,
        installed=version or (UNKNOWN_VERSION if tried else None),
        problem=problem,
        install=command if problem else "",
        without=WITHOUT.get(wanted.module, ""),
        extra=wanted.extra,
    )


def _vendor(name: str, imports: dict[str, Import]) -> Package:
    module, distributions = VENDOR[name]
    tried = imports.get(module)
    versions = (installed_version(distribution) for distribution in distributions)
    installed = next((version for version in versions if version), None) or (tried.version if tried else None)
    if tried is None:
        return Package(name=name, installed=installed, problem="not installed")
    problem = f"cannot be used ({tried.problem})" if tried.problem and tried.known else tried.problem
    return Package(name=name, installed=installed or UNKNOWN_VERSION, problem=problem)


def _cuda(tried: Import | None) -> Cuda:
    """What torch said; nothing, if it did not get so far."""
    facts: dict[str, Any] = tried.facts if tried else {}
    architectures = facts.get("architectures", [])
    cards = tuple(
        Card(**card, problem=_not_for(card["compute_capability"], architectures)) for card in facts.get("cards", ())
    )
    return Cuda(built_for=facts.get("built_for"), hip=facts.get("hip"), cards=cards, problem=facts.get("problem") or "")


def _not_for(capability: str, architectures: list[str]) -> str:
    """Why a torch built for `architectures` has no code for a card; empty if it has, or they are not known."""
    major, minor = map(int, capability.split("."))
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = "".join(character for character in number if character.isdigit())
        built = (int(digits[:-1]), int(digits[-1])) if len(digits) > 1 else (0, 0)
        if (kind == "sm" and built[0] == major and built[1] <= minor) or (
            kind == "compute" and built <= (major, minor)
        ):
            return ""
    if not architectures:
        return ""
    return f"this torch has no code for compute capability {capability} (it has {', '.join(architectures)})"


def _kernel_cache() -> Any:
    from extract.cpu.native_library import cache_directory

    return cache_directory()


def _is_there(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ValueError, ImportError, AttributeError):
        return True  # something of that name is there, in a state that importing it will tell
