"""Decoder checkpoint + dataset -> hidden states after the final norm, in verified Arrow shards.

The functions behind the commands, imported on first use so that `import extract` costs nothing.
"""

import importlib
from typing import Any

_HOMES = {
    "build": "extract.engine.builder",
    "embed": "extract.embedding",
    "export": "extract.exporting.export",
    "fidelity": "extract.fidelity_check.measure",
    "load_job": "extract.spec",
    "JobSpec": "extract.spec",
    "plan": "extract.jobs",
    "quantize": "extract.quantizing",
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
