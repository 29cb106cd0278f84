"""Which of a machine's cards a worker takes: one that the engine fits, and that nobody else has."""

import types

import pytest
import torch
from vendor_rig import batch_of, recipe, vendor

from extract.engine.build_plan import WhichCard, plan_build
from extract.engine.contract import Device, EngineDoesNotFit
from extract.engine.runtimes import load_runtime
from extract.tensorrt.cuda_card import claim_card

H100 = {"name": "NVIDIA H100", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 80 * 2**30}
L4 = {"name": "NVIDIA L4", "major": 8, "minor": 9, "multi_processor_count": 58, "total_memory": 24 * 2**30}
WANTED = Device(type="cuda", name="NVIDIA H100", compute_capability="9.0", num_sms=132)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Say which cards there are; locks lie in a folder of the test's own."""

    def cards(*found):
        properties = [types.SimpleNamespace(**card, uuid=f"card-{place}") for place, card in enumerate(found)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return cards


def test_workers_spread_over_the_cards_that_fit(machine):
    machine(L4, H100, H100)
    first, second = claim_card(WANTED, "engine"), claim_card(WANTED, "engine")
    assert [first._index, second._index] == [1, 2]
    assert (first.device.name, first.device.compute_capability, first.total_bytes) == ("NVIDIA H100", "9.0", 80 * 2**30)
    with pytest.raises(EngineDoesNotFit) as caught:
        claim_card(WANTED, "engine")
    assert str(caught.value) == (
        "engine: this engine needs a free card of kind NVIDIA H100, this machine has 2 of them, each taken by another "
        "worker. Start one worker a card."
    )
    first.close()
    third = claim_card(WANTED, "engine")
    assert third._index == 1
    second.close()
    third.close()


def test_a_build_takes_any_card(machine):
    machine(L4, H100)
    claimed = [claim_card(None, "recipe") for _ in range(2)]
    assert [card._index for card in claimed] == [0, 1]
    for card in claimed:
        card.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"major": 10}, "compute capability 9.0, this machine has 10.0"),
        ({"name": "NVIDIA H200"}, "card NVIDIA H100, this machine has NVIDIA H200"),
        ({"multi_processor_count": 114}, "multiprocessors 132, this machine has 114"),
    ],
)
def test_a_card_of_another_kind_is_refused(change, said, machine):
    machine({**H100, **change})
    with pytest.raises(EngineDoesNotFit, match=f"this engine needs {said}. A TensorRT engine runs on the kind"):
        claim_card(WANTED, "engine")


def test_several_cards_of_other_kinds_are_named(machine):
    machine(L4, {**L4, "name": "NVIDIA A10"})
    with pytest.raises(EngineDoesNotFit, match="this machine has NVIDIA A10 and NVIDIA L4"):
        claim_card(WANTED, "engine")


def test_where_no_file_can_be_locked_a_card_is_taken_all_the_same(machine, tmp_path, monkeypatch):
    machine(H100)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    for _ in range(2):
        claim_card(WANTED, "engine").close()


def test_a_plan_for_the_card_at_hand_tells_no_card_from_taken_ones(machine, vendor_engines):
    checkpoint = vendor_engines.checkpoint(tokenizer=None)
    machine()
    with pytest.raises(WhichCard):
        plan_build(checkpoint, recipe())
    machine(L4)
    plan = plan_build(checkpoint, recipe())
    assert (plan.device, plan.card_bytes) == ("NVIDIA L4", 24 * 2**30)
    held = claim_card(None, "another worker")
    with pytest.raises(EngineDoesNotFit, match="each taken by another worker"):
        plan_build(checkpoint, recipe())
    held.close()


def test_a_runtime_that_is_closed_leaves_its_card_to_the_next(vendor_engines):
    engine = vendor_engines.engine()
    with vendor() as card:
        for _ in range(2):
            runtime = load_runtime(engine)
            assert runtime.hidden_states(batch_of([[5, 6, 7]]), "last").shape == (1, 64)
            runtime.close()
            assert card.closed
