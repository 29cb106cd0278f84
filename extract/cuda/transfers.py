"""Passes on their way: ids go up, states come down, each in memory that nobody else touches until it has been taken.

A ring of slots of page-locked memory beside the card. A pass takes the next slot: its ids go up on one stream, it runs
on another, its states come down on a third while the next pass runs. A slot is taken again only after its states have
been copied out to where they belong: a full ring holds the host back, and nothing is written while it is still read.
States are kept alive on the card until they are down.

One thread gives and takes; it knows neither decoders nor batches.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from extract.records import Int32, Int64, States
from extract.tensorrt.card import Card, Event

NUM_SLOTS = 3
"""One pass runs while the one before comes down and the host copies out the one before that."""
ALIGNMENT = 4
"""Arrays of one upload begin at multiples of 16 bytes, as compiled kernels like them."""

Work = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
"""A pass: int32 arrays on the card -> states on the card. It asks the card for no numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where [n, H] states belong: `array[rows]`, in the array's type; `rows` is a slice or int64 [n]."""

    array: States
    rows: slice | Int64


@dataclass(slots=True)
class Slot:
    """Memory of one pass, and where its states go.

    Attributes:
        staged: page-locked int32, all arrays of the pass one after the other.
        uploaded: the same on the card.
        arrived: page-locked bytes that states come down to.
        number: of its pass, counted from 1.
        states: on the card, kept until they are down.
        targets: where they belong, one for each of `states`.
        downloaded: event behind the last copy down.
    """

    staged: torch.Tensor
    uploaded: torch.Tensor
    arrived: torch.Tensor
    number: int = 0
    states: tuple[torch.Tensor, ...] = ()
    targets: tuple[Target, ...] = ()
    downloaded: Event | None = None


class Transfers:
    """A ring of slots on one card."""

    def __init__(self, card: Card, num_slots: int = NUM_SLOTS) -> None:
        self._card = card
        self._up, self._compute, self._down = card.stream(), card.stream(), card.stream()
        ids, nothing = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.uint8)  # grow with the first pass
        self._idle = deque(Slot(staged=ids, uploaded=ids, arrived=nothing) for _ in range(num_slots))
        self._in_flight: deque[Slot] = deque()
        self._number = 0

    def start(self, arrays: Sequence[Int32], work: Work, targets: tuple[Target, ...]) -> int:
        """Queue one pass and the copies around it.

        Args:
            arrays: what goes up; they may change as soon as this returns.
            work: what runs on the card, given them in their order.
            targets: what the states of `work` are copied to, bit by bit, by `deliver`.

        Returns:
            The number of the pass. Where all slots are taken it first delivers the oldest pass.
        """
        if not self._idle:
            self.deliver(self._in_flight[0].number)
        slot = self._idle.popleft()
        try:
            given, uploaded = self._upload(slot, arrays)
            self._compute.wait(uploaded)
            states = self._compute.run(lambda: work(given))
            self._download(slot, states, targets)
        except BaseException:
            for stream in (self._up, self._compute, self._down):
                stream.synchronize()  # what was queued may still read and write the slot
            slot.states, slot.targets = (), ()
            self._idle.append(slot)
            raise
        self._number += 1
        slot.number = self._number
        self._in_flight.append(slot)
        return self._number

    def deliver(self, number: int) -> None:
        """Wait until pass `number` and those before it are down, and copy their states to their targets."""
        while self._in_flight and self._in_flight[0].number <= number:
            slot = self._in_flight.popleft()
            assert slot.downloaded is not None
            slot.downloaded.synchronize()
            arrived, place = slot.arrived.numpy(), 0
            for one, target in zip(slot.states, slot.targets, strict=True):
                part = arrived[place : place + one.nbytes].view(target.array.dtype)
                target.array[target.rows] = part.reshape(one.shape)
                place += one.nbytes
            slot.states, slot.targets, slot.downloaded = (), (), None
            self._idle.append(slot)

    def close(self) -> None:
        """Deliver what is under way, and give the memory back."""
        self.deliver(self._number)
        self._idle.clear()

    def _upload(self, slot: Slot, arrays: Sequence[Int32]) -> tuple[list[torch.Tensor], Event]:
        starts = np.cumsum([0, *(len(array) + -len(array) % ALIGNMENT for array in arrays)]).tolist()
        if len(slot.uploaded) < starts[-1]:
            room = starts[-1] + starts[-1] // 4
            slot.staged, slot.uploaded = self._card.pinned((room,), torch.int32), self._card.empty((room,), torch.int32)
        staged = slot.staged.numpy()
        for start, array in zip(starts, arrays, strict=False):
            staged[start : start + len(array)] = array
        self._up.copy(slot.uploaded[: starts[-1]], slot.staged[: starts[-1]])
        given = [slot.uploaded[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)]
        return given, self._up.record()

    def _download(self, slot: Slot, states: tuple[torch.Tensor, ...], targets: tuple[Target, ...]) -> None:
        size = sum(one.nbytes for one in states)
        if len(slot.arrived) < size:
            slot.arrived = self._card.pinned((size,), torch.uint8)
        slot.states, slot.targets = states, targets
        self._down.wait(self._compute.record())
        place = 0
        for one in states:
            part = slot.arrived[place : place + one.nbytes].view(one.dtype).view(one.shape)
            self._down.copy(part, one)
            place += one.nbytes
        slot.downloaded = self._down.record()
