"""Every build setting that decides what an engine computes is set, read back, and found beside the built engine."""

import os

import pytest
import vendor_rig
from vendor_rig import RELEASES, recipe, stand_in, vendor, vendor_settings_of

from extract.engine.builder import build
from extract.engine.recipe import Recipe
from extract.tensorrt.model_shape import ModelShape
from extract.tensorrt.pass_limits import GIB, pass_limits
from extract.tensorrt.surface import BUILD_CONFIG, PLUGIN_CONFIG
from extract.tensorrt.vendor_settings import SettingDropped, build_config, plugin_settings

LLAMA = {
    "source": "vendor",
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "weights": "bfloat16",
    "cache": "bfloat16",
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_size": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_positions": 131072,
}


def shape(**changes):
    return ModelShape(**{**LLAMA, **changes})


def configured(of, tmp_path, release="1.2.1", **changes):
    asked = Recipe(runtime="tensorrt-llm", **changes)
    return build_config(asked, of, pass_limits(of, asked, 141 * GIB), tmp_path, release)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("cache", ["none", "paged"])
def test_every_setting_reads_back(release, cache, tmp_path):
    with stand_in(release):
        config = configured(shape(), tmp_path, release, cache=cache)
        plugins = config.plugin_config
        assert {name: getattr(config, name) for name in BUILD_CONFIG[:6]} == {
            "max_input_len": 128,
            "max_seq_len": 129 if cache == "paged" else 128,
            "max_batch_size": 8192,
            "max_beam_width": 1,
            "max_num_tokens": 74_880,
            "opt_num_tokens": 74_880,
        }
        assert config.kv_cache_type.name == ("PAGED" if cache == "paged" else "DISABLED")
        assert (config.gather_context_logits, config.strongly_typed) == (False, True)
        assert (config.input_timing_cache, config.output_timing_cache) == (None, str(tmp_path / "timing.cache"))
        expected = plugin_settings(Recipe(runtime="tensorrt-llm", cache=cache), shape())
        assert set(expected) == set(PLUGIN_CONFIG)
        for name, value in expected.items():
            assert getattr(plugins, name) == ("float16" if value == "auto" else value), name


@pytest.mark.parametrize("release", ["1.1.0", "1.2.1"])
@pytest.mark.parametrize("name", BUILD_CONFIG[:-1])
def test_a_build_setting_that_is_gone_is_refused(release, name, tmp_path, monkeypatch):
    with stand_in(release):
        lose(monkeypatch, "BuildConfig", name)
        with pytest.raises(SettingDropped) as caught:
            configured(shape(), tmp_path, release)
        advice = "this release spells or decides it differently. Use another release, or --runtime torch."
        assert str(caught.value).startswith(f"tensorrt-llm {release}: setting {name} was set to ")
        assert str(caught.value).endswith(
            f"and reads back as nothing, there is no such setting. Nothing was built: {advice}"
        )


@pytest.mark.parametrize("release", ["1.1.0", "1.2.1"])
@pytest.mark.parametrize("name", PLUGIN_CONFIG)
def test_a_plugin_setting_that_is_gone_is_refused(release, name, tmp_path, monkeypatch):
    with stand_in(release):
        lose(monkeypatch, "PluginConfig", name)
        with pytest.raises(SettingDropped, match=f"setting {name} was set to .* reads back as nothing, there is no"):
            configured(shape(), tmp_path, release)


def lose(monkeypatch, cls, name):
    """Let a class of settings not know one of them."""
    from tensorrt_llm import builder, settings_of_release
    from tensorrt_llm.plugin import plugin

    known = settings_of_release.fields
    lost = {key: {k: v for k, v in known(*key).items() if (key[1], k) != (cls, name)} for key in KNOWN}
    monkeypatch.setattr(settings_of_release, "fields", lambda module, owner: lost[module, owner])
    assert builder and plugin


KNOWN = (("tensorrt_llm.builder", "BuildConfig"), ("tensorrt_llm.plugin.plugin", "PluginConfig"))


def test_a_setting_that_is_overruled_is_refused(tmp_path, monkeypatch):
    with stand_in():
        from tensorrt_llm.plugin.plugin import PluginConfig

        check = PluginConfig.check
        overruled = classmethod(lambda cls, name, value: name == "use_paged_context_fmha" or check(name, value))
        monkeypatch.setattr(PluginConfig, "check", overruled)
        with pytest.raises(SettingDropped) as caught:
            configured(shape(), tmp_path)
        assert "setting use_paged_context_fmha was set to False and reads back as True." in str(caught.value)


@pytest.mark.parametrize(
    ("cache", "weights", "entries", "expected"),
    [
        ("none", "bfloat16", "bfloat16", False),
        ("none", "fp8", "bfloat16", False),
        ("none", "fp8", "fp8", False),
        ("paged", "bfloat16", "bfloat16", False),
        ("paged", "fp8", "bfloat16", False),
        ("paged", "fp8", "fp8", True),
    ],
)
def test_both_switches_of_fp8_attention_are_on_only_with_scales_to_read(cache, weights, entries, expected):
    asked = plugin_settings(Recipe(runtime="tensorrt-llm", cache=cache), shape(weights=weights, cache=entries))
    assert (asked["use_paged_context_fmha"], asked["use_fp8_context_fmha"]) == (expected, expected)
    assert asked["gemm_plugin"] == (None if weights == "fp8" else "auto")


@pytest.mark.parametrize(
    ("mlp", "expected"), [("fused", (True, None)), ("separate", (False, None)), ("swiglu-plugin", (True, "fp8"))]
)
def test_the_mlp_is_multiplied_as_the_recipe_says(mlp, expected):
    asked = plugin_settings(Recipe(runtime="tensorrt-llm", mlp=mlp), shape())
    assert (asked["use_fused_mlp"], asked["gemm_swiglu_plugin"]) == expected


def test_a_model_of_few_positions_has_rows_of_as_many(tmp_path):
    with stand_in():
        config = configured(shape(max_positions=100), tmp_path, cache="paged")
        assert (config.max_input_len, config.max_seq_len) == (100, 101)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("cache", ["none", "paged"])
def test_the_vendors_own_record_of_a_build_says_what_was_asked(release, cache, vendor_engines):
    engine = vendor_engines.engine(release, **({} if cache == "none" else {"cache": cache}))
    written = vendor_settings_of(engine)
    assert written["kv_cache_type"].upper() == ("PAGED" if cache == "paged" else "DISABLED")
    numbers = ("max_input_len", "max_seq_len", "max_batch_size", "max_num_tokens", "opt_num_tokens", "max_beam_width")
    longest = vendor_rig.LIMIT + (cache == "paged")
    assert [written[name] for name in numbers] == [32, longest, 16, vendor_rig.PASS, vendor_rig.PASS, 1]
    assert (written["gather_context_logits"], written["strongly_typed"]) == (False, True)
    plugins = {name.removeprefix("_"): value for name, value in written["plugin_config"].items()}
    expected = plugin_settings(recipe(cache=cache), shape(dtype="float32", weights="float32"))
    assert {name: plugins[name] for name in expected} == expected


def test_a_build_writes_nothing_into_the_working_directory(vendor_engines, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with vendor():
        build(vendor_engines.checkpoint(), tmp_path / "there" / "engine", recipe())
    assert os.listdir() == []
    assert vendor_rig.left_behind(tmp_path / "there") == ["engine"]
    names = vendor_rig.left_behind(tmp_path / "there" / "engine")
    assert names == ["config.json", "contract.json", "rank0.engine", "tokenizer.json", "tokenizer_config.json"]
