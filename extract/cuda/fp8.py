"""FP8 (E4M3) products: a scale for each row of the activations and for each output channel of the weights.

On a card one call of torch's scaled product; elsewhere its plain twin, which multiplies the same rounded numbers in
float32. Scales of activations are taken from the rows as they come (dynamic), so no calibration data is needed and a
row's states depend on that row alone.
"""

import torch

from extract.cpu.architecture import Architecture

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest E4M3 number."""
LEAST_PEAK = 1e-30
"""Peaks below it count as this: a row of zeros stays zeros."""
ROWS_AT_ONCE = 4096
"""Rows of a weight that are float32 at a time."""
ALIGNMENT = 16
"""Inputs and outputs of a linear are multiples of it: the scaled product takes no others."""


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows rounded to E4M3: [n, K] -> E4M3 [n, K] and float32 scales [n, 1], values = rounded * scale.

    A row that holds a value that is not finite becomes a row of NaN.
    """
    values = values.float()
    peak = values.abs().amax(dim=-1, keepdim=True)
    scale = peak.clamp(min=LEAST_PEAK) / LARGEST
    return (values / scale).clamp_(-LARGEST, LARGEST).to(FP8), scale


def quantized_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear's weight [N, K] of any type, first as bfloat16 and then as E4M3 [N, K] with float32 scales [N, 1].

    The one rounding that FP8 engines know, whether a build stores it or a load makes it: on any device the same bits.
    """
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        values[rows], scales[rows] = quantized(weight[rows].to(torch.bfloat16))
    return values, scales


def scaled_product(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, channel_scales: torch.Tensor
) -> torch.Tensor:
    """bfloat16 [n, N] of E4M3 values [n, K] with scales [n, 1] and E4M3 weights [N, K] with scales [N, 1]."""
    if not values.is_cuda:
        return emulated_product(values, scales, weight, channel_scales)
    return torch._scaled_mm(
        values,
        weight.t(),
        scale_a=scales,
        scale_b=channel_scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def emulated_product(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, channel_scales: torch.Tensor
) -> torch.Tensor:
    """What `scaled_product` computes, in float32 but for the last rounding."""
    return ((values.float() @ weight.float().t()) * scales * channel_scales.t()).to(torch.bfloat16)


def unfit(architecture: Architecture) -> str | None:
    """Why FP8 cannot run this decoder; `None`: it can."""
    a = architecture
    sizes = {
        "hidden size": a.hidden_size,
        "width of all queries": a.query_width,
        "width of keys and values": 2 * a.kv_width,
        "intermediate size": a.intermediate_size,
    }
    for name, size in sizes.items():
        if size % ALIGNMENT:
            return f"its {name} is {size}, and FP8 products take multiples of {ALIGNMENT}"
    return None
