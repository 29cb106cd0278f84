"""The rig itself: what other tests take for granted."""

import numpy as np
import pytest
import rig


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_a_tiny_tokenizer_keeps_its_ids_when_saved_and_loaded(kind, bos, eos, tmp_path):
    from transformers import AutoTokenizer

    built = rig.tiny_tokenizer(kind, bos=bos, eos=eos, truncation_side="left", padding_side="left")
    built.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = rig.passages(40)
    expected = [built(text)["input_ids"] for text in texts]
    assert [loaded(text)["input_ids"] for text in texts] == expected
    assert all((ids[0] == built.bos_token_id) == bos and (ids[-1] == built.eos_token_id) == eos for ids in expected)
    assert (loaded.truncation_side, loaded.padding_side) == ("left", "left")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mamba"])
def test_the_first_token_of_a_tiny_checkpoint_reaches_the_last_state(family, tmp_path):
    directory = rig.tiny_checkpoint(tmp_path, family)
    sequence = rig.random_sequences([24])[0]
    changed = [sequence[0] + 1, *sequence[1:]]
    first, second = rig.reference_states(directory, [sequence, changed])
    assert first.shape == (24, 64)
    assert np.abs(first[-1] - second[-1]).max() / np.abs(first).max() > 1e-3


def test_the_same_seed_gives_the_same_checkpoint(tmp_path):
    for name in ("a", "b"):
        rig.tiny_checkpoint(tmp_path / name, "qwen3", tied=True, shards=2, seed=7)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
