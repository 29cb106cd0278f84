"""Rows and their reference states, dealt into three parts: one ranks, one searches, one confirms.

A set is chosen as the luckiest of many measurements, so its own figure flatters; that of rows without a say does not.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from extract.errors import SpecError
from extract.fidelity_check.measure import SAY_EVERY_S, ReferenceNotFinite
from extract.fidelity_check.reference import Reference
from extract.fidelity_check.set_trials import Trials

DEAL = (1, 3, 4)
"""Rows of each part, of eight: to rank, to search, to confirm. Ranks need the fewest, and are the most trials."""

RANK_TOKENS = 512
"""About as many tokens rank, however many rows there are: an order needs no narrow intervals, and every linear and
every layer is a trial over them."""


class TooFewRows(SpecError):
    """Rows that cannot be dealt into three parts."""

    template = "--rank-layers deals rows into three parts; {found} rows with tokens found, {expected} or more expected."


@dataclass(frozen=True, slots=True)
class DealtRows:
    """What is tried on each part."""

    rank: Trials
    search: Trials
    held: Trials


def deal(plain: Reference, ids: list[list[int]], seed: int, logits_bytes: int, say: Callable[[str], None]) -> DealtRows:
    """Run the reference over all rows, once.

    Args:
        plain: the reference.
        ids: token ids of each row.
        seed: of the intervals' resamples.
        logits_bytes: of a block of logits.
        say: called with a line when it begins, and every few seconds.

    Raises:
        TooFewRows: not a row for each part.
        ReferenceNotFinite: the reference has no numbers.
    """
    if len(ids) < sum(DEAL):
        raise TooFewRows(found=len(ids), expected=sum(DEAL))
    say(f"running {plain.name} in {plain.dtype}, row by row")
    states, said = [], time.perf_counter()
    for number, row in enumerate(ids):
        states.append(plain.states(row))
        if not np.isfinite(states[-1]).all():
            raise ReferenceNotFinite(name=plain.name, dtype=plain.dtype, row=f"{number:,}")
        if time.perf_counter() - said > SAY_EVERY_S:
            said = time.perf_counter()
            say(f"{number + 1:,} of {len(ids):,} rows")

    def part(first: int, count: int, enough: float = float("inf")) -> Trials:
        places, tokens = [], 0
        for place, row in enumerate(ids):
            if first <= place % sum(DEAL) < first + count and tokens < enough:
                places.append(place)
                tokens += len(row)
        return Trials(
            ids=[ids[place] for place in places],
            expected=[states[place] for place in places],
            head=plain.head,
            logits_bytes=logits_bytes,
            seed=seed,
        )

    rank, search, held = DEAL
    return DealtRows(part(0, rank, RANK_TOKENS), part(rank, search), part(rank + search, held))
