"""How far the next token's distribution moves: KL divergence and agreement, where the head is the token embedding.

A head of its own is never loaded, so models with one get no such figure; neither do families that scale or cap logits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from extract.engine.probe import Float32

SCALES = ("logit_scale", "logits_scaling", "final_logit_softcapping", "lm_head_multiplier", "output_multiplier")


@dataclass(frozen=True, slots=True, eq=False)
class TiedHead:
    """The token embedding [V, H], float32, which is the output embedding too."""

    embedding: Float32

    def compare(self, found: Float32, expected: Float32) -> tuple[float, float]:
        """Mean KL(expected || found) in nats, and how often the most likely token is the same.

        Args:
            found: [T, H].
            expected: [T, H].
        """
        divergence, same = 0.0, 0
        for start in range(0, len(found), 256):
            right = _log_softmax(expected[start : start + 256] @ self.embedding.T)
            left = _log_softmax(found[start : start + 256] @ self.embedding.T)
            divergence += float((np.exp(right) * (right - left)).sum())
            same += int((right.argmax(1) == left.argmax(1)).sum())
        return divergence / len(found), same / len(found)


def tied_head(model: Any) -> TiedHead | None:
    """The head of a base model, where its config says that it is the embedding as it is."""
    config = model.config
    if not getattr(config, "tie_word_embeddings", False):
        return None
    if any(getattr(config, name, None) not in (None, 1, 1.0) for name in SCALES):
        return None
    embedding = model.get_input_embeddings().weight.detach().float().cpu().numpy()
    return TiedHead(embedding) if embedding.shape[1] == config.hidden_size else None


def _log_softmax(logits: Float32) -> Float32:
    logits = logits - logits.max(1, keepdims=True)
    shifted: Float32 = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return shifted
