"""What a GGUF file's settings are in transformers' names, for each architecture that is imported.

Knows no tensor's values. Only architectures stand here whose import was compared with the safetensors original, state
for state, and a setting that an entry does not read is refused, never dropped. Some settings are not in GGUF at all
(Gemma's attention scale, most often its window pattern): llama.cpp, whose format it is, derives them from the model's
size, so the same is done here and said in a note.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from extract.engine.gguf_file import HEAD, ArrayLength, GgufHeader, RefusedGguf

_SAFETENSORS = "Take the checkpoint in safetensors, as its publisher has it."
_SHAPES = ("vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count")
"""Compared with each other, or shown by the shapes of the weights."""
_NEUTRAL = (("rope.scaling.type", "none"), ("expert_count", 0), ("expert_used_count", 0), ("attention.causal", True))
_ROPE_THETA = 10_000.0
"""What llama.cpp takes where a file does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """How the settings of one GGUF architecture become a config.

    Attributes:
        model_type: transformers' name of the architecture.
        names: GGUF setting to config key; a file without one of them is refused.
        derived: the config keys that are more than a copy.
        reads: the settings that `derived` reads, all optional unless `needs` has them too.
        needs: further settings without which a file is refused.
        accepts: settings with the one value that needs no reading, beside those that are neutral everywhere.
        positive: settings whose 0 would mean that there is none.
    """

    model_type: str
    names: Mapping[str, str]
    derived: Callable[[GgufHeader], dict[str, Any]]
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    accepts: tuple[tuple[str, Any], ...] = ()
    positive: tuple[str, ...] = ()


def check_gguf(path: Path, header: GgufHeader) -> tuple[str, ...]:
    """Refuse what the import would drop or guess without a word; return notes.

    Raises:
        RefusedGguf: not one of `ARCHITECTURES`, a setting that is not read or is missing, or a tensor of rotary
            factors.
    """

    def refuse(problem: str) -> RefusedGguf:
        return RefusedGguf(path=path, problem=problem, advice=_SAFETENSORS)

    family = GGUF_FAMILIES.get(header.architecture)
    if family is None:
        raise refuse(f"GGUF architecture {header.architecture} is not imported ({', '.join(ARCHITECTURES)} are)")
    read = {*_SHAPES, *family.names, *family.reads}
    for key, value in header.metadata.items():
        setting = key.removeprefix(header.architecture + ".")
        if setting == key or (setting, value) in (*_NEUTRAL, *family.accepts):
            continue
        if isinstance(value, ArrayLength):
            raise refuse(f"it has the setting {key} as a list of {value}, which the import would drop")
        if setting not in read:
            raise refuse(f"it has the setting {key} = {value}, which the import would drop")
    for setting in (*family.names, *family.needs):
        if header.setting(setting) is None:
            raise refuse(f"it lacks the setting {header.architecture}.{setting}, which the import will not guess")
    rotary, head = header.setting("rope.dimension_count"), head_dim(header)
    if rotary is not None and rotary != head:
        raise refuse(f"{rotary} of the {head} values of an attention head are rotated, which the import would not do")
    for setting in family.positive:
        if header.setting(setting) == 0:
            raise refuse(f"it has the setting {header.architecture}.{setting} = 0, which the import would not do")
    for tensor in header.tensors:
        if tensor.name.startswith("rope_"):
            raise refuse(f"its rotary positions are scaled by the tensor {tensor.name}, which the import would drop")
    types = sorted({tensor.type for tensor in header.tensors})
    return (f"imported from GGUF ({', '.join(types)}), dequantised", *_taken_from_llama_cpp(header))


def config_settings(header: GgufHeader) -> dict[str, Any]:
    """A checked GGUF header's settings under transformers' names."""
    family = GGUF_FAMILIES[header.architecture]
    settings = {name: header.setting(key) for key, name in family.names.items()}
    settings["vocab_size"] = header.setting("vocab_size") or header.metadata.get("tokenizer.ggml.tokens")
    settings["tie_word_embeddings"] = all(tensor.name != HEAD for tensor in header.tensors)
    for special in ("bos", "eos"):
        settings[f"{special}_token_id"] = header.metadata.get(f"tokenizer.ggml.{special}_token_id")
    return {**settings, **family.derived(header)}


def head_dim(header: GgufHeader) -> int:
    """Size of an attention head."""
    stated = header.setting("attention.key_length")
    return int(stated or header.setting("embedding_length") // header.setting("attention.head_count"))


def _rotary(header: GgufHeader) -> dict[str, Any]:
    theta = header.setting("rope.freq_base") or _ROPE_THETA
    return {
        "head_dim": head_dim(header),
        "num_key_value_heads": header.setting("attention.head_count_kv") or header.setting("attention.head_count"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def _phi3(header: GgufHeader) -> dict[str, Any]:
    stated = {"original_max_position_embeddings": header.setting("rope.scaling.original_context_length")}
    return {
        **_rotary(header),
        **{name: value for name, value in stated.items() if value is not None},
        "sliding_window": header.setting("attention.sliding_window") or None,  # 0 is none
        "pad_token_id": header.metadata.get(
            "tokenizer.ggml.padding_token_id"
        ),  # the default may not be in the vocabulary
    }


def _gemma(header: GgufHeader) -> dict[str, Any]:
    period = _window_period(header)
    capping = {"attn_logit_softcapping", "final_logit_softcapping"}
    stated = {name: header.setting(name) for name in capping} | {
        "sliding_window": header.setting("attention.sliding_window")
    }
    return {
        **_rotary(header),
        **{name: value for name, value in stated.items() if value is not None},
        "query_pre_attn_scalar": _query_pre_attn_scalar(header),
        "layer_types": [
            "sliding_attention" if (layer + 1) % period else "full_attention"
            for layer in range(header.setting("block_count"))
        ],
    }


def _gemma3(header: GgufHeader) -> dict[str, Any]:
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": header.setting("rope.freq_base")}
    factor = header.setting("rope.scaling.factor") or 1.0
    if (
        factor != 1.0 and header.setting("rope.scaling.type") != "none"
    ):  # linear is the only other type, and the default
        full.update(rope_type="linear", factor=factor)
    local = {"rope_type": "default", "rope_theta": header.setting("rope.freq_base_swa") or _ROPE_THETA}
    return {**_gemma(header), "rope_parameters": {"full_attention": full, "sliding_attention": local}}


_PERIOD = {"gemma2": 2, "gemma3": 6}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The one size of each whose attention scale does not follow from the size of its heads."""


def _window_period(header: GgufHeader) -> int:
    """Every how many layers one attends to all tokens."""
    return int(header.setting("attention.sliding_window_pattern") or _PERIOD[header.architecture])


def _query_pre_attn_scalar(header: GgufHeader) -> int:
    if header.setting("block_count") == _LAYERS_OF_27B[header.architecture]:
        return int(header.setting("embedding_length") // header.setting("attention.head_count"))
    return head_dim(header)


def _taken_from_llama_cpp(header: GgufHeader) -> tuple[str, ...]:
    if header.architecture not in _PERIOD:
        return ()
    taken = [f"attention scale 1/sqrt({_query_pre_attn_scalar(header)})"]
    if header.setting("attention.sliding_window_pattern") is None:
        taken.append(f"every layer but each {_window_period(header)}th with a window")
    return (f"not in the file, taken as llama.cpp takes it: {', '.join(taken)}",)


_ROPE_DECODER = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_ROTARY = ("attention.head_count_kv", "rope.freq_base")
_WINDOWS = (*_ROTARY, "attention.sliding_window", "attention.sliding_window_pattern", "final_logit_softcapping")
_POSITIVE = ("attention.sliding_window", "attention.sliding_window_pattern")

GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "gemma2": GgufFamily(
            model_type="gemma2",
            names=_ROPE_DECODER,
            derived=_gemma,
            reads=(*_WINDOWS, "attn_logit_softcapping"),
            positive=_POSITIVE,
        ),
        "gemma3": GgufFamily(
            model_type="gemma3_text",
            names=_ROPE_DECODER,
            derived=_gemma3,
            reads=(*_WINDOWS, "rope.freq_base_swa", "rope.scaling.factor"),
            needs=("rope.freq_base", "attention.sliding_window"),
            accepts=(("rope.scaling.type", "linear"),),
            positive=_POSITIVE,
        ),
        "gpt2": GgufFamily(
            model_type="gpt2",
            names={
                "block_count": "n_layer",
                "context_length": "n_positions",
                "embedding_length": "n_embd",
                "feed_forward_length": "n_inner",
                "attention.head_count": "n_head",
                "attention.layer_norm_epsilon": "layer_norm_epsilon",
            },
            derived=lambda _: {},
        ),
        "llama": GgufFamily(model_type="llama", names=_ROPE_DECODER, derived=_rotary, reads=_ROTARY),
        "phi3": GgufFamily(
            model_type="phi3",
            names=_ROPE_DECODER,
            derived=_phi3,
            reads=(*_ROTARY, "attention.sliding_window", "rope.scaling.original_context_length"),
            needs=("attention.sliding_window",),
        ),
        "qwen2": GgufFamily(model_type="qwen2", names=_ROPE_DECODER, derived=_rotary, reads=_ROTARY),
        "qwen3": GgufFamily(model_type="qwen3", names=_ROPE_DECODER, derived=_rotary, reads=_ROTARY),
    }
)
ARCHITECTURES = tuple(GGUF_FAMILIES)
"""Compared with their originals. Others lose something: starcoder2 its rope theta, ..."""
