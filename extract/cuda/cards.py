"""Which of the visible cards an engine runs on, and whether there is room on it.

CUDA_VISIBLE_DEVICES decides what is visible, by numbers, UUIDs or names of MIG parts, and torch numbers what is left
from 0: who runs several workers gives each its own. Choosing is a pure function of facts; only `visible_cards` and
`free_memory` ask torch. Free memory is asked of the chosen card alone, since asking takes memory of it.
"""

import os
from dataclasses import dataclass

import torch

from extract.engine.contract import Device, EngineDoesNotFit
from extract.tensorrt.card import Card

GIB = 2**30
BUILD = "extract build CHECKPOINT -o ENGINE"
BUILD_HERE = f"Build an engine for this card: {BUILD}"
SAYS_WHY = "extract doctor says why."


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleCard:
    """A card that this process may use; `index` is torch's number of it."""

    index: int
    device: Device
    total_bytes: int


def visible_cards() -> list[VisibleCard]:
    """The cards that torch can use; empty where there is none."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        device = Device(
            type="cuda",
            name=facts.name,
            compute_capability=f"{facts.major}.{facts.minor}",
            num_sms=facts.multi_processor_count,
        )
        found.append(VisibleCard(index=index, device=device, total_bytes=facts.total_memory))
    return found


def free_memory(card: VisibleCard) -> int:
    """Bytes that nobody on the card has taken; memory that this process holds without using it counts as free."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(card.index)
    return int(free)


def choose_card(cards: list[VisibleCard], wanted: Device | None, path: object) -> VisibleCard:
    """The first card that is of the kind that an engine is committed to.

    Args:
        cards: that are visible.
        wanted: the engine's device; `None`: any card will do.
        path: what needs it, for the message.

    Raises:
        EngineDoesNotFit: no card, or only others.
    """
    if not cards:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise EngineDoesNotFit(
            path=path,
            field="device",
            expected="cuda" if wanted is None else f"cuda ({wanted.name})",
            found="no CUDA device that torch can use"
            + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"),
            advice=SAYS_WHY if wanted is None else f"{SAYS_WHY} Or build one for this machine: {BUILD}",
        )
    different = [(card, difference) for card in cards if (difference := _difference(card.device, wanted))]
    if len(different) == len(cards):
        field, found, expected = different[0][1]
        names = sorted({card.device.name for card in cards})
        raise EngineDoesNotFit(
            path=path,
            field=field,
            expected=expected,
            found=found if len(cards) == 1 else f"{found} ({len(cards)} cards: {', '.join(names)})",
            advice=BUILD_HERE,
        )
    unfit = {card.index for card, _ in different}
    return next(card for card in cards if card.index not in unfit)


def check_room(card: VisibleCard, free_bytes: int, needed_bytes: int, path: object, advice: str) -> None:
    """Refuse a card on which an engine has no room.

    Raises:
        EngineDoesNotFit: with what is free and what is needed.
    """
    if free_bytes >= needed_bytes:
        return
    others = "" if needed_bytes > card.total_bytes else "Stop what else runs on that card, or choose another one with "
    others += "CUDA_VISIBLE_DEVICES. " if others else ""
    raise EngineDoesNotFit(
        path=path,
        field="free memory on its card:",
        expected=f"{needed_bytes / GIB:.1f} GiB",
        found=f"{free_bytes / GIB:.1f} of {card.total_bytes / GIB:.1f} GiB ({card.device.name})",
        advice=f"{others}{advice}",
    )


def take_card(card: VisibleCard) -> Card:
    """The chosen card, made this process's own."""
    from extract.tensorrt.cuda_card import CudaCard

    return CudaCard(card.index, card.device, None)


def _difference(found: Device, wanted: Device | None) -> tuple[str, object, object] | None:
    """The first thing in which a card is not the one that was asked for: kernels are chosen by all of them."""
    if wanted is None:
        return None
    for field, name in (("compute_capability", "compute capability"), ("name", "card"), ("num_sms", "multiprocessors")):
        here, expected = getattr(found, field), getattr(wanted, field)
        if expected is not None and here != expected:
            return name, here, expected
    return None
