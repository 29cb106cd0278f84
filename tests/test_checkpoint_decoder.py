"""Loading the text decoder: the same states as plain transformers, or a refusal that lists what does not fit."""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rig
import torch
from safetensors.torch import load_file, save_file

from extract.engine.checkpoint import open_checkpoint
from extract.engine.decoder import CannotLoad, Decoder, NonFiniteWeights, WeightsDoNotFit, load_decoder

SEQUENCES = rig.random_sequences([1, 7, 40], seed=3)
FAMILIES = [
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "phi3", "olmo2", "granite"),
    *("smollm3", "opt", "bloom", "mamba", "qwen3_moe", "gpt_oss", "biogpt", "modernbert-decoder"),
]


def load(directory: Path, dtype: str = "float32", **options) -> Decoder:
    return load_decoder(open_checkpoint(directory, **options), dtype, attn_implementation="eager")


def states(decoder: Decoder) -> list[np.ndarray]:
    return rig.reference_states(decoder.model, SEQUENCES)


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def rewrite(directory: Path, change) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return rig.tiny_checkpoint(tmp_path / "llama", "llama", tokenizer=None)


def refusal(error: type[Exception], directory: Path, **options) -> str:
    with pytest.raises(error) as caught:
        load(directory, **options)
    assert caught.value.exit_code == 4
    return str(caught.value)


# --- the same states ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_states_are_those_of_plain_transformers(family, tmp_path):
    directory = rig.tiny_checkpoint(tmp_path, family, tokenizer=None)
    decoder = load(directory)
    assert_same(states(decoder), rig.reference_states(directory, SEQUENCES))
    assert decoder.config.use_cache is False
    assert not decoder.model.training
    assert not any(weight.requires_grad for weight in decoder.model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_sharded_and_small_types_change_nothing(tied, shards, dtype, tmp_path):
    directory = rig.tiny_checkpoint(tmp_path, "qwen3", tied=tied, shards=shards, dtype=dtype, tokenizer=None)
    checkpoint = open_checkpoint(directory)
    assert (checkpoint.dtype, len(checkpoint.files) > 2) == (dtype, shards > 1)
    for wanted in ("float32", dtype):
        decoder = load_decoder(checkpoint, wanted, attn_implementation="eager")
        assert decoder.model.dtype == getattr(torch, wanted)
        assert_same(states(decoder), rig.reference_states(directory, SEQUENCES, dtype=wanted))
    assert decoder.notes == (() if tied else ("language model head not loaded (1 tensors)",))


def test_a_base_model_without_prefix_in_its_names_loads(llama):
    expected = rig.reference_states(llama, SEQUENCES)

    def strip(weights):
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)
        del weights["lm_head.weight"]

    rewrite(llama, strip)
    decoder = load(llama)
    assert_same(states(decoder), expected)
    assert decoder.notes == ()


def test_pickled_weights_load_when_allowed(llama):
    expected = rig.reference_states(llama, SEQUENCES)
    torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    assert_same(states(load(llama, allow_pickle=True)), expected)


def test_a_checkpoint_that_stores_known_buffers_loads(llama):
    expected = rig.reference_states(llama, SEQUENCES)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for i in range(3)}
    rewrite(llama, lambda weights: weights.update(buffers))
    assert_same(states(load(llama)), expected)


def test_prediction_layers_that_the_config_announces_are_left_out(tmp_path):
    directory = rig.tiny_checkpoint(tmp_path, "llama", tokenizer=None)
    rewrite(directory, lambda weights: weights.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(4, 4)}))
    assert "no place in it (layers.3.mlp.up_proj.weight)" in refusal(WeightsDoNotFit, directory).replace("model.", "")
    rig.edit_json(directory / "config.json", {"num_nextn_predict_layers": 1})
    assert "multi-token prediction layers not loaded (1 tensors)" in load(directory).notes


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="transformers reads FP8 with accelerate only"
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8_weights_are_dequantised_exactly(tmp_path, dtype):
    shapes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    directory = rig.tiny_checkpoint(tmp_path, dtype="bfloat16", tokenizer=None, head_dim=32, **shapes)
    expected = {}

    def quantise(weights):
        for name in [name for name in weights if "proj" in name]:  # one block each
            scale = weights[name].float().abs().max() / 448
            weights[name] = (weights[name].float() / scale).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scale.reshape(1, 1)
            expected[name.removeprefix("model.")] = weights[name].float() * scale

    rewrite(directory, quantise)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    rig.edit_json(directory / "config.json", {"quantization_config": settings})
    checkpoint = open_checkpoint(directory)
    assert (checkpoint.dtype, checkpoint.notes) == ("bfloat16", ("dequantised: the checkpoint's weights are fp8",))
    found = load_decoder(checkpoint, dtype).model.state_dict()
    assert all(torch.equal(found[name], weight.to(getattr(torch, dtype))) for name, weight in expected.items())


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="transformers reads MXFP4 with accelerate only"
)
def test_mxfp4_experts_are_dequantised_exactly(tmp_path):
    directory = rig.tiny_checkpoint(tmp_path, "gpt_oss", dtype="bfloat16", tokenizer=None)
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    expected = {}

    def quantise(weights):
        for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, width, rows = weights.pop(name).shape
            shape = (experts, rows, width // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
            weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1)
            scaled = pairs.reshape(*shape, 32) * torch.exp2(scales.float() - 127)[..., None]
            expected[name.removeprefix("model.")] = scaled.reshape(experts, rows, width).transpose(1, 2)

    rewrite(directory, quantise)
    rig.edit_json(directory / "config.json", {"quantization_config": {"quant_method": "mxfp4"}})
    found = load(directory).model.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


# --- wrappers -------------------------------------------------------------------------------------------------------

_TEXT = {
    "vocab_size": rig.VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN_TEXT = {**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
_WRAPPERS = {
    "llava": (
        {"model_type": "llama", **_TEXT},
        {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
        {"image_token_index": 399},
    ),
    "gemma3": (
        {"model_type": "gemma3_text", **_TEXT},
        {"model_type": "siglip_vision_model", **_VISION},
        {"mm_tokens_per_image": 4},
    ),
    "mistral3": (
        {"model_type": "mistral", **_TEXT},
        {"model_type": "pixtral", **_VISION},
        {"image_token_index": 399},
    ),
    "qwen2_5_vl": (
        {"model_type": "qwen2_5_vl_text", **_QWEN_TEXT},
        {**_QWEN_VISION, "fullatt_block_indexes": [1]},
        {},
    ),
    "qwen3_vl": (
        {"model_type": "qwen3_vl_text", **_QWEN_TEXT},
        {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        {},
    ),
}  # fmt: skip


def wrapper(directory: Path, family: str):
    """A tiny vision-language checkpoint; returns the whole model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, vision, more = _WRAPPERS[family]
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **more)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    rig.randomise(model.model.language_model)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("family", _WRAPPERS)
def test_a_wrappers_text_decoder_gives_the_wrappers_states(family, tmp_path):
    whole = wrapper(tmp_path, family)
    checkpoint = open_checkpoint(tmp_path)
    decoder = load_decoder(checkpoint, "float32", attn_implementation="eager")
    assert_same(states(decoder), rig.reference_states(whole.model, SEQUENCES))
    assert any("vision, audio or projector weights not loaded" in note for note in decoder.notes)
    assert f"text decoder ({decoder.config.model_type}) of a {family} model" in checkpoint.notes[0]
    loaded = sum(weight.nbytes for weight in decoder.model.state_dict().values())
    assert checkpoint.decoder_bytes == loaded


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_missing_weight_is_refused_and_not_made_up(llama):
    rewrite(llama, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    assert refusal(WeightsDoNotFit, llama) == (
        f"{llama}: the weights do not fit LlamaModel with this config: 1 weights are missing from the files "
        "(layers.1.mlp.up_proj.weight). Nothing is filled in or left out in silence; check that config.json and the "
        "weight files are from the same checkpoint."
    )


def test_a_missing_norm_is_refused_although_ones_would_do(llama):
    rewrite(llama, lambda weights: weights.pop("model.norm.weight"))
    assert "1 weights are missing from the files (norm.weight)" in refusal(WeightsDoNotFit, llama)


def test_a_missing_bias_is_refused(tmp_path):
    directory = rig.tiny_checkpoint(tmp_path, "qwen2", tokenizer=None)
    rewrite(directory, lambda weights: weights.pop("model.layers.0.self_attn.k_proj.bias"))
    assert "missing from the files (layers.0.self_attn.k_proj.bias)" in refusal(WeightsDoNotFit, directory)


def test_a_layer_too_many_in_the_config_lists_a_few_of_its_weights(llama):
    rig.edit_json(llama / "config.json", {"num_hidden_layers": 4})
    assert "9 weights are missing from the files (layers.3.input_layernorm.weight, layers.3.mlp" in refusal(
        WeightsDoNotFit, llama
    )


def test_a_layer_too_few_in_the_config_is_refused(llama):
    rig.edit_json(llama / "config.json", {"num_hidden_layers": 2})
    assert "9 weights of the files have no place in it (" in refusal(WeightsDoNotFit, llama)


def test_a_bias_that_the_config_does_not_know_is_refused(llama):
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(llama, lambda weights: weights.update({name: torch.zeros(64)}))
    message = refusal(WeightsDoNotFit, llama)
    assert "1 weights of the files have no place in it (" in message
    assert "layers.0.self_attn.q_proj.bias)" in message


def test_a_vision_tower_in_a_text_model_is_left_out_with_a_note(llama):
    rewrite(llama, lambda weights: weights.update({"vision_tower.patch.weight": torch.zeros(4)}))
    assert "vision, audio or projector weights not loaded (1 tensors)" in load(llama).notes


def test_another_shape_is_refused_with_both_shapes(llama):
    rig.edit_json(llama / "config.json", {"intermediate_size": 96})
    message = refusal(WeightsDoNotFit, llama)
    assert "9 weights have another shape (" in message
    assert "layers.0.mlp.down_proj.weight: [64, 128] found, [64, 96] expected" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path, value, dtype):
    directory = rig.tiny_checkpoint(tmp_path, "llama", dtype=dtype, tokenizer=None)
    rewrite(directory, lambda weights: weights["model.layers.2.self_attn.v_proj.weight"][3].fill_(value))
    assert refusal(NonFiniteWeights, directory, dtype=dtype) == (
        f"{directory}: weight layers.2.self_attn.v_proj.weight ({dtype} [32, 64]) has 64 values that are not finite. "
        "The checkpoint is damaged, or overflowed when it was converted; take another copy."
    )


def test_a_pickle_that_holds_more_than_weights_is_refused_and_not_run(llama, tmp_path):
    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "code was run"),)

    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Touch()}))
    message = refusal(CannotLoad, llama, allow_pickle=True)
    assert message.startswith(f"{llama}: transformers ")
    assert not (tmp_path / "code was run").exists()


# --- silence and memory ---------------------------------------------------------------------------------------------


def test_loading_prints_nothing_and_leaves_transformers_logging_as_it_was(llama, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(llama)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


_MEASURE = """
import json, sys, torch
from extract.engine.checkpoint import open_checkpoint
from extract.engine.decoder import load_decoder
from transformers import AutoModel
checkpoint = open_checkpoint(sys.argv[1])
def resident():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return sum(int(lines[key].split()[0]) for key in ("RssAnon", "RssFile")) * 1024
import transformers.models.llama.modeling_llama
before = resident()
decoder = load_decoder(checkpoint, "float32")
with torch.no_grad():
    decoder.model(torch.arange(16)[None], use_cache=False)
print(json.dumps({"used": resident() - before, "decoder": checkpoint.decoder_bytes}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see resident memory")
def test_the_head_is_never_in_memory(tmp_path):
    directory = rig.tiny_checkpoint(tmp_path, "llama", tokenizer=None, vocab_size=50_000, hidden_size=512, head_dim=128)
    run = [sys.executable, "-c", _MEASURE, str(directory)]
    seen = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    head = 50_000 * 512 * 4
    size = (directory / "model.safetensors").stat().st_size
    assert size > seen["decoder"] + head - 100_000
    assert seen["used"] < seen["decoder"] + 0.6 * head
