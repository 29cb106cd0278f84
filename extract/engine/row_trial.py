"""Try a runtime whose inside cannot be looked at: rows must not touch each other, and row i must be text i.

The rows that the vendor's own users met faults with: one token, few, a full row, and one between. A pass with several
rows is compared with each row alone, with one neighbour replaced, and with the plain model; and each row's last state
must be nearer to its own reference than to any other row's, which no rounding and no precision excuses.
"""

from dataclasses import dataclass

import numpy as np

from extract.engine.contract import Proof, Runtime
from extract.engine.probe import Float32, relative_error
from extract.engine.replay import states_of
from extract.errors import CheckpointRefused

SEED = 20
LENGTHS = (1, 7, 128, 50)
LEAK = 1e-3
"""Most that a row may change when its neighbours' ids do. Kernels round a row alike whatever lies beside it; a leak of
one token's attention is hundreds of times larger."""
BOUNDS = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.2, "fp8": 0.5}
"""Relative error against the plain model beyond which a precision is broken, not rounded; builds measure the rest."""


class RowsTouch(CheckpointRefused):
    """Rows of a pass are not what they are alone."""

    template = "{name}: the engine is not right: {problem}. Nothing was written."


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What was seen, and the bound that it was held to."""

    proof: Proof
    bound: float


def try_rows(
    runtime: Runtime, ids: list[list[int]], plain: list[Float32], precision: str, vocabulary: int, name: str
) -> Trial:
    """Run rows together, alone and beside others.

    Args:
        runtime: loaded, its probe not yet replayed.
        ids: real rows.
        plain: their plain states, float32 [L, H] each.
        precision: of the engine's products.
        vocabulary: to draw random rows from.
        name: the checkpoint's, for the message.

    Raises:
        RowsTouch: with what was seen.
    """
    draw = np.random.Generator(np.random.PCG64(SEED))
    limit = runtime.contract.limits.max_input_tokens
    rows = [draw.integers(0, vocabulary, min(length, limit)).tolist() for length in LENGTHS]
    others = [draw.integers(0, vocabulary, len(row)).tolist() for row in rows]
    together = states_of(runtime, rows)
    beside = states_of(
        runtime, [row if place % 2 else other for place, (row, other) in enumerate(zip(rows, others, strict=True))]
    )
    alone = [states_of(runtime, [row])[0] for row in rows]
    neighbour = max(relative_error(beside[place], together[place]) for place in range(1, len(rows), 2))
    moved = max(relative_error(one, other) for one, other in zip(alone, together, strict=True))
    found = states_of(runtime, ids)
    last_only = runtime.contract.output.states == "last"
    expected = [states[-1:] for states in plain] if last_only else plain
    error = max(relative_error(one, other) for one, other in zip(found, expected, strict=True))
    bound = BOUNDS[precision]
    problems = [
        f"row {place} is nearer to another row's reference than to its own"
        for place in _mixed([states[-1] for states in found], [states[-1] for states in plain], ids)
    ]
    if neighbour > LEAK:
        problems.append(
            f"rows change by {neighbour:.1e} (relative) when their neighbours do, at most {LEAK:.0e} expected"
        )
    for what, seen in (("alone and in a pass", moved), ("against the plain model", error)):
        if seen > bound:
            problems.append(f"rows differ by {seen:.1e} (relative) {what}, at most {bound:.0e} expected")
    if problems:
        raise RowsTouch(name=name, problem="; ".join(problems[:5]))
    return Trial(proof=Proof(neighbour=neighbour, moved=moved, plain=error), bound=bound)


def _mixed(found: list[Float32], plain: list[Float32], ids: list[list[int]]) -> list[int]:
    """Rows whose state is nearest to the reference of another one that reads differently."""
    references = np.stack(plain)
    mixed = []
    for place, state in enumerate(found):
        nearest = int(np.argmin(((references - state) ** 2).sum(axis=1)))
        if ids[nearest] != ids[place]:
            mixed.append(place)
    return mixed
