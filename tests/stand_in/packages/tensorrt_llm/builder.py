"""BuildConfig, `build` and the engine directory."""

import copy
import json
from pathlib import Path

import tensorrt
from stand_in.program import Program
from stand_in.state import STATE, at_least

import tensorrt_llm
from tensorrt_llm._common import check_max_num_tokens
from tensorrt_llm.models.modeling_utils import PretrainedConfig
from tensorrt_llm.network import Network, net_guard
from tensorrt_llm.plugin.plugin import PluginConfig
from tensorrt_llm.settings_of_release import Settings, ValidationError

if at_least("1.2"):
    from tensorrt_llm.llmapi.kv_cache_type import KVCacheType
else:
    from tensorrt_llm.bindings import KVCacheType

MAX_ELEMENTS = 2**31 - 1
LEFT_OUT = ("dry_run", "visualize_network")
FP8_WEIGHTS = ("FP8", "W4A8_AWQ", "NVFP4")


class _AutoParallelConfig(dict):
    pass


class _BuildConfig(Settings):
    facts_module = "tensorrt_llm.builder"

    @classmethod
    def factories(cls):
        return {
            "LoraConfig": dict,
            "AutoParallelConfig": _AutoParallelConfig,
            "PluginConfig": PluginConfig,
            "SpeculativeDecodingMode.NONE": lambda: 1,
        }

    def update_kv_cache_type(self, model_architecture):
        """Make the kind of cache and the plugin's flag agree. Raises AssertionError if they contradict each other."""
        flag = self.plugin_config.paged_kv_cache
        if self.kv_cache_type is None:
            self.kv_cache_type = KVCacheType.CONTINUOUS if flag is False else KVCacheType.PAGED
        paged = self.kv_cache_type == KVCacheType.PAGED
        assert flag is None or flag == paged, f"paged_kv_cache={flag} with kv_cache_type={self.kv_cache_type}"
        self.plugin_config.paged_kv_cache = paged


if at_least("1.2"):

    class BuildConfig(_BuildConfig):
        """Unknown keywords are ignored."""

        @classmethod
        def check(cls, name, value):
            """Kinds of values."""
            if name == "kv_cache_type":
                if value is None or isinstance(value, str):
                    return None if value is None else KVCacheType(value)
                raise ValidationError(f"BuildConfig.{name}: {value!r} is no kind of cache")
            if name in ("max_seq_len", "opt_num_tokens", "force_num_profiles"):
                if value is not None and type(value) is not int:
                    raise ValidationError(f"BuildConfig.{name}: {value!r} is no integer")
                return value
            if name == "plugin_config" and not isinstance(value, (PluginConfig, dict)):
                raise ValidationError(f"BuildConfig.{name}: {value!r} is no PluginConfig")
            if name == "plugin_config" and isinstance(value, dict):
                return PluginConfig(**value)
            return super().check(name, value)

        @classmethod
        def from_json_file(cls, config_file):
            """From a file."""
            return cls(**json.loads(Path(config_file).read_text()))

        def model_dump(self):
            """As config.json has it."""
            return _to_dict(self)

else:

    class BuildConfig(_BuildConfig):
        """A dataclass."""

        @classmethod
        def from_dict(cls, config, plugin_config=None):
            """Known names of a mapping."""
            config = copy.deepcopy(config)
            plugin = plugin_config or PluginConfig.from_dict(config.pop("plugin_config", {}))
            kind = config.pop("kv_cache_type", None)
            names = set(vars(cls()))
            made = cls(**{name: value for name, value in config.items() if name in names}, plugin_config=plugin)
            made.kv_cache_type = None if kind is None else KVCacheType[str(kind).upper()]
            return made

        @classmethod
        def from_json_file(cls, config_file, plugin_config=None):
            """From a file."""
            return cls.from_dict(json.loads(Path(config_file).read_text()), plugin_config)

        def to_dict(self):
            """As config.json has it."""
            return _to_dict(self)

        def update_from_dict(self, config):
            """Set the known names of a mapping."""
            for name in vars(self):
                if name in config:
                    setattr(self, name, config[name])

        def update(self, **kwargs):
            """Set attributes."""
            self.update_from_dict(kwargs)


def _to_dict(config):
    table = {name: value for name, value in vars(config).items() if name != "plugin_config"}
    table = {**copy.deepcopy(table), "plugin_config": dict(vars(config.plugin_config))}
    if isinstance(table["kv_cache_type"], KVCacheType):
        table["kv_cache_type"] = table["kv_cache_type"].value
    return table


class EngineConfig:
    """config.json of an engine."""

    def __init__(self, pretrained_config, build_config, version):
        self.pretrained_config, self.build_config, self.version = pretrained_config, build_config, version

    @classmethod
    def from_json_file(cls, config_file):
        """From a file."""
        return cls.from_json_str(Path(config_file).read_text())

    @classmethod
    def from_json_str(cls, config_str):
        """From a text."""
        table = json.loads(config_str)
        make = BuildConfig if at_least("1.2") else BuildConfig.from_dict
        build_config = make(**table["build_config"]) if at_least("1.2") else make(table["build_config"])
        return cls(PretrainedConfig.from_dict(table["pretrained_config"]), build_config, table["version"])

    def to_dict(self):
        """As config.json has it."""
        build_config = {name: value for name, value in _to_dict(self.build_config).items() if name not in LEFT_OUT}
        return {
            "version": self.version,
            "pretrained_config": self.pretrained_config.to_dict(),
            "build_config": build_config,
        }


class Engine:
    """A built engine, in memory."""

    def __init__(self, config, engine, managed_weights=None):
        self.config, self.engine, self.managed_weights = config, engine, managed_weights or {}

    def save(self, engine_dir):
        """Write config.json and rank0.engine."""
        engine_dir = Path(engine_dir)
        engine_dir.mkdir(parents=True, exist_ok=True)
        (engine_dir / "config.json").write_text(json.dumps(self.config.to_dict(), indent=4))
        (engine_dir / "rank0.engine").write_bytes(self.engine)

    @classmethod
    def from_dir(cls, engine_dir, rank=0):
        """Read them."""
        config = EngineConfig.from_json_file(Path(engine_dir) / "config.json")
        return cls(config, (Path(engine_dir) / f"rank{rank}.engine").read_bytes())

    @classmethod
    def from_buffer(cls, engine_buffer, json_config_str, rank=0):
        """From memory."""
        return cls(EngineConfig.from_json_str(json_config_str), engine_buffer)


def get_engine_version(engine_dir):
    """The release that wrote it."""
    return json.loads((Path(engine_dir) / "config.json").read_text()).get("version")


def build(model, build_config):
    """Turn a model into an engine for this card. The model is changed on the way and serves no second build."""
    card = STATE.needs_card()
    if model.stand_in_built:
        raise RuntimeError("stand-in: this model went through build() before; load a fresh one")
    model.stand_in_built = True
    build_config, config = copy.deepcopy(build_config), model.config
    plugin = build_config.plugin_config
    build_config.update_kv_cache_type(config.architecture)
    plugin.dtype = config.dtype
    plugin.reduce_fusion = False
    if build_config.max_seq_len is None:
        build_config.max_seq_len = config.max_position_embeddings
    build_config.max_input_len = min(build_config.max_input_len, build_config.max_seq_len)
    build_config.max_num_tokens, build_config.opt_num_tokens = check_max_num_tokens(
        build_config.max_num_tokens,
        build_config.opt_num_tokens,
        build_config.max_batch_size,
        build_config.max_input_len,
        build_config.max_seq_len,
        build_config.max_beam_width,
        plugin.remove_input_padding,
        plugin.context_fmha,
        plugin.tokens_per_block,
        plugin.multiple_profiles,
    )
    if not plugin.remove_input_padding or plugin.gpt_attention_plugin is None:
        raise NotImplementedError("the stand-in has packed inputs and the attention plugin only")
    _settle_fp8_attention(plugin, config, card)
    quantization = config.quantization
    if "FP8" in (quantization.quant_algo, quantization.kv_cache_quant_algo):
        build_config.strongly_typed = True
    own_field = getattr(build_config, "use_fused_mlp", None)
    fused = plugin.use_fused_mlp if own_field is None else own_field
    model.transformer.use_fused_mlp = fused and plugin.gemm_swiglu_plugin is None

    network = Network(plugin, build_config.strongly_typed)
    use_cache = build_config.kv_cache_type != KVCacheType.DISABLED
    with net_guard(network):
        old = {} if at_least("1.2") else {"gather_generation_logits": build_config.gather_generation_logits}
        inputs = model.prepare_inputs(
            max_batch_size=build_config.max_batch_size,
            max_input_len=build_config.max_input_len,
            max_seq_len=build_config.max_seq_len,
            max_num_tokens=build_config.max_num_tokens,
            use_cache=use_cache,
            max_beam_width=build_config.max_beam_width,
            opt_num_tokens=build_config.opt_num_tokens,
            gather_context_logits=build_config.gather_context_logits,
            **old,
        )
        model(**inputs)
    program = Program(
        about={
            "release": tensorrt_llm.__version__,
            "tensorrt": tensorrt.__version__,
            "card": [card.device.name, card.device.compute_capability],
            "use_cache": use_cache,
            "fp8_context_fmha": bool(plugin.use_fp8_context_fmha),
            "max_input_len": build_config.max_input_len,
            "max_seq_len": build_config.max_seq_len,
            "max_batch_size": build_config.max_batch_size,
            "max_num_tokens": build_config.max_num_tokens,
            "tokens_per_block": plugin.tokens_per_block,
        },
        inputs=network.inputs,
        profiles=network.profiles,
        outputs={name: key for key, name in network.marked.items()},
        values=network.values,
        nodes=network.nodes,
        weights=network.parameters,
    )
    _refuse_large_tensors(program)
    if build_config.output_timing_cache:
        Path(build_config.output_timing_cache).write_bytes(b"timing cache of the stand-in")
    engine_config = EngineConfig(config, build_config, tensorrt_llm.__version__)
    return Engine(engine_config, program.to_bytes())


def _settle_fp8_attention(plugin, config, card):
    """The order of 1.2.1; earlier releases lack the last step, which turns the flag back on."""
    capability = tuple(int(part) for part in card.device.compute_capability.split("."))
    if not plugin.context_fmha:
        plugin.use_fp8_context_fmha = plugin.use_paged_context_fmha = False
    elif config.quantization.quant_algo not in FP8_WEIGHTS or capability < (8, 9):
        plugin.use_fp8_context_fmha = False
    elif at_least("1.2") and plugin.use_paged_context_fmha and config.quantization.kv_cache_quant_algo == "FP8":
        plugin.use_fp8_context_fmha = True


def _refuse_large_tensors(program):
    """TensorRT takes no tensor of 2^31 or more elements at the largest shapes."""
    sizes = {"T": program.about["max_num_tokens"], "B": program.about["max_batch_size"]}
    for node in program.needed():
        inner = {what: (sizes["T"], width) for what, width in node.settings.get("widths", {}).items()}
        for what, shape in {**inner, node.op: program.shape(node.output, sizes)}.items():
            volume = 1
            for side in shape:
                volume *= side
            if volume > MAX_ELEMENTS:
                raise RuntimeError(
                    f"stand-in TensorRT: {what} {shape} has {volume:,} elements, at most {MAX_ELEMENTS:,}"
                )
