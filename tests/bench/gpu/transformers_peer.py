"""transformers on the same card, at its best: sdpa or flash attention, batches in the given order or by length.

What a careful user writes: the base model, padded batches, states of real tokens selected on the card and copied to
host memory. Whichever of its ways is fastest on a sample is the peer; all of them are reported.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpu.time_box import Deadline, on_host, timed

BATCHES = (64, 256, 1024)
TINY_BATCHES = (8,)


def attentions() -> dict[str, str | None]:
    """Ways of attention, and why one cannot be had."""
    flash = None if importlib.util.find_spec("flash_attn") else "flash-attn is not installed"
    return {"sdpa": None, "flash_attention_2": flash}


def batches(rows: Sequence[Any], size: int, *, by_length: bool) -> Iterator[tuple[Any, Any]]:
    """Padded `input_ids` and `attention_mask`, int64 [B, L] each."""
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row])) if by_length else range(len(rows))
    numbers = list(order)
    for start in range(0, len(numbers), size):
        members = [rows[number] for number in numbers[start : start + size]]
        longest = max(map(len, members))
        ids = np.zeros((len(members), longest), np.int64)
        mask = np.zeros((len(members), longest), np.int64)
        for place, row in enumerate(members):
            ids[place, : len(row)] = row
            mask[place, : len(row)] = 1
        yield ids, mask


def run(model: Any, device: Any, rows: Sequence[Any], size: int, *, by_length: bool, kind: str) -> list[Any]:
    """States in host memory, batch by batch."""
    import torch

    found = []
    with torch.inference_mode():
        for ids, mask in batches(rows, size, by_length=by_length):
            on_card = torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
            states = model(input_ids=on_card[0], attention_mask=on_card[1], use_cache=False).last_hidden_state
            if kind == "last":
                last = on_card[1].sum(1) - 1
                found.append(states[torch.arange(len(states), device=device), last].cpu())
            else:
                found.append(states[on_card[1].bool()].cpu())
    return found


def measure(
    model: Any, device: Any, rows: Sequence[Any], deadline: Deadline, *, tiny: bool, kind: str = "tokens"
) -> dict[str, Any]:
    """Tokens/s of every way on a part of the rows, and of the fastest on all of them.

    `model` is a base model on the device, whose attention is changed; rows are int32 [L] each; `kind` is "tokens" or
    "last".
    """
    import torch

    found: dict[str, Any] = {"kind": kind, "ways": {}, "missing": {}}
    sample = rows[: max(8, len(rows) // 4)]
    for attention, reason in attentions().items():
        if reason is not None:
            found["missing"][attention] = reason
            continue
        model.set_attn_implementation(attention)
        for size in TINY_BATCHES if tiny else BATCHES:
            for by_length in (False, True):
                name = f"{attention}, {size} rows, {'by length' if by_length else 'as given'}"
                if not deadline.affords(0.1 if tiny else 2.0, f"transformers: {name}"):
                    continue
                try:
                    found["ways"][name] = _rate(model, device, sample, size, by_length, kind, 1, deadline)
                except (torch.OutOfMemoryError, RuntimeError, ImportError) as error:
                    found["missing"][name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
    if not found["ways"]:
        return found
    best = max(found["ways"], key=found["ways"].get)
    attention, size, order = best.split(", ")
    model.set_attn_implementation(attention)
    rate = _rate(model, device, rows, int(size.split()[0]), order == "by length", kind, 2, deadline)
    return found | {"best": best, "tokens_per_s": rate}


def _rate(
    model: Any, device: Any, rows: Sequence[Any], size: int, by_length: bool, kind: str, runs: int, deadline: Deadline
) -> float:
    seconds = timed(
        lambda: on_host(device, lambda: run(model, device, rows, size, by_length=by_length, kind=kind)),
        at_least_s=0.0,
        runs=runs,
        most=runs,
        deadline=deadline,
    ).median
    return sum(map(len, rows)) / seconds
