"""What only a card can show: its kernels agree with the plain twins that every other test here runs.

Run it where there is a card (`pytest tests/cuda/test_on_a_card.py`). Each test runs on this machine's CPU too, where it
compares a twin with itself, so that the tests themselves are known to work before a card sees them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_rig import CARD, contract, positions_of
from safetensors.torch import save_file
from test_own_architecture import case_name
from test_packed_decoder import LONGEST, RICH, ROWS, Tiny, distance, joined, written

from extract.cpu.weights import open_weights
from extract.cuda.attention import Spans, attend, choose_backend, plain_attention
from extract.cuda.cards import take_card, visible_cards
from extract.cuda.fp8 import emulated_product, quantized, scaled_product
from extract.cuda.fp8_weights import fp8_kinds, fp8_tensors
from extract.cuda.host_card import HostCard
from extract.cuda.memory import memory_model
from extract.cuda.opening import can_fuse
from extract.cuda.regions import fuse
from extract.cuda.runtime import CudaRuntime
from extract.cuda.weights import COMPUTED, load_decoder
from extract.cuda.weights_writing import write_tensors
from extract.records import TokenBatch
from extract.shards.values import as_float32

no_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA card")
DEVICES = ["cpu", pytest.param("cuda", marks=no_card)]
with_device = pytest.mark.parametrize("device", DEVICES)

rich = pytest.fixture(scope="module", params=RICH, ids=case_name, name="rich")(written)
one = pytest.fixture(scope="module", params=RICH[:1], ids=case_name, name="one")(written)


def drawn(*shape: int, device: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def spans(queries: list[int], keys: list[int], device: str) -> Spans:
    ends = [torch.tensor([0, *np.cumsum(one)], dtype=torch.int32, device=device) for one in (queries, keys)]
    return Spans(cu_queries=ends[0], cu_keys=ends[1], max_queries=max(queries), max_keys=128)


LENGTHS = [1, 2, 127, 128, 64, 17, 100, 3]
CASES: list[dict[str, Any]] = [
    {"queries": LENGTHS, "keys": LENGTHS},
    {"queries": LENGTHS, "keys": LENGTHS, "window": 5},
    {"queries": LENGTHS, "keys": LENGTHS, "window": 1},
    {"queries": LENGTHS, "keys": LENGTHS, "window": 4096},
    {"queries": [1, 1, 30, 128, 1, 2, 50, 3], "keys": LENGTHS},
    {"queries": [1, 1, 30, 128, 1, 2, 50, 3], "keys": LENGTHS, "window": 9},
    {"queries": [1] * 8, "keys": LENGTHS},
    {"queries": [1] * 8, "keys": LENGTHS, "window": 9},
]


@with_device
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128), (3, 1, 72), (2, 1, 256)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_of_the_card_is_the_plain_one(
    device: str, case: dict[str, Any], heads: int, kv_heads: int, head_dim: int
) -> None:
    window, where = case.get("window"), spans(case["queries"], case["keys"], device)
    query = drawn(sum(case["queries"]), heads, head_dim, device=device)
    key, value = (drawn(sum(case["keys"]), kv_heads, head_dim, device=device, seed=seed) for seed in (1, 2))
    options: dict[str, Any] = {"scale": head_dim**-0.5, "window": window, "softcap": None}
    found = attend("varlen" if device == "cuda" else "plain", query, key, value, where, **options)
    exact = plain_attention(query.double().cpu(), key.double().cpu(), value.double().cpu(), _on_cpu(where), **options)
    assert found.dtype == torch.bfloat16
    assert distance(found.double().cpu().numpy(), exact.numpy()) <= 5e-3


def _on_cpu(where: Spans) -> Spans:
    return Spans(
        cu_queries=where.cu_queries.cpu(),
        cu_keys=where.cu_keys.cpu(),
        max_queries=where.max_queries,
        max_keys=where.max_keys,
    )


@with_device
@pytest.mark.parametrize("rows", [1, 15, 16, 257, 8352])
def test_the_scaled_product_of_the_card_is_the_emulated_one(device: str, rows: int) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no FP8")
    inputs, outputs = (512, 768) if device == "cuda" else (64, 48)
    given = quantized(drawn(rows, inputs, device=device) * torch.logspace(-3, 3, rows, device=device)[:, None])
    weight = quantized(drawn(outputs, inputs, device=device, seed=1))
    expected = emulated_product(*given, *weight).double()
    for start, stop in ((0, outputs), (16, outputs), (0, 32)):
        found = scaled_product(*given, weight[0][start:stop], weight[1][start:stop]).double()
        row_sizes = expected.norm(dim=1, keepdim=True) / outputs**0.5
        assert bool(
            ((found - expected[:, start:stop]).abs() <= 0.02 * row_sizes + expected[:, start:stop].abs() / 64).all()
        )


@with_device
def test_an_engine_that_stores_fp8_is_rounded_and_loaded_to_the_bits_of_this_machine(
    one: Tiny, device: str, tmp_path: Path
) -> None:
    """Rounded there by the build, and read there block by block to its place."""
    a, path = one.architecture, tmp_path / "model.safetensors"
    model = one.model().bfloat16().state_dict()
    write_tensors(path, fp8_kinds(a, torch.bfloat16), fp8_tensors(model, a, torch.bfloat16, torch.device(device)))
    options: dict[str, Any] = {"max_positions": LONGEST, "backend": "plain"}
    with open_weights(path) as weights:
        found = load_decoder(a, weights, "fp8", device=device, **options)
    save_file(model, tmp_path / "plain.safetensors")
    with open_weights(tmp_path / "plain.safetensors") as weights:
        expected = load_decoder(a, weights, "fp8", device="cpu", **options)
    for name, tensor in expected.named_buffers():
        there = found.get_buffer(name).cpu()
        assert there.dtype == tensor.dtype, name
        assert torch.equal(there.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def on(tiny: Tiny, device: str, precision: Any, *, share: bool, compiled: bool = False) -> CudaRuntime:
    """A runtime with the fastest attention of the device."""
    found = contract(tiny.architecture, precision)
    facts = visible_cards()[0] if device == "cuda" else None
    capability = None if facts is None else facts.device.compute_capability
    with open_weights(tiny.path) as weights:
        decoder = load_decoder(
            tiny.architecture,
            weights,
            precision,
            device=device,
            max_positions=LONGEST,
            backend=choose_backend(tiny.architecture, COMPUTED[precision], device, capability).backend,
        )
    if compiled:
        fuse(decoder.modules())
    if facts is not None:
        torch.cuda.synchronize()
    return CudaRuntime(found, decoder, HostCard(CARD, 2**34) if facts is None else take_card(facts), share=share)


def batch() -> TokenBatch:
    input_ids, cu_seqlens = joined(ROWS)
    return TokenBatch(input_ids=input_ids, cu_seqlens=cu_seqlens, members=np.arange(len(ROWS)))


NEAR = {"float32": 1e-5, "bfloat16": 0.06, "fp8": 0.5}
"""Tiny models amplify rounding; a wrong kernel is off by 1."""


@with_device
@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize("kind", ["tokens", "last", "mean", "first"])
def test_states_of_the_card_are_this_machines(rich: Tiny, device: str, precision: Any, kind: Any) -> None:
    if device == "cpu" and (precision, kind) != ("bfloat16", "last"):
        pytest.skip("on a CPU one of them shows that the test works")
    expected = on(rich, "cpu", precision, share=False).layer_states(batch(), kind, (2,))
    for share in (True, False):
        found = on(rich, device, precision, share=share)
        for _ in range(3):  # slots are used again
            for states, other in zip(found.layer_states(batch(), kind, (2,)), expected, strict=True):
                assert distance(as_float32(states), as_float32(other)) <= NEAR[precision]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=no_card)])
@pytest.mark.parametrize("precision", NEAR)
def test_compiled_regions_give_the_states_of_plain_ones(rich: Tiny, device: str, precision: Any) -> None:
    if not can_fuse():
        pytest.skip("torch cannot compile for this card: no Triton")
    plain, compiled = (on(rich, device, precision, share=True, compiled=one) for one in (False, True))
    for kind in ("tokens", "last"):
        expected = as_float32(plain.hidden_states(batch(), kind))
        assert distance(as_float32(compiled.hidden_states(batch(), kind)), expected) <= 0.3 * NEAR[precision]


@with_device
def test_a_row_that_is_not_finite_spoils_no_other(one: Tiny, device: str) -> None:
    # oneDNN's bfloat16 products themselves read into the next row and multiply by zero, see `cpu.portable_packing`.
    found = on(one, device, "float32" if device == "cpu" else "bfloat16", share=False)
    embed: Any = found.decoder.embed
    embed.table[ROWS[0][0]] = float("nan")
    with_it = [ROWS[0][0] in row for row in ROWS]
    states = as_float32(found.hidden_states(batch(), "last"))
    assert np.isfinite(states).all(axis=1).tolist() == [not broken for broken in with_it]


@no_card
def test_passes_take_no_more_of_the_card_than_planned(one: Tiny) -> None:
    precision = "bfloat16"
    backend = choose_backend(one.architecture, torch.bfloat16, "cuda", "9.0").backend
    planned = memory_model(one.architecture, precision, backend=backend, max_positions=LONGEST, fused=False)
    found = on(one, "cuda", precision, share=False)
    input_ids, cu_seqlens = (torch.from_numpy(part).cuda() for part in joined(ROWS * 40))
    positions = positions_of(cu_seqlens.cpu()).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        found.decoder(input_ids, positions, cu_seqlens, LONGEST)
    assert torch.cuda.max_memory_allocated() - before <= planned.pass_bytes(len(input_ids))
