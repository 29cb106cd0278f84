"""Ours: an engine that `extract build` made, through `load_runtime` and `hidden_states`, in the passes of `pack`.

Knows nothing of what runs inside, so the same lines measure whatever the engine's contract says. What `run` returns is
the passes' states: the job writes them to shards in that form.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peers.protocol import Ids, Kind, NotPossible, Rows, serve


def build_command(checkpoint: str, dtype: str, output: str) -> list[str]:
    """The public command that makes the engine of a dtype."""
    return [sys.executable, "-m", "extract", "build", checkpoint, "--dtype", dtype, "-o", output]


class Ours:
    """Settings: checkpoint, dtype, engine (its directory), threads, share. No options."""

    def prepare(self, settings: dict[str, Any]) -> None:
        """Build the engine, and load it once so that compiled code is in its cache."""
        engine, stamp = Path(settings["engine"]), Path(settings["engine"] + ".stamp")
        made_of = _made_of(Path(settings["checkpoint"]))
        if not engine.is_dir() or not stamp.is_file() or stamp.read_text() != made_of:
            shutil.rmtree(engine, ignore_errors=True)
            engine.parent.mkdir(parents=True, exist_ok=True)
            command = build_command(settings["checkpoint"], settings["dtype"], settings["engine"])
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise NotPossible(" ".join(done.stderr.strip().splitlines()[-2:]))
            stamp.write_text(made_of)
        self.load(settings)

    def load(self, settings: dict[str, Any]) -> dict[str, str]:
        from extract.engine.runtimes import load_runtime

        self.runtime = load_runtime(
            Path(settings["engine"]), threads=settings["threads"], share=settings.get("share", True)
        )
        runtime = self.runtime.contract.runtime
        return {"extract": _version(), runtime.name: runtime.version}

    def run(self, sequences: Sequence[Ids], kind: Kind, options: dict[str, Any]) -> Any:
        from extract.packing import TokenBudget, pack
        from extract.records import TokenRows

        lengths = [len(sequence) for sequence in sequences]
        limits, layout = self.runtime.contract.limits, self.runtime.contract.runtime.layout
        rows = TokenRows(
            source_index=np.arange(len(sequences), dtype=np.int32),
            chunk=np.zeros(len(sequences), np.int32),
            outcome=np.zeros(len(sequences), np.uint8),
            num_tokens_original=np.array(lengths, np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            input_ids=np.concatenate(sequences),
        )
        budget = TokenBudget(
            max_tokens=limits.max_tokens, max_sequences=limits.max_sequences, equal_length=layout == "dense"
        )
        return kind, [(batch, self.runtime.hidden_states(batch, kind)) for batch in pack(rows, budget)]

    def rows(self, result: Any) -> Rows:
        from extract.shards.values import as_float32

        kind, passes = result
        found = {}
        for batch, states in passes:
            values = as_float32(states)
            ends = batch.cu_seqlens if kind == "tokens" else np.arange(batch.num_sequences + 1)
            for place, member in enumerate(batch.members.tolist()):
                found[member] = values[ends[place] : ends[place + 1]]
        return [found[row] for row in range(len(found))]


def _made_of(checkpoint: Path) -> str:
    """Changes with the code that builds and runs engines, and with the checkpoint: an old engine is not measured."""
    import extract

    package = Path(extract.__file__).parent
    code = sorted([*package.glob("engine/**/*.py"), *package.glob("cpu/**/*")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in code if path.suffix in (".py", ".cpp", ".h")))
    weights = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(checkpoint.iterdir())]
    digest.update(repr(weights).encode())
    return digest.hexdigest()


def _version() -> str:
    from importlib.metadata import version

    return version("extract-hidden-states")


if __name__ == "__main__":
    serve(Ours())
