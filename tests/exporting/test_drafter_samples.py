"""Training data of drafters: the files, keys, shapes and types that the trainers' loaders look for.

What a loader expects is written down here as it was read in its source (speculators 0.9.0, SpecForge 0.2.0); where the
package itself is installed, its own loader opens the export too.
"""

import json

import numpy as np
import pytest
import torch
from exporting_rig import DTYPES, output, stored, with_layers
from safetensors.torch import load_file

from extract import export
from extract.exporting.loss_mask import NoLossMask
from extract.exporting.state_columns import NoSuchLayer
from extract.exporting.target import TargetNeeds
from extract.output import open_output


def bits(tensor):
    """A tensor's numbers as they are stored."""
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def rows_with_states(out):
    return [row for row in open_output(out) if row.states is not None]


# --- speculators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_speculators_files_hold_the_layers_in_order(dtype, tmp_path):
    import datasets

    out = with_layers(output(tmp_path, "tokens", dtype), 2, 5, 9)
    export(out, tmp_path / "to", kind="speculators", layers=("5", "2", "9"), loss_mask="all")
    expected = stored(out, with_states_only=True)
    rows = datasets.load_from_disk(str(tmp_path / "to"))
    assert rows.format["type"] == "torch"
    assert len(list((tmp_path / "to" / "hidden_states").iterdir())) == len(rows) == len(expected) == 15
    for n, (states, row) in enumerate(zip(expected, rows_with_states(out), strict=True)):
        sample = load_file(tmp_path / "to" / "hidden_states" / f"hs_{n}.safetensors")
        assert set(sample) == {"hidden_states", "token_ids"}
        assert sample["hidden_states"].dtype == getattr(torch, dtype)
        for place, layer in enumerate((5, 2, 9)):
            assert np.array_equal(bits(sample["hidden_states"][:, place].contiguous()), np.roll(states, layer, axis=1))
        assert sample["token_ids"].tolist() == row.input_ids.tolist()
        assert torch.equal(sample["token_ids"], rows[n]["input_ids"])
        assert rows[n]["loss_mask"].tolist() == [1] * row.num_tokens
        assert (int(rows[n]["seq_len"]), int(rows[n]["row"])) == (row.num_tokens, row.row)


def test_speculators_of_the_final_state_alone_has_one_layer(tmp_path):
    out = output(tmp_path, "tokens", "bfloat16")
    export(out, tmp_path / "to", kind="speculators", layers=("final",), loss_mask="all")
    for n, states in enumerate(stored(out, with_states_only=True)):
        sample = load_file(tmp_path / "to" / "hidden_states" / f"hs_{n}.safetensors")
        assert sample["hidden_states"].shape == (len(states), 1, 48)
        assert np.array_equal(bits(sample["hidden_states"][:, 0].contiguous()), states)


@pytest.mark.filterwarnings("ignore")
def test_speculators_own_loader_reads_the_samples(tmp_path):
    data = pytest.importorskip("speculators.train.data", reason="speculators is not installed")
    out = with_layers(output(tmp_path, "tokens", "bfloat16"), 2, 5, 9, 12)
    export(out, tmp_path / "to", kind="speculators", layers=("2", "5", "9", "12"), loss_mask="all")
    samples = data.ArrowDataset(512, tmp_path / "to", on_missing="raise")
    expected, rows = stored(out, with_states_only=True), rows_with_states(out)
    assert len(samples) == len(expected)
    for n, states in enumerate(expected):
        sample = samples[n]
        aux = np.concatenate([np.roll(states, layer, axis=1) for layer in (2, 5, 9)], axis=1)
        assert np.array_equal(bits(sample["hidden_states"].contiguous()), aux)
        last = sample["verifier_last_hidden_states"].contiguous()
        assert np.array_equal(bits(last), np.roll(states, 12, axis=1))
        assert sample["input_ids"].tolist() == rows[n].input_ids.tolist()
        assert sample["loss_mask"].tolist() == [1] * len(states)
    batch = data.CollateFn(512, 48)([samples[n] for n in range(3)])
    assert batch["hidden_states"].shape == (1, 512, 3 * 48)


# --- SpecForge ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_specforge_files_hold_each_tensor_once_under_all_of_its_names(dtype, tmp_path):
    out = with_layers(output(tmp_path, "tokens", dtype), 2, 5, 9)
    export(out, tmp_path / "to", kind="specforge", layers=("2", "5", "9"), loss_mask="all")
    files = sorted((tmp_path / "to").rglob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("data_")))
    assert {file.parent.name for file in files} == {"rows_0-5000"}
    expected, rows = stored(out, with_states_only=True), rows_with_states(out)
    assert len(files) == len(expected)
    for file, states, row in zip(files, expected, rows, strict=True):
        sample = torch.load(file, weights_only=True)
        aux = np.concatenate([np.roll(states, layer, axis=1) for layer in (2, 5, 9)], axis=1)
        for name in ("hidden_state", "target_last_hidden_states"):
            assert np.array_equal(bits(sample[name]), states[None])
        for name in ("aux_hidden_state", "hidden_states"):
            assert np.array_equal(bits(sample[name]), aux[None])
        assert sample["hidden_state"].data_ptr() == sample["target_last_hidden_states"].data_ptr()
        assert sample["input_ids"].tolist() == row.input_ids.tolist()
        assert sample["loss_mask"].tolist() == [1] * row.num_tokens
        assert (sample["input_ids"].dtype, sample["loss_mask"].dtype) == (torch.int64, torch.int64)
        assert int(sample["row"]) == row.row


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", ["eagle3", "dspark"])
def test_specforge_own_reader_reads_the_samples(trainer, tmp_path):
    reader = pytest.importorskip("specforge.runtime.data_plane.offline_reader", reason="specforge is not installed")
    from specforge.algorithms.common import dflash_family_data
    from specforge.algorithms.eagle3 import data
    from specforge.runtime.data_plane.feature_store import load_feature_file

    out = with_layers(output(tmp_path, "tokens", "bfloat16"), 2, 5, 9)
    export(out, tmp_path / "to", kind="specforge", layers=("2", "5", "9"), loss_mask="all", outcomes=("ok",))
    options = {"run_id": "r", "ttt_length": 1, "max_len": 512}
    if trainer == "eagle3":
        samples, normalize = data.build_offline_reader(str(tmp_path / "to"), **options), data.normalize_offline_sample
    else:
        samples = dflash_family_data.build_dspark_offline_reader("dspark", str(tmp_path / "to"), **options)
        normalize = dflash_family_data.normalize_dspark_offline_sample
    samples.validate_files = True
    assert len(samples.read()) == 15
    expected = {tuple(row.input_ids.tolist()): row for row in rows_with_states(out)}
    for path in reader.list_feature_files(str(tmp_path / "to")):
        raw = load_feature_file(path)
        if len(raw["input_ids"]) < 2:
            continue  # a dspark sample wants two tokens to learn from
        sample = normalize(raw, 512)
        row = expected[tuple(sample["input_ids"][0].tolist())]
        length = row.num_tokens
        assert sample["hidden_state" if trainer == "eagle3" else "hidden_states"].shape == (1, length, 3 * 48)
        final = sample["target" if trainer == "eagle3" else "target_last_hidden_states"]
        assert final.shape == (1, length, 48)


# --- what cannot be had ---------------------------------------------------------------------------------------------


def test_speculators_without_layers_says_what_it_needs(tmp_path):
    out = output(tmp_path)
    with pytest.raises(TargetNeeds) as error:
        export(out, tmp_path / "to", kind="speculators", loss_mask="all")
    assert str(error.value) == (
        f"{out}: --to speculators needs states of intermediate layers and of the last layer before the final norm, in "
        "that order. The output holds the state after the final norm alone: --layers final writes it for mtp drafters; "
        "for eagle3 and others run a job that stores the layers."
    )


def test_speculators_never_takes_a_normed_state_for_one_before_the_norm(tmp_path):
    out = with_layers(output(tmp_path), 2)
    with pytest.raises(TargetNeeds, match="put the last one through the final norm themselves"):
        export(out, tmp_path / "to", kind="speculators", layers=("2", "final"), loss_mask="all")


def test_specforge_without_layers_says_what_it_needs(tmp_path):
    out = output(tmp_path)
    with pytest.raises(TargetNeeds) as error:
        export(out, tmp_path / "to", kind="specforge", loss_mask="all")
    assert str(error.value) == (
        f"{out}: --to specforge needs states of intermediate layers (aux_hidden_state) beside the final state. The "
        "output holds the final state alone: run a job that stores the layers, or write files without "
        "aux_hidden_state: --layers final"
    )


@pytest.mark.parametrize("kind", ["speculators", "specforge"])
def test_a_layer_that_is_not_stored_is_named(kind, tmp_path):
    out = with_layers(output(tmp_path), 2, 11)
    with pytest.raises(NoSuchLayer) as error:
        export(out, tmp_path / "to", kind=kind, layers=("2", "7"), loss_mask="all")
    assert str(error.value) == (
        f"{out}: holds no states of layer 7 (it has: 2, 11, final). Run a job that stores layer_7 beside the final "
        "state, or choose with --layers among those that are there."
    )
    assert not (tmp_path / ".to.exporting").exists()


def test_a_cast_changes_layers_too(tmp_path):
    out = with_layers(output(tmp_path, "tokens", "float32"), 2)
    export(out, tmp_path / "to", kind="npy", cast="float16")
    whole = np.load(tmp_path / "to" / "states.npy")
    assert whole.dtype == np.float16
    assert np.array_equal(np.load(tmp_path / "to" / "layer_2.npy"), np.roll(whole, 2, axis=1))


def test_layers_go_to_the_other_targets_too(tmp_path):
    import pyarrow.parquet as pq

    out = with_layers(output(tmp_path), 2)
    export(out, tmp_path / "npy", kind="npy")
    whole = np.concatenate(stored(out, with_states_only=True))
    assert np.array_equal(np.load(tmp_path / "npy" / "layer_2.npy"), np.roll(whole, 2, axis=1))
    export(out, tmp_path / "pq", kind="parquet")
    file = pq.ParquetFile(tmp_path / "pq" / "data" / "part-00000.parquet")
    assert "layer_2" in file.schema_arrow.names
    export(out, tmp_path / "st", kind="safetensors")
    sample = load_file(tmp_path / "st" / "part-00000-00000.safetensors")
    assert np.array_equal(np.roll(sample["states"].numpy(), 2, axis=1), sample["layer_2"].numpy())


def test_a_loss_mask_of_roles_needs_conversations(tmp_path):
    out = output(tmp_path)
    with pytest.raises(NoLossMask) as error:
        export(out, tmp_path / "to", kind="specforge", layers=("final",))
    assert str(error.value) == (
        f'{out}: which tokens the assistant wrote cannot be told: the job\'s input was "text", without roles. Choose '
        "another --loss-mask: all (every token counts), or the name of a carried column that holds lists of 0 and 1."
    )


def test_a_loss_mask_of_a_column_that_is_not_carried_is_refused(tmp_path):
    with pytest.raises(NoLossMask, match='the output carries no column "mask"'):
        export(output(tmp_path), tmp_path / "to", kind="specforge", layers=("final",), loss_mask="mask")


def test_the_record_says_where_masks_are_from(tmp_path):
    made = export(output(tmp_path), tmp_path / "to", kind="specforge", layers=("final",), loss_mask="all")
    record = json.loads((tmp_path / "to" / "export.json").read_bytes())
    tokens = 3 * (3 + 1 + 5 + 128 + 2)
    assert record["loss_mask"] == {"from": "all", "tokens": tokens, "learned": tokens, "unknown_rows": 0}
    assert made.record["layers"] == ["final"]
