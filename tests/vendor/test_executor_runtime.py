"""The design with a paged cache and one generated token gives the same states, through the vendor's executor."""

import gc
import shutil

import job_rig
import numpy as np
import pytest
import rig
from vendor_rig import KINDS, LIMIT, OF_BOTH_KINDS, StandInCard, batch_of, pooled, vendor

from extract.engine.contract import EngineDoesNotFit, OutputDiffers
from extract.engine.runtimes import load_runtime
from extract.tensorrt.executor_runtime import RequestFailed
from extract.tensorrt.open_runtime import NotLoaded


@pytest.fixture(scope="module")
def plain(vendor_engines):
    """States of rows by transformers' own base model, one row at a time."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(vendor_engines.checkpoint(tokenizer=None), attn_implementation="eager")
    return lambda rows: rig.reference_states(model, rows)


def check(runtime, plain, rows, kind):
    found, expected = runtime.hidden_states(batch_of(rows), kind), pooled(plain(rows), kind)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("release", OF_BOTH_KINDS)
def test_states_are_those_of_the_plain_model_row_by_row(release, vendor_engines, plain):
    engine = vendor_engines.engine(release, cache="paged")
    with vendor(release):
        runtime = load_runtime(engine)
        for kind in KINDS:
            check(runtime, plain, rig.random_sequences([1, LIMIT, 7, *[5] * 20], seed=len(kind)), kind)
        runtime.close()


@pytest.mark.parametrize("release", OF_BOTH_KINDS)
def test_rows_that_share_a_prefix_are_complete(release, vendor_engines, plain):
    engine = vendor_engines.engine(release, cache="paged", max_input_tokens=100)
    (start,) = rig.random_sequences([90])
    rows = [start + end for end in rig.random_sequences([1, 3, 10, 1], seed=1)]
    with vendor(release):
        runtime = load_runtime(engine)
        check(runtime, plain, [*rows, rows[0]], "tokens")
        check(runtime, plain, rows, "tokens")
        runtime.close()


def test_closing_gives_the_cards_memory_back(vendor_engines):
    engine, card = vendor_engines.engine(cache="paged"), StandInCard()
    with vendor(card=card):
        runtime = load_runtime(engine)
        assert card.used_bytes > card.total_bytes // 2
        runtime.close()
        gc.collect()
        assert (card.used_bytes, card.closed) == (0, True)


def test_a_request_that_fails_is_one_clear_error_and_no_later_batch_meets_its_neighbours(
    vendor_engines, plain, monkeypatch
):
    def first_come_first_served(executor, only):
        found, executor._waiting = executor._waiting[:3], executor._waiting[3:]
        return [response for _, response in found]

    engine = vendor_engines.engine(cache="paged")
    with vendor():
        from tensorrt_llm.bindings.executor import Executor

        monkeypatch.setattr(Executor, "_ready", first_come_first_served)
        runtime = load_runtime(engine)
        rows = rig.random_sequences([4] * 6 + [LIMIT + 1] + [5] * 6)
        with pytest.raises(RequestFailed) as caught:
            runtime.hidden_states(batch_of(rows), "tokens")
        assert str(caught.value) == (
            "the vendor's executor refused a sequence of 33 tokens: Prompt length (33) exceeds maximum input length "
            "(32). Build the engine again."
        )
        check(runtime, plain, rig.random_sequences([3, 4, 5], seed=9), "tokens")
        runtime.close()


def test_an_engine_that_does_not_load_is_one_clear_error(vendor_engines, tmp_path):
    engine = shutil.copytree(vendor_engines.engine(), tmp_path / "engine")
    job_rig.edit_contract(engine, cache="paged")
    with vendor() as card:
        from tensorrt_llm.bindings import executor

        message = "[TensorRT-LLM][ERROR] Assertion failed: engine has no tensor 'logits'\nat batchManager.cpp:12"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor.Executor, "_outputs_of", lambda *_: (_ for _ in ()).throw(RuntimeError(message)))
            with pytest.raises(NotLoaded) as caught:
                load_runtime(engine)
        assert card.closed
    assert "does not load it: RuntimeError: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({"dtype": "bfloat16"}, "dtype float32, the contract says bfloat16"),
        ({"width": 65}, "shape (32, 64), the contract says (32, 65)"),
    ],
)
def test_an_output_that_is_not_the_contracts(output, said, vendor_engines, tmp_path):
    engine = shutil.copytree(vendor_engines.engine(cache="paged"), tmp_path / "changed")
    job_rig.edit_contract(engine, output=output)
    with vendor(), pytest.raises(OutputDiffers) as caught:
        runtime = load_runtime(engine)
        runtime.close()
    assert str(caught.value).startswith(f"{engine}: the states have {said.split(' (')[0]}")


def test_an_answer_without_our_output_is_refused(vendor_engines, monkeypatch):
    engine = vendor_engines.engine(cache="paged")
    with vendor():
        from tensorrt_llm.bindings.executor import Executor

        monkeypatch.setattr(Executor, "_additional", lambda self, output, found, first: [])
        with pytest.raises(OutputDiffers) as caught:
            load_runtime(engine)
    assert str(caught.value) == (
        f"{engine}: the states have output none, the contract says context_extract_hidden_states. "
        "Build the engine again."
    )


def test_another_card_is_refused(vendor_engines):
    with vendor(card=StandInCard(name="Other card")), pytest.raises(EngineDoesNotFit, match="this machine has Other"):
        load_runtime(vendor_engines.engine(cache="paged"))
