"""From facts to verdicts: which runtimes are ready on this machine, why the others are not, what to do. Pure."""

from dataclasses import dataclass

from extract.doctor.facts import UNKNOWN_VERSION, Facts
from extract.tensorrt.surface import FIRST_RELEASE, FIRST_RELEASE_WITHOUT, RELEASES

VENDOR_INDEX = "https://pypi.nvidia.com"
INSTALL_TENSORRT_LLM = f'pip install "tensorrt-llm>=0.16,<1.3" --extra-index-url {VENDOR_INDEX}'
CONTAINER = "or NVIDIA's container of such a release: nvcr.io/nvidia/tensorrt-llm/release:1.2.1"
INSTALL_MODELOPT = f'pip install "nvidia-modelopt[hf]" --extra-index-url {VENDOR_INDEX}'
INSTALL_CUDA = 'pip install --force-reinstall "torch>=2.11" --index-url https://pypi.org/simple'
"""On Linux that index holds the build for CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One way to compute.

    Attributes:
        why: what is in the way; empty if it is ready.
        install: what to type, a line each.
        without: what can be done in its place.
    """

    name: str
    ready: bool
    why: str = ""
    install: tuple[str, ...] = ()
    without: str = ""


def runtimes(facts: Facts) -> tuple[Runtime, ...]:
    """The verdict of each runtime."""
    torch = _torch(facts)
    card = _card(facts, torch)
    vendor = _tensorrt_llm(facts, card)
    return torch, card, vendor, _quantize(facts, card, vendor)


def _torch(facts: Facts) -> Runtime:
    name = "torch on the CPU"
    if facts.python.problem:
        return Runtime(name=name, ready=False, why=facts.python.problem, install=("a newer Python",))
    lacking = [package for package in facts.packages if package.problem and not package.without and not package.extra]
    if lacking:
        why = f"{lacking[0].name}: {lacking[0].problem}"
        if len(lacking) > 1:
            why = f"{', '.join(package.name for package in lacking)} are missing or broken"
        return Runtime(name=name, ready=False, why=why)
    return Runtime(name=name, ready=True)


def _card(facts: Facts, torch: Runtime) -> Runtime:
    name, without = "torch on a card", "all of it on the CPU"
    cuda, why, install = facts.cuda, "", ""
    if not torch.ready and not cuda.built_for and not cuda.problem:
        why, without = "torch on the CPU is not ready either", ""
    elif cuda.hip:
        why = f"this torch is built for ROCm {cuda.hip}, and only CUDA is supported"
    elif not cuda.built_for and not cuda.problem:
        why = "this torch is built without CUDA"
        if facts.smi.cards:
            install = INSTALL_CUDA
        else:
            why += f", and the driver shows no card ({facts.smi.problem or 'none'})"
    elif cuda.problem:
        why = cuda.problem
        if not facts.smi.cards:
            install = "an NVIDIA driver, or in a container: --gpus all"
    elif not cuda.cards:
        why = "torch sees no card"
    elif all(one.problem for one in cuda.cards):
        why = "; ".join(sorted({f"{one.name}: {one.problem}" for one in cuda.cards}))
        install = "a torch that is built for this card: https://pytorch.org/get-started/locally"
    elif not torch.ready:
        why = torch.why
    return Runtime(
        name=name, ready=not why, why=why, install=(install,) if install else (), without=without if why else ""
    )


def _tensorrt_llm(facts: Facts, card: Runtime) -> Runtime:
    name, without = "TensorRT-LLM", "the torch runtime, on a card or on the CPU"
    vendor, tensorrt = facts.vendor["tensorrt-llm"], facts.vendor["tensorrt"]
    reasons, install = [], []
    if vendor.installed is None:
        reasons.append(f"not installed ({RELEASES} is needed)")
    elif vendor.installed == UNKNOWN_VERSION:
        reasons.append(
            f"its release is not known ({RELEASES} is needed)" + (f"; {vendor.problem}" if vendor.problem else "")
        )
    elif not supported(vendor.installed):
        reasons.append(f"{vendor.installed} is installed, {RELEASES} is needed (newer ones have no engine builder)")
    elif vendor.problem:
        reasons.append(vendor.problem)
    if reasons:
        install += [INSTALL_TENSORRT_LLM, CONTAINER]
    elif tensorrt.problem:
        reasons.append(f"tensorrt: {tensorrt.problem}")
        install.append("the tensorrt that this tensorrt-llm asks for: pip check")
    if not facts.smi.cards and not facts.cuda.cards:
        reasons.append("no NVIDIA card")
    elif not card.ready:
        reasons.append(f"torch: {card.why}")
    return Runtime(
        name=name, ready=not reasons, why="; ".join(reasons), install=tuple(install), without=without if reasons else ""
    )


def _quantize(facts: Facts, card: Runtime, vendor: Runtime) -> Runtime:
    name, without = "extract quantize", "engines in float32 and bfloat16, int8 on a CPU"
    modelopt = facts.vendor["nvidia-modelopt"]
    reasons, install = [], []
    if modelopt.installed is None or modelopt.problem:
        reasons.append(f"nvidia-modelopt: {modelopt.problem or 'not installed'}")
        install.append(INSTALL_MODELOPT)
    if not vendor.ready:
        reasons.append("TensorRT-LLM is not ready")
    return Runtime(
        name=name, ready=not reasons, why="; ".join(reasons), install=tuple(install), without=without if reasons else ""
    )


def supported(release: str) -> bool:
    """Whether a release of TensorRT-LLM is one that was read."""
    parts = release.split(".")
    numbers = tuple(int(part) if part.isdigit() else 0 for part in parts[:2])
    return FIRST_RELEASE <= numbers < FIRST_RELEASE_WITHOUT
