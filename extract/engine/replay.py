"""Run a loaded engine over given sequences, as a run would: its probe at every load, the comparison at build."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from extract.engine.contract import Runtime
from extract.engine.probe import Float32, as_rows, projection, relative_error
from extract.errors import EngineRefused
from extract.packing import TokenBudget, pack
from extract.records import TokenRows
from extract.shards.values import as_float32


class ProbeFailed(EngineRefused):
    """The engine's numbers on this machine are not those of its build."""

    template = (
        "{path}: probe sequence {sequence} differs from the contract by {found:.1e} (relative), at most {expected:.1e} "
        "expected. This machine or its libraries ({here}, built with {built}) give other numbers: "
        "build the engine again here."
    )


def replay_probe(directory: Path, runtime: Runtime) -> None:
    """Run the contract's probe sequences and compare their digest values.

    Raises:
        ProbeFailed: a sequence differs by more than the contract's tolerance.
    """
    probe = runtime.contract.probe
    sequences = [sequence.input_ids for sequence in probe.sequences]
    states = states_of(runtime, sequences)
    name = runtime.contract.runtime.name
    for number, (sequence, found) in enumerate(zip(probe.sequences, states, strict=True)):
        error = relative_error(projection(found), np.array(sequence.projection, np.float32))
        if error > probe.tolerance:
            raise ProbeFailed(
                path=directory,
                sequence=number,
                found=error,
                expected=probe.tolerance,
                here=f"{name} {version(name)}" if name == "torch" else runtime.arithmetic,
                built=runtime.contract.runtime.version,
            )


def states_of(runtime: Runtime, sequences: Sequence[Sequence[int]]) -> list[Float32]:
    """float32 [L, H] of each sequence, packed within the engine's limits as a run would.

    [1, H], the last token's, from an engine that puts out no others.
    """
    lengths = [len(sequence) for sequence in sequences]
    rows = TokenRows(
        source_index=np.arange(len(sequences), dtype=np.int32),
        chunk=np.zeros(len(sequences), np.int32),
        outcome=np.zeros(len(sequences), np.uint8),
        num_tokens_original=np.array(lengths, np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        input_ids=np.array([token for sequence in sequences for token in sequence], np.int32),
    )
    limits, layout = runtime.contract.limits, runtime.contract.runtime.layout
    budget = TokenBudget(
        max_tokens=limits.max_tokens, max_sequences=limits.max_sequences, equal_length=layout == "dense"
    )
    found: list[Float32] = [np.zeros((0, 0), np.float32)] * len(sequences)
    kind = runtime.contract.output.states
    for batch in pack(rows, budget):
        states = as_float32(runtime.hidden_states(batch, kind))
        counts = batch.lengths.tolist() if kind == "tokens" else [1] * batch.num_sequences
        for member, one in zip(batch.members, as_rows(states, counts), strict=True):
            found[int(member)] = one
    return found
