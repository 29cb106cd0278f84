"""`extract doctor`: what this machine can do."""

import textwrap
from typing import TYPE_CHECKING

import click

from extract.cli.options import json_option
from extract.doctor import SECONDS
from extract.report import emit

if TYPE_CHECKING:
    from extract.doctor import Diagnosis
    from extract.doctor.facts import Facts, Package
    from extract.doctor.hardware import Space
    from extract.doctor.readiness import Runtime

NOT_READY = 4
WIDTH, INDENT = 100, " " * 11


@click.command("doctor")
@click.option(
    "--seconds",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=SECONDS,
    show_default=True,
    help="Longest wait for packages to import.",
)
@json_option
def doctor_command(seconds: float, as_json: bool) -> None:
    """Say what this machine can do, and what to install for the rest.

    Looks at Python and the packages, the CPU and its kernels, memory and disks, the cards, TensorRT-LLM and the cache
    of the Hugging Face hub, and ends with one line a runtime: ready, or why not. Changes nothing; packages are imported
    in processes of their own, so that a broken one is named and breaks nothing. The exit code is 0 if the torch runtime
    is ready, else 4.

    \b
    Example:
        extract doctor
    """
    from extract.doctor import doctor

    found = doctor(seconds)
    emit(found, diagnosis_text, as_json)
    if not found.ready:
        click.get_current_context().exit(NOT_READY)


def diagnosis_text(found: "Diagnosis") -> str:
    """Facts, then verdicts."""
    lines = _facts(found.facts)
    for runtime in found.runtimes:
        lines += _verdict(runtime)
    return "\n".join(lines)


def _facts(facts: "Facts") -> list[str]:
    python, cpu = facts.python, facts.cpu
    right = [package for package in facts.packages if not package.problem and not package.extra]
    num_wanted = sum(not package.extra for package in facts.packages)
    threads = f"{cpu.threads} of {cpu.all_threads} threads"
    if cpu.quota is not None:
        threads += f", a quota of {cpu.quota:g} CPUs"
    kernels = ", ".join(f"{precision} {kind}" for precision, kind in cpu.kernels.items())
    lines = [
        *_line("extract", f"{python.project}, Python {python.version} on {python.platform}, {python.prefix}"),
        *_line(
            "packages",
            f"{len(right)} of {num_wanted} as wanted"
            + (f": {', '.join(f'{package.name} {package.installed}' for package in right)}" if right else ""),
        ),
    ]
    for package in facts.packages:
        if package.problem and not package.extra:
            lines += _package(package)
    lines += [
        *_line("cpu", f"{cpu.name}, {cpu.instruction_set}, {threads}"),
        *_line("kernels", f"{kernels}; C++ compiler: {cpu.compiler or 'none'}"),
        *_line("memory", _space(facts.memory)),
        *_line("cache", f"{facts.cache.path}: {_space(facts.cache)}"),
        *_line(
            "hub cache",
            f"{facts.hub.space.path}: {_space(facts.hub.space)}; {facts.hub.num_models} models, "
            f"{facts.hub.num_datasets} datasets"
            + (f"; offline by {', '.join(facts.hub.offline)}" if facts.hub.offline else "; the hub may be asked"),
        ),
        *_cards(facts),
    ]
    for package in facts.vendor.values():
        said = "not installed" if package.installed is None else package.installed
        lines += _line(
            "vendor", f"{package.name}: {said}{'; ' + package.problem if package.installed and package.problem else ''}"
        )
    for package in facts.packages:
        if package.extra and package.name not in facts.vendor:
            lines += _line("optional", f"{package.name} ({package.extra}): {package.problem or package.installed}")
    return lines


def _cards(facts: "Facts") -> list[str]:
    cuda, smi = facts.cuda, facts.smi
    built = f"built for CUDA {cuda.built_for}" if cuda.built_for else "built without CUDA"
    if cuda.hip:
        built = f"built for ROCm {cuda.hip}"
    torch = next((package for package in facts.packages if package.name == "torch"), None)
    if torch is None or (torch.problem and not cuda.built_for):
        built = "not known to have CUDA"
    lines = _line("torch", f"{built}{'; ' + cuda.problem if cuda.problem else ''}")
    for card in smi.cards:
        about = [card.name]
        about += [f"compute capability {card.compute_capability}"] if card.compute_capability else []
        about += [f"{_size(card.free_bytes)} of {_size(card.total_bytes)} free", f"driver {card.driver}"]
        about += [f"MIG {card.mig.lower()}"] if card.mig else []
        lines += _line("card", ", ".join(about))
    for one in cuda.cards:
        said = f"torch sees {one.name}, compute capability {one.compute_capability}, "
        said += f"{_size(one.free_bytes)} of {_size(one.total_bytes)} free"
        lines += _line("card", f"{said}{': ' + one.problem if one.problem else ''}")
    if not smi.cards and not cuda.cards:
        lines += _line("card", f"none ({smi.problem or 'nvidia-smi shows none'})")
    return lines


def _package(package: "Package") -> list[str]:
    lines = _line("wrong", f"{package.name}: {package.problem}")
    if package.without:
        lines += _line("", f"without it: {package.without}")
    return [*lines, *([f"{INDENT}{package.install}"] if package.install else [])]


def _verdict(runtime: "Runtime") -> list[str]:
    if runtime.ready:
        return _line("ready", runtime.name)
    lines = _line("not ready", f"{runtime.name}, because: {runtime.why}")
    lines += [f"{INDENT}{command}" for command in runtime.install]
    return lines + (_line("", f"without it: {runtime.without}") if runtime.without else [])


def _line(name: str, text: str) -> list[str]:
    """One fact under its name, wrapped."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{name:<10} ",
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _space(space: "Space") -> str:
    said = f"{_size(space.free_bytes)} of {_size(space.total_bytes)} free"
    if space.limit_bytes is not None:
        said += f", limited to {_size(space.limit_bytes)}"
    return f"{said}; {space.problem}" if space.problem else said


def _size(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 1e9:,.1f} GB"
