"""A checkpoint of the hub's kind -> a model."""

import torch

from tensorrt_llm.models import MODEL_MAP
from tensorrt_llm.models.modeling_utils import PretrainedConfig, QuantConfig


def resolve_dtype(hf_config, dtype):
    """`auto` is the checkpoint's own type, and float16 for a float32 one."""
    if dtype != "auto":
        return dtype
    own = str(getattr(hf_config, "dtype", None) or torch.float16).removeprefix("torch.")
    return "float16" if own == "float32" else own


def config_of(hf_config, dtype, mapping=None, quant_config=None):
    """The vendor's config for transformers' one."""
    architecture = (hf_config.architectures or [None])[0]
    heads = hf_config.num_attention_heads
    return PretrainedConfig(
        architecture=architecture,
        dtype=resolve_dtype(hf_config, dtype),
        hidden_size=hf_config.hidden_size,
        num_hidden_layers=hf_config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(hf_config, "num_key_value_heads", None) or heads,
        head_size=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        vocab_size=hf_config.vocab_size,
        intermediate_size=getattr(hf_config, "intermediate_size", None) or getattr(hf_config, "n_inner", None),
        hidden_act=getattr(hf_config, "hidden_act", None) or "gelu",
        norm_epsilon=getattr(hf_config, "rms_norm_eps", 1e-5),
        max_position_embeddings=hf_config.max_position_embeddings,
        position_embedding_type="rope_gpt_neox",
        mapping=mapping,
        quantization=quant_config or QuantConfig(),
        stand_in_hf_config={**hf_config.to_diff_dict(), "model_type": hf_config.model_type},
    )


class AutoModelForCausalLM:
    """Looks the class up by architecture."""

    @staticmethod
    def get_trtllm_model_class(hf_model_or_dir, trust_remote_code=False, has_speculative_model=False):
        """Of a directory."""
        from transformers import AutoConfig

        hf_config = AutoConfig.from_pretrained(hf_model_or_dir, trust_remote_code=trust_remote_code)
        architecture = hf_config.architectures[0]
        if architecture not in MODEL_MAP:
            raise NotImplementedError(f"The given huggingface model architecture {architecture} is not supported")
        return MODEL_MAP[architecture]

    @staticmethod
    def from_hugging_face(hf_model_or_dir, dtype="auto", mapping=None, quant_config=None, **kwargs):
        """A model with the weights of a directory, in `dtype`."""
        from transformers import AutoConfig
        from transformers import AutoModelForCausalLM as Loader

        cls = AutoModelForCausalLM.get_trtllm_model_class(hf_model_or_dir)
        if quant_config is not None and quant_config.quant_algo is not None:
            raise NotImplementedError("calibration is needed: use quantize")
        config = config_of(AutoConfig.from_pretrained(hf_model_or_dir), dtype, mapping, quant_config)
        loaded = Loader.from_pretrained(hf_model_or_dir, dtype=getattr(torch, config.dtype))
        model = cls(config)
        model.load(weights_of(loaded))
        return model


def weights_of(loaded):
    """Weights under the names of the stand-in's checkpoints."""
    weights = {f"transformer.{name}": tensor for name, tensor in loaded.base_model.state_dict().items()}
    weights["lm_head.weight"] = loaded.get_output_embeddings().weight.detach()
    return weights
