"""`tune`: build, sweep precision x threads x token budget, choose.

Points come in the order of their use, because time may run out: all threads before fewer, the checkpoint's own
precision before others. What is chosen is never less exact than that precision, however fast the others are, unless
int8 is allowed.
"""

import datetime
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from extract.engine.contract import Device
from extract.engine.device import computes_in, this_device
from extract.engine.recipe import Recipe, override
from extract.errors import EngineRefused, ExtractError, OutOfSpace, SpecError
from extract.tuning.results import Point, Tuning, Unmeasured
from extract.tuning.sweep import Sweep, choose

SECONDS = 150.0
"""Time for a sweep, builds included, unless told otherwise."""

EXACT_FIRST = ("float32", "bfloat16", "float16", "int8", "fp8")
TRIED = ("float32", "bfloat16", "int8", "fp8")
"""Precisions of a sweep that names none, beside the checkpoint's own."""
EIGHT_BITS = ("int8", "fp8")


class NoSuchPrecision(SpecError):
    """A precision that is unknown, or that the device has no arithmetic for."""

    template = "precisions: {found!r} is not what this {device} computes in ({expected})."


class NotOfThisRuntime(SpecError):
    """Precisions or threads for a runtime that has no choice of them."""

    template = (
        "tune: precisions, threads and int8 are not for runtime {runtime}, which runs a checkpoint in the precision "
        "that it has. Leave them out."
    )


class NothingToChoose(SpecError):
    """None of the precisions to measure may be chosen."""

    template = "precisions: of {found}, none may be chosen for a checkpoint in {dtype}. Add {advice}."


class BadThreads(SpecError):
    """A number of threads that is none."""

    template = "threads: {found} is no number of threads; give whole numbers, 1 or more."


class NoPassFits(OutOfSpace):
    """Not even the smallest pass of any precision that may be chosen fits in memory."""

    template = "{checkpoint}: passes of {budget:,} tokens do not fit in the memory of {device}. Use a larger machine."


class NothingMeasured(EngineRefused):
    """No precision that may be chosen could be measured."""

    template = "{checkpoint}: nothing could be measured in {precisions}: {reason}."


def tune(
    checkpoint: str | Path,
    *,
    precisions: Sequence[str] | None = None,
    threads: Sequence[int] | None = None,
    max_input_tokens: int | None = None,
    seconds: float = SECONDS,
    allow_int8: bool = False,
    device: str = "auto",
    runtime: Literal["torch", "tensorrt-llm"] = "torch",
    reference: str | Path | None = None,
    allow_pickle: bool = False,
    say: Callable[[str], None] = lambda message: None,
) -> Tuning:
    """Find the fastest settings for a checkpoint on this device.

    Args:
        checkpoint: Hugging Face directory, hub id or GGUF file.
        precisions: to measure; `None`: the checkpoint's own, float32, bfloat16, int8, fp8, where the device has them.
        threads: numbers of CPU threads; `None`: all that this process may use, half of them, one.
        max_input_tokens: longest row; `None`: a recipe's default.
        seconds: no point is begun that would not be done by then; the first one always is.
        allow_int8: int8, or fp8 on a card, may be chosen.
        device: as in a recipe.
        runtime: with tensorrt-llm, tiers of token budgets are built and measured; precisions and threads are not asked
            for, because a checkpoint has its precision there.
        reference: with tensorrt-llm, as for `build`.
        allow_pickle: as in a build.
        say: called with a line whenever a step begins or a curve is done.

    Raises:
        SpecError: precisions or threads that cannot be, or nothing that may be chosen.
        CheckpointRefused, EngineRefused: as for a build; `NothingMeasured`.
        NoPassFits: memory is too small.
    """
    from extract.engine.checkpoint import open_checkpoint
    from extract.engine.checkpoint_tokenizer import load_tokenizer
    from extract.tuning.engines import Engines
    from extract.tuning.workload import workload

    if runtime == "tensorrt-llm":
        from extract.tuning.card_tiers import tune_tiers

        if precisions or threads or allow_int8:
            raise NotOfThisRuntime(runtime=runtime)
        recipe = Recipe(runtime=runtime, max_input_tokens=max_input_tokens or Recipe().max_input_tokens)
        return tune_tiers(checkpoint, recipe, reference=reference, seconds=seconds, say=say)
    started = time.monotonic()
    counts = _threads(threads)
    here = this_device(device)
    opened = open_checkpoint(checkpoint, allow_pickle=allow_pickle)
    own = own_precision(here, opened.dtype)
    asked = _precisions(precisions, here, own)
    choosable = _choosable(asked, own, allow_int8=allow_int8)
    recipe = Recipe(device=here.type, max_input_tokens=max_input_tokens or Recipe().max_input_tokens)
    tokenizer = load_tokenizer(opened)
    settings = [(precision, count) for count in (counts if here.type == "cpu" else [None]) for precision in asked]
    with tempfile.TemporaryDirectory(prefix="extract-tune-") as scratch:
        engines = Engines(checkpoint, Path(scratch), recipe, tokenizer, allow_pickle=allow_pickle, say=say)
        contract = engines.base.contract
        work = workload(tokenizer, contract.limits.max_input_tokens, contract.checkpoint.vocab_size)
        sweep = Sweep(engines, work, deadline=started + seconds, say=say)
        for precision, count in settings:
            sweep.measure(precision, count)
    chosen = choose(sweep.points, choosable)
    if chosen is None:
        raise _nothing(opened.name, sweep.points, sweep.unmeasured, choosable, here)
    return Tuning(
        checkpoint=opened.name,
        architecture=opened.architecture,
        dtype=opened.dtype,
        device=here.name,
        decoder=contract.runtime.decoder,
        arithmetic=sweep.arithmetic,
        budget_is="tokens per micro-batch" if engines.base.own_on == "cpu" else "tokens per pass",
        mean_tokens=round(work.mean_tokens, 1),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        seconds=round(time.monotonic() - started, 1),
        points=tuple(
            sorted(sweep.points, key=lambda point: (asked.index(point.precision), -(point.threads or 0), point.budget))
        ),
        unmeasured=tuple(sweep.unmeasured),
        chosen=chosen,
        recipe=override(
            recipe,
            dtype=chosen.precision,
            decoder=contract.runtime.decoder,
            micro_batch=chosen.budget if engines.base.own_on == "cpu" else None,
            pass_tokens=chosen.budget if engines.base.own_on == "cuda" else None,
            max_tokens=sweep.pass_tokens(chosen),
            threads=chosen.threads,
            architectures=(opened.architecture,),
            description=_description(chosen, opened.name, here),
        ),
    )


def own_precision(device: Device, dtype: str) -> str:
    """What a build with dtype "auto" takes: the checkpoint's own type where the device computes in it, else float32."""
    return dtype if dtype in ("bfloat16", "float16") and computes_in(device, dtype) else "float32"


def _precisions(asked: Sequence[str] | None, device: Device, own: str) -> list[str]:
    """Without repetitions, the checkpoint's own first."""
    offered = [precision for precision in EXACT_FIRST if computes_in(device, precision)]
    for precision in asked or ():
        if precision not in offered:
            raise NoSuchPrecision(found=precision, device=device.type, expected=", ".join(offered))
    chosen = asked or [precision for precision in offered if precision in TRIED or precision == own]
    return sorted(dict.fromkeys(chosen), key=lambda precision: precision != own)


def _choosable(asked: Sequence[str], own: str, *, allow_int8: bool) -> list[str]:
    """The checkpoint's own precision, what is more exact, and int8 where it is allowed."""
    exact = ("float32", own)
    found = [precision for precision in asked if precision in exact or (precision in EIGHT_BITS and allow_int8)]
    if not found:
        asked_for = [precision for precision in asked if precision in EIGHT_BITS]
        advice = f"{own}, or allow {asked_for[0]} (--allow-int8)" if asked_for else own
        raise NothingToChoose(found=", ".join(asked), dtype=own, advice=advice)
    return found


def _threads(asked: Sequence[int] | None) -> list[int]:
    """Most first."""
    usable = len(os.sched_getaffinity(0))
    for count in asked or ():
        if count < 1:
            raise BadThreads(found=count)
    return sorted({*(asked or (usable, max(1, usable // 2), 1))}, reverse=True)


def _nothing(
    name: str, points: Sequence[Point], unmeasured: Sequence[Unmeasured], choosable: Sequence[str], device: Device
) -> ExtractError:
    refused = [point for point in points if point.precision in choosable]
    if refused:
        return NoPassFits(checkpoint=name, budget=min(point.budget for point in refused), device=device.name)
    reason = next(one.reason for one in unmeasured if one.precision in choosable)
    return NothingMeasured(checkpoint=name, precisions=", ".join(choosable), reason=reason)


def _description(chosen: Point, name: str, device: Device) -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    on = device.name if chosen.threads is None else f"{chosen.threads} threads of {device.name}"
    return (
        f"extract tune, {today}: {name} in {chosen.precision} on {on} gave {chosen.tokens_per_s:,.0f} tokens/s "
        f"(median of {chosen.runs} runs, {chosen.slowest:,.0f} to {chosen.fastest:,.0f})"
    )
