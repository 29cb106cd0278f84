"""States of the engine without cache are the plain model's, row by row, however late the card is; all else is refused.

The stand-in's streams do nothing before somebody waits for them, so a wait that is missing shows as wrong numbers: the
waits of the runtime are taken away here one by one.
"""

import dataclasses
import gc
import inspect
import shutil
import types

import job_rig
import numpy as np
import pytest
import rig
from vendor_rig import KINDS, LATEST, LIMIT, PASS, SEQUENCES, StandInCard, batch_of, pooled, vendor

from extract.engine.contract import EngineDoesNotFit, OutputDiffers, read_contract
from extract.engine.runtimes import load_runtime
from extract.tensorrt import open_runtime, session_runtime
from extract.tensorrt.engine_inputs import INPUTS, InputMissing, UnknownInput, check_inputs
from extract.tensorrt.open_runtime import NotLoaded, open_tensorrt_runtime
from extract.tensorrt.session_runtime import PassRefused

SHAPES = {
    "one token a row": [1] * 5,
    "unequal rows": [1, 7, LIMIT, 20],
    "a full pass": [LIMIT] * (PASS // LIMIT),
    "as many rows as a pass takes": [3] * SEQUENCES,
    "more rows than a pass takes": [2, 5] * 20,
    "more tokens than a pass takes": [LIMIT, 31, 30] * 9,
}


@pytest.fixture(scope="module")
def engine(vendor_engines):
    return vendor_engines.engine()


@pytest.fixture(scope="module")
def plain(vendor_engines):
    """States of rows by transformers' own base model, one row at a time."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(vendor_engines.checkpoint(tokenizer=None), attn_implementation="eager")
    return lambda rows: rig.reference_states(model, rows)


@pytest.fixture
def runtime(engine):
    with vendor():
        loaded = load_runtime(engine)
        yield loaded
        loaded.close()


@pytest.fixture
def changed(engine, tmp_path):
    """A copy of the engine whose contract a test may change."""
    return shutil.copytree(engine, tmp_path / "changed")


def error_of(runtime, plain, lengths, kind="tokens", seed=0):
    rows = rig.random_sequences(lengths, seed=seed)
    found = runtime.hidden_states(batch_of(rows), kind)
    expected = pooled(plain(rows), kind)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max()) if np.isfinite(found).all() else np.inf


class TestStates:
    @pytest.mark.parametrize("kind", KINDS)
    def test_states_are_those_of_the_plain_model_row_by_row(self, runtime, plain, kind):
        for seed, lengths in enumerate(SHAPES.values()):
            assert error_of(runtime, plain, lengths, kind, seed) < 1e-5, (kind, lengths)

    def test_batches_of_other_shapes_in_a_row_do_not_remember_each_other(self, runtime, plain):
        for seed, lengths in enumerate(([5], [LIMIT] * 40, [1], [5], [6, 4], [4, 6])):
            assert error_of(runtime, plain, lengths, seed=seed) < 1e-5, lengths

    def test_an_engine_of_last_tokens_gives_only_those(self, vendor_engines, plain):
        engine = vendor_engines.engine(states="last")
        with vendor():
            loaded = load_runtime(engine)
            for lengths in SHAPES.values():
                assert error_of(loaded, plain, lengths, "last") < 1e-5, lengths
            loaded.close()

    def test_states_in_bfloat16_are_bits(self, vendor_engines):
        engine = vendor_engines.engine(dtype="bfloat16")
        with vendor():
            loaded = load_runtime(engine)
            rows = batch_of(rig.random_sequences([3, 9, 1]))
            states = {kind: loaded.hidden_states(rows, kind) for kind in KINDS}
            loaded.close()
        assert {kind: one.dtype.name for kind, one in states.items()} == {
            **dict.fromkeys(("tokens", "last", "first"), "uint16"),
            "mean": "float32",
        }
        every = (states["tokens"].astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(states["last"], states["tokens"][[2, 11, 12]])
        assert np.array_equal(states["first"], states["tokens"][[0, 3, 12]])
        np.testing.assert_allclose(states["mean"][1], every[3:12].mean(0), rtol=1e-5, atol=1e-6)

    def test_shapes_are_told_only_when_they_change(self, runtime, monkeypatch):
        from tensorrt_llm.runtime.session import Session

        told = []
        infer = Session.infer_shapes
        monkeypatch.setattr(Session, "infer_shapes", lambda self, inputs: told.append(inputs) or infer(self, inputs))
        for lengths in ([4, 4], [5, 3], [8], [8]):
            runtime.hidden_states(batch_of(rig.random_sequences(lengths)), "tokens")
        assert len(told) == 2


WAITS = {
    "a pass begins when its ids are on the card": ("        self._compute.wait(uploaded)\n", ""),
    "states come down when the pass is done": ("        self._down.wait(self._compute.record())\n", ""),
    "states are read when they are down": ("    slot.downloaded.synchronize()\n", ""),
    "a slot is used again when its states are collected": ("_collect(waiting.pop(0), states)", "pass"),
    "what is pooled is pooled after the pass": (
        "self._compute.run(lambda: _pooled(outputs[OUTPUT_NAME], inputs, part, kind))",
        "_pooled(outputs[OUTPUT_NAME], inputs, part, kind)",
    ),
    "shapes are told again when they change": ("        if shapes == self._shapes:", "        if self._shapes:"),
}


def without(change):
    """The runtime's module with one piece of its text changed."""
    old, new = change
    source = inspect.getsource(session_runtime)
    assert source.count(old) == 1
    module = types.ModuleType("mutated_session_runtime")
    exec(compile(source.replace(old, new), "mutated_session_runtime", "exec"), vars(module))
    return module


@pytest.mark.parametrize("change", WAITS.values(), ids=WAITS)
def test_without_a_wait_the_numbers_are_wrong(change, engine, plain, monkeypatch):
    module = without(change)
    with vendor():
        from tensorrt_llm.runtime.session import Session

        from extract.tensorrt import cuda_card

        card = cuda_card.claim_card(None, engine)
        session = Session.from_serialized_engine((engine / "rank0.engine").read_bytes())
        loaded = module.SessionRuntime(engine, read_contract(engine), session, card)
        batches = [([7, 3], "tokens"), ([LIMIT, 31] * 12, "tokens"), ([4, 9, 1] * 7, "last"), ([LIMIT] * 40, "first")]
        errors = []
        for seed, (lengths, kind) in enumerate(batches):
            try:
                errors.append(error_of(loaded, plain, lengths, kind, seed))
            except Exception:
                errors.append(np.inf)
                break
        assert max(errors) > 1e-3


class TestFailures:
    def test_after_a_refused_pass_the_next_batch_is_right(self, runtime, plain, monkeypatch):
        from tensorrt_llm.runtime.session import Session

        run, calls = Session.run, []
        monkeypatch.setattr(Session, "run", lambda *given: calls.append(1) or (len(calls) != 3 and run(*given)))
        with pytest.raises(PassRefused) as caught:
            runtime.hidden_states(batch_of(rig.random_sequences([LIMIT] * 40)), "tokens")
        assert str(caught.value) == (
            "TensorRT refused a pass of 256 tokens in 8 sequences; what it wrote above says why. "
            "Run again with a smaller --max-tokens, or build the engine again."
        )
        for seed in range(3):
            assert error_of(runtime, plain, [LIMIT, 5, 1] * 9, seed=seed) < 1e-5

    def test_after_a_failure_nothing_is_under_way(self, runtime, monkeypatch):
        from tensorrt_llm.runtime.session import Session

        monkeypatch.setattr(Session, "run", _interrupted_at_the_second(Session.run))
        with pytest.raises(KeyboardInterrupt):
            runtime.hidden_states(batch_of(rig.random_sequences([LIMIT] * 40)), "tokens")
        assert [len(stream.queue) for stream in (runtime._up, runtime._compute, runtime._down)] == [0, 0, 0]

    def test_closing_gives_the_cards_memory_back(self, engine):
        card = StandInCard()
        with vendor(card=card):
            loaded = load_runtime(engine)
            assert card.used_bytes > 0
            loaded.close()
            gc.collect()
            assert (card.used_bytes, card.closed) == (0, True)

    @pytest.mark.parametrize("beside", [False, True])
    def test_a_card_without_room_is_one_clear_error(self, engine, beside):
        card = StandInCard(total_bytes=100_000)
        if beside:  # the engine fits, what goes in and out of it does not
            with vendor(card=StandInCard()) as larger:
                loaded = load_runtime(engine)
                card.total_bytes = larger.used_bytes - 1
                loaded.close()
        with vendor(card=card):
            with pytest.raises(NotLoaded) as caught:
                load_runtime(engine)
            assert card.closed
            caught = str(caught.value)
        assert caught.startswith(f"{engine}: TensorRT-LLM 1.2.1 does not load it: ")
        assert "out of memory" in caught
        assert ("OutOfMemoryError: CUDA" if beside else "RuntimeError: stand-in TensorRT: Error Code 2") in caught
        assert "\n" not in caught

    def test_an_engine_file_that_is_none_is_one_clear_error(self, changed):
        (changed / "rank0.engine").write_bytes(b"STANDIN0")
        with vendor(), pytest.raises(NotLoaded, match="RuntimeError: stand-in TensorRT: deserialisation failed"):
            open_tensorrt_runtime(changed, read_contract(changed))


def _interrupted_at_the_second(run):
    calls = []

    def interrupted(*given):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*given)

    return interrupted


class TestInputs:
    @pytest.mark.parametrize("name", INPUTS)
    def test_every_input_lies_in_its_place(self, name, runtime, monkeypatch):
        from tensorrt_llm.runtime.session import Session

        seen = {}
        run = Session.run
        monkeypatch.setattr(Session, "run", lambda self, inputs, *rest: seen.update(inputs) or run(self, inputs, *rest))
        runtime.hidden_states(batch_of(rig.random_sequences([3, 2])), "tokens")
        where = runtime._card.where(seen[name])
        assert where == ("host" if name.startswith("host_") else "card")
        assert str(seen[name].dtype) == f"torch.{INPUTS[name].dtype}"
        expected = {
            "position_ids": [0, 1, 2, 0, 1],
            "last_token_ids": [3, 5],
            "context_lengths": [3, 2],
            "host_context_lengths": [3, 2],
            "host_request_types": [0, 0],
            "host_max_attention_window_sizes": [LIMIT] * 3,
            "host_sink_token_length": [0],
            "host_runtime_perf_knobs": [-1] * 16,
            "host_context_progress": [0],
        }
        assert name == "input_ids" or seen[name].tolist() == expected[name]

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("sequence_length", "which belongs to an engine with a cache"),
            ("kv_cache_block_offsets", "which belongs to an engine with a cache"),
            ("past_key_value_0", "which belongs to an engine with a cache"),
            ("all_reduce_workspace", "which belongs to an engine for several cards"),
            ("lora_ranks", "which belongs to an engine with LoRA adapters"),
            ("spec_decoding_params", "which belongs to an engine with speculative decoding"),
            ("tomorrows_input", "which is not known"),
        ],
    )
    def test_an_input_that_is_not_known_is_refused_by_name(self, name, problem):
        with pytest.raises(UnknownInput) as caught:
            check_inputs("engine", ["input_ids", "last_token_ids", "context_lengths", name])
        assert str(caught.value) == (
            f"engine: the engine lists input {name}, {problem}. It was built with other settings than its contract "
            "says: build it again with extract build."
        )

    @pytest.mark.parametrize("name", ["input_ids", "last_token_ids", "context_lengths"])
    def test_an_engine_without_what_every_decoder_needs_is_refused(self, name):
        with pytest.raises(InputMissing, match=f"the engine lists no input {name}, which every decoder has"):
            check_inputs("engine", [one for one in INPUTS if one != name])

    def test_an_engine_with_a_cache_does_not_open_as_one_without(self, vendor_engines, tmp_path):
        engine = shutil.copytree(vendor_engines.engine(cache="paged"), tmp_path / "paged")
        job_rig.edit_contract(engine, cache="none")
        with vendor(), pytest.raises(UnknownInput, match="which belongs to an engine with a cache"):
            load_runtime(engine)


class TestRefusals:
    @pytest.mark.parametrize(
        ("output", "said"),
        [
            ({"dtype": "bfloat16"}, "dtype float32, the contract says bfloat16"),
            ({"width": 65}, "shape (-1, 64), the contract says (-1, 65)"),
        ],
    )
    def test_an_output_that_is_not_the_contracts(self, output, said, changed):
        job_rig.edit_contract(changed, output=output)
        with vendor(), pytest.raises(OutputDiffers) as caught:
            load_runtime(changed)
        assert str(caught.value) == f"{changed}: the states have {said}. Build the engine again."

    @pytest.mark.parametrize(("built", "promised"), [("tokens", "last"), ("last", "tokens")])
    def test_states_from_before_the_gather_are_not_those_from_after_it(self, built, promised, vendor_engines, tmp_path):
        engine = shutil.copytree(vendor_engines.engine(states=built), tmp_path / "changed")
        job_rig.edit_contract(engine, output={"states": promised})
        with vendor(), pytest.raises(OutputDiffers, match="shape of extract_hidden_states"):
            load_runtime(engine)

    def test_an_engine_without_our_output(self, engine, monkeypatch):
        monkeypatch.setattr(session_runtime, "OUTPUT_NAME", "another")
        with vendor(), pytest.raises(OutputDiffers, match="output logits, extract_hidden_states, the contract says an"):
            load_runtime(engine)

    def test_an_output_in_host_memory(self, engine, monkeypatch):
        with vendor():
            from tensorrt import TensorLocation
            from tensorrt_llm.runtime import session

            monkeypatch.setattr(session._Engine, "get_tensor_location", lambda self, name: TensorLocation.HOST)
            with pytest.raises(OutputDiffers, match="place host memory, the contract says the card"):
                load_runtime(engine)

    @pytest.mark.parametrize(("limit", "what"), [("pass_tokens", "tokens"), ("max_sequences", "sequences")])
    def test_an_engine_file_for_other_passes(self, limit, what, changed):
        job_rig.edit_contract(changed, limits={limit: 8})
        with vendor(), pytest.raises(EngineDoesNotFit) as caught:
            load_runtime(changed)
        most = PASS if what == "tokens" else SEQUENCES
        assert (
            f"this engine needs passes of at most this many {what}: 8, this machine has an engine file of {most}"
            in str(caught.value)
        )

    @pytest.mark.parametrize(("field", "name"), [("version", "TensorRT-LLM"), ("tensorrt", "TensorRT")])
    def test_another_release(self, field, name, changed):
        job_rig.edit_contract(changed, runtime={field: "1.1.0"})
        here = LATEST if field == "version" else "10.14.1.48"
        with vendor(), pytest.raises(EngineDoesNotFit) as caught:
            load_runtime(changed)
        assert str(caught.value) == (
            f"{changed}: this engine needs {name} 1.1.0, this machine has {here}. {open_runtime.REBUILD}"
        )

    @pytest.mark.parametrize(
        ("card", "said"),
        [
            ({"name": "Other card"}, "needs card Stand-in card, this machine has Other card"),
            ({"compute_capability": "8.9"}, "needs compute capability 9.0, this machine has 8.9"),
            ({"num_sms": 114}, "needs multiprocessors 132, this machine has 114"),
        ],
    )
    def test_another_card(self, card, said, engine):
        with vendor(card=StandInCard(**card)), pytest.raises(EngineDoesNotFit) as caught:
            load_runtime(engine)
        assert str(caught.value) == (
            f"{engine}: this engine {said}. A TensorRT engine runs on the kind of card that it was built on. Build one "
            "for this card: extract build CHECKPOINT --runtime tensorrt-llm -o ENGINE"
        )

    def test_numbers_that_are_not_the_builds(self, changed):
        contract = read_contract(changed)
        probe = dataclasses.asdict(contract.probe)
        probe["sequences"][2]["projection"] = [-one for one in probe["sequences"][2]["projection"]]
        job_rig.edit_contract(changed, probe=probe)
        from extract.engine.replay import ProbeFailed

        with vendor(), pytest.raises(ProbeFailed, match="probe sequence 2 differs from the contract"):
            load_runtime(changed)
