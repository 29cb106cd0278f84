"""Where sequences begin and end in the row of one packed pass, and how attention learns of it.

A context variable carries it, set around the forward: a keyword argument of `forward` is dropped by some families on
its way down to attention. Knows no model and no tensors.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from extract.errors import EngineRefused

Boundaries = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
"""Cumulative lengths of B sequences: B + 1 whole numbers, first 0, last T."""


class PackedAttentionRefused(EngineRefused):
    """A model asks its attention for something that the packed one does not compute."""

    template = "packed attention: {module} passes {found}, {expected}. Build this checkpoint with layout dense."


class Group(NamedTuple):
    """Consecutive sequences of equal length, the first one at token `start`."""

    start: int
    num_sequences: int
    length: int


@dataclass(slots=True)
class PackedPass:
    """One forward pass over a packed row, and how often attention was called in it."""

    groups: tuple[Group, ...]
    num_tokens: int
    calls: int = 0

    @property
    def longest(self) -> Group:
        """The group of the longest sequences."""
        return max(self.groups, key=lambda group: group.length)


_current: ContextVar[PackedPass] = ContextVar("packed_pass")


def groups_of(cu_seqlens: npt.NDArray[np.integer[Any]]) -> tuple[Group, ...]:
    """Runs of equal length in `cu_seqlens` [B + 1]; few and long where the caller sorts by length."""
    lengths = np.diff(cu_seqlens)
    bounds = np.concatenate(([0], np.flatnonzero(np.diff(lengths)) + 1, [len(lengths)]))
    return tuple(
        Group(int(cu_seqlens[first]), int(last - first), int(lengths[first])) for first, last in pairwise(bounds)
    )


@contextmanager
def packed_pass(groups: tuple[Group, ...], num_tokens: int) -> Iterator[PackedPass]:
    """While inside, packed attention works on these groups."""
    this_pass = PackedPass(groups, num_tokens)
    token = _current.set(this_pass)
    try:
        yield this_pass
    finally:
        _current.reset(token)


def current_pass() -> PackedPass:
    """The pass that is running.

    Raises:
        PackedAttentionRefused: none is; a packed model was called without boundaries.
    """
    try:
        return _current.get()
    except LookupError:
        raise PackedAttentionRefused(
            module="a model", found="a row without boundaries", expected="only TorchDecoder may run a packed model"
        ) from None
