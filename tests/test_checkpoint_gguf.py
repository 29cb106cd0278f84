"""GGUF files: read by their header, refused by name, and imported to the states of their safetensors twin."""

import functools
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import rig

from extract.engine.checkpoint import open_checkpoint
from extract.engine.checkpoint_tokenizer import load_tokenizer
from extract.engine.decoder import WeightsDoNotFit, load_decoder
from extract.engine.gguf_file import GgufHeader, RefusedGguf, read_gguf
from extract.engine.gguf_settings import ARCHITECTURES, GGUF_FAMILIES, check_gguf, config_settings

SEQUENCES = rig.random_sequences([1, 9, 40], seed=5)
DEMO = Path(__file__).parent.parent / "demo"
_FROM_HF = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
_LEFT_OUT = {"gpt2": ("num_key_value_heads", "head_dim"), "phi3": ("head_dim",)}
"""What llama.cpp's converter does not write for a family, though the tiny configs carry it."""
_TWINS = {
    "gemma2": {"sliding_window": 8},
    "gemma3": {
        "num_hidden_layers": 7,  # the sixth has no window
        "sliding_window": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "phi3": {"sliding_window": 8},
}


def settings_of(config, architecture: str) -> dict:
    """The settings that llama.cpp's converter writes for a config."""
    written = {
        name: getattr(config, key, None) for key, name in _FROM_HF.items() if key not in _LEFT_OUT.get(architecture, ())
    }
    if architecture == "gpt2":
        written["feed_forward_length"] = config.n_inner or 4 * config.n_embd
    if "attention.key_length" in written:
        written["attention.value_length"] = written["attention.key_length"]
    rope = getattr(config, "rope_parameters", None) or {}
    if architecture == "gemma3":
        rope = rope["full_attention"]
    if architecture != "gemma2":
        written["rope.freq_base"] = rope.get("rope_theta")
    if rope.get("rope_type") == "linear":
        written |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if architecture == "phi3":
        written["attention.sliding_window"] = config.sliding_window or 0
        written["rope.dimension_count"] = config.hidden_size // config.num_attention_heads
        written["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if architecture == "llama":
        written |= {"rope.dimension_count": config.head_dim, "vocab_size": config.vocab_size}
    return {name: value for name, value in written.items() if value is not None}


def convert(checkpoint: Path, path: Path, architecture: str, *, extra=None, drop: str = "", factors=False) -> Path:
    """Write a float32 GGUF file of a tiny checkpoint, as llama.cpp's converter would.

    Args:
        checkpoint: a safetensors directory of `rig.tiny_checkpoint`.
        path: the file to write.
        architecture: GGUF's name of it.
        extra: settings to add or, with `None`, to leave out.
        drop: weights with this in their name are left out.
        factors: write a tensor of rotary factors.
    """
    import gguf
    from safetensors.numpy import load_file
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(checkpoint)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writers = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in {**settings_of(config, architecture), **(extra or {})}.items():
        if value is not None:
            writers.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
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
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + np.float32(1)
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


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [(name, tied) for name in ARCHITECTURES for tied in (True, False) if tied or not name.startswith("gemma")],
)
def test_the_import_gives_the_states_of_the_safetensors_twin(architecture, tied, tmp_path):
    family, settings = GGUF_FAMILIES[architecture].model_type, _TWINS.get(architecture, {})
    directory = rig.tiny_checkpoint(tmp_path / "twin", family, tied=tied, **settings)
    path = convert(directory, tmp_path / "tiny.gguf", architecture)
    decoder = load_decoder(open_checkpoint(path), "float32", attn_implementation="eager")
    found = rig.reference_states(decoder.model, SEQUENCES)
    expected = rig.reference_states(directory, SEQUENCES)
    assert rig.relative_error(found, expected) == 0
    assert decoder.config.use_cache is False


# --- what Gemma's files do not say ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 in safetensors."""
    return rig.tiny_checkpoint(tmp_path_factory.mktemp("gemma"), "gemma3_text", tied=True, **_TWINS["gemma3"])


def settings_read(path: Path) -> dict:
    header = read_gguf(path)
    check_gguf(path, header)
    return config_settings(header)


def test_a_note_says_what_is_taken_as_llama_cpp_takes_it(gemma, tmp_path):
    path = convert(gemma, tmp_path / "gemma.gguf", "gemma3")
    assert open_checkpoint(path).notes == (
        "imported from GGUF (F32), dequantised",
        "not in the file, taken as llama.cpp takes it: attention scale 1/sqrt(16), "
        "every layer but each 6th with a window",
    )


@pytest.mark.parametrize(
    ("architecture", "layers", "scalar"),
    [("gemma2", 46, 144), ("gemma2", 42, 128), ("gemma3", 62, 144), ("gemma3", 48, 128)],
)
def test_the_27b_sizes_alone_scale_attention_by_the_hidden_size(architecture, layers, scalar):
    stated = {
        "block_count": layers,
        "embedding_length": 4608,
        "attention.head_count": 32,
        "attention.key_length": 128,
        "rope.freq_base": 1e6,
    }
    metadata = {f"{architecture}.{key}": value for key, value in stated.items()}
    header = GgufHeader(architecture=architecture, metadata=metadata, tensors=())
    assert config_settings(header)["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize("extra", [{"rope.scaling.type": "none"}, {"rope.scaling.factor": None}])
def test_gemma_positions_are_scaled_only_if_the_file_says_so(gemma, tmp_path, extra):
    settings = settings_read(convert(gemma, tmp_path / "unscaled.gguf", "gemma3", extra=extra))
    assert settings["rope_parameters"]["full_attention"] == {"rope_type": "default", "rope_theta": 1_000_000.0}


def test_a_gemma_file_may_state_its_windows(gemma, tmp_path):
    extra = {"attention.sliding_window_pattern": 3, "rope.freq_base_swa": 5_000.0}
    path = convert(gemma, tmp_path / "windows.gguf", "gemma3", extra=extra)
    settings = settings_read(path)
    full = [layer for layer, kind in enumerate(settings["layer_types"]) if kind == "full_attention"]
    assert full == [2, 5]
    assert settings["rope_parameters"]["sliding_attention"]["rope_theta"] == 5_000.0
    assert open_checkpoint(path).notes[1:] == (
        "not in the file, taken as llama.cpp takes it: attention scale 1/sqrt(16)",
    )


def test_gemma_windows_of_no_size_are_refused(gemma, tmp_path):
    path = convert(gemma, tmp_path / "none.gguf", "gemma3", extra={"attention.sliding_window": 0})
    assert refusal(path) == (
        f"{path}: it has the setting gemma3.attention.sliding_window = 0, which the import would not do. "
        "Take the checkpoint in safetensors, as its publisher has it."
    )


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


def test_a_setting_of_each_layer_is_refused(twin, tmp_path):
    path = convert(twin, tmp_path / "layers.gguf", "llama", extra={"attention.head_count_kv": [2, 2, 2]})
    assert refusal(path) == (
        f"{path}: it has the setting llama.attention.head_count_kv as a list of 3, which the import would drop. "
        "Take the checkpoint in safetensors, as its publisher has it."
    )


def test_heads_that_are_rotated_in_part_are_refused(twin, tmp_path):
    path = convert(twin, tmp_path / "part.gguf", "llama", extra={"rope.dimension_count": 8})
    assert refusal(path) == (
        f"{path}: 8 of the 16 values of an attention head are rotated, which the import would not do. "
        "Take the checkpoint in safetensors, as its publisher has it."
    )


@pytest.mark.parametrize(
    ("architecture", "setting"),
    [
        ("gemma3", "rope.freq_base"),
        ("gemma3", "attention.sliding_window"),
        ("gemma3", "attention.layer_norm_rms_epsilon"),
        ("phi3", "attention.sliding_window"),
    ],
)
def test_a_setting_that_the_import_would_guess_is_refused(architecture, setting, tmp_path):
    directory = rig.tiny_checkpoint(tmp_path / "twin", GGUF_FAMILIES[architecture].model_type, tied=True)
    path = convert(directory, tmp_path / "lacks.gguf", architecture, extra={setting: None})
    assert refusal(path) == (
        f"{path}: it lacks the setting {architecture}.{setting}, which the import will not guess. "
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


def real_file(pattern: str) -> Path:
    found = sorted(DEMO.glob(pattern))
    if not found:
        pytest.skip(f"demo/{pattern} is not here")
    return found[0]


@functools.cache
def real_tokenizer(path: Path):
    """Kept, because a vocabulary of 262,144 tokens takes transformers half a minute."""
    return load_tokenizer(open_checkpoint(path))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "text", "continuation"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "The capital of France is", " Paris"),
        ("gemma-3-270m*.gguf", "Paris is the capital of", " France"),
    ],
)
def test_a_real_file_continues_a_sentence(pattern, text, continuation):
    path = real_file(pattern)
    tokenizer, decoder = real_tokenizer(path), load_decoder(open_checkpoint(path), "float32")

    def likeliest(text: str, count: int) -> list[str]:
        (state,) = rig.reference_states(decoder.model, [tokenizer(text)["input_ids"]])
        logits = decoder.model.embed_tokens.weight.numpy() @ state[-1]
        return [tokenizer.decode([token]) for token in np.argsort(-logits)[:count].tolist()]

    assert likeliest(text, 1) == [continuation]
    assert " Paris" in likeliest("The capital of France is", 3)  # Gemma puts " the" and " a" first, in llama.cpp too


@pytest.mark.model
@pytest.mark.slow
def test_the_tokenizer_of_a_real_gemma_file_gives_known_ids():
    tokenizer = real_tokenizer(real_file("gemma-3-270m*.gguf"))
    assert tokenizer("The capital of France is")["input_ids"] == [2, 818, 5279, 529, 7001, 563]
    assert tokenizer.decode(tokenizer("a    b\n\n\tGrüße")["input_ids"][1:]) == "a    b\n\n\tGrüße"
