"""Caches for SAELens: states of a shard end to end, cut every `context` of them; what its store asks of a cache."""

import numpy as np
import pytest
from exporting_rig import DTYPES, output, stored

from extract import export
from extract.output import open_output
from extract.shards.values import as_float32


def rows_of(path):
    import datasets

    return datasets.load_from_disk(str(path))


def states_of(path, hook="final_norm"):
    """[windows, context, H]."""
    return np.stack(rows_of(path).with_format("numpy", columns=[hook])[:][hook])


def by_shard(out):
    """States and ids of each shard end to end."""
    opened, states, ids = open_output(out), [], []
    for commit in opened.shards:
        rows = [row for row in opened.rows_of_shard(commit.shard, range(commit.num_rows_out)) if row.states is not None]
        states.append(np.concatenate([row.states for row in rows]))
        ids.append(np.concatenate([row.input_ids for row in rows]))
    return states, ids


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_and_ids_are_those_of_the_rows_end_to_end(dtype, tmp_path):
    out = output(tmp_path, "tokens", dtype)
    made = export(out, tmp_path / "to", kind="saelens", context=8)
    states, ids = by_shard(out)
    kept = [len(one) // 8 * 8 for one in states]
    expected = np.concatenate([one[:n] for one, n in zip(states, kept, strict=True)])
    assert np.array_equal(states_of(tmp_path / "to").reshape(-1, 48).astype(np.float32), expected)
    tokens = np.concatenate([one[:n] for one, n in zip(ids, kept, strict=True)])
    assert np.array_equal(np.array(rows_of(tmp_path / "to")["token_ids"]).reshape(-1), tokens)
    assert made.record["states_left_over"] == sum(map(len, states)) - sum(kept) == 3 * (139 % 8)
    assert made.record["windows"] == sum(kept) // 8
    assert rows_of(tmp_path / "to").features["final_norm"].dtype == ("float16" if dtype == "float16" else "float32")


def test_what_a_record_batch_leaves_over_goes_on_with_the_next(tmp_path):
    out = output(tmp_path, "tokens", "float32", num_shards=2, rows_per_shard=42)
    assert open_output(out).shard(0).num_batches > 2
    export(out, tmp_path / "to", kind="saelens", context=10)
    states, ids = by_shard(out)
    whole = [np.concatenate([one[: len(one) // 10 * 10] for one in parts]) for parts in (states, ids)]
    assert np.array_equal(states_of(tmp_path / "to").reshape(-1, 48), whole[0])
    assert np.array_equal(np.array(rows_of(tmp_path / "to")["token_ids"]).reshape(-1), whole[1])


def test_a_context_of_one_leaves_nothing_over(tmp_path):
    out = output(tmp_path, "tokens", "bfloat16")
    made = export(out, tmp_path / "to", kind="saelens", context=1, hook="blocks.5.hook_resid_post")
    whole = as_float32(np.concatenate(stored(out, with_states_only=True)))
    assert np.array_equal(states_of(tmp_path / "to", "blocks.5.hook_resid_post")[:, 0], whole)
    assert made.record["states_left_over"] == 0


def test_a_context_longer_than_a_shard_leaves_everything_over_and_says_so(tmp_path):
    out = output(tmp_path)
    made = export(out, tmp_path / "to", kind="saelens", context=1000)
    assert (len(rows_of(tmp_path / "to")), made.record["states_left_over"]) == (0, 3 * 139)


@pytest.mark.filterwarnings("ignore")
def test_saelens_own_store_takes_the_cache(tmp_path):
    store = pytest.importorskip("sae_lens.training.activations_store", reason="sae_lens is not installed")
    import torch

    out = output(tmp_path, "tokens", "bfloat16")
    export(out, tmp_path / "to", kind="saelens", context=8, hook="hook")
    cache = object.__new__(store.ActivationsStore)
    cache.cached_activations_path, cache.hook_name = str(tmp_path / "to"), "hook"
    cache.context_size, cache.d_in, cache.store_batch_size_prompts = 8, 48, 4
    cache.device, cache.dtype = torch.device("cpu"), torch.float32
    cache.cached_activation_dataset = cache.load_cached_activation_dataset()
    found, ids = cache._load_raw_llm_batch_from_cached(raise_on_epoch_end=True)
    states, tokens = by_shard(out)
    assert np.array_equal(found.numpy(), states[0][:32])
    assert np.array_equal(ids.numpy(), tokens[0][:32])
