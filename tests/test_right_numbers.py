"""A stored vector is the output of the final norm for that row alone, whatever shares its pass, window or shard.

Every job runs whole, over a Parquet file, and is held to transformers' own base model on each row by itself.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import rig
from job_rig import (
    CHECKPOINTS,
    LIMIT,
    Engines,
    errors,
    ids_of,
    job,
    output_table,
    parquet,
    reference,
    run,
    snapshot,
    stored,
    stored_ids,
    texts,
)

from extract.output import open_output

EXACT = 1e-5
"""Relative error of float32 states that are stored as float32."""

ROUNDING = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 2e-2}
"""What a stored type adds, relative to the largest value of a row."""

KINDS = ("tokens", "last", "first", "mean")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """300 rows with shuffled lengths from 1 token to over the limit."""
    return parquet(tmp_path_factory.mktemp("rows") / "rows.parquet", {"text": texts(300)})


def ids_table(path: Path, ids: list[list[int]]) -> Path:
    return parquet(path, {"ids": pa.array(ids, pa.list_(pa.int32()))})


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_row_of_every_kind_equals_the_plain_model_on_that_row_alone(engines: Engines, rows, tmp_path, name):
    """Tokens, last, first and mean; packed and dense; left and right padding or none; BOS, BOS and EOS, neither."""
    ids = ids_of(engines.checkpoint(name), texts(300))
    assert len({*map(len, ids)}) > LIMIT - 8 and min(map(len, ids)) <= 3 and max(map(len, ids)) == LIMIT
    for kind in KINDS:
        run(job(engines.engine(name), rows, tmp_path / kind, kind=kind))
        assert stored_ids(tmp_path / kind) == ids
        found = stored(tmp_path / kind)
        assert errors(found, reference(engines.checkpoint(name), ids, kind)).max() <= EXACT


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", ["tokens", "mean"])
def test_a_stored_type_adds_its_own_rounding_and_no_more(engines: Engines, rows, tmp_path, dtype, kind):
    run(job(engines.engine("llama"), rows, tmp_path / "out", kind=kind, dtype=dtype))
    checkpoint = engines.checkpoint("llama")
    worst = errors(stored(tmp_path / "out"), reference(checkpoint, ids_of(checkpoint, texts(300)), kind)).max()
    assert worst <= EXACT + ROUNDING[dtype]
    assert dtype == "float32" or worst > ROUNDING[dtype] / 20  # the bound is not idle


@pytest.mark.parametrize("name", ["llama", "bloom"])
@pytest.mark.parametrize(
    ("max_sequences", "max_tokens"), [(1, 16_384), (7, 16_384), (300, 16_384), (300, 1), (300, 64), (7, 64)]
)
def test_the_numbers_do_not_depend_on_the_size_of_a_pass(
    engines: Engines, rows, tmp_path, name, max_sequences, max_tokens
):
    limits = {"max_sequences": max_sequences, "max_tokens": max_tokens}
    run(job(engines.engine(name), rows, tmp_path / "out", kind="last", **limits))
    checkpoint = engines.checkpoint(name)
    expected = reference(checkpoint, ids_of(checkpoint, texts(300)), "last")
    assert errors(stored(tmp_path / "out"), expected).max() <= EXACT


def test_the_numbers_do_not_depend_on_how_rows_fall_into_shards(engines: Engines, rows, tmp_path):
    checkpoint = engines.checkpoint("llama")
    expected = reference(checkpoint, ids_of(checkpoint, texts(300))[:40], "tokens")
    for rows_per_shard in (1, 7, 39):
        output = tmp_path / str(rows_per_shard)
        run(job(engines.engine("llama"), rows, output, rows_per_shard=rows_per_shard, limit=40))
        assert errors(stored(output), expected).max() <= EXACT


def test_the_overlapped_loop_and_its_sequential_twin_write_the_same_bytes(engines: Engines, rows, tmp_path):
    for overlap in (True, False):
        run(job(engines.engine("llama"), rows, tmp_path / str(overlap), rows_per_shard=64, overlap=overlap))
    assert snapshot(tmp_path / "True" / "data") == snapshot(tmp_path / "False" / "data")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_sixty_four_rows_of_one_token_each_keep_their_own_state_also_the_second_time(engines: Engines, tmp_path, name):
    ids = [[token] for token in np.random.default_rng(1).permutation(np.arange(4, 68)).tolist()]
    rows = ids_table(tmp_path / "rows.parquet", ids)
    expected = reference(engines.checkpoint(name), ids, "last")
    for output in ("first", "second"):
        run(job(engines.engine(name), rows, tmp_path / output, column="ids", input="input_ids", kind="last"))
        found = stored(tmp_path / output)
        assert errors(found, expected).max() <= EXACT
        nearest = [int(np.argmin([np.abs(one - other).max() for other in expected])) for one in found]
        assert nearest == list(range(64))


def test_sixty_four_texts_of_one_token_each_keep_their_own_state(engines: Engines, tmp_path):
    checkpoint = engines.checkpoint("gpt2")
    rows = list(dict.fromkeys("".join(texts(300))))[:64]
    ids = ids_of(checkpoint, rows)
    assert len(rows) == 64 and {*map(len, ids)} == {1}
    run(job(engines.engine("gpt2"), parquet(tmp_path / "rows.parquet", {"text": rows}), tmp_path / "out"))
    assert errors(stored(tmp_path / "out"), reference(checkpoint, ids)).max() <= EXACT


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_rows_with_one_prefix_and_exact_copies_come_back_whole(engines: Engines, tmp_path, name):
    prefix, *ends = rig.random_sequences([24, *range(1, 9), *range(1, 5)], seed=3)
    ids = [prefix + end for end in ends] + [prefix, prefix, prefix + ends[0], prefix + ends[3]]
    assert len(ids) == 16
    rows = ids_table(tmp_path / "rows.parquet", ids)
    run(job(engines.engine(name), rows, tmp_path / "out", column="ids", input="input_ids"))
    found = stored(tmp_path / "out")
    assert [len(states) for states in found] == list(map(len, ids))
    assert errors(found, reference(engines.checkpoint(name), ids)).max() <= EXACT
    assert np.array_equal(found[12], found[13])


def test_one_row_of_the_limit_among_very_short_ones(engines: Engines, tmp_path):
    lengths = [3] * 200
    lengths[117] = LIMIT
    ids = rig.random_sequences(lengths, seed=4)
    rows = ids_table(tmp_path / "rows.parquet", ids)
    run(job(engines.engine("llama"), rows, tmp_path / "out", column="ids", input="input_ids", max_tokens=40))
    assert errors(stored(tmp_path / "out"), reference(engines.checkpoint("llama"), ids)).max() <= EXACT


@pytest.mark.parametrize("kind", ["last", "mean", "first"])
def test_states_have_the_models_own_length_unless_unit_length_is_asked_for(engines: Engines, rows, tmp_path, kind):
    checkpoint = engines.checkpoint("llama")
    expected = np.array(reference(checkpoint, ids_of(checkpoint, texts(300)), kind))
    length = np.linalg.norm(expected, axis=1, keepdims=True)
    assert abs(length - 1).min() > 0.5
    run(job(engines.engine("llama"), rows, tmp_path / "plain", kind=kind))
    found = np.array(stored(tmp_path / "plain"))
    assert np.allclose(np.linalg.norm(found, axis=1, keepdims=True), length, rtol=EXACT)
    run(job(engines.engine("llama"), rows, tmp_path / "unit", kind=kind, normalize=True))
    found = np.array(stored(tmp_path / "unit"))
    assert np.abs(found - expected / length).max() <= EXACT
    assert open_output(tmp_path / "unit").schema.metadata[b"extract.normalized"] == b"true"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_states_are_those_after_the_final_norm_and_not_those_before_it(engines: Engines, rows, tmp_path, name):
    import torch
    from transformers import AutoModel

    checkpoint = engines.checkpoint(name)
    ids = ids_of(checkpoint, texts(300))[:40]
    run(job(engines.engine(name), rows, tmp_path / "out", limit=40))
    model = AutoModel.from_pretrained(checkpoint, attn_implementation="eager")
    before: list[np.ndarray] = []
    norm = next(module for path, module in model.named_modules() if path in ("norm", "ln_f"))
    norm.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0][0].numpy()))
    with torch.no_grad():
        for one in ids:
            model(torch.tensor([one]), use_cache=False)
    found = stored(tmp_path / "out")
    assert errors(found, reference(checkpoint, ids)).max() <= EXACT
    assert errors(found, before).min() > 0.1
    assert open_output(tmp_path / "out").schema.metadata[b"extract.position"] == b"post_final_norm"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_states_times_the_head_are_the_models_own_logits(engines: Engines, rows, tmp_path, name):
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = engines.checkpoint(name)
    ids = ids_of(checkpoint, texts(300))[:40]
    run(job(engines.engine(name), rows, tmp_path / "out", limit=40))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    with torch.no_grad():
        expected = [model(torch.tensor([one]), use_cache=False).logits[0].numpy() for one in ids]
        found = [model.get_output_embeddings()(torch.tensor(states)).numpy() for states in stored(tmp_path / "out")]
    softcap = getattr(model.config, "final_logit_softcapping", None)
    if softcap is not None:
        found = [softcap * np.tanh(logits / softcap) for logits in found]
    assert errors(found, expected).max() <= EXACT


def test_the_first_token_is_the_first_real_one_though_the_tokenizer_pads_on_the_left(engines: Engines, rows, tmp_path):
    checkpoint = engines.checkpoint("gemma2")
    ids = ids_of(checkpoint, texts(300))
    run(job(engines.engine("gemma2"), rows, tmp_path / "out", kind="first"))
    assert output_table(tmp_path / "out").column("num_tokens").to_pylist() == list(map(len, ids))
    assert not any(rig.tiny_tokenizer().pad_token_id in one for one in ids)
    assert errors(stored(tmp_path / "out"), reference(checkpoint, [one[:1] for one in ids], "first")).max() <= EXACT
