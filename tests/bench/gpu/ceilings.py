"""How fast this card multiplies and copies: the limits that every engine is measured against.

Products [M, K] x [K, N] of the model's own linears, and the best square one: bfloat16, and FP8 with a scale a row and a
scale a column, as an FP8 engine needs it. Operands are drawn anew (zeros run faster than data), several copies take
turns, so that nothing is measured out of a cache.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from gpu.shapes import Shape
from gpu.time_box import Deadline, on_device, timed

ROWS = (8192, 32_768, 131_072)
TINY_ROWS = (64, 128)
SQUARES = (4096, 8192, 16_384)
TINY_SQUARES = (64, 128)
TYPES = ("bfloat16", "fp8")
COPIES = 3


def product(device: Any, kind: str, rows: int, outputs: int, inputs: int) -> Callable[[], object]:
    """One product after another over fresh operands; raises what torch raises where the device has none."""
    import torch

    sets = []
    for _ in range(COPIES):
        left = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
        right = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
        if kind == "bfloat16":
            sets.append((left, right.t()))
            continue
        scales = torch.rand(rows, 1, device=device) + 0.5, torch.rand(1, outputs, device=device) + 0.5
        sets.append((left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t(), *scales))
    turns = itertools.cycle(sets)
    if kind == "bfloat16":
        return lambda: torch.mm(*next(turns))

    def scaled() -> object:
        left, right, rows_scale, columns_scale = next(turns)
        return torch._scaled_mm(
            left, right, scale_a=rows_scale, scale_b=columns_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return scaled


def rate(
    device: Any, kind: str, rows: int, outputs: int, inputs: int, *, at_least_s: float, deadline: Deadline
) -> float:
    """FLOP/s of one product."""
    work = product(device, kind, rows, outputs, inputs)
    found = timed(lambda: on_device(device, work), at_least_s=at_least_s, runs=5, deadline=deadline)
    return 2.0 * rows * outputs * inputs / found.median


def products(device: Any, shapes: Iterable[Shape], deadline: Deadline, *, tiny: bool) -> dict[str, Any]:
    """By type: the best square, each linear of each shape at its best number of rows, and tokens/s from them.

    `tokens_per_s` is one token through all linears of a model, each at its own best rate: the ceiling of that model.
    """
    import torch

    at_least_s = 0.02 if tiny else 0.15
    found: dict[str, Any] = {}
    rates: dict[tuple[str, int, int], dict[int, float]] = {}
    for kind in TYPES:
        try:
            squares = {
                size: rate(device, kind, size, size, size, at_least_s=at_least_s, deadline=deadline)
                for size in (TINY_SQUARES if tiny else SQUARES)
                if deadline.affords(0.5, f"{kind} square of {size:,}")
            }
        except (RuntimeError, NotImplementedError, ValueError) as error:
            found[kind] = {"missing": _short(error)}
            continue
        found[kind] = {"square": {"by_size": squares, "best": max(squares.values(), default=0.0)}, "models": {}}
    for shape in shapes:
        for kind in [kind for kind in TYPES if "models" in found[kind]]:
            for (_, outputs, inputs), rows in itertools.product(shape.linears, TINY_ROWS if tiny else ROWS):
                key = (kind, outputs, inputs)
                if rows in rates.setdefault(key, {}) or not _fits(device, rows, outputs, inputs):
                    continue
                if deadline.affords(0.5, f"{kind} {rows:,} x {inputs:,} x {outputs:,}"):
                    rates[key][rows] = rate(
                        device, kind, rows, outputs, inputs, at_least_s=at_least_s, deadline=deadline
                    )
            found[kind]["models"][shape.name] = _model(shape, kind, rates)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _model(shape: Shape, kind: str, rates: dict[tuple[str, int, int], dict[int, float]]) -> dict[str, Any]:
    best: dict[str, float] = {}
    for name, outputs, inputs in shape.linears:
        seen = rates.get((kind, outputs, inputs), {})
        if not seen:
            return {"missing": f"{name} was not measured"}
        best[name] = max(seen.values())
    seconds = sum(2.0 * outputs * inputs / best[name] for name, outputs, inputs in shape.linears) * shape.layers
    by_rows = {
        name: {str(rows): found for rows, found in rates[(kind, outputs, inputs)].items()}
        for name, outputs, inputs in shape.linears
    }
    return {"flops": best, "by_rows": by_rows, "tokens_per_s": 1.0 / seconds}


def copies(device: Any, deadline: Deadline, *, tiny: bool) -> dict[str, float]:
    """Bytes/s: card to pinned memory and back, card to pageable memory, on the card (read and written counted)."""
    import torch

    size = 2**20 if tiny else 2**30
    at_least_s = 0.02 if tiny else 0.3
    on_card = [torch.randint(0, 255, (size,), dtype=torch.uint8, device=device) for _ in range(2)]
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pinned.random_()
    pageable = torch.zeros(size, dtype=torch.uint8)
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "device_to_pinned": (size, lambda: pinned.copy_(on_card[0], non_blocking=True)),
        "pinned_to_device": (size, lambda: on_card[1].copy_(pinned, non_blocking=True)),
        "device_to_pageable": (size, lambda: pageable.copy_(on_card[0])),
        "device_copy_read_and_write": (2 * size, lambda: on_card[1].copy_(on_card[0])),
    }
    found: dict[str, float] = {}
    for name, (moved, work) in ways.items():
        if deadline.affords(1.0, f"copy {name}"):
            run = timed(lambda work=work: on_device(device, work), at_least_s=at_least_s, runs=5, deadline=deadline)
            found[name] = moved / run.median
    return found


def _fits(device: Any, rows: int, outputs: int, inputs: int) -> bool:
    import torch

    if device.type != "cuda":
        return True
    needed = 2 * (rows * inputs + outputs * inputs) * (COPIES + 1) + 4 * rows * outputs
    return needed < 0.8 * torch.cuda.mem_get_info(device)[0]


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
