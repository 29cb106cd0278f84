"""Decoder checkpoint + dataset -> hidden states after the final norm, in verified Arrow shards.

The functions behind the commands, imported on first use so that `import extract` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from extract.embedding import embed as embed
    from extract.engine.builder import build as build
    from extract.engine.recipe import Recipe as Recipe
    from extract.engine.runtimes import load_runtime as load_runtime
    from extract.exporting.export import export as export
    from extract.fidelity_check.layer_ranking import rank_layers as rank_layers
    from extract.fidelity_check.measure import fidelity as fidelity
    from extract.jobs import plan as plan
    from extract.output import open_output as open_output
    from extract.quantizing import quantize as quantize
    from extract.report_page.page import write_report as write_report
    from extract.runners.local import run as run
    from extract.spec import JobSpec as JobSpec
    from extract.spec import RunSpec as RunSpec
    from extract.spec import SourceSpec as SourceSpec
    from extract.spec import StatesSpec as StatesSpec
    from extract.spec import TextSpec as TextSpec
    from extract.spec import load_job as load_job
    from extract.streaming import stream as stream
    from extract.tuning.search import tune as tune
    from extract.verification import verify as verify

_HOMES = {
    "build": "extract.engine.builder",
    "embed": "extract.embedding",
    "export": "extract.exporting.export",
    "fidelity": "extract.fidelity_check.measure",
    "load_job": "extract.spec",
    "load_runtime": "extract.engine.runtimes",
    "JobSpec": "extract.spec",
    "Recipe": "extract.engine.recipe",
    "RunSpec": "extract.spec",
    "SourceSpec": "extract.spec",
    "StatesSpec": "extract.spec",
    "TextSpec": "extract.spec",
    "plan": "extract.jobs",
    "quantize": "extract.quantizing",
    "rank_layers": "extract.fidelity_check.layer_ranking",
    "run": "extract.runners.local",
    "stream": "extract.streaming",
    "tune": "extract.tuning.search",
    "verify": "extract.verification",
    "open_output": "extract.output",
    "write_report": "extract.report_page.page",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'extract' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
