"""Every decoder family that transformers knows, built small from its config with random weights.

One rule shrinks them all: each field that a config has and `SMALL` names gets the small value, and lists of layer kinds
become a list in which every kind of the family's own default occurs. What that rule cannot do stands in `SPECIAL`.

Weights are drawn so that attention is far from uniform and norms and biases are not at their defaults: a lost scale, a
skipped norm or a missing bias must show.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel

VOCAB = 512

NOT_BUILT = {
    "dbrx": "transformers 5.24 fails to build it from a default config",
    "dots3_note_text": "does not shrink",
    "gemma4_assistant": "not standalone: needs another model's states",
    "gemma4_unified_assistant": "not standalone: needs another model's states",
}
"""Decoders that are not tried, and why."""

NOT_DECODERS = frozenset({
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert",
    "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus", "plbart",
    "prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr",
    "whisper", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Encoders and encoder-decoders whose decoder transformers also offers as a causal model."""

WRAPPERS = frozenset({
    "blt", "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2",
    "llama4", "mllama", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal",
    "qwen3_5", "qwen3_5_moe", "qwen4_exp",
})  # fmt: skip
"""Models around a decoder (vision, audio, bytes); their text decoder is a family of its own."""

LAYERS = 4

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 256,
    "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 256, "n_ctx": 256, "n_inner": 96,
    "d_model": 64, "n_layers": LAYERS, "n_heads": 4, "num_layers": LAYERS, "num_heads": 4, "ffn_dim": 96,
    "sliding_window": 8, "window_size": 8, "attention_window_size": 8, "sliding_window_size": 8, "local_attention": 8,
    "attention_chunk_size": 16, "use_sliding_window": True,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "num_nextn_predict_layers": 0,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "qk_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_head_dim": 16, "linear_num_heads": 4,
    "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 16, "mamba_dt_rank": 8,
    "state_size": 16, "time_step_rank": 8, "chunk_size": 16,
    "rotary_dim": 8, "query_pre_attn_scalar": 16, "attention_dropout": 0.0,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
"""Fields that give each layer its kind."""

HYBRID = ["linear_attention", "full_attention"] * (LAYERS // 2)
SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "layers_block_type": ...},
    "cohere_compass_text": {
        "layer_types": SLIDING,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in SLIDING[:2]},
    },
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_length": 4, "position_bias_num_buckets": 32},
    "ctrl": {"dff": 96},
    "cwm": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 16},
    "dory": {"layer_types": SLIDING, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "layer_types": SLIDING, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16, "laurel_rank": 8,
    },
    "gemma4_text": {"layer_types": SLIDING, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granite": {"attention_multiplier": 0.25},
    "granite_swa": {"attention_multiplier": 0.25},
    "granitemoe": {"attention_multiplier": 0.25},
    "granitemoe_swa": {"attention_multiplier": 0.25},
    "granitemoehybrid": {"attention_multiplier": 0.25, "layer_types": HYBRID},
    "granitemoeshared": {"attention_multiplier": 0.25},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "longcat_flash": {"zero_expert_num": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32},
    "mamba2": {"num_heads": 8},
    "minicpm3": {"scale_emb": 1},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2},
    "modernbert-decoder": {
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2,
    },
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "hc_lowrank": 16,
    },
    "xlm": {"pad_token_id": 2, "emb_dim": 64},
    "xlnet": {"d_inner": 96},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * (LAYERS // 2)},
}  # fmt: skip
"""Fields that the rule gets wrong, by family."""


def small_config(model_type: str) -> Any:
    """The family's config, small."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    fields = default.to_dict()
    chosen = {name: value for name, value in SMALL.items() if name in fields}
    for name in KINDS:
        kinds = fields.get(name)
        if kinds:
            distinct = list(dict.fromkeys(kinds))
            if distinct == ["full_attention"] and "sliding_window" in fields:
                distinct = SLIDING
            chosen[name] = [distinct[i % len(distinct)] for i in range(LAYERS)]
    if "qk_rope_head_dim" in fields and model_type != "deepseek_v4":
        chosen["num_key_value_heads"] = SMALL["num_attention_heads"]
        if "head_dim" in fields:
            chosen["head_dim"] = SMALL["qk_rope_head_dim"]
    chosen.update(SPECIAL.get(model_type, {}))
    return config_class(**{name: value for name, value in chosen.items() if value is not ...})


def small_model(model_type: str, seed: int = 0) -> nn.Module:
    """The family's base model in float32 and eval mode."""
    config = small_config(model_type)
    torch.manual_seed(seed)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    scramble(model)
    return model


@torch.no_grad()
def scramble(model: nn.Module) -> None:
    """Draw weights that make every part of the model matter."""
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if parameter.ndim == 1 and leaf == "bias":
            parameter.normal_(std=0.3)
        elif parameter.ndim == 1 and leaf == "weight":
            parameter.add_(torch.randn_like(parameter) * 0.3)
        elif parameter.ndim == 2 and leaf == "weight":
            parameter.normal_(std=1.5 / math.sqrt(parameter.shape[1]) if parameter.shape[0] != VOCAB else 1.0)
        elif parameter.ndim >= 2 and "conv" not in name:
            parameter.normal_(std=1.5 / math.sqrt(parameter.shape[-1]))
