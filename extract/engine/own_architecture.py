"""A loaded transformers base model -> the `Architecture` that our packed decoder runs, or the reason why not.

Decides by reading, never by trying: every config key must be known to be understood or to be without effect, every
module must be of the family's own code, every tensor must be accounted for by name and shape. Whatever is left over is
a refusal that names it, and the engine then runs transformers' model: nothing is approximated. Numbers are taken from
the modules where they hold them (scales, epsilons, rotary frequencies), so a default that transformers fills in is not
filled in a second time here. Knows no weights' values, and imports neither transformers nor torch.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from extract.cpu.architecture import Activation, Architecture, LayerKind, Norms, Rotary
from extract.cpu.weights import tensor_shapes
from extract.engine.own_families import (
    ACTIVATIONS,
    ALL_FAMILIES,
    FAMILIES,
    LAYER_KINDS,
    NEEDS,
    ROPE_KEYS,
    ROPE_TYPES,
    WITHOUT_EFFECT,
    Family,
)
from extract.errors import EngineRefused


class NoOwnArchitecture(EngineRefused):
    """A model cannot be said in the words of `Architecture`."""

    template = "{family}: our packed decoder does not know {option} = {value}; transformers' own model runs it."


def architecture_of(model: Any, max_input_tokens: int) -> Architecture:
    """What `model` computes, in eval mode, for rows of at most `max_input_tokens` tokens.

    The embedding scale of the Gemma families is float32's sqrt(H), as transformers' model has it in float32; loaded in
    bfloat16 it rounds that number, and its states differ accordingly.

    Args:
        model: a loaded transformers base model (no head), on any device and of any type.
        max_input_tokens: rotary frequencies that follow the length are taken where no row reaches the change.

    Raises:
        NoOwnArchitecture: the family, an option, a module or a tensor is not known.
    """
    config = model.config
    name = str(config.model_type)
    if name not in FAMILIES:
        raise NoOwnArchitecture(family=name, option="model_type", value=_shown(name))
    family = FAMILIES[name]
    _check_keys(name, family, config.to_dict())
    _check_modules(name, family, model)
    attentions = [layer.self_attn for layer in model.layers]
    rotary, table_of_kind = _rotary(name, family, model, max_input_tokens)
    norms: Norms = "sandwich" if getattr(config, "use_post_norm", False) else family.norms
    tensors = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    architecture = Architecture(
        family=name,
        vocab_size=model.embed_tokens.num_embeddings,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_one(name, "head_dim", (attention.head_dim for attention in attentions)),
        intermediate_size=config.intermediate_size,
        norm_eps=float(_one(name, "rms_norm_eps", _epsilons(model))),
        activation=_activation(name, family, config),
        attention_scale=float(_one(name, "scaling", (attention.scaling for attention in attentions))),
        layers=_layers(name, family, config, table_of_kind),
        rotary=rotary,
        norms=norms,
        norm_plus_one=family.norm_plus_one,
        head_norm=family.head_norm,
        softcap=_softcap(name, attentions),
        embedding_scale=_embedding_scale(model),
        residual_scale=float(
            _one(name, "residual_multiplier", (getattr(layer, "residual_multiplier", 1.0) for layer in model.layers))
        ),
        qkv_bias=any(key.endswith((".q_proj.bias", ".qkv_proj.bias")) for key in tensors),
        output_bias=any(key.endswith(".o_proj.bias") for key in tensors),
        mlp_bias=any(key.endswith(".down_proj.bias") for key in tensors),
    )
    _check_tensors(name, tensors, tensor_shapes(architecture))
    return architecture


def _check_keys(name: str, family: Family, config: Mapping[str, Any]) -> None:
    needs = {**NEEDS, **(family.needs or {})}
    for key, value in config.items():
        if key in needs:
            if value not in needs[key]:
                raise NoOwnArchitecture(family=name, option=key, value=_shown(value))
        elif key not in ALL_FAMILIES and key not in WITHOUT_EFFECT and key not in family.keys:
            raise NoOwnArchitecture(family=name, option=key, value=_shown(value))


def _check_modules(name: str, family: Family, model: Any) -> None:
    """Only the family's own classes and plain torch: no code from a checkpoint, no quantised linear, no adapter."""
    code = family.code or name
    own = f"transformers.models.{code}.modeling_{code}"
    for path, module in model.named_modules():
        kind = type(module)
        if kind.__module__ not in (own, "transformers.activations") and not kind.__module__.startswith(
            "torch.nn.modules."
        ):
            option = f"module {path}" if path else "model"
            raise NoOwnArchitecture(family=name, option=option, value=f"{kind.__module__}.{kind.__qualname__}")
    kinds = {type(module).__name__ for module in model.modules() if "norm" in type(module).__name__.lower()}
    if kinds != {type(model.norm).__name__} or not type(model.norm).__name__.endswith("RMSNorm"):
        raise NoOwnArchitecture(family=name, option="norms", value=", ".join(sorted(kinds)))
    for path, _ in model.named_buffers():
        if not path.endswith(("inv_freq", "embed_scale")):
            raise NoOwnArchitecture(family=name, option="buffer", value=path)


def _check_tensors(name: str, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    for key in sorted({*found, *expected}):
        if found.get(key) != expected.get(key):
            value = " expected, ".join(
                "none" if shapes.get(key) is None else str(list(shapes[key])) for shapes in (expected, found)
            )
            raise NoOwnArchitecture(family=name, option=f"tensor {key}", value=f"{value} found")


def _rotary(
    name: str, family: Family, model: Any, max_input_tokens: int
) -> tuple[tuple[Rotary, ...], dict[str | None, int]]:
    """Rotary tables, and which of them a kind of layer has (`None`: any kind).

    A module made afresh from the same config gives the frequencies: those of the loaded one may have been rounded to
    the weights' type, or moved on by a long row.
    """
    config = model.config
    kinds: tuple[str | None, ...] = (None,)
    if family.tables == "by kind":
        kinds = tuple(sorted(set(config.layer_types)))
        for key in config.rope_parameters:
            if key not in LAYER_KINDS:
                raise NoOwnArchitecture(family=name, option="rope_parameters", value=_shown(key))
    for kind in kinds:
        parameters = config.rope_parameters if kind is None else config.rope_parameters[kind]
        _check_rope(name, family, parameters, config, max_input_tokens)
    fresh = type(model.rotary_emb)(config)
    tables: list[Rotary] = []
    table_of_kind: dict[str | None, int] = {}
    for kind in kinds:
        prefix = "" if kind is None else f"{kind}_"
        frequencies = getattr(fresh, f"{prefix}original_inv_freq")
        loaded = getattr(model.rotary_emb, f"{prefix}original_inv_freq")
        if not frequencies.to(loaded.device, loaded.dtype).equal(loaded):
            raise NoOwnArchitecture(family=name, option="rotary_emb", value="other frequencies than its config gives")
        table = Rotary(
            inv_freq=tuple(frequencies.float().tolist()), scaling=float(getattr(fresh, f"{prefix}attention_scaling"))
        )
        if table not in tables:
            tables.append(table)
        table_of_kind[kind] = tables.index(table)
    return tuple(tables), table_of_kind


def _check_rope(name: str, family: Family, parameters: Mapping[str, Any], config: Any, max_input_tokens: int) -> None:
    kind = parameters["rope_type"]
    original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    for key, value in parameters.items():
        known = key in ROPE_KEYS
        if key == "partial_rotary_factor":
            known = family.partial_rotary or kind == "proportional" or value == 1
        if key == "llama_4_scaling_beta":  # scales queries at positions from `original` on
            known = name == "ministral3" and max_input_tokens <= original
        if not known or (key == "rope_type" and value not in ROPE_TYPES):
            raise NoOwnArchitecture(family=name, option=f"rope_parameters.{key}", value=_shown(value))
    limit = {"dynamic": config.max_position_embeddings, "longrope": original}.get(kind)
    if limit is not None and limit < max_input_tokens:
        value = f'"{kind}" with rows of {max_input_tokens:,} tokens, which changes at {limit:,}'
        raise NoOwnArchitecture(family=name, option="rope_parameters.rope_type", value=value)


def _layers(name: str, family: Family, config: Any, table_of_kind: Mapping[str | None, int]) -> tuple[LayerKind, ...]:
    window = getattr(config, "sliding_window", None)
    if family.windows == "by kind":
        kinds = list(config.layer_types)
        if len(kinds) != config.num_hidden_layers or not set(kinds) <= set(LAYER_KINDS):
            raise NoOwnArchitecture(family=name, option="layer_types", value=_shown(kinds))
        if "sliding_attention" in kinds and not getattr(config, "use_sliding_window", True):
            raise NoOwnArchitecture(family=name, option="use_sliding_window", value="false, with sliding layer_types")
    else:
        kinds = [None if family.windows == "none" or window is None else "sliding_attention"] * config.num_hidden_layers
    if "sliding_attention" in kinds and (not isinstance(window, int) or window < 1):
        raise NoOwnArchitecture(family=name, option="sliding_window", value=_shown(window))
    rotated = [True] * len(kinds)
    if family.rotated == "no_rope_layers":
        rotated = [bool(rotates) for rotates in config.no_rope_layers]
    elif family.rotated == "sliding" and window is not None:
        rotated = [kind == "sliding_attention" for kind in kinds]
    if len(rotated) != len(kinds):
        raise NoOwnArchitecture(family=name, option="no_rope_layers", value=_shown(config.no_rope_layers))
    return tuple(
        LayerKind(
            rotary=table_of_kind[kind if family.tables == "by kind" else None] if rotates else None,
            window=window if kind == "sliding_attention" else None,
        )
        for kind, rotates in zip(kinds, rotated, strict=True)
    )


def _activation(name: str, family: Family, config: Any) -> Activation:
    value = getattr(config, family.activation)
    # Gemma's configs hold both names and transformers reads one of them: two values are a question, not an answer.
    for key in ("hidden_act", "hidden_activation"):
        found = getattr(config, key, None)
        if (found is not None and found != value) or (key == family.activation and found not in ACTIVATIONS):
            raise NoOwnArchitecture(family=name, option=key, value=_shown(found))
    return ACTIVATIONS[value]


def _softcap(name: str, attentions: Iterable[Any]) -> float | None:
    softcap = _one(name, "attn_logit_softcapping", (getattr(a, "attn_logit_softcapping", None) for a in attentions))
    if softcap is not None and not softcap > 0:
        raise NoOwnArchitecture(family=name, option="attn_logit_softcapping", value=_shown(softcap))
    return None if softcap is None else float(softcap)


def _embedding_scale(model: Any) -> float:
    scale = getattr(model.embed_tokens, "scalar_embed_scale", None)
    if scale is not None:
        return float(np.float32(scale))
    return float(getattr(model, "embedding_multiplier", 1.0))


def _epsilons(model: Any) -> list[float]:
    norms = [module for module in model.modules() if type(module) is type(model.norm)]
    return [norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps for norm in norms]


def _one(family: str, option: str, values: Iterable[Any]) -> Any:
    """The value that all layers share."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) != 1:
        raise NoOwnArchitecture(family=family, option=option, value=_shown(distinct))
    return distinct[0]


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
