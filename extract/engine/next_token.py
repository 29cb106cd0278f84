"""How far the next token's distribution moves: KL divergence and agreement, from the logits of two sets of states.

The one place that computes either. Knows no models: a head is whatever turns states into logits; the one that is known
here is the token embedding, which a build has at hand (a checkpoint's own head is `torch_causal_head`).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from extract.engine.probe import Float32

Logits = npt.NDArray[np.float32]

LOGITS_BYTES = 32 * 2**20
"""Of one block of logits; about five such blocks are held at a time."""

SERIES_BELOW = 0.1
"""Where exp(d) - 1 - d is taken from its series: there, a difference of float32 values would be mostly rounding."""

SCALES = ("logit_scale", "logits_scaling", "final_logit_softcapping", "lm_head_multiplier", "output_multiplier")


class Head(Protocol):
    """Turns states into logits."""

    @property
    def vocab_size(self) -> int:
        """V."""

    def logits(self, states: Float32) -> Logits:
        """float32 [T, H] -> float32 [T, V], freshly allocated."""


@dataclass(frozen=True, slots=True, eq=False)
class NextTokens:
    """The next token's distribution at each of T states, against the expected one.

    Attributes:
        kl: float64 [T], KL(expected || found) in nats, 0 or more.
        same: bool [T], whether the most likely token is the same.
    """

    kl: npt.NDArray[np.float64]
    same: npt.NDArray[np.bool_]


def next_tokens(head: Head, found: Float32, expected: Float32, *, logits_bytes: int = LOGITS_BYTES) -> NextTokens:
    """Compare the distributions that follow from two sets of states, in blocks of tokens.

    Args:
        head: what makes logits of states.
        found: [T, H].
        expected: [T, H].
        logits_bytes: most bytes of a block of logits; changes nothing but memory and speed.
    """
    kl = np.zeros(len(found))
    same = np.zeros(len(found), np.bool_)
    step = max(1, logits_bytes // (8 * head.vocab_size))
    for start in range(0, len(found), step):
        part = slice(start, start + step)
        both = head.logits(np.concatenate([expected[part], found[part]]))  # one product with the head's weights
        size = len(both) // 2
        same[part] = both[:size].argmax(1) == both[size:].argmax(1)
        kl[part] = _divergence(both[:size], both[size:])
    return NextTokens(kl=kl, same=same)


def _divergence(expected: Logits, found: Logits) -> npt.NDArray[np.float64]:
    """KL of each row, [T, V] twice -> [T]; the logits are overwritten.

    Summed as p (exp(d) - 1 - d), with d the difference of the log probabilities: the same sum, since both distributions
    add up to 1, but of terms that are never negative, so that a small divergence is not the rest of a cancellation.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        p, q = _to_log_softmax(expected), _to_log_softmax(found)
        np.subtract(found, expected, out=found)
        d = np.nan_to_num(found, copy=False, nan=0.0, posinf=np.inf, neginf=-np.inf)  # both impossible: no difference
        small = np.abs(d) < SERIES_BELOW
        series = d * d * (np.float32(1 / 2) + d * (np.float32(1 / 6) + d * (np.float32(1 / 24) + d / np.float32(120))))
        series *= p
        q -= p
        np.multiply(d, p, out=d, where=p > 0)
        q -= np.where(p > 0, d, 0)
        terms = np.where(small & (p > 0), series, q)
    sums: npt.NDArray[np.float64] = terms.sum(axis=1, dtype=np.float64)
    return np.maximum(sums, 0.0)


def _to_log_softmax(logits: Logits) -> Logits:
    """Turn logits into log probabilities in place; returns the probabilities."""
    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits)
    total = probabilities.sum(axis=1, keepdims=True)
    logits -= np.log(total)
    probabilities /= total
    return probabilities


@dataclass(frozen=True, slots=True, eq=False)
class TiedHead:
    """The token embedding [V, H], float32, which is the output embedding too."""

    embedding: Float32

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.embedding)

    def logits(self, states: Float32) -> Logits:
        """float32 [T, H] -> float32 [T, V]."""
        return np.asarray(states @ self.embedding.T, np.float32)

    def compare(self, found: Float32, expected: Float32) -> tuple[float, float]:
        """Mean KL(expected || found) in nats, and how often the most likely token is the same, of [T, H] twice."""
        seen = next_tokens(self, found, expected)
        return float(seen.kl.mean()), float(seen.same.mean())


def tied_head(model: Any) -> TiedHead | None:
    """The head of a base model, where its config says that it is the embedding as it is."""
    config = model.config
    if not getattr(config, "tie_word_embeddings", False):
        return None
    if any(getattr(config, name, None) not in (None, 1, 1.0) for name in SCALES):
        return None
    embedding = model.get_input_embeddings().weight.detach().float().cpu().numpy()
    return TiedHead(embedding) if embedding.shape[1] == config.hidden_size else None
