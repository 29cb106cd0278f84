"""Opening a checkpoint: identity, and each refusal with its words."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import rig
import transformers

from extract.engine.checkpoint import AdapterRefused, open_checkpoint
from extract.engine.hub_cache import NoSuchCheckpoint
from extract.engine.model_config import NeedsOwnCode, NotACheckpoint, NotADecoder, UnknownModelType
from extract.engine.quantization import QuantizedCheckpoint, UnknownQuantization
from extract.engine.sentence_transformers import BadModules
from extract.engine.weights_files import NoWeights, PickledWeights

VERSION = transformers.__version__


@pytest.fixture
def llama(llama_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama whose files may be changed."""
    return shutil.copytree(llama_checkpoint, tmp_path / "llama")


def refusal(error: type[Exception], path: str | Path, **options) -> str:
    with pytest.raises(error) as caught:
        open_checkpoint(path, **options)
    assert caught.value.exit_code == 4
    return str(caught.value)


# --- identity -------------------------------------------------------------------------------------------------------


def test_a_directory_is_described_without_reading_its_weights(llama):
    found = open_checkpoint(llama)
    assert (found.name, found.kind, found.model_type, found.architecture) == (
        "llama", "directory", "llama", "LlamaForCausalLM",
    )  # fmt: skip
    assert (found.dtype, found.pickled, found.notes) == ("float32", False, ())
    assert found.config["hidden_size"] == 64
    assert [path.name for path in found.files] == ["model.safetensors", "config.json"]


def test_the_head_does_not_count_among_the_decoders_bytes(llama):
    with_head = (llama / "model.safetensors").stat().st_size
    head = rig.VOCAB_SIZE * 64 * 4
    assert 0 < with_head - head - open_checkpoint(llama).decoder_bytes < 20_000


def test_the_same_bytes_in_another_folder_have_the_same_identity(llama, tmp_path):
    other = shutil.copytree(llama, tmp_path / "elsewhere" / "renamed")
    assert open_checkpoint(other).sha256 == open_checkpoint(str(llama)).sha256


def test_a_checkpoint_of_links_is_the_checkpoint_that_they_lead_to(llama, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in llama.iterdir():
        (linked / path.name).symlink_to(path)
    assert open_checkpoint(linked).sha256 == open_checkpoint(llama).sha256


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_changed_byte_changes_the_identity(llama, name):
    before = open_checkpoint(llama).sha256
    content = bytearray((llama / name).read_bytes())
    content[-2 if name == "model.safetensors" else content.index(b"\n")] ^= ord("\n") ^ ord(" ")
    (llama / name).write_bytes(content)
    assert open_checkpoint(llama).sha256 != before


def test_the_stored_dtype_is_the_one_of_most_weights(tmp_path):
    assert open_checkpoint(rig.tiny_checkpoint(tmp_path, "qwen2", dtype="bfloat16")).dtype == "bfloat16"


def test_opening_changes_no_file(llama):
    before = {path: path.stat().st_mtime_ns for path in llama.iterdir()}
    open_checkpoint(llama)
    assert {path: path.stat().st_mtime_ns for path in llama.iterdir()} == before


# --- not there, not a checkpoint ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [str, Path])
def test_a_missing_directory_is_said_to_be_missing(tmp_path, make):
    path = tmp_path / "nothing"
    assert refusal(NoSuchCheckpoint, make(path)) == (
        f"{path}: no such directory. Give a checkpoint directory, a .gguf file, or a hub name (org/name)."
    )


def test_a_weight_file_is_not_a_checkpoint(llama):
    path = llama / "model.safetensors"
    assert refusal(NoSuchCheckpoint, path) == (
        f"{path}: a file that is not a .gguf file. Give the checkpoint's directory."
    )


def test_a_directory_without_a_config_lists_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").touch()
    assert refusal(NotACheckpoint, tmp_path) == (
        f"{tmp_path}: not a checkpoint: it holds no config.json. Found there: notes.txt."
    )


def test_a_publishers_own_layout_is_named(tmp_path):
    for name in ("consolidated.safetensors", "params.json"):
        (tmp_path / name).touch()
    assert refusal(NotACheckpoint, tmp_path) == (
        f"{tmp_path}: not a checkpoint: it holds no config.json, only its publisher's own layout "
        "(consolidated.safetensors, params.json). Take the checkpoint in the layout that transformers reads."
    )


def test_a_directory_of_checkpoints_suggests_one(llama):
    assert refusal(NotACheckpoint, llama.parent).endswith(f"it holds no config.json. Did you mean {llama}?")


def test_a_directory_with_only_a_gguf_file_suggests_the_file(tmp_path):
    (tmp_path / "model-q4.gguf").touch()
    assert refusal(NotACheckpoint, tmp_path).endswith(f"Give the GGUF file itself: {tmp_path / 'model-q4.gguf'}")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "config.json is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        (b"[1]", "config.json is not a JSON object"),
        (b'{"\xff": 1}', "config.json is not JSON ('utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "config.json is not JSON (maximum recursion depth exceeded"),
    ],
)
def test_a_config_that_does_not_parse_is_refused(llama, content, problem):
    (llama / "config.json").write_bytes(content)
    message = refusal(NotACheckpoint, llama)
    assert message.startswith(f"{llama}: not a checkpoint: {problem[:60]}")


def test_a_model_type_is_never_guessed_from_the_directorys_name(llama):
    rig.edit_json(llama / "config.json", {"model_type": None})
    assert refusal(NotACheckpoint, llama) == (
        f"{llama}: not a checkpoint: config.json has no model_type. A model is never guessed from a file's name."
    )


def test_a_config_that_redirects_the_weights_is_refused(llama):
    rig.edit_json(llama / "config.json", {"transformers_weights": "../other.safetensors"})
    assert refusal(NotACheckpoint, llama) == (
        f"{llama}: not a checkpoint: config.json redirects the weights to '../other.safetensors'. "
        "Remove the key transformers_weights."
    )


def test_config_values_that_transformers_refuses_are_passed_on(llama):
    rig.edit_json(llama / "config.json", {"num_attention_heads": 5})
    message = refusal(NotACheckpoint, llama)
    assert message.startswith(f"{llama}: not a checkpoint: transformers refuses its config.json (")
    assert message.endswith("Compare it with the publisher's.")


# --- not a decoder, not known ---------------------------------------------------------------------------------------


def test_an_unknown_model_type_names_the_version_of_transformers(llama):
    rig.edit_json(llama / "config.json", {"model_type": "llama9", "transformers_version": "9.1.0"})
    assert refusal(UnknownModelType, llama) == (
        f'{llama}: model_type is "llama9", which transformers {VERSION} does not know. It was saved by transformers '
        "9.1.0. Check whether the checkpoint's own page names a version of transformers."
    )


def test_a_checkpoint_that_needs_its_own_code_is_refused_and_the_code_not_run(llama):
    (llama / "modeling.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    changes = {"model_type": "own", "auto_map": {"AutoConfig": "modeling.C", "AutoModel": "modeling.M"}}
    rig.edit_json(llama / "config.json", changes)
    assert refusal(NeedsOwnCode, llama) == (
        f'{llama}: model_type "own" needs code of its own (trust_remote_code, auto_map in config.json), which extract '
        f"never runs, and transformers {VERSION} has no class of its own for it."
    )


def test_own_code_beside_a_known_model_type_is_noted_and_not_run(llama):
    (llama / "modeling.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    rig.edit_json(llama / "config.json", {"auto_map": {"AutoConfig": "modeling.C", "AutoModel": "modeling.M"}})
    note = "auto_map: the checkpoint's own code is not run, transformers' llama is used"
    assert open_checkpoint(llama).notes == (note,)


@pytest.mark.parametrize(
    ("model_type", "named", "found"),
    [
        ("t5", "t5", "an encoder-decoder"),
        ("bart", "bart", "an encoder-decoder"),
        ("whisper", "whisper", "an encoder-decoder"),
        ("bert", "bert", "an encoder (is_decoder is not set)"),
        ("modernbert", "modernbert", "a ModernBert model without a language model head"),
        ("vit", "vit", "a ViT model without a language model head"),
        ("xlnet", "xlnet", "a model whose states depend on later tokens"),
    ],
)
def test_a_model_that_is_no_decoder_is_refused_by_name(llama, model_type, named, found):
    (llama / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert refusal(NotADecoder, llama) == (
        f'{llama}: not a decoder: "{named}" is {found}, a causal language model is expected. '
        "Hidden states are extracted from decoders only."
    )


def test_a_decoder_inside_an_encoder_decoder_is_not_taken_for_one(llama):
    parts = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
    config = {"model_type": "musicgen", **parts, "decoder": {"model_type": "musicgen_decoder"}}
    (llama / "config.json").write_text(json.dumps(config))
    assert 'not a decoder: "musicgen" is an encoder-decoder, ' in refusal(NotADecoder, llama)


# --- weights that are not there, or not as meant --------------------------------------------------------------------


def test_a_config_without_weights_is_refused(llama):
    (llama / "model.safetensors").unlink()
    assert refusal(NoWeights, llama) == (
        f"{llama}: no weights: neither model.safetensors nor model.safetensors.index.json is there. "
        "Fetch the weights too, as safetensors."
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("consolidated.safetensors", "consolidated.safetensors is its publisher's own layout: take the one that"),
        (
            "model-00001-of-00002.safetensors",
            "These are shards without their index: fetch model.safetensors.index.json",
        ),
        ("model.fp16.safetensors", "Fetch the weights too, as safetensors."),
    ],
)
def test_weights_under_names_that_are_not_loaded_are_listed(llama, name, advice):
    (llama / "model.safetensors").rename(llama / name)
    message = refusal(NoWeights, llama)
    assert f"is there; found {name}. {advice}" in message


def test_pickled_weights_are_refused_unless_allowed(llama):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    assert refusal(PickledWeights, llama) == (
        f"{llama}: the weights are there only as pytorch_model.bin, a pickle. Convert them to safetensors (better), or "
        "allow them with --allow-pickle: they are then read with weights_only, which runs no code."
    )
    assert open_checkpoint(llama, allow_pickle=True).pickled


def test_an_adapter_alone_is_refused_with_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    assert refusal(AdapterRefused, tmp_path) == (
        f"{tmp_path}: not a checkpoint, but an adapter of org/base. Merge it first (peft: merge_and_unload, then "
        "save_pretrained) and give the merged checkpoint."
    )


def test_an_adapter_beside_full_weights_is_refused(llama):
    (llama / "adapter_config.json").write_text("{}")
    assert refusal(AdapterRefused, llama) == (
        f"{llama}: adapter_config.json stands beside full weights, an adapter of a model that it does not name. Merge "
        "it first (peft: merge_and_unload, then save_pretrained) and give the merged checkpoint, or remove "
        "adapter_config.json if the weights are merged already."
    )


# --- quantised by somebody else -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named", "package"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq (4 bits)", "optimum gptqmodel"),
        ({"quant_method": "awq", "bits": 4}, "awq (4 bits)", "gptqmodel"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes (8 bits)", "bitsandbytes"),
        ({"load_in_4bit": True}, "bitsandbytes (4 bits)", "bitsandbytes"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            "compressed-tensors (8 bits)",
            "compressed-tensors",
        ),
        ({"quant_method": "torchao"}, "torchao", "torchao"),
        ({"quant_method": "hqq"}, "hqq", "hqq"),
    ],
)
def test_a_quantised_checkpoint_is_refused_with_method_bits_and_package(llama, settings, named, package):
    rig.edit_json(llama / "config.json", {"quantization_config": settings})
    assert refusal(QuantizedCheckpoint, llama) == (
        f"{llama}: the weights are quantised with {named}, which is not read here. Take the checkpoint that it was "
        f"made from, or dequantise it first and save it again (it needs: pip install {package})."
    )


def test_fp8_weights_are_refused_where_nothing_can_read_them(llama, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rig.edit_json(llama / "config.json", {"quantization_config": {"quant_method": "fp8"}})
    assert refusal(QuantizedCheckpoint, llama) == (
        f"{llama}: the weights are quantised with fp8, which is not read here. Take the checkpoint that it was made "
        "from, or dequantise it first and save it again (reading it needs: pip install accelerate)."
    )


def test_an_unknown_quantisation_method_is_refused(llama):
    rig.edit_json(llama / "config.json", {"quantization_config": {"quant_method": "fancy2"}})
    assert refusal(UnknownQuantization, llama) == (
        f'{llama}: quantization_config has quant_method "fancy2", which is not known here. Weights that cannot be read '
        "as they were meant are never guessed; take the checkpoint that it was made from."
    )


def test_a_modelopt_checkpoint_is_refused(llama):
    (llama / "hf_quant_config.json").touch()
    assert "quantised with ModelOpt (hf_quant_config.json), which is not read here" in refusal(
        QuantizedCheckpoint, llama
    )


@pytest.mark.parametrize("ending", ["qweight", "scales", "weight_packed", "SCB"])
def test_packed_weights_without_a_quantization_config_are_refused(llama, ending):
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(llama / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.{ending}"
    save_file({**weights, name: torch.zeros(4, 4, dtype=torch.int32)}, llama / "model.safetensors")
    assert refusal(UnknownQuantization, llama) == (
        f"{llama}: quantised, no quantization_config: 1 tensors such as {name} are packed weights. Weights that cannot "
        "be read as they were meant are never guessed; take the checkpoint that it was made from."
    )


# --- sentence-transformers ------------------------------------------------------------------------------------------


def pipeline(directory: Path, path: str) -> None:
    modules = [
        {"idx": 0, "name": "0", "path": path, "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (directory / "modules.json").write_text(json.dumps(modules))


def test_a_sentence_transformer_is_opened_and_says_what_is_not_applied(llama):
    pipeline(llama, "")
    prompts = {"query": "Instruct: find\nQuery: ", "document": ""}
    (llama / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    assert open_checkpoint(llama).notes == (
        "sentence-transformers: not applied: Pooling, Normalize",
        "sentence-transformers: prompts are not applied, choose one as prefix: query='Instruct: find\\nQuery: '",
    )


def test_the_transformer_of_a_pipeline_is_found_in_its_own_directory(llama, tmp_path):
    root = tmp_path / "pipeline"
    shutil.move(llama, root / "0_Transformer")
    pipeline(root, "0_Transformer")
    found = open_checkpoint(root)
    assert (found.name, found.path) == ("pipeline", root / "0_Transformer")
    assert found.notes == ("sentence-transformers: not applied: Pooling, Normalize",)


@pytest.mark.parametrize("path", ["../other", "1_Missing", "/"])
def test_a_pipeline_that_leads_out_of_its_directory_is_refused(llama, path):
    (llama.parent / "other").mkdir()
    pipeline(llama, path)
    assert refusal(BadModules, llama) == (
        f'{llama / "modules.json"}: its transformer is in "{path}", which is not a directory here. Fetch the whole '
        "checkpoint, or give the transformer's own directory."
    )
