"""Which card an engine takes, and every refusal with what was found and what was expected."""

import dataclasses
from typing import Any

import pytest
import torch
from cuda_rig import CARD
from test_own_architecture import small_model

from extract.cuda import cards
from extract.cuda.attention import choose_backend
from extract.cuda.cards import VisibleCard, check_room, choose_card, visible_cards
from extract.engine.contract import Device, EngineDoesNotFit
from extract.engine.own_architecture import architecture_of

GIB = 2**30
H100 = Device(type="cuda", name="NVIDIA H100 80GB HBM3", compute_capability="9.0", num_sms=132)
A100 = Device(type="cuda", name="NVIDIA A100-SXM4-80GB", compute_capability="8.0", num_sms=108)
MIG = dataclasses.replace(H100, name="NVIDIA H100 80GB HBM3 MIG 3g.40gb", num_sms=60)
PART = dataclasses.replace(H100, num_sms=114)


def seen(*devices: Device) -> list[VisibleCard]:
    return [VisibleCard(index=index, device=device, total_bytes=80 * GIB) for index, device in enumerate(devices)]


def refusal(call: Any, *given: Any) -> str:
    with pytest.raises(EngineDoesNotFit) as caught:
        call(*given)
    return str(caught.value)


def test_the_first_card_of_the_kind_is_taken() -> None:
    assert choose_card(seen(A100, H100, H100), H100, "engine").index == 1
    assert choose_card(seen(A100, H100), None, "recipe").index == 0


@pytest.mark.parametrize(("found", "message"), [
    ([], "engine: this engine needs device cuda (NVIDIA H100 80GB HBM3), this machine has no CUDA device that torch "
         "can use. extract doctor says why. Or build one for this machine: extract build CHECKPOINT -o ENGINE"),
    ([A100], "engine: this engine needs compute capability 9.0, this machine has 8.0. Build an engine for this card: "
             "extract build CHECKPOINT -o ENGINE"),
    ([MIG], "engine: this engine needs card NVIDIA H100 80GB HBM3, this machine has NVIDIA H100 80GB HBM3 MIG 3g.40gb. "
            "Build an engine for this card: extract build CHECKPOINT -o ENGINE"),
    ([PART], "engine: this engine needs multiprocessors 132, this machine has 114. Build an engine for this card: "
             "extract build CHECKPOINT -o ENGINE"),
    ([A100, MIG], "engine: this engine needs compute capability 9.0, this machine has 8.0 (2 cards: NVIDIA "
                  "A100-SXM4-80GB, NVIDIA H100 80GB HBM3 MIG 3g.40gb). Build an engine for this card: "
                  "extract build CHECKPOINT -o ENGINE"),
])  # fmt: skip
def test_other_cards_are_refused_with_found_and_expected(
    found: list[Device], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert refusal(choose_card, seen(*found), H100, "engine") == message


def test_cards_that_were_hidden_are_said_to_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refusal(choose_card, [], None, "recipe") == (
        "recipe: this engine needs device cuda, this machine has no CUDA device that torch can use "
        "(CUDA_VISIBLE_DEVICES is ''). extract doctor says why."
    )


def test_memory_that_others_have_taken_is_refused_with_found_and_needed() -> None:
    card = seen(H100)[0]
    check_room(card, 30 * GIB, 30 * GIB, "engine", "Build smaller.")
    assert refusal(check_room, card, 10 * GIB, 21.25 * GIB, "engine", "Build smaller.") == (
        "engine: this engine needs free memory on its card: 21.2 GiB, this machine has 10.0 of 80.0 GiB (NVIDIA H100 "
        "80GB HBM3). Stop what else runs on that card, or choose another one with CUDA_VISIBLE_DEVICES. Build smaller."
    )
    assert refusal(check_room, card, 80 * GIB, 90 * GIB, "engine", "Build smaller.") == (
        "engine: this engine needs free memory on its card: 90.0 GiB, this machine has 80.0 of 80.0 GiB (NVIDIA H100 "
        "80GB HBM3). Build smaller."
    )


def test_torch_is_asked_for_what_a_contract_says_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    class Facts:
        name, major, minor, multi_processor_count, total_memory = CARD.name, 9, 0, 132, 80 * GIB

    assert visible_cards() == [] or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Facts())
    assert visible_cards() == [VisibleCard(index=i, device=CARD, total_bytes=80 * GIB) for i in (0, 1)]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 + index, 80 * GIB))
    assert cards.free_memory(visible_cards()[1]) == 8


@pytest.mark.parametrize(("family", "options", "dtype", "where", "capability", "expected"), [
    ("llama", {}, torch.bfloat16, "cuda", "9.0", "varlen"),
    ("llama", {}, torch.bfloat16, "cuda", "8.0", "varlen"),
    ("mistral", {"sliding_window": 5}, torch.bfloat16, "cuda", "9.0", "varlen"),
    ("llama", {}, torch.bfloat16, "cuda", "7.5", "plain: compute capability 7.5, 8.0 needed"),
    ("llama", {}, torch.float32, "cuda", "9.0", "plain: type float32"),
    ("llama", {}, torch.bfloat16, "cpu", None, "plain: no card"),
    ("gemma2", {"attn_logit_softcapping": 1.5}, torch.bfloat16, "cuda", "9.0", "plain: a softcap"),
    ("llama", {"head_dim": 20}, torch.bfloat16, "cuda", "9.0", "plain: heads of 20 channels"),
    ("llama", {"head_dim": 264}, torch.bfloat16, "cuda", "9.0", "plain: heads of 264 channels"),
])  # fmt: skip
def test_the_fast_attention_is_taken_only_where_it_computes_the_same(
    family: str, options: dict[str, Any], dtype: torch.dtype, where: str, capability: str | None, expected: str
) -> None:
    architecture = architecture_of(small_model(family, **options), 16)
    assert choose_backend(architecture, dtype, where, capability).described == expected
