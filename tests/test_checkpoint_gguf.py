"""GGUF files: read by their header, refused by name, and imported to the states of their safetensors twin."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import rig

from extract.engine.checkpoint import open_checkpoint
from extract.engine.checkpoint_tokenizer import load_tokenizer
from extract.engine.decoder import WeightsDoNotFit, load_decoder
from extract.engine.gguf_file import ARCHITECTURES, RefusedGguf, read_gguf

SEQUENCES = rig.random_sequences([1, 9, 40], seed=5)
_FROM_HF = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
}


def convert(checkpoint: Path, path: Path, architecture: str, *, extra=None, drop: str = "", factors=False) -> Path:
    """Write a float32 GGUF file of a tiny checkpoint, as llama.cpp's converter would."""
    import gguf
    from safetensors.numpy import load_file
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(checkpoint)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    for key, name in _FROM_HF.items():
        value = getattr(config, key, None)
        if key == "intermediate_size" and architecture == "gpt2":
            value = config.n_inner or 4 * config.n_embd
        if value is not None:
            writer.add_uint32(f"{architecture}.{name}", value)
    epsilon = next(
        getattr(config, key) for key in ("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon") if hasattr(config, key)
    )
    rms = hasattr(config, "rms_norm_eps")
    writer.add_float32(f"{architecture}.attention.layer_norm_{'rms_' if rms else ''}epsilon", epsilon)
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or (rope.get("full_attention") or {}).get("rope_theta")
    if theta:
        writer.add_float32(f"{architecture}.rope.freq_base", theta)
        writer.add_uint32(
            f"{architecture}.rope.dimension_count", config.head_dim if hasattr(config, "head_dim") else 16
        )
    for key, value in (extra or {}).items():
        writer.add_string(f"{architecture}.{key}", value)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)

    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if drop and drop in name:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
        part = next((part for part in heads if part in name), None)
        if architecture == "llama" and part:  # halves to interleaved pairs
            count = heads[part]
            weight = weight.reshape(count, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
        if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            weight = weight.T
        stem, _, ending = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", np.ascontiguousarray(weight, dtype=np.float32))
    if factors:
        writer.add_tensor("rope_freqs.weight", np.full(8, 2.0, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in safetensors."""
    return rig.tiny_checkpoint(tmp_path_factory.mktemp("twin"), "llama", tokenizer=rig.tiny_tokenizer(bos=False))


@pytest.fixture(scope="module")
def llama(twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same Llama as a GGUF file."""
    return convert(twin, tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama")


def refusal(path: Path) -> str:
    with pytest.raises(RefusedGguf) as caught:
        open_checkpoint(path)
    assert caught.value.exit_code == 4
    return str(caught.value)


def test_a_gguf_file_is_described_by_its_header(llama, twin):
    found = open_checkpoint(llama)
    assert (found.name, found.kind, found.architecture, found.dtype) == ("tiny.gguf", "gguf", "llama", "float32")
    assert found.notes == ("imported from GGUF (F32), dequantised",)
    assert found.decoder_bytes == open_checkpoint(twin).decoder_bytes
    assert read_gguf(llama).setting("block_count") == 3


def test_another_name_for_the_same_gguf_file_is_the_same_checkpoint(llama, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(llama.read_bytes())
    assert open_checkpoint(other).sha256 == open_checkpoint(llama).sha256


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_import_gives_the_states_of_the_safetensors_twin(architecture, tied, tmp_path):
    directory = rig.tiny_checkpoint(tmp_path / "twin", architecture, tied=tied)
    path = convert(directory, tmp_path / "tiny.gguf", architecture)
    decoder = load_decoder(open_checkpoint(path), "float32", attn_implementation="eager")
    found = rig.reference_states(decoder.model, SEQUENCES)
    expected = rig.reference_states(directory, SEQUENCES)
    assert rig.relative_error(found, expected) == 0
    assert decoder.config.use_cache is False


def test_the_tokenizer_of_a_gguf_file_gives_the_twins_ids(llama, twin):
    texts = rig.passages(50)
    found = load_tokenizer(open_checkpoint(llama))
    assert found(texts)["input_ids"] == load_tokenizer(open_checkpoint(twin))(texts)["input_ids"]


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_cut_gguf_file_says_bytes_found_and_expected(llama, tmp_path):
    content = llama.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:-1000])
    message = refusal(path)
    assert message.startswith(f"{path}: the file is cut short: 30 tensors need ")
    assert message.endswith(f"found {len(content) - 1000:,}. Copy the file again, or take a whole one.")


@pytest.mark.parametrize("size", [30, 100, 5000])
def test_a_gguf_file_cut_in_its_header_is_refused(llama, tmp_path, size):
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama.read_bytes()[:size])
    assert refusal(path).startswith(f"{path}: the file is cut short: its header needs ")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "0 bytes are too few for a GGUF header"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file: it starts with b'PK\\x03\\x04', \"GGUF\" expected"),
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 1) + bytes(40), "GGUF version 1 found, 2 or 3 expected"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 2**62), "the file is cut short: its header needs"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path, content, problem):
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path}: {problem}")


def test_an_architecture_that_is_not_imported_is_named(llama, tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(llama.read_bytes().replace(b"llama", b"lambda"[:5]))
    assert refusal(path) == (
        f"{path}: GGUF architecture lambd is not imported ({', '.join(ARCHITECTURES)} are). "
        "Take the checkpoint in safetensors, as its publisher has it."
    )


@pytest.mark.parametrize("key", ["rope.scaling.type", "attention.scale", "attention.sliding_window", "anything.else"])
def test_a_setting_that_the_import_would_drop_is_refused(twin, tmp_path, key):
    path = convert(twin, tmp_path / "scaled.gguf", "llama", extra={key: "yarn"})
    assert refusal(path) == (
        f"{path}: it has the setting llama.{key} = yarn, which the import would drop. "
        "Take the checkpoint in safetensors, as its publisher has it."
    )


def test_unscaled_rotary_positions_may_be_spelled_out(twin, tmp_path):
    open_checkpoint(convert(twin, tmp_path / "plain.gguf", "llama", extra={"rope.scaling.type": "none"}))


def test_factors_of_rotary_positions_are_refused(twin, tmp_path):
    path = convert(twin, tmp_path / "factors.gguf", "llama", factors=True)
    assert refusal(path) == (
        f"{path}: its rotary positions are scaled by the tensor rope_freqs.weight, which the import would drop. "
        "Take the checkpoint in safetensors, as its publisher has it."
    )


def test_a_tensor_that_the_import_would_drop_is_refused(tmp_path):
    directory = rig.tiny_checkpoint(tmp_path / "twin", "llama", attention_bias=True)
    path = convert(directory, tmp_path / "bias.gguf", "llama")
    checkpoint = open_checkpoint(path)
    with pytest.raises(WeightsDoNotFit, match=r"12 weights of the files have no place in it \(blk.0.attn_k.bias, "):
        load_decoder(checkpoint, "float32")


def test_a_missing_tensor_is_refused(twin, tmp_path):
    path = convert(twin, tmp_path / "missing.gguf", "llama", drop="layers.1.mlp.up_proj")
    with pytest.raises(WeightsDoNotFit, match=r"1 weights are missing from the files \(layers.1.mlp.up_proj.weight\)"):
        load_decoder(open_checkpoint(path), "float32")


# --- a real file ----------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_imports_and_continues_a_sentence():
    path = Path(os.environ.get("EXTRACT_SMOLLM2_GGUF", ""))
    if not path.is_file():
        pytest.skip("EXTRACT_SMOLLM2_GGUF does not name the SmolLM2-135M GGUF file")
    checkpoint = open_checkpoint(path)
    tokenizer, decoder = load_tokenizer(checkpoint), load_decoder(checkpoint, "float32")
    ids = tokenizer("The capital of France is")["input_ids"]
    (state,) = rig.reference_states(decoder.model, [ids])
    logits = decoder.model.embed_tokens.weight.numpy() @ state[-1]
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"
