"""What was found on this machine, before any verdict: Python, packages, CPU, memory, disks, cards, TensorRT-LLM."""

from dataclasses import dataclass, field

from extract.doctor.hardware import Cpu, Smi, Space
from extract.doctor.hub import Hub

UNKNOWN_VERSION = "of unknown version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """The Python that runs this.

    Attributes:
        wanted: the least version, as `3.11`.
        problem: why it will not do; empty if it does.
    """

    version: str
    wanted: str
    platform: str
    prefix: str
    project: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package, as it is wanted and as it is.

    Attributes:
        wanted: versions that will do; may be empty.
        installed: its version; `None`: not installed.
        problem: what is wrong with it; empty if nothing is.
        install: what to type if something is.
        without: what can be done without it; empty: nothing can.
        extra: the optional part of the project that asks for it.
    """

    name: str
    wanted: str = ""
    installed: str | None = None
    problem: str = ""
    install: str = ""
    without: str = ""
    extra: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card as torch sees it.

    Attributes:
        problem: why torch cannot compute on it; empty if it can.
    """

    name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """What torch says of CUDA.

    Attributes:
        built_for: the CUDA version that this torch was built for; `None`: none, or not known.
        hip: likewise of ROCm.
        problem: why no card can be used; empty if that is not so, or there is no CUDA in it.
    """

    built_for: str | None = None
    hip: str | None = None
    cards: tuple[Card, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All of it.

    Attributes:
        vendor: TensorRT-LLM and what comes with it, by name.
        cache: where compiled kernels go.
    """

    python: Python
    packages: tuple[Package, ...]
    cpu: Cpu
    memory: Space
    cache: Space
    smi: Smi
    cuda: Cuda
    hub: Hub
    vendor: dict[str, Package] = field(default_factory=dict)
