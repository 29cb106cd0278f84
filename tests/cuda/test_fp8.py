"""FP8 products: rounding row by row, and the plain twin against what torch's own scaled product gives here."""

import numpy as np
import pytest
import torch
from test_own_architecture import small_model

from extract.cpu.architecture import Architecture
from extract.cuda import fp8
from extract.cuda.fp8 import FP8, LARGEST, emulated_product, quantized, quantized_weight, scaled_product, unfit
from extract.cuda.linears import ScaledLinear
from extract.engine.own_architecture import architecture_of


def rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def test_rounding_moves_no_value_by_more_than_a_sixteenth_of_it_or_the_smallest_step() -> None:
    given = rows(50, 64) * torch.logspace(-20, 20, 50)[:, None]
    values, scales = quantized(given)
    assert values.dtype == FP8 and scales.shape == (50, 1)
    assert bool((values.float().abs().amax(dim=1) == LARGEST).all())
    error = (values.float() * scales - given).abs()
    assert bool((error <= torch.maximum(given.abs() / 16, scales * 2.0**-10) * 1.0001).all())


def test_a_row_depends_on_itself_alone() -> None:
    given = rows(9, 32)
    whole = quantized(given)
    for number in range(9):
        alone = quantized(given[number : number + 1])
        assert torch.equal(alone[0].float(), whole[0][number : number + 1].float())
        assert torch.equal(alone[1], whole[1][number : number + 1])


def test_a_weight_is_rounded_as_bfloat16_however_many_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = rows(9, 32) * 1.001
    expected = quantized(given.bfloat16())
    for rows_at_once in (1, 4, 4096):
        monkeypatch.setattr(fp8, "ROWS_AT_ONCE", rows_at_once)
        values, scales = quantized_weight(given)
        assert torch.equal(values.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scales, expected[1])


def test_rows_of_zeros_stay_zeros_and_broken_rows_stay_broken() -> None:
    given = rows(4, 16)
    given[0], given[1, 3], given[2, 3] = 0, float("nan"), float("inf")
    found = scaled_product(*quantized(given), *quantized(rows(16, 16, 1)))
    assert bool((found[0] == 0).all())
    assert not torch.isfinite(found[1:3]).any()
    assert torch.isfinite(found[3]).all()


def test_the_product_of_rounded_numbers_is_exact_but_for_bfloat16() -> None:
    given, weight = rows(33, 64), rows(48, 64, 1)
    (values, scales), (rounded, channels) = quantized(given), quantized(weight)
    exact = (values.double() * scales.double()) @ (rounded.double() * channels.double()).t()
    found = emulated_product(values, scales, rounded, channels)
    assert found.dtype == torch.bfloat16
    assert bool(((found.double() - exact).abs() <= exact.abs() / 256 + 1e-5).all())


def test_torch_scaled_product_agrees_with_the_twin() -> None:
    """Row by row here; a card's own kernel is called with the same arguments."""
    given, weight = rows(32, 64), rows(48, 64, 1)
    (values, scales), (rounded, channels) = quantized(given), quantized(weight)
    try:
        found = torch._scaled_mm(
            values, rounded.t(), scale_a=scales, scale_b=channels.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        pytest.skip(f"torch has no row-wise scaled product on this CPU: {str(error).splitlines()[0]}")
    expected = emulated_product(values, scales, rounded, channels)
    assert bool(((found.float() - expected.float()).abs() <= expected.float().abs() / 128 + 1e-3).all())


def test_a_linear_gives_any_of_its_outputs_alone() -> None:
    linear = ScaledLinear(*quantized(rows(48, 32, 1)), rows(1, 48, 2)[0].bfloat16())
    operand = quantized(rows(7, 32))
    whole = linear(operand)
    assert torch.equal(linear(operand, 16), whole[:, 16:])
    assert torch.equal(linear(operand, 0, 16), whole[:, :16])
    exact = rows(7, 32).double() @ rows(48, 32, 1).double().t() + rows(1, 48, 2).double()
    assert np.linalg.norm(whole.double() - exact) / np.linalg.norm(exact) < 0.06


@pytest.mark.parametrize(("options", "problem"), [
    ({}, None),
    (
        {"head_dim": 12, "num_key_value_heads": 1},
        "its width of keys and values is 24, and FP8 products take multiples of 16",
    ),
    ({"intermediate_size": 40}, "its intermediate size is 40, and FP8 products take multiples of 16"),
])  # fmt: skip
def test_sizes_that_fp8_products_do_not_take_are_named(options: dict[str, int], problem: str | None) -> None:
    architecture: Architecture = architecture_of(small_model("llama", **options), 16)
    assert unfit(architecture) == problem
