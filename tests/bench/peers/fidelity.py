"""Is what an engine gives the model's hidden states? Asked before its time counts.

Against the float32 reference: cosine and relative error of every row, then, on the first rows, what a reader of the
states would notice: the next token through the head, as KL and top-1 agreement. The limits only separate an engine of
its type from one that is wrong (rows in another order, no final norm, another pooling); how near it is stands in the
table.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

MAX_HEAD_STATES = 4096
"""States that the head reads; more change the third digit."""

MIN_COSINE_MEAN = {"float32": 0.99999, "bfloat16": 0.999, "int8": 0.97}
MIN_COSINE_P1 = {"float32": 0.9999, "bfloat16": 0.99, "int8": 0.7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How near states are to the reference.

    Attributes:
        rel_error: norm of the difference over the norm of the reference, of all states together.
        kl: mean KL of the next token in nats; `None` where states are no token's (kind mean).
        top1: how often the most likely next token is the same.
    """

    cosine_mean: float
    cosine_p1: float
    rel_error: float
    kl: float | None
    top1: float | None


class WrongOutput(Exception):
    """The states are not the model's, or not of all rows."""


def compare(found: Float32, reference: Float32, head: Any, dtype: str) -> Fidelity:
    """Both [N, H], the same rows in the same order; `head` is a float32 tensor [V, H], or `None`.

    Raises:
        WrongOutput: other shape, values that are not finite, or further off than the dtype explains.
    """
    if found.shape != reference.shape:
        raise WrongOutput(f"states {list(found.shape)}, expected {list(reference.shape)}")
    if not np.isfinite(found).all():
        raise WrongOutput("states are not finite")
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(reference, axis=1)
    cosines = (found * reference).sum(1) / np.maximum(lengths, 1e-30)
    kl, top1 = (None, None) if head is None else _next_token(found, reference, head)
    fidelity = Fidelity(
        cosine_mean=float(cosines.mean()),
        cosine_p1=float(np.quantile(cosines, 0.01)),
        rel_error=float(np.linalg.norm(found - reference) / np.linalg.norm(reference)),
        kl=kl,
        top1=top1,
    )
    if fidelity.cosine_mean < MIN_COSINE_MEAN[dtype] or fidelity.cosine_p1 < MIN_COSINE_P1[dtype]:
        raise WrongOutput(
            f"cosine mean {fidelity.cosine_mean:.5f}, p1 {fidelity.cosine_p1:.5f}, "
            f"expected {MIN_COSINE_MEAN[dtype]} and {MIN_COSINE_P1[dtype]} for {dtype}"
        )
    return fidelity


def _next_token(found: Float32, reference: Float32, head: Any) -> tuple[float, float]:
    import torch

    kl, same, count = 0.0, 0, min(len(found), MAX_HEAD_STATES)
    with torch.inference_mode():
        for start in range(0, count, 256):
            p, q = (
                torch.log_softmax(torch.from_numpy(states[start : min(start + 256, count)]) @ head.T, -1)
                for states in (reference, found)
            )
            kl += float((p.exp() * (p - q)).sum())
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
    return kl / count, same / count


def head_of(checkpoint: Path) -> Any:
    """The checkpoint's output embedding, float32 [V, H]; tied ones stand under the input embedding's name."""
    from safetensors import safe_open

    where = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            where |= dict.fromkeys(tensors.keys(), file)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight"):
        if name in where:
            with safe_open(where[name], "pt") as tensors:
                return tensors.get_tensor(name).float()
    raise FileNotFoundError(f"{checkpoint}: no output embedding found")
