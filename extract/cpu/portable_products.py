"""Products of rows with weights through torch: oneDNN's prepacked ones where they are right, plain ones elsewhere.

A product takes an operand's rows [m, K] and gives [m, N], without bias. Which ones this CPU and this build of torch do
right is found by trying them on numbers whose product is known, extremes included: an int8 product that saturates half
way, as on CPUs without VNNI, then shows itself. Knows nothing of norms, rotations and threads; how many threads
torch takes is the caller's business.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from extract.cpu.kernels import Precision

Product = Callable[[torch.Tensor], torch.Tensor]
ZERO_POINT = 128
"""Byte that stands for 0 in an int8 operand."""


@dataclass(frozen=True, slots=True)
class Channels:
    """Weights of a linear as they are multiplied.

    Attributes:
        weights: [N, K] float32, bfloat16 or int8, contiguous.
        scales: float32 [N], of int8 weights (else ones).
        rows_hint: rows of a usual operand.
    """

    weights: torch.Tensor
    scales: torch.Tensor
    rows_hint: int


Packer = Callable[[Channels], Product]


def prepacked(channels: Channels) -> Product:
    """Weights in oneDNN's own layout; the product has their type."""
    packed = torch.ops.mkldnn._reorder_linear_weight(channels.weights, channels.rows_hint)
    linear = torch.ops.mkldnn._linear_pointwise.default

    def product(rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = linear(rows, packed, None, "none", [], "")
        return result

    return product


def prepacked_int8(channels: Channels, result: torch.dtype = torch.bfloat16) -> Product:
    """Bytes times int8 in oneDNN's own layout; the product is scaled by channel."""
    packed = torch.ops.onednn.qlinear_prepack(channels.weights, [channels.rows_hint, channels.weights.shape[1]])
    linear = torch.ops.onednn.qlinear_pointwise.default
    zero_points = torch.zeros(len(channels.weights), dtype=torch.int64)
    scales = channels.scales

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = linear(
            rows, 1.0, ZERO_POINT, packed, scales, zero_points, None, 1.0, 0, result, "none", [], ""
        )
        return product

    return multiply


def prepacked_int8_to_float32(channels: Channels) -> Product:
    """The same in float32: more memory to write, but every CPU with the instructions can."""
    return prepacked_int8(channels, torch.float32)


def plain(channels: Channels) -> Product:
    """`F.linear` in float32."""
    weights = channels.weights.float()
    return lambda rows: functional.linear(rows.float(), weights)


def plain_int8(channels: Channels) -> Product:
    """The integers multiplied as float32: sums beyond 2**24 are rounded to 24 bits, as the result is anyway."""
    weights = channels.weights.float()
    scales = channels.scales

    def product(rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows.float() - ZERO_POINT, weights) * scales

    return product


CANDIDATES: dict[Precision, tuple[Packer, ...]] = {
    "float32": (prepacked, plain),
    "bfloat16": (prepacked, plain),
    "int8": (prepacked_int8, prepacked_int8_to_float32, plain_int8),
}
"""Best first; the last one is right everywhere."""


def packer(precision: Precision) -> Packer:
    """The first of `CANDIDATES` that is right on this machine."""
    *candidates, last = CANDIDATES[precision]
    return next((candidate for candidate in candidates if is_right(candidate, precision)), last)


def is_right(candidate: Packer, precision: Precision) -> bool:
    """Whether a product of small integers with all signs, and of the largest bytes, comes out as it must."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    steps = torch.arange(24 * 128, dtype=torch.float32)
    weights, rows = (steps[: 24 * 128] % 11 - 5).view(24, 128), (steps[: 16 * 128] % 7 - 3).view(16, 128)
    scales = torch.ones(24)
    if precision == "int8":
        weights, rows = torch.where(weights > 0, 127.0, -127.0), torch.where(rows >= 0, 127.0, -128.0)
        scales = torch.full((24,), 2.0**-6)
    expected = rows.double() @ weights.double().T * scales
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
    try:
        product = candidate(Channels(weights.to(types[precision]), scales, len(rows)))
        found = product((rows + ZERO_POINT).to(torch.uint8) if precision == "int8" else rows.to(types[precision]))
    except (RuntimeError, AttributeError, NotImplementedError):  # torch was built without it, or the CPU is too old
        return False
    return bool(((found.double() - expected).abs() <= 2**-8 * expected.abs().clamp(min=1)).all())
