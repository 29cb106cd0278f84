"""One state a sequence out of packed states: the last token's, the first one's, or the mean; on any device.

Means are taken over runs of sequences of equal length, in float32 and in a fixed order, so the same pass gives the same
bits again, on a card too.
"""

from typing import Literal

import torch

from extract.engine.torch_packed_pass import groups_of
from extract.records import Int64

PooledKind = Literal["last", "first", "mean"]


def pool(states: torch.Tensor, bounds: Int64, kind: PooledKind) -> torch.Tensor:
    """[T, H] -> [B, H]; means are float32, the others have the type of `states`.

    Args:
        states: of sequences end to end.
        bounds: B + 1 cumulative lengths.
        kind: which state of each sequence.
    """
    if kind == "mean":
        means = [
            torch.unflatten(states[start : start + count * length], 0, (count, length)).mean(1, dtype=torch.float32)
            for start, count, length in groups_of(bounds)
        ]
        return means[0] if len(means) == 1 else torch.cat(means)
    chosen = bounds[1:] - 1 if kind == "last" else bounds[:-1]
    return states[torch.from_numpy(chosen).to(states.device)]
