"""Configs of checkpoints, and the base class whose `forward` has the documented tail."""

import copy
import json
from pathlib import Path

import tensorrt as trt
from safetensors.torch import load_file, save_file
from stand_in.state import at_least

from tensorrt_llm import functional
from tensorrt_llm._utils import str_dtype_to_torch
from tensorrt_llm.functional import Tensor, gather_last_token_logits
from tensorrt_llm.layers.attention import AttentionParams, KeyValueCacheParams
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.module import Module, Parameter
from tensorrt_llm.quantization.mode import QuantAlgo


class QuantConfig:
    """What is quantised, and how."""

    def __init__(
        self,
        quant_algo=None,
        kv_cache_quant_algo=None,
        group_size=128,
        smoothquant_val=0.5,
        clamp_val=None,
        use_meta_recipe=False,
        has_zero_point=False,
        pre_quant_scale=False,
        exclude_modules=None,
    ):
        self.quant_algo = None if quant_algo is None else QuantAlgo(quant_algo)
        self.kv_cache_quant_algo = None if kv_cache_quant_algo is None else QuantAlgo(kv_cache_quant_algo)
        self.group_size, self.smoothquant_val, self.clamp_val = group_size, smoothquant_val, clamp_val
        self.use_meta_recipe, self.has_zero_point = use_meta_recipe, has_zero_point
        self.pre_quant_scale, self.exclude_modules = pre_quant_scale, exclude_modules

    @classmethod
    def from_dict(cls, config):
        """The other way round."""
        return cls(**config)

    def to_dict(self):
        """For config.json."""
        return dict(vars(self))


class PretrainedConfig:
    """A checkpoint's config.json; what it does not know it keeps."""

    def __init__(
        self,
        *,
        architecture,
        dtype,
        hidden_size,
        num_hidden_layers,
        num_attention_heads,
        vocab_size=None,
        hidden_act="gelu",
        logits_dtype="float32",
        norm_epsilon=1e-05,
        position_embedding_type="learned_absolute",
        max_position_embeddings=None,
        num_key_value_heads=None,
        intermediate_size=None,
        mapping=None,
        quantization=None,
        head_size=None,
        **others,
    ):
        self.architecture, self.dtype, self.logits_dtype = architecture, dtype, logits_dtype
        self.hidden_size, self.num_hidden_layers, self.vocab_size = hidden_size, num_hidden_layers, vocab_size
        self.num_attention_heads, self.hidden_act, self.norm_epsilon = num_attention_heads, hidden_act, norm_epsilon
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.position_embedding_type, self.max_position_embeddings = position_embedding_type, max_position_embeddings
        self.intermediate_size = intermediate_size or 4 * hidden_size
        self.head_size = head_size or hidden_size // num_attention_heads
        self.mapping = Mapping.from_dict(mapping) if isinstance(mapping, dict) else mapping or Mapping()
        is_table = isinstance(quantization, dict)
        self.quantization = QuantConfig.from_dict(quantization) if is_table else quantization or QuantConfig()
        vars(self).update(others)

    @classmethod
    def from_dict(cls, config):
        """From a table."""
        return cls(**config)

    @classmethod
    def from_json_file(cls, config_file):
        """From a checkpoint's config.json."""
        return cls.from_dict(json.loads(Path(config_file).read_text()))

    @classmethod
    def from_checkpoint(cls, ckpt_dir):
        """From a checkpoint's directory."""
        return cls.from_json_file(Path(ckpt_dir) / "config.json")

    def to_dict(self):
        """For config.json."""
        table = copy.deepcopy(vars(self))
        return {**table, "mapping": self.mapping.to_dict(), "quantization": self.quantization.to_dict()}

    def to_json_file(self, config_file):
        """Write config.json."""
        Path(config_file).write_text(json.dumps(self.to_dict(), indent=4))

    def set_rank(self, rank):
        """Say which rank this process is."""
        self.mapping.rank = rank

    @property
    def quant_algo(self):
        """Of the weights."""
        return self.quantization.quant_algo


class Linear(Module):
    """Times a weight [out, in]."""

    def __init__(self, name, out_features, in_features):
        self.name, self.features = name, (out_features, in_features)
        self.weight = Parameter()

    def forward(self, x):
        """`x` W^T."""
        return functional.linear(x, self.name, self.weight)


class Transformer(Module):
    """Everything below the head, as one operation, and the widths of the tensors that the vendor's graph would have."""

    takes_positions = False

    def __init__(self, config):
        self.config = config
        self.use_fused_mlp = False
        self.weights = {}

    def named_parameters(self, prefix="", recurse=True):
        """Under transformers' names, behind `transformer.`."""
        yield from self.weights.items()

    def forward(self, input_ids, position_ids=None, attention_params=None, use_cache=False, **others):
        """[T, H], and with a cache the presents too."""
        config = self.config
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        widths = {
            "hidden states": config.hidden_size,
            "fused QKV": heads * config.head_size,
            "fused gate and up" if self.use_fused_mlp else "MLP": config.intermediate_size
            * (2 if self.use_fused_mlp else 1),
        }
        inputs = {"input_ids": input_ids, "position_ids": position_ids, **attention_params.tensors}
        states = functional.decoder(inputs, config, self.weights, widths, self.takes_positions)
        return (states, []) if use_cache else states


class PretrainedModel(Module):
    """A model of a checkpoint."""

    config_class = PretrainedConfig

    def __init__(self, config):
        self.config = config
        self.stand_in_built = False

    @classmethod
    def from_config(cls, config):
        """Without weights."""
        return cls(config)

    @classmethod
    def from_checkpoint(cls, ckpt_dir, rank=None, config=None, *, preprocess_weights_hook=None):
        """With the weights of `rank{N}.safetensors`."""
        if config is None:
            config = PretrainedConfig.from_checkpoint(ckpt_dir)
        if rank is not None:
            config.set_rank(rank)
        model = cls(config)
        weights = load_file(Path(ckpt_dir) / f"rank{config.mapping.rank}.safetensors")
        model.load(preprocess_weights_hook(weights) if preprocess_weights_hook else weights)
        return model

    def load(self, weights, from_pruned=False):
        """Take the weights over."""
        weights = dict(weights)
        head = weights.pop("lm_head.weight")
        dtype = str_dtype_to_torch(self.config.dtype)
        self.lm_head.weight.value = head.to(dtype)
        self.transformer.weights = {name: Parameter(tensor) for name, tensor in weights.items()}

    def save_checkpoint(self, output_dir, save_config=True):
        """Write `config.json` and `rank0.safetensors`."""
        output_dir = Path(output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        weights = {name: parameter.value.contiguous().clone() for name, parameter in self.named_weights().items()}
        save_file(weights, output_dir / f"rank{self.config.mapping.rank}.safetensors")
        if save_config:
            self.config.to_json_file(output_dir / "config.json")

    def named_weights(self):
        """As a checkpoint names them."""
        return {**self.transformer.weights, "lm_head.weight": self.lm_head.weight}

    if at_least("1.2"):

        def prepare_inputs(
            self,
            max_batch_size,
            max_input_len,
            max_seq_len,
            max_num_tokens,
            use_cache,
            max_beam_width=1,
            opt_num_tokens=None,
            *,
            gather_context_logits=False,
            **others,
        ):
            """The inputs of `forward`, with their ranges."""
            assert "gather_generation_logits" not in others
            return self._inputs(
                max_batch_size, max_seq_len, max_num_tokens, use_cache, opt_num_tokens, gather_context_logits
            )

    else:

        def prepare_inputs(
            self,
            max_batch_size,
            max_input_len,
            max_seq_len,
            max_num_tokens,
            use_cache,
            max_beam_width=1,
            opt_num_tokens=None,
            *,
            gather_context_logits=False,
            gather_generation_logits=False,
            **others,
        ):
            """The inputs of `forward`, with their ranges."""
            return self._inputs(
                max_batch_size, max_seq_len, max_num_tokens, use_cache, opt_num_tokens, gather_context_logits
            )

    def _inputs(self, max_batch_size, max_seq_len, max_num_tokens, use_cache, opt_num_tokens, gather_context_logits):
        tokens = [1, opt_num_tokens, max_num_tokens]
        sequences = [1, (max_batch_size + 1) // 2, max_batch_size]
        ranges = {"T": tokens, "B": sequences}

        def declare(name, shape, dtype=trt.int32):
            sides = [ranges.get(side, [side] * 3) for side in shape]
            return Tensor(name, dtype, shape, dim_range=[list(three) for three in zip(*sides, strict=True)])

        input_ids = declare("input_ids", ["T"])
        position_ids = declare("position_ids", ["T"])
        last_token_ids = None if gather_context_logits else declare("last_token_ids", ["B"])
        attention = {
            "context_lengths": declare("context_lengths", ["B"]),
            "host_context_lengths": declare("host_context_lengths", ["B"]),
            "host_request_types": declare("host_request_types", ["B"]),
            "host_max_attention_window_sizes": declare(
                "host_max_attention_window_sizes", [self.config.num_hidden_layers]
            ),
            "host_sink_token_length": declare("host_sink_token_length", [1]),
            "host_runtime_perf_knobs": declare("host_runtime_perf_knobs", [16], trt.int64),
            "host_context_progress": declare("host_context_progress", [1], trt.int64),
        }
        cache = {}
        if use_cache:
            layers = [self.config.num_hidden_layers, 2] if at_least("1.0") else [self.config.num_hidden_layers]
            cache = {
                "sequence_length": declare("sequence_length", ["B"]),
                "host_past_key_value_lengths": declare("host_past_key_value_lengths", ["B"]),
                "cache_indirection": declare("cache_indirection", ["B", 1, max_seq_len]),
                "kv_cache_block_offsets": declare("kv_cache_block_offsets", [1, "B", 2, 4]),
                "host_kv_cache_block_offsets": declare("host_kv_cache_block_offsets", [1, "B", 2, 4]),
                "host_kv_cache_pool_pointers": declare("host_kv_cache_pool_pointers", [1, 2], trt.int64),
                "host_kv_cache_pool_mapping": declare("host_kv_cache_pool_mapping", layers),
            }
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "use_cache": use_cache,
            "last_token_ids": last_token_ids,
            "attention_mask": None,
            "kv_cache_params": KeyValueCacheParams(**cache),
            "attention_params": AttentionParams(**attention),
        }


class DecoderModelForCausalLM(PretrainedModel):
    """Decoder, then the last token of each sequence, then the head."""

    def __init__(self, config, transformer, lm_head):
        super().__init__(config)
        self.transformer, self.lm_head = transformer, lm_head

    def forward(
        self,
        input_ids,
        position_ids=None,
        use_cache=False,
        last_token_ids=None,
        attention_mask=None,
        kv_cache_params=None,
        attention_params=None,
        mrope_params=None,
        hidden_states=None,
        prompt_embedding_table=None,
        prompt_tasks=None,
        prompt_vocab_size=None,
        lora_params=None,
        spec_decoding_params=None,
    ):
        """Logits, and the states after and before the gather."""
        hidden_states = self.transformer(
            input_ids, position_ids=position_ids, use_cache=use_cache, attention_params=attention_params
        )
        if use_cache:
            hidden_states, _presents = hidden_states
        all_hidden_states = hidden_states
        hidden_states = gather_last_token_logits(hidden_states, last_token_ids, True)
        lm_logits = self.lm_head(hidden_states)
        lm_logits.mark_output("logits", self.config.logits_dtype)
        return lm_logits, hidden_states, all_hidden_states
