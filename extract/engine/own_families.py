"""What transformers' code of each family computes, and which keys of its config say so: tables, read by hand.

The families that our packed decoder can be: those whose modeling files differ from llama's only in what
`Architecture` has a word for. Everything here was read from transformers' sources; a key that is in no table makes
`extract.engine.own_architecture` refuse, because a key that nobody has read may change the states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from extract.cpu.architecture import Activation, HeadNorm, Norms


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the modeling code of a family fixes.

    Attributes:
        code: the package of `transformers.models` whose classes it consists of; `None`: the family's name.
        windows: which layers have `sliding_window`: none, all, or those of kind "sliding_attention".
        tables: one rotary table for all layers, or one for each kind of layer.
        rotated: which layers have rotary positions.
        keys: config keys that are understood, besides `ALL_FAMILIES`.
        needs: config keys that are understood only with one of these values.
    """

    code: str | None = None
    norms: Norms = "pre"
    norm_plus_one: bool = False
    head_norm: HeadNorm = "none"
    windows: Literal["none", "all", "by kind"] = "none"
    tables: Literal["one", "by kind"] = "one"
    rotated: Literal["all", "no_rope_layers", "sliding"] = "all"
    partial_rotary: bool = False
    activation: Literal["hidden_act", "hidden_activation"] = "hidden_act"
    keys: tuple[str, ...] = ()
    needs: Mapping[str, tuple[Any, ...]] | None = None


ALL_FAMILIES = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "hidden_act",
})  # fmt: skip
"""Keys that every family reads, and this module too."""

WITHOUT_EFFECT = frozenset({
    "model_type", "architectures", "transformers_version", "_name_or_path", "name_or_path", "_model_name_or_path",
    "dtype", "torch_dtype", "auto_map", "transformers.js_config", "is_llama_config", "unsloth_fixed", "unsloth_version",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
    "id2label", "label2id", "problem_type", "output_hidden_states", "output_attentions", "return_dict",
    "chunk_size_feed_forward", "initializer_range", "use_cache", "cache_implementation", "max_position_embeddings",
    "pretraining_tp", "attention_dropout", "hidden_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop",
    "tie_word_embeddings", "logits_scaling", "final_logit_softcapping", "lm_head_bias",
})  # fmt: skip
"""Keys that none of the families' base models computes with in eval mode: names, token ids, training, the head.

`max_position_embeddings` matters where frequencies follow the length, and is looked at there.
"""

NEEDS: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "is_causal": (True,),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
    "rope_scaling": (None,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "attention_chunk_size": (None,),
}
"""Keys that are without effect at these values only."""

LAYER_KINDS = ("full_attention", "sliding_attention")

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope")
ROPE_KEYS = frozenset({
    "rope_type", "type", "rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor",
    "partial_rotary_factor", "original_max_position_embeddings", "max_position_embeddings",
})  # fmt: skip

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

_NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}
_BIASES = ("attention_bias", "mlp_bias")
_WINDOWS = ("sliding_window", "layer_types")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
_GEMMA2 = ("attention_bias", "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", *_WINDOWS)

FAMILIES: dict[str, Family] = {
    "cwm": Family(windows="by kind", keys=("mlp_bias", *_WINDOWS), needs={"attention_bias": (False,)}),
    "exaone4": Family(
        norms="post",
        head_norm="head",
        windows="by kind",
        rotated="sliding",
        keys=("sliding_window_pattern", *_WINDOWS),
        needs=_NO_BIAS,
    ),
    "gemma": Family(norm_plus_one=True, keys=("attention_bias", "hidden_activation")),
    "gemma2": Family(
        norms="sandwich", norm_plus_one=True, windows="by kind", activation="hidden_activation", keys=_GEMMA2
    ),
    "gemma3_text": Family(
        code="gemma3",
        norms="sandwich",
        norm_plus_one=True,
        head_norm="head",
        windows="by kind",
        tables="by kind",
        activation="hidden_activation",
        keys=("_sliding_window_pattern", "sliding_window_pattern", *_GEMMA2),
        needs={"attn_logit_softcapping": (None,)},  # transformers reads it and does not apply it
    ),
    "granite": Family(keys=(*_BIASES, *_MULTIPLIERS)),
    "hyperclovax": Family(keys=(*_BIASES, *_MULTIPLIERS, "use_post_norm")),
    "internlm3": Family(code="llama", keys=_BIASES),
    "iquestcoder": Family(code="llama", keys=_BIASES),
    "llama": Family(keys=_BIASES),
    "ministral": Family(windows="by kind", keys=_WINDOWS, needs=_NO_BIAS),
    "ministral3": Family(windows="all", keys=("sliding_window",), needs=_NO_BIAS),
    "mistral": Family(windows="all", keys=("sliding_window",), needs=_NO_BIAS),
    "olmo2": Family(norms="post", head_norm="projection", keys=("attention_bias",)),
    "olmo3": Family(
        norms="post", head_norm="projection", windows="by kind", tables="by kind", keys=("attention_bias", *_WINDOWS)
    ),
    "phi3": Family(
        windows="all",
        partial_rotary=True,
        keys=("sliding_window", "partial_rotary_factor", "original_max_position_embeddings"),
        needs={**_NO_BIAS, "full_attn_mod": (1,), "interpolate_factor": (1,)},
    ),
    "qwen2": Family(windows="by kind", keys=("use_sliding_window", "max_window_layers", *_WINDOWS)),
    "qwen3": Family(
        head_norm="head",
        windows="by kind",
        keys=("attention_bias", "use_sliding_window", "max_window_layers", *_WINDOWS),
    ),
    "seed_oss": Family(keys=("attention_out_bias", *_BIASES)),
    "smollm3": Family(
        windows="by kind",
        rotated="no_rope_layers",
        keys=(
            "use_sliding_window",
            "max_window_layers",
            "no_rope_layers",
            "no_rope_layer_interval",
            *_BIASES,
            *_WINDOWS,
        ),
    ),
    "vaultgemma": Family(norm_plus_one=True, windows="by kind", activation="hidden_activation", keys=_GEMMA2),
}
