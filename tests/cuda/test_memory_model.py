"""The memory model against numbers that can be worked out with a pencil, and against tensors that a pass makes."""

import dataclasses

import pytest
import torch
from cuda_rig import LLAMA_8B, loaded, positions_of
from test_packed_decoder import RICH, ROWS, Tiny, case_name, joined, written

from extract.cuda.memory import (
    LARGEST_PASS,
    MAX_ELEMENTS,
    PASS_STEP,
    RESERVED_BYTES,
    USABLE,
    MemoryModel,
    memory_model,
    weight_bytes,
)

rich = pytest.fixture(scope="module", params=RICH, ids=case_name, name="rich")(written)


def model(precision: str, **options: object) -> MemoryModel:
    given = {"backend": "varlen", "max_positions": 128, "fused": True, **options}
    return memory_model(LLAMA_8B, precision, **given)  # type: ignore[arg-type]


def test_weights_of_an_8b_model_are_what_a_pencil_says() -> None:
    linears = 4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14_336
    assert linears == 218_103_808
    embedding, norms, tables = 128_256 * 4096, 4 * 4096 * (2 * 32 + 1), 2 * 4 * 128 * 64
    assert weight_bytes(LLAMA_8B, "bfloat16", 128) == 2 * (32 * linears + embedding) + norms + tables
    assert weight_bytes(LLAMA_8B, "float32", 128) == 4 * (32 * linears + embedding) + norms + tables
    channels = 6144 + 4096 + 28_672 + 4096
    fp8 = 32 * (linears + 4 * channels) + 2 * embedding + norms + tables
    assert weight_bytes(LLAMA_8B, "fp8", 128) == fp8
    assert round(weight_bytes(LLAMA_8B, "bfloat16", 128) / 1e9, 1) == 15.0
    assert round(fp8 / 1e9, 1) == 8.0


def test_a_token_is_largest_in_the_mlp_of_an_8b_model() -> None:
    stream, read, gate_up, gated = 4 * 4096, 2 * 4096, 2 * 2 * 14_336, 2 * 14_336  # stream and read before and after
    assert model("bfloat16").token_bytes == 2 * (stream + read) + gate_up + gated == 135_168
    assert model("fp8").token_bytes == 2 * (stream + 4096 + 4) + gate_up + (14_336 + 4)
    assert model("bfloat16").key_bytes == 2 * 2 * 1024 + 4
    assert model("bfloat16").state_bytes == 2 * 4096
    assert model("bfloat16", num_layers=3).state_bytes == 4 * 2 * 4096


def test_a_pass_of_every_size_needs_what_its_tokens_need() -> None:
    found = model("bfloat16")
    each = 135_168 + 4 * 4100 + 3 * 8192
    assert found.pass_bytes(10) - found.pass_bytes(0) == 10 * each
    assert found.needed_bytes(1000) == RESERVED_BYTES + round((found.weight_bytes + 1000 * each) / USABLE)


@pytest.mark.parametrize(("gib", "precision", "expected"), [
    (141, "bfloat16", LARGEST_PASS), (80, "bfloat16", LARGEST_PASS), (24, "fp8", LARGEST_PASS), (16, "bfloat16", 0),
    (8, "fp8", 0),
])  # fmt: skip
def test_the_largest_pass_of_an_8b_model_on_cards_of_these_sizes(gib: int, precision: str, expected: int) -> None:
    assert model(precision).pass_tokens(gib * 2**30, 2**20) == expected


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("free", range(9, 60, 3))
def test_the_largest_pass_fits_and_the_next_one_does_not(precision: str, free: int) -> None:
    found, room = model(precision), free * 2**30
    tokens = found.pass_tokens(room, 2**20)
    assert tokens == 0 or found.needed_bytes(tokens) <= room
    if tokens < LARGEST_PASS:
        assert found.needed_bytes(tokens + (PASS_STEP if tokens >= PASS_STEP else 1)) > room


def test_no_tensor_of_a_pass_has_more_elements_than_32_bits_count() -> None:
    wide = dataclasses.replace(LLAMA_8B, intermediate_size=28_672)
    found = memory_model(wide, "fp8", backend="varlen", max_positions=128, fused=True)
    tokens = found.pass_tokens(2**50, 2**20)
    assert tokens * 2 * 28_672 <= MAX_ELEMENTS < (tokens + PASS_STEP) * 2 * 28_672


def test_a_budget_is_the_most_that_a_pass_holds() -> None:
    assert model("bfloat16").pass_tokens(80 * 2**30, 16_384) == 16_384
    assert model("bfloat16").pass_tokens(80 * 2**30, 700) == 700


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "fp8"])
def test_weights_take_what_the_model_says(rich: Tiny, precision: str) -> None:
    tensors = {one.data_ptr(): one for one in loaded(rich, precision).buffers()}  # type: ignore[arg-type]
    held = sum(one.numel() * one.element_size() for one in tensors.values())
    assert held == weight_bytes(rich.architecture, precision, 60)


def test_the_plan_of_a_pass_is_never_exceeded_by_its_tensors(rich: Tiny) -> None:
    """Every tensor that is alive at one moment, as torch counts allocations."""
    decoder = loaded(rich)
    input_ids, cu_seqlens = (torch.from_numpy(one) for one in joined(ROWS * 8))
    positions = positions_of(cu_seqlens)
    found = memory_model(rich.architecture, "float32", backend="plain", max_positions=60, fused=False)
    with torch.inference_mode(), torch.profiler.profile(profile_memory=True) as seen:
        decoder(input_ids, positions, cu_seqlens, 60)
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 0 < peak <= found.pass_bytes(len(input_ids))
