"""Every name of the vendor's package that we use, with the parameters that we give it: what must not change.

Data only. `gate` compares it with the package that is installed, a test compares it with our own call sites and with
recorded facts of each release. Where a name moved between releases, all of its homes are listed.
"""

from dataclasses import dataclass
from typing import Literal

Purpose = Literal["build", "run", "executor", "quantize"]
"""What a name is needed for: building, the Session of an engine without cache, the executor of one with, quantising."""

FIRST_RELEASE = (0, 16)
FIRST_RELEASE_WITHOUT = (1, 3)
"""The engine builder left the vendor's main branch in July 2026; 1.2.1 is the newest release read that has it."""
RELEASES = "0.16 to 1.2.x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """One name.

    Attributes:
        homes: modules that have it in one release or another.
        parameters: of the function, or of the class when it is constructed.
        attributes: methods, members or fields of the class.
        methods: parameters of its methods.
        purposes: what it is needed for.
    """

    homes: tuple[str, ...]
    name: str
    purposes: tuple[Purpose, ...]
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    methods: tuple[tuple[str, tuple[str, ...]], ...] = ()


BUILD_CONFIG = (
    *("max_input_len", "max_seq_len", "max_batch_size", "max_beam_width", "max_num_tokens", "opt_num_tokens"),
    *("kv_cache_type", "gather_context_logits", "strongly_typed", "input_timing_cache", "output_timing_cache"),
    "plugin_config",
)
PLUGIN_CONFIG = (
    *("gpt_attention_plugin", "gemm_plugin", "gemm_swiglu_plugin", "remove_input_padding", "context_fmha"),
    *("use_paged_context_fmha", "use_fp8_context_fmha", "use_fused_mlp", "reduce_fusion", "multiple_profiles"),
    "manage_weights",
)
QUANTIZE = (
    *("model_dir", "device", "calib_dataset", "dtype", "qformat", "kv_cache_dtype", "calib_size", "batch_size"),
    *("calib_max_seq_length", "awq_block_size", "output_dir", "tp_size", "pp_size", "cp_size", "seed"),
    "tokenizer_max_seq_length",
)

SURFACE: tuple[Needed, ...] = (
    Needed(homes=("tensorrt_llm.builder",), name="BuildConfig", purposes=("build",), attributes=BUILD_CONFIG),
    Needed(homes=("tensorrt_llm.builder",), name="build", purposes=("build",), parameters=("model", "build_config")),
    Needed(
        homes=("tensorrt_llm.builder",),
        name="Engine",
        purposes=("build",),
        methods=(("save", ("engine_dir",)),),
    ),
    Needed(homes=("tensorrt_llm.plugin.plugin",), name="PluginConfig", purposes=("build",), attributes=PLUGIN_CONFIG),
    Needed(
        homes=("tensorrt_llm.llmapi.kv_cache_type", "tensorrt_llm.bindings"),
        name="KVCacheType",
        purposes=("build",),
        attributes=("DISABLED", "PAGED"),
    ),
    Needed(homes=("tensorrt_llm.models",), name="MODEL_MAP", purposes=("build",)),
    Needed(
        homes=("tensorrt_llm.models.modeling_utils",),
        name="PretrainedConfig",
        purposes=("build",),
        methods=(("from_json_file", ("config_file",)), ("set_rank", ("rank",))),
    ),
    Needed(
        homes=("tensorrt_llm.models.modeling_utils",),
        name="DecoderModelForCausalLM",
        purposes=("build",),
        methods=(("from_checkpoint", ("ckpt_dir", "config")), ("save_checkpoint", ("output_dir", "save_config"))),
    ),
    Needed(
        homes=("tensorrt_llm.models.automodel",),
        name="AutoModelForCausalLM",
        purposes=("build",),
        methods=(("from_hugging_face", ("hf_model_or_dir", "dtype")),),
    ),
    Needed(
        homes=("tensorrt_llm.runtime.session",),
        name="Session",
        purposes=("run",),
        attributes=("engine",),
        methods=(
            ("from_serialized_engine", ("engine",)),
            ("infer_shapes", ("inputs",)),
            ("run", ("inputs", "outputs", "stream")),
        ),
    ),
    Needed(
        homes=("tensorrt_llm.runtime.session",),
        name="TensorInfo",
        purposes=("run",),
        parameters=("name", "dtype", "shape"),
    ),
    Needed(homes=("tensorrt_llm._utils",), name="trt_dtype_to_torch", purposes=("run",), parameters=("dtype",)),
    Needed(
        homes=("tensorrt_llm.bindings.executor",),
        name="AdditionalModelOutput",
        purposes=("executor",),
        parameters=("name", "gather_context"),
    ),
    Needed(
        homes=("tensorrt_llm.bindings.executor",),
        name="OutputConfig",
        purposes=("executor",),
        parameters=("additional_model_outputs",),
    ),
    Needed(
        homes=("tensorrt_llm.bindings.executor",),
        name="KvCacheConfig",
        purposes=("executor",),
        parameters=("enable_block_reuse", "free_gpu_memory_fraction"),
    ),
    Needed(homes=("tensorrt_llm.bindings.executor",), name="ModelType", purposes=("executor",)),
    Needed(
        homes=("tensorrt_llm.bindings.executor",),
        name="ExecutorConfig",
        purposes=("executor",),
        parameters=("max_beam_width", "kv_cache_config", "enable_chunked_context", "max_batch_size", "max_num_tokens"),
    ),
    Needed(
        homes=("tensorrt_llm.bindings.executor",),
        name="Request",
        purposes=("executor",),
        parameters=("input_token_ids", "max_tokens", "output_config", "end_id"),
    ),
    Needed(
        homes=("tensorrt_llm.bindings.executor",),
        name="Executor",
        purposes=("executor",),
        parameters=("model_path", "model_type", "executor_config"),
        methods=(("enqueue_requests", ("requests",)), ("await_responses", ()), ("shutdown", ())),
    ),
    Needed(
        homes=("tensorrt_llm.quantization", "tensorrt_llm.quantization.quantize_by_modelopt"),
        name="quantize_and_export",
        purposes=("quantize",),
        parameters=QUANTIZE,
    ),
)
