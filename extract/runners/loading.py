"""Load the engine of an opened job into this process, saying what takes its time."""

from collections.abc import Callable

from extract.engine.contract import Runtime
from extract.jobs import OpenJob


def load_engine(job: OpenJob, say: Callable[[str], None], *, threads: int | None) -> Runtime:
    """Load it.

    Args:
        job: opened; its spec says whether passes share prefixes.
        say: is told what is loaded.
        threads: CPU threads of the forward pass; `None`: see `load_runtime`.

    Raises:
        EngineRefused: see `load_runtime`.
    """
    from extract.cpu.implementations import COMPILING, compiles_first
    from extract.engine.runtimes import load_runtime

    say(f"loading {job.engine}")
    if job.plan.engine.runtime.decoder == "own" and compiles_first():
        say(COMPILING)
    return load_runtime(job.engine, threads=threads, share=job.plan.spec.run.share)
