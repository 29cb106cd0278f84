"""A transformers model and its `Architecture` give the same states; what an architecture cannot say is refused.

The reference is transformers' own base model in float64 (eager attention; its norms and softmax stay in float32). The
other side is `plain_decoder`, which knows only the architecture and the weights file. Weights are drawn so that every
option shows, and that they do is a test of its own.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_decoder import plain_states
from rig import randomise, relative_error
from torch import nn
from transformers import AutoConfig, AutoModel

from extract.cpu.architecture import Architecture, LayerKind, read_architecture, write_architecture
from extract.cpu.weights import open_weights, tensor_shapes
from extract.engine.own_architecture import NoOwnArchitecture, architecture_of
from extract.engine.own_families import FAMILIES

VOCAB = 96
LONGEST = 40
BOUND = 1e-5
ROWS = [np.random.default_rng(length).integers(0, VOCAB, length).tolist() for length in (1, 2, 17, LONGEST)]

SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = [SLIDING, FULL, SLIDING, FULL]


def rope(rope_type: str, **options: Any) -> dict[str, Any]:
    """Options of one rotary table, at a base so low that all channels turn within a few tokens."""
    return {"rope_type": rope_type, "rope_theta": 100.0, **options}


LINEAR = rope("linear", factor=4.0)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
YARN_ALL = rope(
    "yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0, truncate=False,
    mscale=1.3, mscale_all_dim=0.7,
)  # fmt: skip
YARN_FACTOR = rope("yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=0.7)
DYNAMIC = rope("dynamic", factor=2.0)
PROPORTIONAL = rope("proportional", partial_rotary_factor=0.5)


def longrope(channels: int) -> dict[str, Any]:
    """Short and long factors far apart, for `channels` rotated channels."""
    short = [1.0 + 0.3 * i for i in range(channels // 2)]
    return rope(
        "longrope", short_factor=short, long_factor=[9.0 * f for f in short], original_max_position_embeddings=64
    )


def no_head_dim(**options: Any) -> dict[str, Any]:
    """The family's own head size: hidden size by heads."""
    return {"head_dim": None, **options}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", no_head_dim(num_key_value_heads=4)),
    ("llama", {"num_key_value_heads": 1, "head_dim": 40}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.1}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"hidden_act": "gelu_new"}),
    ("llama", {"hidden_act": "swish"}),
    ("llama", {"rope_parameters": rope("default")}),
    ("llama", {"rope_parameters": LINEAR}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": YARN_ALL}),
    ("llama", {"rope_parameters": YARN_FACTOR}),
    ("llama", {"rope_parameters": DYNAMIC}),
    ("llama", {"rope_parameters": PROPORTIONAL}),
    ("llama", {"rope_parameters": longrope(24)}),
    ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    ("iquestcoder", {}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 5}),
    ("mistral", {"sliding_window": 1, "rope_parameters": YARN}),
    ("ministral", {"sliding_window": 5, "layer_types": MIXED}),
    ("ministral", {"sliding_window": 5, "layer_types": [FULL] * 4}),
    ("ministral3", {"sliding_window": None}),
    ("ministral3", {"sliding_window": 7, "rope_parameters": {**YARN_ALL, "llama_4_scaling_beta": 0.5}}),
    ("cwm", {"sliding_window": 5, "layer_types": MIXED, "rope_parameters": LLAMA3}),
    ("cwm", {"sliding_window": 5, "layer_types": MIXED, "rope_parameters": LINEAR, "mlp_bias": True}),
    ("seed_oss", {"attention_bias": True, "attention_out_bias": False}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("qwen2", no_head_dim()),
    ("qwen2", {"head_dim": 24}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED, "rope_parameters": YARN}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 2}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 4, "head_dim": 16}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_parameters": YARN}),
    ("gemma", {}),
    ("gemma", {"attention_bias": True, "hidden_act": "silu", "num_key_value_heads": 1}),
    ("gemma", {"hidden_act": "gelu", "rope_parameters": LINEAR}),
    ("gemma2", {"layer_types": MIXED, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8}),
    ("gemma2", {"layer_types": [FULL] * 4, "attn_logit_softcapping": None, "attention_bias": True}),
    ("gemma2", {"layer_types": MIXED, "hidden_activation": "gelu"}),
    ("gemma3_text", {"layer_types": MIXED, "query_pre_attn_scalar": 8}),
    ("gemma3_text", {"layer_types": [FULL, SLIDING] * 2, "attention_bias": True, "hidden_activation": "silu"}),
    (
        "gemma3_text",
        {"layer_types": MIXED, "rope_parameters": {SLIDING: rope("default"), FULL: {**LINEAR, "rope_theta": 900.0}}},
    ),
    ("gemma3_text", {"layer_types": MIXED, "rope_parameters": {SLIDING: YARN, FULL: LLAMA3}}),
    ("vaultgemma", {"layer_types": MIXED, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8}),
    ("vaultgemma", {"layer_types": [FULL] * 4, "attn_logit_softcapping": None, "attention_bias": True}),
    ("phi3", no_head_dim()),
    ("phi3", no_head_dim(sliding_window=5, num_key_value_heads=4)),
    ("phi3", no_head_dim(rope_parameters=rope("default", partial_rotary_factor=0.5))),
    ("phi3", no_head_dim(rope_parameters=longrope(16), original_max_position_embeddings=64)),
    (
        "phi3",
        no_head_dim(
            rope_parameters={**longrope(12), "partial_rotary_factor": 0.75}, original_max_position_embeddings=64
        ),
    ),
    ("olmo2", no_head_dim()),
    ("olmo2", no_head_dim(attention_bias=True, num_key_value_heads=4, rope_parameters=LINEAR)),
    ("olmo3", no_head_dim(layer_types=MIXED)),
    ("olmo3", no_head_dim(attention_bias=True, rope_parameters={SLIDING: rope("default"), FULL: YARN})),
    ("exaone4", no_head_dim(sliding_window=5, layer_types=MIXED)),
    ("exaone4", no_head_dim(sliding_window=None, layer_types=[FULL] * 4, rope_parameters=LLAMA3)),
    ("granite", no_head_dim(attention_multiplier=0.2, embedding_multiplier=6.0, residual_multiplier=0.3)),
    ("granite", no_head_dim(attention_multiplier=0.2, attention_bias=True, mlp_bias=True, logits_scaling=8.0)),
    ("hyperclovax", {"use_post_norm": True, "residual_multiplier": 0.3, "attention_multiplier": 0.1}),
    ("hyperclovax", {"use_post_norm": False, "embedding_multiplier": 6.0, "attention_bias": True}),
    ("smollm3", no_head_dim(no_rope_layer_interval=2)),
    ("smollm3", no_head_dim(no_rope_layers=[0, 1, 1, 0], attention_bias=True, mlp_bias=True)),
    ("smollm3", no_head_dim(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=5)),
    (
        "smollm3",
        no_head_dim(
            no_rope_layers=[1, 1, 0, 1], use_sliding_window=True, sliding_window=5, layer_types=MIXED,
            rope_parameters=YARN,
        ),
    ),
]  # fmt: skip


def small_model(family: str, **options: Any) -> Any:
    """A base model with telling random weights, in float32 and eval mode; an option `None` may be left out."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 5,
    }  # fmt: skip
    if family in ("llama", "internlm3", "iquestcoder", "gemma", "granite", "hyperclovax", "olmo2", "seed_oss"):
        del settings["sliding_window"]
    if family == "phi3":
        settings |= {"original_max_position_embeddings": 256, "sliding_window": None}
    if family in ("cwm", "ministral3"):
        settings["rope_parameters"] = {**YARN, "llama_4_scaling_beta": 0.1} if family == "ministral3" else LLAMA3
    settings |= options
    if settings["head_dim"] is None:
        del settings["head_dim"]
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng():
        model = AutoModel.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    return model


def transformers_states(model: Any) -> list[np.ndarray]:
    """Its states of `ROWS`, computed in float64."""
    model = model.double()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0].numpy() for row in ROWS]


def case_name(case: tuple[str, dict[str, Any]]) -> str:
    family, options = case
    shown = [key if isinstance(value, (dict, list)) else f"{key}={value}" for key, value in options.items()]
    return "-".join([family, *shown])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_architecture_and_weights_say_all_that_a_model_computes(
    case: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    family, options = case
    model = small_model(family, **options)
    model.save_pretrained(tmp_path)
    architecture = architecture_of(model, LONGEST)
    write_architecture(tmp_path, architecture)
    assert read_architecture(tmp_path) == architecture
    with open_weights(tmp_path / "model.safetensors") as weights:
        assert weights.names == tensor_shapes(architecture).keys()
    found = plain_states(tmp_path / "model.safetensors", architecture, ROWS)
    assert relative_error(found, transformers_states(model)) <= BOUND


def test_every_known_family_has_a_case() -> None:
    assert {family for family, _ in CASES} == FAMILIES.keys()


RICH = ("gemma3_text", {"layer_types": [FULL, SLIDING] * 2, "attention_bias": True, "query_pre_attn_scalar": 8})
MUTATIONS: dict[str, tuple[tuple[str, dict[str, Any]], Any]] = {
    "norm_eps": (("llama", {"rms_norm_eps": 0.1}), 0.01),
    "activation": (("llama", {"hidden_act": "gelu"}), "gelu_tanh"),
    "attention_scale": (RICH, 16**-0.5),
    "window": (RICH, (LayerKind(rotary=0), LayerKind(rotary=1)) * 2),
    "table": (RICH, (LayerKind(rotary=0), LayerKind(rotary=0, window=5)) * 2),
    "no table": (RICH, (LayerKind(rotary=0), LayerKind(rotary=None, window=5)) * 2),
    "norm_plus_one": (RICH, False),
    "head_norm": (RICH, "none"),
    "softcap": (("gemma2", {"layer_types": MIXED, "attn_logit_softcapping": 1.5}), None),
    "embedding_scale": (RICH, 1.0),
    "residual_scale": (("granite", no_head_dim(attention_multiplier=0.2, residual_multiplier=0.3)), 1.0),
    "rotary": (("llama", {"rope_parameters": YARN}), 1.0),
    "qkv_bias": (RICH, False),
    "output_bias": (RICH, False),
    "mlp_bias": (("llama", {"mlp_bias": True}), False),
}
"""A model, and one word of its architecture said wrongly (some names stand for a part of `layers`)."""


@pytest.mark.parametrize("word", MUTATIONS)
def test_a_wrong_word_in_an_architecture_shows_in_the_states(word: str, tmp_path: Path) -> None:
    (family, options), wrong = MUTATIONS[word]
    model = small_model(family, **options)
    model.save_pretrained(tmp_path)
    architecture = architecture_of(model, LONGEST)
    if word == "rotary":
        wrong = (dataclasses.replace(architecture.rotary[0], scaling=wrong),)
    field = "layers" if word in ("window", "table", "no table") else word
    assert getattr(architecture, field) != wrong
    found = plain_states(tmp_path / "model.safetensors", dataclasses.replace(architecture, **{field: wrong}), ROWS)
    assert relative_error(found, transformers_states(model)) > 20 * BOUND


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama with a scaled rope": {
        "model_type": "llama", "rope_theta": 500000.0, "torch_dtype": "bfloat16", "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    },
    "llama with leftovers of its training": {
        "model_type": "llama", "rope_theta": 100000, "rope_scaling": None, "rope_interleaved": False,
        "is_llama_config": True, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "qwen2": {
        "model_type": "qwen2", "rope_theta": 1000000.0, "max_window_layers": 24, "sliding_window": 32768,
        "use_mrope": False, "use_sliding_window": False,
    },
    "gemma2 with both names of its activation": {
        "model_type": "gemma2", "cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0, "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", "_sliding_window_pattern": 6, "attn_logit_softcapping": None,
        "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
        "use_bidirectional_attention": False,
    },
    "phi3 with longrope": {
        "model_type": "phi3", "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "full_attn_mod": 1,
        "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "attention_bias": False,
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096, "sliding_window": 262144,
        "rope_scaling": {"type": "longrope", "long_factor": [3.0] * 6, "short_factor": [1.0] * 6},
        "max_position_embeddings": 131072,
    },
    "olmo3 with yarn": {
        "model_type": "olmo3", "rope_theta": 500000, "sliding_window": 4096, "max_position_embeddings": 65536,
        "rope_scaling": {
            "attention_factor": 1.2, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    },
    "smollm3": {
        "model_type": "smollm3", "max_window_layers": 28, "no_rope_layer_interval": 4, "pretraining_tp": 2,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
    },
}  # fmt: skip
"""Keys as real checkpoints have them, in the spelling of their time."""


@pytest.mark.parametrize("published", PUBLISHED)
def test_configs_in_the_wild_are_understood(published: str) -> None:
    options = PUBLISHED[published].copy()
    family = options.pop("model_type")
    model = small_model(family, **{"max_position_embeddings": 32768, "head_dim": None, **options})
    assert architecture_of(model, LONGEST).family == family


def test_the_type_of_the_loaded_weights_does_not_matter() -> None:
    model = small_model("gemma3_text", layer_types=MIXED)
    architecture = architecture_of(model, LONGEST)
    assert architecture.embedding_scale == 8.0
    assert architecture_of(model.bfloat16(), LONGEST) == architecture


def test_the_embedding_scale_is_float32s() -> None:
    model = small_model("gemma", hidden_size=60, head_dim=16)
    assert architecture_of(model.bfloat16(), LONGEST).embedding_scale == float(np.float32(60**0.5))


def test_frequencies_are_bit_for_bit_those_of_transformers() -> None:
    model = small_model("llama", rope_parameters=YARN_ALL)
    table = architecture_of(model, LONGEST).rotary[0]
    assert np.array_equal(np.float32(table.inv_freq), model.rotary_emb.inv_freq.numpy())
    assert table.scaling == model.rotary_emb.attention_scaling != 1


@pytest.mark.parametrize("parameters", [DYNAMIC, longrope(24)], ids=["dynamic", "longrope"])
def test_frequencies_are_those_of_short_rows_even_after_a_long_one(parameters: dict[str, Any]) -> None:
    model = small_model("llama", rope_parameters=parameters)
    before = architecture_of(model, LONGEST)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 300, dtype=torch.int64), use_cache=False)
    assert not np.array_equal(np.float32(before.rotary[0].inv_freq), model.rotary_emb.inv_freq.numpy())
    assert architecture_of(model, LONGEST) == before


@pytest.mark.parametrize(("parameters", "limit"), [(DYNAMIC, 256), (longrope(24), 64)], ids=["dynamic", "longrope"])
def test_rows_may_be_as_long_as_frequencies_stay(parameters: dict[str, Any], limit: int) -> None:
    model = small_model("llama", rope_parameters=parameters)
    assert architecture_of(model, limit) == architecture_of(model, 1)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, limit, dtype=torch.int64), use_cache=False)
    assert torch.equal(model.rotary_emb.inv_freq, model.rotary_emb.original_inv_freq)


def test_kinds_of_layers_with_one_table_share_it() -> None:
    found = architecture_of(small_model("olmo3", head_dim=None, layer_types=MIXED), LONGEST)
    assert len(found.rotary) == 1
    assert found.layers == (
        LayerKind(rotary=0, window=5),
        LayerKind(rotary=0),
        LayerKind(rotary=0, window=5),
        LayerKind(rotary=0),
    )


def test_an_architecture_names_every_choice_of_a_rich_model() -> None:
    family, options = RICH
    found = architecture_of(small_model(family, **options), LONGEST)
    frequencies = {base: torch.pow(base, -torch.arange(0, 24, 2) / 24).tolist() for base in (1e4, 1e6)}
    for table, base in zip(found.rotary, (1e6, 1e4), strict=True):
        assert np.allclose(table.inv_freq, frequencies[base], rtol=1e-6)
    assert dataclasses.replace(found, rotary=()) == Architecture(
        family="gemma3_text",
        vocab_size=VOCAB,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        intermediate_size=80,
        norm_eps=1e-6,
        activation="gelu_tanh",
        attention_scale=8**-0.5,
        layers=(LayerKind(rotary=0), LayerKind(rotary=1, window=5)) * 2,
        rotary=(),
        norms="sandwich",
        norm_plus_one=True,
        head_norm="head",
        embedding_scale=8.0,
        qkv_bias=True,
        output_bias=True,
    )


def refused(family: str, option: str, value: str) -> str:
    return f"{family}: our packed decoder does not know {option} = {value}; transformers' own model runs it."


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("llama", {"attention_sinks": 4}, "attention_sinks", "4"),
    ("llama", {"new_option": None}, "new_option", "null"),
    ("llama", {"sliding_window": 4}, "sliding_window", "4"),
    ("llama", {"hidden_act": "relu"}, "hidden_act", '"relu"'),
    ("llama", {"is_causal": False}, "is_causal", "false"),
    ("llama", {"use_mrope": True}, "use_mrope", "true"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config", '{"bits": 4}'),
    ("mistral", {"layer_types": MIXED}, "layer_types", str(MIXED).replace("'", '"')),
    ("mistral", {"attention_bias": True}, "attention_bias", "true"),
    ("mistral", {"sliding_window": 0}, "sliding_window", "0"),
    ("qwen2", {"layer_types": MIXED}, "use_sliding_window", "false, with sliding layer_types"),
    ("qwen2", {"layer_types": [FULL, "chunked_attention"] * 2}, "layer_types",
     '["full_attention", "chunked_attention", "full_attention", "chunked_attention"]'),
    ("smollm3", {"layer_types": MIXED}, "use_sliding_window", "false, with sliding layer_types"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "true"),
    ("gemma", {"hidden_activation": "gelu"}, "hidden_activation", '"gelu"'),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation", '"relu"'),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping", "0.0"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "50.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "true"),
    ("phi3", {"head_dim": None, "full_attn_mod": 2}, "full_attn_mod", "2"),
    ("gpt2", {}, "model_type", '"gpt2"'),
    ("mixtral", {}, "model_type", '"mixtral"'),
    ("llama", {"rope_parameters": rope("default", partial_rotary_factor=0.5)},
     "rope_parameters.partial_rotary_factor", "0.5"),
    ("llama", {"rope_parameters": rope("default", mrope_section=[2, 5, 5])},
     "rope_parameters.mrope_section", "[2, 5, 5]"),
    ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 39}, "rope_parameters.rope_type",
     '"dynamic" with rows of 40 tokens, which changes at 39'),
    ("llama", {"rope_parameters": {**longrope(24), "original_max_position_embeddings": 32}},
     "rope_parameters.rope_type", '"longrope" with rows of 40 tokens, which changes at 32'),
    ("ministral3", {"rope_parameters": {**YARN, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}},
     "rope_parameters.llama_4_scaling_beta", "0.1"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "options", "option", "value"), REFUSED)
def test_what_is_not_understood_is_refused_by_name(
    family: str, options: dict[str, Any], option: str, value: str
) -> None:
    model = small_model(family, **options)
    with pytest.raises(NoOwnArchitecture) as refusal:
        architecture_of(model, LONGEST)
    assert str(refusal.value) == refused(family, option, value if len(value) <= 80 else value[:77] + "...")


class LinearOfSomeoneElse(nn.Linear):
    """What an adapter, a quantiser or a checkpoint's own code puts in a linear's place."""


def foreign_linear(model: Any) -> None:
    model.layers[1].mlp.down_proj = LinearOfSomeoneElse(80, 64, bias=False)


def foreign_norm(model: Any) -> None:
    model.layers[2].input_layernorm = nn.LayerNorm(64, bias=False)


def more_parameters(model: Any) -> None:
    model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))


def missing_layer(model: Any) -> None:
    model.config.num_hidden_layers = 5


def lone_bias(model: Any) -> None:
    model.layers[3].self_attn.k_proj = nn.Linear(64, 48, bias=True)


def other_width(model: Any) -> None:
    model.layers[3].mlp.up_proj = nn.Linear(64, 72, bias=False)


def more_buffers(model: Any) -> None:
    model.layers[0].register_buffer("skip", torch.zeros(1), persistent=False)


def other_epsilon(model: Any) -> None:
    model.norm.variance_epsilon = 0.5


def other_scale(model: Any) -> None:
    model.layers[0].self_attn.scaling = 0.5


def other_frequencies(model: Any) -> None:
    model.rotary_emb.original_inv_freq *= 2


@pytest.mark.parametrize(
    ("change", "option", "value"),
    [
        (foreign_linear, "module layers.1.mlp.down_proj", f"{__name__}.LinearOfSomeoneElse"),
        (foreign_norm, "norms", "LayerNorm, LlamaRMSNorm"),
        (more_parameters, "tensor layers.0.self_attn.sinks", "none expected, [4] found"),
        (missing_layer, "tensor layers.4.input_layernorm.weight", "[64] expected, none found"),
        (lone_bias, "tensor layers.3.self_attn.k_proj.bias", "none expected, [48] found"),
        (other_width, "tensor layers.3.mlp.up_proj.weight", "[80, 64] expected, [72, 64] found"),
        (more_buffers, "buffer", "layers.0.skip"),
        (other_epsilon, "rms_norm_eps", "[1e-06, 0.5]"),
        (other_scale, "scaling", "[0.5, 0.2041241452319315]"),
        (other_frequencies, "rotary_emb", "other frequencies than its config gives"),
    ],
)
def test_a_model_that_is_not_what_its_config_says_is_refused(change: Any, option: str, value: str) -> None:
    model = small_model("llama")
    change(model)
    with pytest.raises(NoOwnArchitecture) as refusal:
        architecture_of(model, LONGEST)
    assert str(refusal.value) == refused("llama", option, value)


def test_a_kind_of_rope_that_is_not_known_is_refused() -> None:
    model = small_model("llama")
    model.config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(NoOwnArchitecture) as refusal:
        architecture_of(model, LONGEST)
    assert str(refusal.value) == refused("llama", "rope_parameters.rope_type", '"spiral"')


def test_an_option_beside_the_ropes_of_kinds_of_layers_is_refused() -> None:
    model = small_model("olmo3", head_dim=None)
    model.config.rope_parameters["mixing"] = 2
    with pytest.raises(NoOwnArchitecture) as refusal:
        architecture_of(model, LONGEST)
    assert str(refusal.value) == refused("olmo3", "rope_parameters", '"mixing"')


def test_a_class_of_a_checkpoints_own_code_is_refused() -> None:
    model = small_model("llama")
    model.__class__ = type("LlamaModel", (type(model),), {"__module__": "transformers_modules.mine"})
    with pytest.raises(NoOwnArchitecture) as refusal:
        architecture_of(model, LONGEST)
    assert str(refusal.value) == refused("llama", "model", "transformers_modules.mine.LlamaModel")
