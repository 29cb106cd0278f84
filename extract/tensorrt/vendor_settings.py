"""A recipe in the vendor's words: every build setting that decides what the engine computes, set and then read back.

Reading back is the point. Releases to 1.1 refuse a keyword that they do not know, 1.2 drops it without a word; an
engine built with a setting that was dropped would be another engine than its contract says.
"""

from pathlib import Path
from typing import Any

from extract.engine.recipe import Recipe
from extract.errors import EngineRefused
from extract.tensorrt.model_shape import ModelShape
from extract.tensorrt.pass_limits import PassLimits


class SettingDropped(EngineRefused):
    """The vendor's package did not keep a setting."""

    template = (
        "tensorrt-llm {release}: setting {name} was set to {expected} and reads back as {found}. Nothing was built: "
        "this release spells or decides it differently. Use another release, or --runtime torch."
    )


def build_config(recipe: Recipe, shape: ModelShape, limits: PassLimits, scratch: Path, release: str) -> Any:
    """The vendor's `BuildConfig` for a recipe.

    Args:
        recipe: what to build.
        shape: of the checkpoint that is built.
        limits: what `pass_limits` allows.
        scratch: where the timing cache is written; its default is the working directory.
        release: the installed one, for messages.

    Raises:
        SettingDropped: a value was not kept.
    """
    from tensorrt_llm.builder import BuildConfig
    from tensorrt_llm.plugin.plugin import PluginConfig

    longest = min(recipe.max_input_tokens, shape.max_positions or recipe.max_input_tokens)
    generated = 1 if recipe.cache == "paged" else 0
    wanted = {
        "max_input_len": longest,
        "max_seq_len": longest + generated,  # the executor takes inputs of up to max_seq_len - 1
        "max_batch_size": limits.max_sequences,
        "max_beam_width": 1,
        "max_num_tokens": limits.pass_tokens,
        "opt_num_tokens": limits.pass_tokens,  # by default kernels are chosen for as many tokens as there are sequences
        "kv_cache_type": cache_type(recipe.cache),
        "gather_context_logits": False,  # the head would run over every token
        "strongly_typed": True,
        "input_timing_cache": None,
        "output_timing_cache": str(scratch / "timing.cache"),
    }
    plugins = PluginConfig()
    for name, value in plugin_settings(recipe, shape).items():
        _set(plugins, name, value, release)
    config = BuildConfig()
    for name, value in wanted.items():
        _set(config, name, value, release)
    config.plugin_config = plugins
    return config


def plugin_settings(recipe: Recipe, shape: ModelShape) -> dict[str, Any]:
    """Plugin options by name.

    FP8 attention has two switches, and a release turns the first back on while the second is on. Without a cache there
    are no scales for it to read: both are off. With a paged cache of FP8 entries both are on.
    """
    fp8_attention = recipe.cache == "paged" and shape.weights == "fp8" and shape.cache == "fp8"
    return {
        "gpt_attention_plugin": "auto",
        "gemm_plugin": None if shape.weights == "fp8" else "auto",  # as the vendor's performance guide has it
        "gemm_swiglu_plugin": "fp8" if recipe.mlp == "swiglu-plugin" else None,
        "remove_input_padding": True,
        "context_fmha": True,
        "use_paged_context_fmha": fp8_attention,
        "use_fp8_context_fmha": fp8_attention,
        "use_fused_mlp": recipe.mlp != "separate",
        "reduce_fusion": False,
        "multiple_profiles": False,
        "manage_weights": False,  # weights in a file of their own, which a Session does not load
    }


def cache_type(cache: str) -> Any:
    """The vendor's name for a recipe's cache; the enumeration moved in 1.2."""
    try:
        from tensorrt_llm.llmapi.kv_cache_type import KVCacheType
    except ImportError:
        from tensorrt_llm.bindings import KVCacheType
    return KVCacheType.PAGED if cache == "paged" else KVCacheType.DISABLED


def _set(target: Any, name: str, value: Any, release: str) -> None:
    missing = object()
    known = getattr(target, name, missing) is not missing
    if known:
        setattr(target, name, value)
    found = getattr(target, name) if known else "nothing, there is no such setting"
    kept = isinstance(found, str) and known if value == "auto" else found == value  # auto reads back as what it means
    if not kept:
        raise SettingDropped(release=release, name=name, expected=value, found=found)
