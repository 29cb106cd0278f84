"""The decoder by the branches that a card takes: every operation keeps the rules of the card's kernels. See the rig.

What torch's own checks do not repeat of the kernels' demands is asked here, as it stands in torch's C++ code:
`ScaledBlas.cpp` and `RowwiseScaledMM.cu` for products with scales, `flash_api.cpp` for attention, and 16 bytes for
whatever is loaded in pieces of 16 bytes.
"""

import re
from typing import Any

import numpy as np
import pytest
import torch
from cuda_rig import LLAMA_8B, batch
from fake_card_rig import ARCHITECTURES, FakeCard, Indexed, fake_runtime, fused, on_fake_card
from torch.utils._pytree import tree_leaves

from extract.cuda.memory import memory_model

PRECISIONS = ["bfloat16", "fp8"]
KINDS = ["tokens", "last", "mean", "first"]
TYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32, torch.int64, torch.uint8, torch.bool)
PASS = 500
"""Tokens of a pass: not a multiple of anything."""

architectures = pytest.mark.parametrize("name", ARCHITECTURES)
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def rows(count: int, *, shared: bool = False, longest: int = 128) -> list[list[int]]:
    """Rows of many lengths, with a common beginning where they share."""
    draw = np.random.default_rng(3)
    found = [draw.integers(0, 1000, draw.integers(1, longest + 1)).tolist() for _ in range(count)]
    return [found[0][:1] * 90 + row[:38] for row in found] if shared else found


class Rules:
    """Asks of each operation what the card's kernels ask. `seen`: how often each came."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        name = str(func)
        self.seen[name] = self.seen.get(name, 0) + 1
        for one in tree_leaves((args, options)):
            if isinstance(one, torch.Tensor):
                assert one.device.type == "cuda", f"{name}: {one.device}"
                assert one.dtype in TYPES or one.dtype == torch.uint64, f"{name}: {one.dtype}"
        assert options.get("device") in (None, torch.device("cuda", 0), torch.device("cuda")), f"{name}: {options}"
        if "_scaled_mm" in name:
            scaled_product(*args, **options)
        elif "_varlen_attn" in name:
            attention(*args, **options)


def aligned(tensor: torch.Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes."""
    size = tensor.element_size()
    apart = [stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if stride > 1 and length > 1]
    return all(one * size % 16 == 0 for one in [tensor.storage_offset(), *apart])


def scaled_product(left: Any, right: Any, scale_a: Any, scale_b: Any, *rest: Any) -> None:
    bias, scale, out_dtype, _fast = rest
    (rows, inner), outputs = left.shape, right.shape[1]
    assert left.dtype == right.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16 and bias is scale is None
    assert left.stride() == (inner, 1) and right.stride() == (1, inner)
    assert inner % 16 == 0 and outputs % 16 == 0
    assert (tuple(scale_a.shape), tuple(scale_b.shape)) == ((rows, 1), (1, outputs))
    assert scale_a.stride(0) == 1 and scale_b.stride(1) == 1 and scale_a.is_contiguous() and scale_b.is_contiguous()
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert all(aligned(one) for one in (left, right.t(), scale_b)) and scale_a.storage_offset() == 0


def attention(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *rest: Any) -> None:
    causal, _scale, window, gqa = (*rest, False)[:4]  # defaults at the end are left out
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert key.shape == value.shape and query.shape[1] % key.shape[1] == 0 and query.shape[2] == key.shape[2]
    assert query.shape[2] % 8 == 0 and query.shape[2] <= 256 and gqa == (query.shape[1] != key.shape[1])
    assert all(one.stride(-1) == 1 and aligned(one) for one in (query, key, value))
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.is_contiguous() and cu_k.is_contiguous()
    assert cu_q.shape == cu_k.shape and cu_q.shape[0] >= 2 and 1 <= max_q <= max_k
    assert window[1] == 0 and causal == (window[0] == -1) and -1 <= window[0] < max_k


@architectures
@precisions
def test_every_operation_keeps_the_rules_of_the_card(name: str, precision: Any) -> None:
    card, rules = FakeCard(), Rules()
    decoder = on_fake_card(card, ARCHITECTURES[name], precision)
    card.meter.seen.append(rules)
    for work, share in ((rows(12), False), (rows(16, shared=True), True)):
        found = fake_runtime(card, decoder, pass_tokens=PASS, share=share)
        for kind in KINDS:
            with Indexed():
                states = found.layer_states(batch(work), kind, (1,))
            assert [one.shape[1] for one in states] == [ARCHITECTURES[name].hidden_size] * 2
    assert rules.seen["torch_attn._varlen_attn.default"] > 20
    assert rules.seen.get("aten._scaled_mm.default", 0) > (80 if precision == "fp8" else -1)
    assert not any(re.search("_local_scalar|nonzero|masked_select|is_nonzero", one) for one in rules.seen)


@precisions
@pytest.mark.parametrize("lengths", [[1], [1, 1], [2], [17], [128] * 3, [1, 128, 5]], ids=str)
def test_one_token_and_odd_numbers_of_them_keep_the_rules(precision: Any, lengths: list[int]) -> None:
    card, rules = FakeCard(), Rules()
    found = fake_runtime(card, on_fake_card(card, ARCHITECTURES["llama"], precision), pass_tokens=PASS)
    card.meter.seen.append(rules)
    for kind in KINDS:
        with Indexed():
            found.hidden_states(batch([[3] * length for length in lengths]), kind)
    assert rules.seen["torch_attn._varlen_attn.default"] >= 8


def test_windows_reach_the_kernel_as_it_counts_them() -> None:
    """A query that sees itself and 63 before it is `(63, 0)` there; a window as long as the rows is none."""
    card, windows = FakeCard(), []
    decoder = on_fake_card(card, ARCHITECTURES["gemma3"], "bfloat16")
    card.meter.seen.append(
        lambda func, args, options: windows.append(tuple(args[9])) if "varlen" in str(func) else None
    )
    for longest in (128, 64):
        with Indexed():
            fake_runtime(card, decoder, pass_tokens=PASS).hidden_states(batch([[1] * longest]), "tokens")
    assert windows == [(63, 0), (-1, 0), (-1, 0), (-1, 0)]


@pytest.mark.parametrize(
    "asks", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: torch.nonzero(x), lambda x: bool((x > 0).all())]
)
def test_an_operation_that_asks_the_card_for_a_number_would_be_seen(asks: Any) -> None:
    card = FakeCard()
    with card.used(), pytest.raises(RuntimeError):
        asks(torch.empty(4, device="cuda"))


def test_a_tensor_of_the_host_among_the_cards_would_be_seen() -> None:
    card = FakeCard()
    with card.used(), pytest.raises(RuntimeError, match="device"):
        torch.empty(4, device="cuda") + torch.empty(4)


class TestMemory:
    """The memory model against tensors that are alive: never less, and not much more."""

    @architectures
    @precisions
    @pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
    def test_passes_take_no_more_than_planned(self, name: str, precision: Any, compiled: bool) -> None:
        card, architecture = FakeCard(), ARCHITECTURES[name]
        decoder = on_fake_card(card, architecture, precision)
        if compiled:
            fused(decoder, card.meter)
        planned = memory_model(
            architecture, precision, backend="varlen", max_positions=128, fused=compiled, share=False
        )
        assert card.meter.held == planned.weight_bytes
        work = [[1] * 128 for _ in range(24)]  # three passes in flight
        for kind in ("tokens", "last", "mean"):
            with Indexed():
                fake_runtime(card, decoder, pass_tokens=1024, share=False).hidden_states(batch(work), kind)
        took = card.meter.peak - planned.weight_bytes
        assert took <= planned.pass_bytes(1024)
        assert took >= planned.pass_bytes(1024) / 1.3

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("kind", ["tokens", "mean"])
    def test_shared_prefixes_and_layers_take_no_more_than_planned(self, kind: Any, shared: bool) -> None:
        card, architecture = FakeCard(), ARCHITECTURES["biases"]
        decoder = fused(on_fake_card(card, architecture, "bfloat16"), card.meter)
        planned = memory_model(
            architecture, "bfloat16", backend="varlen", max_positions=128, fused=True, share=shared, num_layers=3
        )
        with Indexed():
            found = fake_runtime(card, decoder, pass_tokens=512, share=shared)
            found.layer_states(batch(rows(30, shared=True)), kind, (0, 1, 2))
        assert card.meter.peak <= planned.weight_bytes + planned.pass_bytes(512)

    @precisions
    def test_an_8b_model_at_the_largest_pass_takes_what_its_recipes_say(self, precision: Any) -> None:
        card, tokens = FakeCard(), 65_536
        decoder = fused(on_fake_card(card, LLAMA_8B, precision), card.meter)
        planned = memory_model(LLAMA_8B, precision, backend="varlen", max_positions=128, fused=True)
        assert card.meter.held == planned.weight_bytes
        for last in (False, True):
            with card.used(), torch.no_grad():
                ids, positions = (torch.empty(tokens, dtype=torch.int32, device="cuda") for _ in range(2))
                cu_seqlens = torch.empty(tokens // 128 + 1, dtype=torch.int32, device="cuda")
                states = decoder(ids, positions, cu_seqlens, 128, last=last)
            assert states.shape == (512 if last else tokens, 4096)
            del states, ids, positions, cu_seqlens
        took = card.meter.peak - planned.weight_bytes
        assert tokens * planned.token_bytes <= took <= planned.pass_bytes(tokens) <= 1.4 * took
