"""The stand-in of `tensorrt_llm` is right where a caller is right, and hard where a caller is wrong.

Each hardness is one that the documentation of the vendor speaks of, or that its silence allows. Nothing of our package
is under test here except that the card is of the kind that the runtimes take.
"""

import importlib
import json
import pickle
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import rig
import torch
from stand_in.card import DeviceFault, StandInCard
from stand_in.rig import RELEASES, stand_in

PREFERRED = {"max_input_len": 32, "max_seq_len": 32, "max_batch_size": 4, "max_num_tokens": 64, "opt_num_tokens": 64}
OURS = "ours"
LENGTHS = (1, 7, 20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return rig.tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture(scope="module")
def vendor_checkpoint(checkpoint, tmp_path_factory):
    """Of the tiny Llama, in float32."""
    with stand_in():
        return converted(checkpoint, tmp_path_factory.mktemp("vendor"))


@pytest.fixture
def card():
    with stand_in() as card:
        yield card


def of(module, name=None):
    """A module of the stand-in, or a name in it."""
    found = importlib.import_module(f"tensorrt_llm.{module}")
    return found if name is None else getattr(found, name)


def converted(source, target, dtype="float32"):
    model = of("models.automodel", "AutoModelForCausalLM").from_hugging_face(str(source), dtype=dtype)
    model.save_checkpoint(output_dir=str(target), save_config=True)
    return target


def cache_kind(name):
    try:
        return of("llmapi.kv_cache_type", "KVCacheType")[name]
    except ModuleNotFoundError:
        return of("bindings", "KVCacheType")[name]


def settings(cache="DISABLED", plugin=None, **given):
    config = of("builder", "BuildConfig")(kv_cache_type=cache_kind(cache), **{**PREFERRED, **given})
    config.output_timing_cache = None
    for name, value in {"use_paged_context_fmha": False, "use_fp8_context_fmha": False, **(plugin or {})}.items():
        setattr(config.plugin_config, name, value)
    return config


def marked_model(directory, place=2, head=True, **changes):
    """A model whose `place`-th result is an output."""
    config = of("models.modeling_utils", "PretrainedConfig").from_json_file(Path(directory) / "config.json")
    for name, value in changes.items():
        setattr(config, name, value)

    class Marked(of("models", "MODEL_MAP")[config.architecture]):
        def forward(self, *args, **kwargs):
            if not head:
                self.lm_head.forward = lambda states: states
            returned = super().forward(*args, **kwargs)
            returned[place].mark_output(OURS, self.config.dtype)
            return returned

    return Marked.from_checkpoint(directory, config=config)


def build(directory, place=2, head=True, changes=None, **given):
    model = marked_model(directory, place, head, **(changes or {}))
    return of("builder", "build")(model, settings(**given))


class Pass:
    """One pass of a session: right inputs, which a test then spoils."""

    def __init__(self, engine, card, lengths=LENGTHS):
        self.card = card
        self.session = of("runtime.session", "Session").from_serialized_engine(engine.engine)
        self.sequences = rig.random_sequences(lengths, seed=len(lengths))
        ends = np.cumsum(lengths).tolist()
        layers = engine.config.pretrained_config.num_hidden_layers
        on_card = {
            "input_ids": [token for sequence in self.sequences for token in sequence],
            "position_ids": [place for length in lengths for place in range(length)],
            "last_token_ids": ends,
            "context_lengths": lengths,
        }
        host = {
            "host_context_lengths": (lengths, torch.int32),
            "host_request_types": ([0] * len(lengths), torch.int32),
            "host_max_attention_window_sizes": ([32] * layers, torch.int32),
            "host_sink_token_length": ([0], torch.int32),
            "host_runtime_perf_knobs": ([-1] * 16, torch.int64),
            "host_context_progress": ([0], torch.int64),
        }
        self.inputs = {name: self.on_card(torch.tensor(value, dtype=torch.int32)) for name, value in on_card.items()}
        self.inputs |= {name: torch.tensor(value, dtype=dtype) for name, (value, dtype) in host.items()}
        self.stream = card.stream()
        self.outputs = {
            info.name: card.empty(tuple(info.shape), of("_utils").trt_dtype_to_torch(info.dtype))
            for info in self.infer()
        }

    def on_card(self, tensor):
        copy = self.card.empty(tuple(tensor.shape), tensor.dtype)
        return copy.copy_(tensor)

    def infer(self, **changes):
        infos = {name: [of("_utils").torch_dtype_to_trt(x.dtype), tuple(x.shape)] for name, x in self.inputs.items()}
        make = of("runtime.session", "TensorInfo")
        return self.session.infer_shapes([make(name, *info) for name, info in {**infos, **changes}.items()])

    def queue(self):
        return self.session.run(self.inputs, self.outputs, self.stream.handle)

    def run(self):
        assert self.queue()
        self.stream.synchronize()
        return {name: tensor.float().numpy() for name, tensor in self.outputs.items()}


@pytest.fixture
def one_pass(vendor_checkpoint, card):
    return Pass(build(vendor_checkpoint), card)


class TestNumbers:
    @pytest.mark.parametrize("release", RELEASES)
    def test_states_of_every_release_are_those_of_transformers(self, release, checkpoint, tmp_path):
        with stand_in(release) as card:
            directory = converted(checkpoint, tmp_path)
            run = Pass(build(directory), card)
            found = run.run()
        expected = np.concatenate(rig.reference_states(checkpoint, run.sequences))
        assert rig.relative_error([found[OURS]], [expected]) < 1e-5
        assert found["logits"].shape == (3, rig.tiny_config("llama").vocab_size)

    @pytest.mark.parametrize("family", ["qwen2", "gpt2", "mistral"])
    def test_states_of_other_families(self, family, card, tmp_path):
        checkpoint = rig.tiny_checkpoint(tmp_path / "hf", family)
        run = Pass(build(converted(checkpoint, tmp_path / "vendor")), card)
        expected = np.concatenate(rig.reference_states(checkpoint, run.sequences))
        assert rig.relative_error([run.run()[OURS]], [expected]) < 1e-5

    def test_learned_positions_are_read_and_rotary_ones_are_not(self, one_pass, card, tmp_path):
        right = one_pass.run()[OURS].copy()
        one_pass.inputs["position_ids"].zero_()
        assert (one_pass.run()[OURS] == right).all()
        gpt2 = Pass(build(converted(rig.tiny_checkpoint(tmp_path / "hf", "gpt2"), tmp_path / "vendor")), card)
        right = gpt2.run()[OURS].copy()
        gpt2.inputs["position_ids"].zero_()
        assert np.abs(gpt2.run()[OURS] - right).max() > 0.01

    def test_a_float32_checkpoint_becomes_float16_unless_told(self, checkpoint, card):
        load = of("models.automodel", "AutoModelForCausalLM").from_hugging_face
        assert load(checkpoint).config.dtype == "float16"
        assert load(checkpoint, dtype="bfloat16").config.dtype == "bfloat16"

    def test_the_last_rows_are_the_gathered_ones_and_logits_come_of_them(self, vendor_checkpoint, card):
        every, last = (Pass(build(vendor_checkpoint, place), card).run() for place in (2, 1))
        assert (every[OURS][np.cumsum(LENGTHS) - 1] == last[OURS]).all()
        assert (every["logits"] == last["logits"]).all()

    def test_a_bfloat16_engine_puts_out_bfloat16_and_float32_logits(self, checkpoint, card, tmp_path):
        run = Pass(build(converted(checkpoint, tmp_path, "bfloat16")), card)
        assert (run.outputs[OURS].dtype, run.outputs["logits"].dtype) == (torch.bfloat16, torch.float32)
        expected = np.concatenate(rig.reference_states(checkpoint, run.sequences, dtype="bfloat16", attention="sdpa"))
        assert rig.relative_error([run.run()[OURS]], [expected]) < 0.01


class TestGraph:
    def test_a_dropped_head_leaves_the_engine_and_logits_are_the_gathered_states(self, vendor_checkpoint, card):
        whole, headless = build(vendor_checkpoint), build(vendor_checkpoint, head=False)
        assert b"lm_head.weight" in whole.engine
        assert b"lm_head.weight" not in headless.engine
        found = Pass(headless, card).run()
        assert (found["logits"] == found[OURS][np.cumsum(LENGTHS) - 1]).all()

    def test_what_no_output_needs_is_left_out_and_its_inputs_stay(self, vendor_checkpoint, card):
        model = marked_model(vendor_checkpoint)

        def forward(input_ids, position_ids, attention_params, **inputs):
            states = model.transformer(input_ids, position_ids=position_ids, attention_params=attention_params)
            model.lm_head(states)
            states.mark_output(OURS, "float32")

        model.forward = forward
        engine = of("builder", "build")(model, settings())
        assert b"lm_head.weight" not in engine.engine
        run = Pass(engine, card)
        assert list(run.outputs) == [OURS]
        del run.inputs["last_token_ids"]
        assert not run.queue()

    def test_an_output_marked_twice_has_the_later_name(self, vendor_checkpoint, card):
        engine = build(vendor_checkpoint, place=1, head=False)  # the gathered states were marked as logits before
        assert [info.name for info in Pass(engine, card).infer()] == [OURS]

    def test_a_mark_of_another_type_casts(self, vendor_checkpoint, card):
        engine = build(vendor_checkpoint, changes={"logits_dtype": "float16"})
        assert Pass(engine, card).outputs["logits"].dtype == torch.float16

    def test_context_logits_make_the_gather_the_identity(self, vendor_checkpoint, card):
        model = marked_model(vendor_checkpoint, place=1)
        engine = of("builder", "build")(model, settings(gather_context_logits=True))
        session = of("runtime.session", "Session").from_serialized_engine(engine.engine)
        assert session.engine.get_tensor_mode("last_token_ids").name == "NONE"
        assert session.engine.get_tensor_shape(OURS) == (-1, 64)
        assert session.engine.get_tensor_shape("logits")[0] == -1

    @pytest.mark.parametrize(
        ("architecture", "error"), [("DeciLMForCausalLM", IndexError), ("DeepseekV2ForCausalLM", AssertionError)]
    )
    def test_deci_returns_two_tensors_and_latent_attention_needs_a_cache(
        self, architecture, error, vendor_checkpoint, card
    ):
        config = of("models.modeling_utils", "PretrainedConfig").from_checkpoint(vendor_checkpoint)
        model = of("models", "MODEL_MAP")[architecture].from_checkpoint(vendor_checkpoint, config=config)
        forward = model.forward
        model.forward = lambda **inputs: forward(**inputs)[2]
        with pytest.raises(error):
            of("builder", "build")(model, settings())


class TestSettings:
    @pytest.mark.parametrize("release", RELEASES)
    def test_unknown_settings_are_refused_up_to_1_1_and_vanish_in_1_2(self, release):
        with stand_in(release):
            make = of("builder", "BuildConfig")
            if release.startswith("1.2"):
                config = make(max_batchsize=3)
                config.max_batchsize = 3
                config.plugin_config.context_fhma = False
                assert not hasattr(config, "max_batchsize")
                assert not hasattr(config.plugin_config, "context_fhma")
                assert config.plugin_config.context_fmha is True
            else:
                with pytest.raises(TypeError, match="max_batchsize"):
                    make(max_batchsize=3)

    def test_1_2_validates_values(self):
        with stand_in("1.2.1"):
            config, wrong_kind = of("builder", "BuildConfig"), of("bindings", "KVCacheType").DISABLED
            for given in ({"max_input_len": "128"}, {"max_seq_len": 1.5}, {"kv_cache_type": wrong_kind}):
                with pytest.raises(ValueError, match=next(iter(given))):
                    config(**given)
            plugin = of("plugin.plugin", "PluginConfig")(gemm_plugin="enable", context_fmha="disable")
            assert (plugin.gemm_plugin, plugin.context_fmha) == (plugin.dtype, False)
            for name, value in (("gemm_plugin", "fast"), ("context_fmha", 1), ("tokens_per_block", True)):
                with pytest.raises(ValueError, match=name):
                    setattr(plugin, name, value)

    @pytest.mark.parametrize("release", RELEASES)
    def test_defaults_are_those_of_the_release(self, release):
        with stand_in(release):
            config, late = of("builder", "BuildConfig")(), release >= "0.2"
            assert hasattr(config, "use_fused_mlp") == (release < "0.18")
            assert hasattr(config, "auto_parallel_config") == (release < "1.2")
            assert config.plugin_config.use_fp8_context_fmha is late
            assert config.plugin_config.use_paged_context_fmha is late
            assert config.plugin_config.gpt_attention_plugin == config.plugin_config.dtype == "float16"

    @pytest.mark.parametrize("release", ["0.17.0.dev2024121700", "1.1.0", "1.2.1"])
    def test_plugin_settings_by_keyword(self, release):
        with stand_in(release):
            make = of("plugin.plugin", "PluginConfig")
            if release.startswith("0"):
                with pytest.raises(TypeError):
                    make(context_fmha=False)
            else:
                assert make(context_fmha=False).context_fmha is False

    @pytest.mark.parametrize("release", RELEASES)
    def test_the_kind_of_cache_has_one_home_in_which_a_build_finds_it(self, release):
        with stand_in(release):
            if release.startswith("1.2"):
                assert of("llmapi.kv_cache_type", "KVCacheType").DISABLED == "disabled"
            else:
                with pytest.raises(ModuleNotFoundError):
                    of("llmapi.kv_cache_type")

    @pytest.mark.parametrize(
        ("cache", "flag", "becomes"),
        [
            ("DISABLED", None, ("DISABLED", False)),
            ("PAGED", None, ("PAGED", True)),
            (None, None, ("PAGED", True)),
            (None, False, ("CONTINUOUS", False)),
            ("DISABLED", True, None),
            ("PAGED", False, None),
        ],
    )
    def test_cache_and_flag_agree_or_it_is_an_error(self, cache, flag, becomes, card):
        config = of("builder", "BuildConfig")()
        config.kv_cache_type = None if cache is None else cache_kind(cache)
        config.plugin_config.paged_kv_cache = flag
        if becomes is None:
            with pytest.raises(AssertionError):
                config.update_kv_cache_type("LlamaForCausalLM")
        else:
            config.update_kv_cache_type("LlamaForCausalLM")
            assert (config.kv_cache_type.name, config.plugin_config.paged_kv_cache) == becomes


class TestBuild:
    def test_a_model_serves_one_build(self, vendor_checkpoint, card):
        model = marked_model(vendor_checkpoint)
        of("builder", "build")(model, settings())
        with pytest.raises(RuntimeError, match="fresh"):
            of("builder", "build")(model, settings())

    def test_limits_are_clipped_and_the_best_number_of_tokens_defaults_to_the_sequences(self, vendor_checkpoint, card):
        given = {"max_input_len": 99, "max_num_tokens": 999, "opt_num_tokens": None}
        engine = build(vendor_checkpoint, **given)
        config = engine.config.build_config
        assert (config.max_input_len, config.max_num_tokens, config.opt_num_tokens) == (32, 128, 4)
        profile = Pass(engine, card).session.engine.get_tensor_profile_shape
        assert profile("input_ids", 0) == [(1,), (4,), (128,)]
        assert profile("context_lengths", 0) == [(1,), (2,), (4,)]

    @pytest.mark.parametrize(
        ("changes", "plugin", "what"),
        [
            ({"hidden_size": 2048}, {"use_fused_mlp": False}, "hidden states"),
            ({"head_size": 2**8}, {"use_fused_mlp": False}, "fused QKV"),
            ({"intermediate_size": 2**10}, {}, "fused gate and up"),
            ({"intermediate_size": 2**11}, {"use_fused_mlp": False}, "MLP"),
            ({"intermediate_size": 2**11}, {"gemm_swiglu_plugin": "fp8"}, "MLP"),
        ],
    )
    def test_a_tensor_of_2_to_the_31_elements_is_refused_and_one_token_less_is_not(
        self, changes, plugin, what, vendor_checkpoint, card
    ):
        limits = {"max_batch_size": 2**15, "plugin": plugin, "changes": changes}
        with pytest.raises(RuntimeError, match=what):
            build(vendor_checkpoint, max_num_tokens=2**20, opt_num_tokens=None, **limits)
        build(vendor_checkpoint, max_num_tokens=2**20 - 1, opt_num_tokens=None, **limits)

    @pytest.mark.parametrize("release", RELEASES)
    def test_the_engine_directory_spells_the_cache_as_the_release_does(self, release, vendor_checkpoint, tmp_path):
        with stand_in(release):
            build(vendor_checkpoint).save(tmp_path)
            assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "rank0.engine"]
            table = json.loads((tmp_path / "config.json").read_text())
            assert sorted(table) == ["build_config", "pretrained_config", "version"]
            assert table["version"] == release
            expected = "disabled" if release.startswith("1.2") else "DISABLED"
            assert table["build_config"]["kv_cache_type"] == expected
            assert not {"dry_run", "visualize_network"} & set(table["build_config"])
            again = of("builder", "Engine").from_dir(tmp_path)
            assert again.config.build_config.kv_cache_type.name == "DISABLED"

    def test_the_timing_cache_lands_in_the_working_directory_unless_told(
        self, vendor_checkpoint, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        with stand_in():
            config = settings()
            config.output_timing_cache = of("builder", "BuildConfig")().output_timing_cache
            of("builder", "build")(marked_model(vendor_checkpoint), config)
        assert [path.name for path in tmp_path.iterdir()] == ["model.cache"]

    def test_without_a_card_nothing_is_built_or_loaded(self, vendor_checkpoint):
        with stand_in():
            engine = build(vendor_checkpoint)
        with stand_in(with_card=False):
            with pytest.raises(RuntimeError, match="no CUDA-capable device"):
                build(vendor_checkpoint)
            with pytest.raises(RuntimeError, match="no CUDA-capable device"):
                of("runtime.session", "Session").from_serialized_engine(engine.engine)

    @pytest.mark.parametrize(
        ("release", "card"), [("1.1.0", {}), ("1.2.1", {"compute_capability": "8.0"}), ("1.2.1", {"name": "Other"})]
    )
    def test_an_engine_of_another_release_or_card_is_not_loaded(self, release, card, vendor_checkpoint):
        with stand_in():
            engine = build(vendor_checkpoint)
        with stand_in(release, card=StandInCard(**card)), pytest.raises(RuntimeError, match="deserialisation"):
            of("runtime.session", "Session").from_serialized_engine(engine.engine)


class TestFp8Attention:
    QUANTISED = ("FP8", "FP8")

    def engine(self, directory, algorithms, **plugin):
        quantization = of("models.modeling_utils", "QuantConfig")(*algorithms)
        return build(directory, changes={"quantization": quantization}, plugin=plugin)

    @pytest.mark.parametrize(("release", "back_on"), [("1.1.0", False), ("1.2.1", True)])
    def test_the_paged_flag_turns_it_back_on_in_1_2(self, release, back_on, vendor_checkpoint):
        with stand_in(release):
            engine = self.engine(vendor_checkpoint, self.QUANTISED, use_paged_context_fmha=True)
            assert engine.config.build_config.plugin_config.use_fp8_context_fmha is back_on

    @pytest.mark.parametrize("capability", ["8.0", "9.0"])
    @pytest.mark.parametrize("algorithm", [None, "FP8"])
    def test_it_needs_fp8_weights_and_a_card_for_them(self, capability, algorithm, vendor_checkpoint):
        with stand_in(card=StandInCard(compute_capability=capability)):
            engine = self.engine(vendor_checkpoint, (algorithm, None), use_fp8_context_fmha=True)
            found = engine.config.build_config.plugin_config.use_fp8_context_fmha
            assert found is (capability == "9.0" and algorithm == "FP8")

    def test_without_a_cache_it_is_a_device_fault(self, vendor_checkpoint, card):
        run = Pass(self.engine(vendor_checkpoint, self.QUANTISED, use_fp8_context_fmha=True), card)
        assert run.queue()
        with pytest.raises(DeviceFault, match="null scale"):
            run.stream.synchronize()
        Pass(self.engine(vendor_checkpoint, self.QUANTISED), StandInCard())

    def test_a_broken_card_stays_broken(self, one_pass, card):
        one_pass.inputs["host_context_progress"].fill_(8)
        one_pass.queue()
        for call in (one_pass.stream.synchronize, card.stream, lambda: card.empty((1,), torch.int32)):
            with pytest.raises(DeviceFault):
                call()


class TestShapes:
    def test_unknown_names_wrong_types_and_shapes_beyond_the_profile_are_rejected(self, one_pass):
        int32 = of("_utils").str_dtype_to_trt("int32")
        with pytest.raises(ValueError, match="not an input"):
            one_pass.infer(sequence_length=[int32, (3,)])
        with pytest.raises(ValueError, match="wrong dtype"):
            one_pass.infer(input_ids=[of("_utils").str_dtype_to_trt("int64"), (28,)])
        for shape in ((65,), (0,), (7, 4)):
            with pytest.raises(RuntimeError, match="profile"):
                one_pass.infer(input_ids=[int32, shape])
        with pytest.raises(ValueError, match="another input says"):
            one_pass.infer(position_ids=[int32, (27,)])

    def test_shapes_come_out_as_rows_of_tokens_and_sequences(self, one_pass):
        assert {info.name: tuple(info.shape) for info in one_pass.infer()} == {OURS: (28, 64), "logits": (3, 400)}

    def test_a_pass_before_its_shapes_are_set_is_not_taken(self, vendor_checkpoint, card):
        run = Pass(build(vendor_checkpoint), card)
        other = Pass(build(vendor_checkpoint), card)
        other.session.context.shapes.clear()
        run.session = other.session
        assert not run.queue()

    def test_shapes_that_were_not_set_anew_are_the_old_ones(self, one_pass, card):
        right = one_pass.run()[OURS].copy()
        ids = one_pass.inputs["input_ids"]
        one_pass.inputs["input_ids"] = one_pass.on_card(torch.cat([ids, ids]))
        one_pass.outputs[OURS] = card.empty((56, 64), torch.float32)
        found = one_pass.run()[OURS]
        assert (found[:28] == right).all()
        assert np.isnan(found[28:]).all()

    def test_what_the_engine_lists(self, one_pass):
        engine, trt = one_pass.session.engine, importlib.import_module("tensorrt")
        names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        assert set(inputs) == set(one_pass.inputs)
        assert engine.get_tensor_shape(OURS) == (-1, 64)
        assert engine.get_tensor_dtype(OURS) == trt.DataType.FLOAT
        assert engine.get_tensor_location(OURS) == trt.TensorLocation.DEVICE
        assert engine.device_memory_size_v2 > 0


class TestRun:
    def test_nothing_happens_before_somebody_waits(self, one_pass):
        assert one_pass.queue()
        assert one_pass.outputs[OURS].isnan().all()
        one_pass.stream.synchronize()
        assert not one_pass.outputs[OURS].isnan().any()

    @pytest.mark.parametrize("name", ["position_ids", "host_sink_token_length", "logits", OURS])
    def test_a_missing_tensor_fails(self, name, one_pass):
        one_pass.inputs.pop(name, None)
        one_pass.outputs.pop(name, None)
        assert not one_pass.queue()

    def test_an_empty_tensor_fails(self, one_pass, card):
        one_pass.inputs["input_ids"] = card.empty((0,), torch.int32)
        assert not one_pass.queue()

    @pytest.mark.parametrize("name", ["input_ids", "context_lengths", OURS])
    @pytest.mark.parametrize("pinned", [False, True])
    def test_a_tensor_beside_the_card_is_a_fault(self, name, pinned, one_pass, card):
        tables = one_pass.inputs if name in one_pass.inputs else one_pass.outputs
        tensor = tables[name]
        memory = card.pinned(tuple(tensor.shape), tensor.dtype) if pinned else torch.empty_like(tensor)
        tables[name] = memory.copy_(tensor)
        one_pass.queue()
        with pytest.raises(DeviceFault, match="not on the card"):
            one_pass.stream.synchronize()

    def test_a_host_tensor_on_the_card_is_a_fault(self, one_pass):
        one_pass.inputs["host_request_types"] = one_pass.on_card(one_pass.inputs["host_request_types"])
        with pytest.raises(DeviceFault, match="segmentation"):
            one_pass.queue()

    def test_a_tensor_of_another_type_is_read_as_if_it_were_right(self, one_pass):
        right = one_pass.run()[OURS].copy()
        one_pass.inputs["input_ids"] = one_pass.on_card(one_pass.inputs["input_ids"].long())
        assert np.abs(one_pass.run()[OURS] - right).max() > 0.01

    def test_a_strided_tensor_is_read_as_if_it_were_dense(self, one_pass):
        right = one_pass.run()[OURS].copy()
        ids = one_pass.inputs["input_ids"]
        one_pass.inputs["input_ids"] = one_pass.on_card(torch.stack([ids, ids.flip(0)], dim=1))[:, 0]
        assert np.abs(one_pass.run()[OURS] - right).max() > 0.01

    def test_a_buffer_that_is_too_short_is_a_fault(self, one_pass, card):
        one_pass.outputs[OURS] = card.empty((27, 64), torch.float32)
        one_pass.queue()
        with pytest.raises(DeviceFault, match="too short"):
            one_pass.stream.synchronize()

    def test_a_longer_buffer_is_filled_from_its_beginning(self, one_pass, card):
        right = one_pass.run()[OURS].copy()
        one_pass.outputs[OURS] = card.empty((64, 64), torch.float32)
        found = one_pass.run()[OURS]
        assert (found[:28] == right).all()
        assert np.isnan(found[28:]).all()

    def test_memory_freed_before_the_pass_is_a_fault(self, one_pass):
        one_pass.queue()
        del one_pass.inputs["input_ids"]
        with pytest.raises(DeviceFault, match="freed"):
            one_pass.stream.synchronize()

    def test_host_tensors_are_read_when_queued_and_others_when_done(self, one_pass):
        right = one_pass.run()[OURS].copy()
        one_pass.queue()
        one_pass.inputs["host_context_lengths"].zero_()
        one_pass.stream.synchronize()
        assert (one_pass.outputs[OURS].numpy() == right).all()
        one_pass.inputs["host_context_lengths"].copy_(torch.tensor(LENGTHS))
        one_pass.queue()
        one_pass.inputs["input_ids"].fill_(5)
        one_pass.stream.synchronize()
        assert np.abs(one_pass.outputs[OURS].numpy() - right).max() > 0.01

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("host_context_lengths", [7, 1, 20]),
            ("context_lengths", [2, 7, 20]),
            ("host_max_attention_window_sizes", [19] * 3),
            ("host_sink_token_length", [1]),
        ],
    )
    def test_contradictions_that_nobody_checks_give_nan(self, name, value, one_pass):
        one_pass.inputs[name].copy_(torch.tensor(value))
        assert np.isnan(one_pass.run()[OURS]).all()

    def test_last_token_ids_that_are_lengths_give_other_rows(self, vendor_checkpoint, card):
        run = Pass(build(vendor_checkpoint, place=1), card)
        right = run.run()[OURS].copy()
        run.inputs["last_token_ids"].copy_(torch.tensor(LENGTHS))
        found = run.run()[OURS]
        assert (found[0] == right[0]).all()
        assert (found[1:] != right[1:]).any(axis=1).all()
        run.inputs["last_token_ids"].copy_(torch.tensor([0, 8, 29]))
        assert np.isnan(run.run()[OURS][[0, 2]]).all()

    @pytest.mark.parametrize("token", [-1, 400])
    def test_a_token_outside_the_vocabulary_is_a_fault(self, token, one_pass):
        one_pass.inputs["input_ids"][3] = token
        one_pass.queue()
        with pytest.raises(DeviceFault, match="vocabulary"):
            one_pass.stream.synchronize()

    @pytest.mark.parametrize("sequences", [12_287, 12_288])
    def test_sequences_must_fit_a_kernels_shared_memory(self, sequences, vendor_checkpoint, card):
        engine = build(vendor_checkpoint, max_batch_size=2**14, max_num_tokens=2**14)
        run = Pass(engine, card, lengths=[1] * sequences)
        run.inputs["host_sink_token_length"].fill_(1)  # nothing is computed then
        assert run.queue()
        if sequences < 12_288:
            run.stream.synchronize()
        else:
            with pytest.raises(DeviceFault, match="shared memory"):
                run.stream.synchronize()

    def test_generation_without_a_cache_is_refused(self, one_pass):
        one_pass.inputs["host_request_types"].fill_(1)
        with pytest.raises(RuntimeError, match="only supported for context"):
            one_pass.queue()

    def test_a_stream_that_is_none_is_refused(self, one_pass):
        with pytest.raises(RuntimeError, match="invalid resource handle"):
            one_pass.session.run(one_pass.inputs, one_pass.outputs, 0)

    def test_two_passes_of_a_session_out_of_order_spoil_each_other(self, one_pass, card):
        second = card.stream()
        one_pass.queue()
        one_pass.session.run(one_pass.inputs, one_pass.outputs, second.handle)
        second.synchronize()
        assert one_pass.outputs[OURS].isnan().all()

    def test_a_paged_engine_wants_the_caches_tensors_too(self, vendor_checkpoint, card):
        engine = build(vendor_checkpoint, cache="PAGED")
        session = of("runtime.session", "Session").from_serialized_engine(engine.engine)
        names = {session.engine.get_tensor_name(number) for number in range(session.engine.num_io_tensors)}
        assert {"sequence_length", "cache_indirection", "host_kv_cache_pool_pointers"} < names

    def test_weights_and_activations_need_room_on_the_card(self, vendor_checkpoint, card):
        engine = build(vendor_checkpoint)
        before = card.used_bytes
        session = of("runtime.session", "Session").from_serialized_engine(engine.engine)
        needed = card.used_bytes - before
        assert needed > session.context_mem_size > 0
        del session
        assert card.used_bytes == before
        with stand_in(card=StandInCard(needed - 1)), pytest.raises(RuntimeError, match="OutOfMemory"):
            of("runtime.session", "Session").from_serialized_engine(engine.engine)


class TestCard:
    def test_fresh_memory_is_poison_and_runs_out(self):
        card = StandInCard(1000)
        assert card.empty((200,), torch.float32).isnan().all()
        held = card.empty((200,), torch.int32)
        assert (held > 10**9).all()
        with pytest.raises(torch.OutOfMemoryError):
            card.empty((101,), torch.bfloat16)
        del held
        card.empty((200,), torch.bfloat16)
        assert card.pinned((10_000,), torch.float32).isnan().all()

    def test_memory_is_told_apart_through_views(self):
        card = StandInCard()
        tensor, pinned = card.empty((4, 4), torch.float32), card.pinned((4,), torch.float32)
        assert card.where(tensor[1:].view(-1)) == "card"
        assert card.where(pinned[2:]) == "pinned"
        assert card.where(torch.zeros(4)) == "host"

    def test_a_stream_does_what_is_waited_for_and_no_more(self):
        card = StandInCard()
        stream, source = card.stream(), card.pinned((2,), torch.float32)
        first, second = card.empty((2,), torch.float32), card.empty((2,), torch.float32)
        source.fill_(1)
        stream.copy(first, source)
        event = stream.record()
        stream.copy(second, source)
        assert first.isnan().all()
        event.synchronize()
        assert (first == 1).all()
        assert second.isnan().all()
        source.fill_(2)  # too early: the second copy has not been waited for
        stream.synchronize()
        assert (second == 2).all()

    def test_a_stream_waits_for_an_event_of_another_and_only_then(self):
        card = StandInCard()
        up, down = card.stream(), card.stream()
        pinned, memory, result = card.pinned((2,), torch.float32), *(card.empty((2,), torch.float32) for _ in "ab")
        pinned.fill_(3)
        up.copy(memory, pinned)
        down.copy(result, memory)
        down.synchronize()
        assert result.isnan().all()
        down.wait(up.record())
        down.copy(result, memory)
        down.synchronize()
        assert (result == 3).all()

    def test_copies_are_of_equal_tensors_with_pinned_memory_on_the_host(self):
        card = StandInCard()
        stream, memory = card.stream(), card.empty((2,), torch.float32)
        for source in (torch.zeros(2), card.pinned((3,), torch.float32), card.pinned((2,), torch.float16)):
            with pytest.raises(ValueError, match="copy"):
                stream.copy(memory, source)

    def test_torch_operations_are_queued_with_the_rest(self):
        card = StandInCard()
        stream, pinned, memory = card.stream(), card.pinned((4,), torch.float32), card.empty((4,), torch.float32)
        pinned.copy_(torch.tensor([1.0, 2, 3, 4]))
        stream.copy(memory, pinned)

        def work():
            memory[:2] += 10
            return memory.view(2, 2).sum(0).to(torch.float16)

        result = stream.run(work)
        assert card.where(result) == "card"
        assert result.isnan().all()
        stream.synchronize()
        assert result.tolist() == [14, 16]

    def test_an_operation_whose_result_the_host_needs_waits(self):
        card = StandInCard()
        stream, pinned, memory = card.stream(), card.pinned((4,), torch.float32), card.empty((4,), torch.float32)
        pinned.fill_(2)
        stream.copy(memory, pinned)
        assert stream.run(lambda: memory.sum().item()) == 8
        assert stream.run(lambda: memory[memory > 1]).tolist() == [2] * 4

    def test_a_closed_card_gives_no_memory(self):
        card = StandInCard()
        card.close()
        with pytest.raises(RuntimeError, match="closed"):
            card.empty((1,), torch.float32)


class TestExecutor:
    @pytest.fixture
    def directory(self, vendor_checkpoint, tmp_path):
        def built(release, cache="PAGED", **given):
            build(vendor_checkpoint, cache=cache, **given).save(tmp_path / release)
            return tmp_path / release

        return built

    @staticmethod
    def executor(directory, names=(OURS,), gather_context=True, reuse=False):
        bindings = of("bindings.executor")
        wanted = [bindings.AdditionalModelOutput(name, gather_context) for name in names]
        told = (
            {"additional_model_outputs": wanted}
            if bindings.OUTPUTS_ARE_OBJECTS
            else {"additional_output_names": list(names)}
        )
        cache = bindings.KvCacheConfig() if reuse is None else bindings.KvCacheConfig(enable_block_reuse=reuse)
        config = bindings.ExecutorConfig(kv_cache_config=cache, **told)
        return bindings.Executor(directory, bindings.ModelType.DECODER_ONLY, config)

    @staticmethod
    def ask(executor, sequences, gather_context=True, **given):
        bindings = of("bindings.executor")
        wanted = bindings.OutputConfig(
            additional_model_outputs=[bindings.AdditionalModelOutput(OURS, gather_context=gather_context)]
        )
        requests = [
            bindings.Request(input_token_ids=ids, **{"max_tokens": 1, "output_config": wanted, **given})
            for ids in sequences
        ]
        ids, found = executor.enqueue_requests(requests), {}
        while len(found) < len(ids):
            found |= {response.request_id: response for response in executor.await_responses()}
        return [found[number] for number in ids]

    @pytest.mark.parametrize("release", ["0.17.0.dev2024121700", "1.0.0", "1.2.1"])
    @pytest.mark.parametrize("cache", ["PAGED", "DISABLED"])
    def test_states_come_back_by_name_for_every_sequence(self, release, cache, directory, checkpoint):
        sequences = rig.random_sequences([5, 1, 30, 2, 7])
        with stand_in(release):
            executor = self.executor(directory(release, cache))
            found = [
                {output.name: output.output for output in response.result.additional_outputs}
                for response in self.ask(executor, sequences)
            ]
        assert all(set(one) == {f"context_{OURS}", f"generation_{OURS}"} for one in found)
        assert found[0][f"generation_{OURS}"].shape == (1, 1 if release >= "1" else 0, 64)
        states = [one[f"context_{OURS}"].numpy() for one in found]
        assert rig.relative_error(states, rig.reference_states(checkpoint, sequences)) < 1e-5

    def test_answers_come_in_another_order_a_few_at_a_time(self, card, directory):
        executor = self.executor(directory("1.2.1"))
        request = of("bindings.executor", "Request")
        ids = executor.enqueue_requests([request([5, 6], 1) for _ in range(5)])
        first = [response.request_id for response in executor.await_responses()]
        assert len(first) < 5
        assert first != ids[: len(first)]
        executor.await_responses()
        with pytest.raises(RuntimeError, match="for ever"):
            executor.await_responses()

    def test_tokens_of_reused_blocks_are_missing(self, card, directory):
        path = directory("1.2.1", plugin={"tokens_per_block": 8})
        sequences = [list(range(10, 30)), list(range(10, 27))]
        for reuse, lost in ((False, 0), (True, 16), (None, 16)):
            executor = self.executor(path, reuse=reuse)
            shapes = [one.result.additional_outputs[0].output.shape[0] for one in self.ask(executor, sequences)]
            assert shapes == [20, 17 - lost]
            executor.shutdown()

    def test_the_gather_must_be_that_of_the_place_where_the_output_was_marked(self, card, directory):
        every, last = directory("1.2.1"), None
        with pytest.raises(RuntimeError, match="final index mismatch"):
            self.ask(self.executor(every, gather_context=False), [[5, 6]], gather_context=False)
        card.give(card.used_bytes)
        last = directory("1.2.1", place=1)
        with pytest.raises(RuntimeError, match="final index mismatch"):
            self.ask(self.executor(last), [[5, 6]])
        card.give(card.used_bytes)
        [response] = self.ask(self.executor(last, gather_context=False), [[5, 6]], gather_context=False)
        assert [output.name for output in response.result.additional_outputs] == [f"generation_{OURS}"]

    def test_outputs_that_the_executor_was_not_told_of_are_refused(self, card, directory):
        with pytest.raises(RuntimeError, match="not in the executor's config"):
            self.ask(self.executor(directory("1.2.1"), names=()), [[5, 6]])
        with pytest.raises(RuntimeError, match="no output"):
            self.executor(directory("1.2.1"), names=("other",))

    def test_an_executor_needs_logits(self, card, directory):
        path = directory("1.2.1", head=False, place=1)
        with pytest.raises(RuntimeError, match="logits"):
            self.executor(path)

    @pytest.mark.parametrize(
        ("cache", "tokens", "new", "problem"),
        [
            ("PAGED", 32, 1, r"maximum input length \(31\)"),
            ("PAGED", 31, 2, "exceed max_seq_len"),
            ("DISABLED", 2, 2, "without KV cache"),
        ],
    )
    def test_what_does_not_fit_is_an_error_of_that_response(self, cache, tokens, new, problem, card, directory):
        executor = self.executor(directory("1.2.1", cache))
        bad, good = [
            self.ask(executor, rig.random_sequences([length]), max_tokens=count)[0]
            for length, count in ((tokens, new), (31, 1))
        ]
        assert bad.has_error()
        assert not good.has_error()
        with pytest.raises(RuntimeError, match=problem):
            _ = bad.result

    @pytest.mark.parametrize(
        ("release", "name", "right", "wrong"),
        [
            ("0.17.0.dev2024121700", "Request", ([1],), {"max_token": 1}),
            ("0.17.0.dev2024121700", "Request", ([1],), (1,)),
            ("1.2.1", "Request", ([1], 1), {"max_token": 1}),
            ("0.17.0.dev2024121700", "ExecutorConfig", (), {"additional_model_outputs": []}),
            ("1.2.1", "ExecutorConfig", (), {"additional_output_names": []}),
        ],
    )
    def test_signatures_are_those_of_the_release(self, release, name, right, wrong):
        with stand_in(release):
            make = of("bindings.executor", name)
            make(*right)
            with pytest.raises(TypeError):
                make(*right, **wrong) if isinstance(wrong, dict) else make(*right, *wrong)

    def test_later_requests_must_say_how_many_tokens(self, card):
        with pytest.raises(TypeError, match="max_tokens"):
            of("bindings.executor", "Request")([1])

    def test_the_cache_takes_most_of_the_card_and_gives_it_back(self, card, directory):
        before = card.used_bytes
        executor = self.executor(directory("1.2.1"))
        assert card.used_bytes > 0.8 * card.total_bytes
        executor.shutdown()
        assert card.used_bytes == before

    def test_pickling_a_result_drops_the_outputs(self, card, directory):
        [response] = self.ask(self.executor(directory("1.2.1")), [[5, 6]])
        assert len(response.result.additional_outputs) == 2
        assert pickle.loads(pickle.dumps(response.result)).additional_outputs == []


class TestQuantisation:
    @staticmethod
    def quantise(model, texts, output, **given):
        home = "quantization" if hasattr(of("quantization"), "quantize_and_export") else None
        home = home or "quantization.quantize_by_modelopt"
        wanted = {
            "model_dir": str(model),
            "device": "cuda",
            "calib_dataset": str(texts),
            "dtype": "bfloat16",
            "qformat": "fp8",
            "kv_cache_dtype": None,
            "calib_size": 4,
            "batch_size": 1,
            "calib_max_seq_length": 32,
            "awq_block_size": 128,
            "output_dir": str(output),
            "tp_size": 1,
            "pp_size": 1,
            "cp_size": 1,
            "seed": 1234,
            "tokenizer_max_seq_length": 64,
        }
        wanted = {name: value for name, value in {**wanted, **given}.items() if value is not ...}
        return of(home, "quantize_and_export")(**wanted)

    @pytest.fixture
    def texts(self, tmp_path):
        directory = tmp_path / "texts"
        directory.mkdir()
        lines = [json.dumps({"text": text}) for text in rig.passages(8)]
        (directory / "train.jsonl").write_text("\n".join(lines))
        return directory

    @pytest.mark.parametrize("release", ["0.17.0.dev2024121700", "1.2.1"])
    def test_an_fp8_checkpoint_is_near_the_original_and_its_head_is_left_alone(
        self, release, checkpoint, texts, tmp_path
    ):
        from safetensors.torch import load_file

        with stand_in(release) as card:
            self.quantise(checkpoint, texts, tmp_path / "fp8")
            config = json.loads((tmp_path / "fp8" / "config.json").read_text())
            assert config["quantization"]["quant_algo"] == "FP8"
            assert config["quantization"]["kv_cache_quant_algo"] is None
            assert config["quantization"]["exclude_modules"] == ["lm_head"]
            weights = load_file(tmp_path / "fp8" / "rank0.safetensors")
            assert weights["lm_head.weight"].dtype == torch.bfloat16
            kinds = {name.rpartition(".")[2]: tensor.dtype for name, tensor in weights.items() if "proj" in name}
            assert kinds["weight"] == torch.float8_e4m3fn
            assert {"weights_scaling_factor", "activation_scaling_factor"} < set(kinds)
            run = Pass(build(tmp_path / "fp8"), card)
            found = run.run()[OURS]
        expected = np.concatenate(rig.reference_states(checkpoint, run.sequences))
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 0.005 < error < 0.2

    def test_it_needs_a_card(self, checkpoint, texts, tmp_path):
        with stand_in(with_card=False), pytest.raises(OSError, match="GPU is required"):
            self.quantise(checkpoint, texts, tmp_path / "fp8")

    @pytest.mark.parametrize(
        ("given", "error"),
        [
            ({"seed": ...}, TypeError),
            ({"quantise_lm_head": True}, TypeError),
            ({"calib_dataset": "cnn_dailymail"}, ConnectionError),
            ({"tp_size": 2}, NotImplementedError),
        ],
    )
    def test_wrong_arguments_are_refused(self, given, error, checkpoint, texts, card, tmp_path):
        with pytest.raises(error):
            self.quantise(checkpoint, texts, tmp_path / "fp8", **given)

    @pytest.mark.parametrize(("name", "column"), [("train.jsonl", "article"), ("test.jsonl", "text")])
    def test_the_texts_are_the_column_text_of_the_split_train(self, name, column, checkpoint, card, tmp_path):
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / name).write_text(json.dumps({column: "a b c"}))
        with pytest.raises((KeyError, ValueError)):
            self.quantise(checkpoint, tmp_path / "texts", tmp_path / "fp8")

    def test_later_options_are_of_later_releases(self, checkpoint, texts, tmp_path):
        with stand_in("0.17.0.dev2024121700"), pytest.raises(TypeError, match="device_map"):
            self.quantise(checkpoint, texts, tmp_path / "fp8", device_map="auto")


class TestRig:
    @pytest.mark.parametrize("noisy", [False, True])
    def test_it_is_installed_as_its_release_and_may_speak_on_stdout(self, noisy, capsys):
        with stand_in("1.1.0", noisy=noisy):
            assert metadata.version("tensorrt-llm") == "1.1.0"
            importlib.import_module("tensorrt_llm")
        assert ("1.1.0" in capsys.readouterr().out) is noisy
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version("tensorrt-llm")

    def test_nothing_is_left_behind(self):
        path = list(sys.path)
        with stand_in("0.21.0"):
            assert importlib.import_module("tensorrt_llm").__version__ == "0.21.0"
        assert sys.path == path
        assert not [name for name in sys.modules if name.startswith("tensorrt")]
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("tensorrt_llm")

    @pytest.mark.parametrize("release", RELEASES)
    def test_every_module_of_it_imports_in_every_release(self, release):
        from stand_in.rig import PACKAGES

        names = [
            ".".join(path.relative_to(PACKAGES).with_suffix("").parts).removesuffix(".__init__")
            for path in sorted(PACKAGES.rglob("*.py"))
        ]
        with stand_in(release):
            for name in names:
                if name != "tensorrt_llm.llmapi.kv_cache_type":
                    importlib.import_module(name)
