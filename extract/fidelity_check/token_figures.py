"""Figures of single tokens, gathered window by window: a few numbers a token, never their states or logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from extract.engine.next_token import LOGITS_BYTES, Head, next_tokens
from extract.engine.probe import Float32, relative_error

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenFigures:
    """What is known of T compared tokens of R rows.

    Attributes:
        row: int64 [T], 0 to R - 1.
        position: int64 [T], place in the row.
        length: int64 [T], tokens of the row.
        rel_error, cosine: float64 [T].
        kl: float64 [T]; NaN without a head.
        same: float64 [T], 1 where the most likely next token is the same; NaN without a head.
        finite: bool [T], whether the engine's state is; where it is not, the other figures mean nothing.
        worst_row: largest relative error of a row, as contracts count it.
    """

    row: Int64
    position: Int64
    length: Int64
    rel_error: Float64
    cosine: Float64
    kl: Float64
    same: Float64
    finite: npt.NDArray[np.bool_]
    worst_row: float


class Gathered:
    """Takes rows as they come."""

    def __init__(self, head: Head | None, *, logits_bytes: int = LOGITS_BYTES) -> None:
        self._head = head
        self._logits_bytes = logits_bytes
        self._parts: list[dict[str, npt.NDArray[Any]]] = []
        self._num_rows = 0
        self._worst = 0.0

    def add(
        self,
        lengths: Sequence[int],
        positions: Sequence[Int64],
        found: Sequence[Float32],
        expected: Sequence[Float32],
    ) -> None:
        """Compare some rows.

        Args:
            lengths: tokens of each row.
            positions: which of them are compared, [K] a row.
            found: the engine's states of these, [K, H] a row.
            expected: the reference's.
        """
        errors, cosines = [], []
        for one, other in zip(found, expected, strict=True):
            error, cosine = _states(one, other)
            errors.append(error)
            cosines.append(cosine)
            self._worst = max(self._worst, relative_error(one, other))
        sizes = [len(one) for one in positions]
        flat = np.concatenate(found)
        finite = np.asarray(np.isfinite(flat).all(axis=1))
        kl, same = np.full(len(flat), np.nan), np.full(len(flat), np.nan)
        if self._head is not None and finite.any():
            seen = next_tokens(
                self._head, flat[finite], np.concatenate(expected)[finite], logits_bytes=self._logits_bytes
            )
            kl[finite], same[finite] = seen.kl, seen.same
        self._parts.append(
            {
                "row": np.repeat(np.arange(len(sizes)) + self._num_rows, sizes),
                "position": np.concatenate(positions),
                "length": np.repeat(np.asarray(lengths, np.int64), sizes),
                "rel_error": np.concatenate(errors),
                "cosine": np.concatenate(cosines),
                "kl": kl,
                "same": same,
                "finite": finite,
            }
        )
        self._num_rows += len(sizes)

    def figures(self) -> TokenFigures:
        """All rows so far."""
        whole = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        return TokenFigures(worst_row=self._worst, **whole)


def _states(found: Float32, expected: Float32) -> tuple[Float64, Float64]:
    """Relative error and cosine of each token's state, [L, H] twice -> [L] each, in float64."""
    one, other = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        size, own = np.linalg.norm(other, axis=1), np.linalg.norm(one, axis=1)
        error = np.linalg.norm(one - other, axis=1) / np.maximum(size, 1e-30)
        cosine = (one * other).sum(axis=1) / np.maximum(size * own, 1e-30)
    return error, cosine
