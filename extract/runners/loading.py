"""Load an engine of an opened job into this process: the first one that fits the device, saying what takes its time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from extract.engine.contract import EngineDoesNotFit, Runtime
from extract.errors import ExtractError
from extract.jobs import OpenJob
from extract.planning import Plan
from extract.runners.layer_trial import try_layers
from extract.tensorrt.gate import VendorMissing


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine in memory, and the job as this engine does it."""

    path: Path
    plan: Plan
    runtime: Runtime


def load_engine(job: OpenJob, say: Callable[[str], None], *, threads: int | None) -> LoadedEngine:
    """Load it.

    Args:
        job: opened; its spec says whether passes share prefixes.
        say: is told what is loaded.
        threads: CPU threads of the forward pass; `None`: see `load_runtime`.

    Raises:
        EngineRefused: see `load_runtime`; of several engines that fit no device here, the first one's.
        NoLayerStates, LayersOverflow: see `try_layers`.
    """
    from extract.cpu.implementations import COMPILING, compiles_first
    from extract.engine.runtimes import load_runtime

    refused: ExtractError | None = None
    for path, plan in ((job.engine, job.plan), *job.others):
        say(f"loading {path}")
        if plan.engine.runtime.decoder == "own" and compiles_first():
            say(COMPILING)
        try:
            runtime = load_runtime(path, threads=threads, share=plan.spec.run.share)
        except (EngineDoesNotFit, VendorMissing) as error:  # the next one may be for what is here
            refused = refused or error
        else:
            try_layers(runtime, plan.spec.states)
            return LoadedEngine(path, plan, runtime)
    assert refused is not None  # there is at least one engine
    raise refused
