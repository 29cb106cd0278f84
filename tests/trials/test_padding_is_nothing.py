"""Nothing is padded, so how a tokenizer would pad changes nothing: its side, its token, none at all, or pad == EOS."""

import json

import number_rig
import numpy as np
import pyarrow as pa
import pytest
import rig
from job_rig import errors, ids_of, job, output_table, parquet, reference, run, stored, texts
from number_rig import EXACT, LIMIT

SETTINGS = {
    "right": {"pad": "<pad>", "side": "right"},
    "left": {"pad": "<pad>", "side": "left"},
    "left, pad is EOS": {"pad": "</s>", "side": "left"},
    "no pad": {"pad": None, "side": "left"},
}

TEXTS = [*texts(20, seed=17, characters=150), "a", "</s>", "<pad> <pad>", "x</s>"]


def padded_engine(root, weights, settings, decoder):
    """An engine of the same weights with a tokenizer that would pad so, and that sees texts unchanged otherwise."""
    import shutil

    root.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(weights / name, root / name)
    tokenizer = rig.tiny_tokenizer(padding_side=settings["side"])
    tokenizer.pad_token = settings["pad"]
    tokenizer.save_pretrained(root)
    return number_rig.build_engine(root, root / "engine", decoder=decoder)


@pytest.mark.parametrize(("name", "decoder"), [("llama", "own"), ("gpt2", "transformers")])
def test_every_way_to_pad_gives_the_same_bytes(subjects, tmp_path, name, decoder):
    weights = subjects.checkpoint(name)
    source = parquet(tmp_path / "in.parquet", {"text": TEXTS})
    outputs = {}
    for label, settings in SETTINGS.items():
        engine = padded_engine(tmp_path / label, weights, settings, decoder)
        for kind in ("tokens", "last", "first"):
            output = tmp_path / f"{label} {kind}"
            summary = run(job(engine, source, output, kind=kind))
            table = output_table(output)
            outputs.setdefault(kind, []).append(table)
            ids = ids_of(tmp_path / label, TEXTS, limit=LIMIT)
            assert table.column("input_ids").to_pylist() == ids
            assert table.column("num_tokens").to_pylist() == list(map(len, ids))
            assert summary.tokens_computed == sum(map(len, ids))
            assert errors(stored(output), reference(weights, ids, kind)).max() <= EXACT
    for same in outputs.values():
        assert all(table.equals(same[0]) for table in same[1:])


def test_a_missing_pad_token_is_not_made_up(subjects):
    """No row of the embedding and no word of the vocabulary more than the checkpoint has."""
    from safetensors import safe_open

    for subject in ("gpt2-transformers", "mistral-own"):
        engine, checkpoint = subjects.engine(subject), subjects.checkpoint(subject)
        shapes = []
        for directory in (engine, checkpoint):
            with safe_open(directory / "model.safetensors", "np") as weights:
                names = list(weights.keys())
                (name,) = (name for name in names if name.endswith(("embed_tokens.weight", "wte.weight")))
                shapes.append(weights.get_slice(name).get_shape())
        assert shapes[0] == shapes[1]
        vocabularies = [json.loads((place / "tokenizer.json").read_text()) for place in (engine, checkpoint)]
        assert vocabularies[0]["model"]["vocab"] == vocabularies[1]["model"]["vocab"]
        assert vocabularies[0]["added_tokens"] == vocabularies[1]["added_tokens"]
        assert json.loads((engine / "tokenizer_config.json").read_text()).get("pad_token") is None


@pytest.mark.parametrize("subject", ["gemma3-own", "gemma3-transformers", "recurrent_gemma-transformers"])
def test_the_bos_is_the_first_state_of_every_row_so_a_reader_can_drop_it(subjects, tmp_path, subject):
    """Under left padding the first position of a batch is a pad for most rows, and the BOS stands somewhere else."""
    source = parquet(tmp_path / "in.parquet", {"text": pa.array(TEXTS)})
    run(job(subjects.engine(subject), source, tmp_path / "out"))
    (bos,) = reference(subjects.checkpoint(subject), [[1]])
    for states, ids in zip(
        stored(tmp_path / "out"), output_table(tmp_path / "out")["input_ids"].to_pylist(), strict=True
    ):
        assert ids[0] == 1
        assert 1 not in ids[1:]
        assert np.abs(states[0] - bos[0]).max() <= EXACT * np.abs(bos).max()
