"""Are the numbers right here? Asked before anything is timed: nobody is fast by being wrong.

A small model, its weights in bfloat16, run by transformers in float32 one row at a time: the truth. Then the engine in
each precision, every token and last token, with and without shared prefixes, on rows of many lengths in one pass.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu.ours import Ours, batch_of
from gpu.rows import rows_of

BOUNDS = {"float32": 2e-3, "bfloat16": 0.05, "fp8": 0.35}
"""Relative error (of a row's norm) beyond which a precision is broken rather than rounded. float32 is wide enough for
attention in TF32."""


def truth(model: Any, device: Any, rows: Sequence[Any]) -> list[Any]:
    """float32 [L, H] of each row by itself, from weights that are bfloat16 values in float32."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    found = []
    try:
        with torch.inference_mode():
            for row in rows:
                ids = torch.from_numpy(row.astype(np.int64))[None].to(device)
                found.append(model(input_ids=ids, use_cache=False).last_hidden_state[0].float().cpu().numpy())
    finally:
        torch.set_float32_matmul_precision(before)
    return found


def relative(found: Any, expected: Any) -> float:
    """Norm of the difference over the norm; infinite where anything is not finite."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-30))


def checked_rows(vocabulary: int) -> list[Any]:
    """Many lengths, one token among them, an exact duplicate, and rows with a common beginning."""
    rows = rows_of("mixed", 21, vocabulary, seed=1)
    shared = rows_of("shared", 8, vocabulary, seed=2)
    return [*rows, rows[3], rows[0][:1], *shared]


def compare(ours: Ours, expected: Sequence[Any], rows: Sequence[Any]) -> dict[str, Any]:
    """Worst relative errors of one engine, and whether they are within its bound."""
    batch = batch_of(rows)
    bounds = batch.cu_seqlens
    states = ours.states(batch, "tokens")
    last = ours.states(batch, "last")
    by_row = [relative(states[start:stop], one) for start, stop, one in zip(bounds, bounds[1:], expected, strict=False)]
    worst_last = max(relative(found, one[-1]) for found, one in zip(last, expected, strict=True))
    alone = [ours.states(batch_of([row]), "tokens") for row in rows[:4]]
    moved = max(relative(states[bounds[place] : bounds[place + 1]], one) for place, one in enumerate(alone))
    worst, bound = max(by_row), BOUNDS[ours.precision]
    return {
        "tokens": worst,
        "last": worst_last,
        "alone_against_together": moved,
        "bound": bound,
        "right": max(worst, worst_last, moved) <= bound,
    }
