"""Passes in flight on a card that does everything as late as it may: states arrive whole, in order, in their places.

The card of `stand_in.card` does nothing before somebody waits for it, and hands out memory full of NaN. That every wait
is needed is shown by taking it away.
"""

from collections.abc import Iterator
from typing import Any

import cuda_rig
import numpy as np
import pytest
import torch
from cuda_rig import runtime, states
from stand_in.card import StandInCard, StandInEvent, StandInStream
from test_packed_decoder import ROWS, Tiny, distance, write_tiny

from extract.cuda.host_card import HostCard
from extract.cuda.transfers import NUM_SLOTS, Target, Transfers

WIDTH = 5


def work(given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """States that say which ids made them, and the ids' doubles beside them."""
    ids = given[0].float()[:, None] + torch.arange(WIDTH) / 8
    return ids, ids * 2 + given[1].float()[:, None]


def passes(count: int) -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    sizes = [int(size) for size in draw.integers(1, 30, count)]
    return [tuple(draw.integers(0, 1000, size).astype(np.int32) for _ in range(2)) for size in sizes]  # type: ignore[misc]


def expected(one: tuple[Any, Any]) -> list[Any]:
    return [part.numpy() for part in work([torch.from_numpy(array) for array in one])]


def targets(one: tuple[Any, Any]) -> tuple[Target, ...]:
    """An array that is filled, and rows of another one."""
    count = len(one[0])
    rows = np.random.default_rng(count).permutation(2 * count)[:count]
    return (
        Target(np.full((count, WIDTH), np.nan, np.float32), slice(None)),
        Target(np.full((2 * count, WIDTH), np.nan, np.float32), rows),
    )


def run_all(card: Any, given: list[tuple[Any, Any]]) -> list[tuple[Target, ...]]:
    """Start every pass, delivering none before the ring is full, and all at the end."""
    ring = Transfers(card)
    into = [targets(one) for one in given]
    numbers = [ring.start(one, work, to) for one, to in zip(given, into, strict=True)]
    assert numbers == sorted(numbers)
    ring.deliver(numbers[-1])
    return into


def right(found: list[tuple[Target, ...]], given: list[tuple[Any, Any]]) -> bool:
    """Every state is there, and nothing else was written."""
    for one, by in zip(found, given, strict=False):
        for target, states_of in zip(one, expected(by), strict=True):
            if not np.array_equal(target.array[target.rows], states_of):
                return False
            if np.count_nonzero(~np.isnan(target.array)) != states_of.size:
                return False
    return True


@pytest.mark.parametrize("card", [StandInCard, lambda: HostCard(cuda_rig.CARD, 2**30)], ids=["late", "host"])
def test_states_of_many_passes_arrive_whole_and_in_their_places(card: Any) -> None:
    given = passes(3 * NUM_SLOTS + 1)
    assert right(run_all(card(), given), given)


@pytest.mark.parametrize("taken", ["wait", "synchronize"])
def test_without_any_one_kind_of_wait_states_are_wrong(taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = passes(3 * NUM_SLOTS + 1)
    kind = StandInStream if taken == "wait" else StandInEvent
    monkeypatch.setattr(kind, taken, lambda self, *_: None)
    assert not right(run_all(StandInCard(), given), given)


@pytest.mark.parametrize("stream", ["_compute", "_down"])
def test_without_the_wait_of_one_stream_states_are_wrong(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = passes(2)
    ring = Transfers(StandInCard())
    monkeypatch.setattr(getattr(ring, stream), "wait", lambda event: None, raising=False)
    into = [targets(one) for one in given]
    for one, to in zip(given, into, strict=True):
        ring.start(one, work, to)
    ring.deliver(2)
    assert not right(into, given)


def test_nothing_is_written_before_it_is_asked_for_unless_the_ring_is_full() -> None:
    ring, given = Transfers(StandInCard()), passes(NUM_SLOTS + 1)
    into = [targets(one) for one in given]
    for one, to in zip(given[:NUM_SLOTS], into, strict=False):
        ring.start(one, work, to)
    assert all(np.isnan(part.array).all() for to in into for part in to)
    ring.start(given[-1], work, into[-1])
    assert right(into[:1], given)
    assert all(np.isnan(part.array).all() for to in into[1:] for part in to)


def test_arrays_may_change_as_soon_as_a_pass_is_started() -> None:
    ring, given = Transfers(StandInCard()), passes(NUM_SLOTS)
    into = [targets(one) for one in given]
    for one, to in zip(given, into, strict=True):
        copies = [array.copy() for array in one]
        ring.start(copies, work, to)
        for array in copies:
            array[:] = -1
    ring.deliver(NUM_SLOTS)
    assert right(into, given)


def test_slots_are_used_again_and_grow_only_for_larger_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    card, sizes = StandInCard(), []
    pinned = card.pinned
    monkeypatch.setattr(card, "pinned", lambda shape, dtype: sizes.append(shape) or pinned(shape, dtype))
    ring, one = Transfers(card), passes(1)[0]
    for _ in range(4 * NUM_SLOTS):
        ring.start(one, work, targets(one))
    assert len(sizes) == 2 * NUM_SLOTS  # ids and states of each slot


def test_a_pass_that_fails_leaves_the_others_and_the_ring_as_they_were() -> None:
    ring, given = Transfers(StandInCard()), passes(2 * NUM_SLOTS)
    into = [targets(one) for one in given]

    def broken(ids: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        work(ids)
        raise torch.OutOfMemoryError("out of memory")

    for one, to in zip(given, into, strict=True):
        for _ in range(NUM_SLOTS + 1):
            with pytest.raises(torch.OutOfMemoryError):
                ring.start(one, broken, targets(one))
        number = ring.start(one, work, to)
    ring.deliver(number)
    assert right(into, given)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    yield write_tiny(tmp_path_factory.mktemp("llama"), "llama", {})


@pytest.mark.parametrize("share", [True, False], ids=["sharing", "plain"])
@pytest.mark.parametrize("kind", ["tokens", "last", "mean", "first"])
def test_a_whole_decoder_on_a_late_card_gives_the_states_of_this_machine(tiny: Tiny, kind: str, share: bool) -> None:
    expected_states = states(runtime(tiny, share=share), kind=kind)
    late = runtime(tiny, share=share, card=StandInCard())
    assert distance(states(late, ROWS, kind), expected_states) <= 1e-6
