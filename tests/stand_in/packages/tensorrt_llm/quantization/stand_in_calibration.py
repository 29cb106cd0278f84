"""FP8 weights with scales from calibration texts: real rounding, real amax of the activations, no head.

The texts come from a local data set with a train split and a column `text`, read with the datasets library, as the
vendor reads them.
"""

import tempfile
from pathlib import Path

import torch
from stand_in.facts import entry, signature
from stand_in.program import FP8_MAX
from stand_in.state import STATE, at_least

FORMATS = {"fp8": "FP8", "full_prec": None}
HOME = "tensorrt_llm.quantization" if at_least("1.2") else "tensorrt_llm.quantization.quantize_by_modelopt"


def quantize_and_export(**given):
    """Write a calibrated checkpoint; keyword-only, and all but the last options are required."""
    bound = signature(entry(HOME, "quantize_and_export")["params"]).bind(**given)
    bound.apply_defaults()
    wanted = bound.arguments
    if STATE.card is None:
        raise EnvironmentError("GPU is required for inference.")  # noqa: UP024
    if wanted["qformat"] not in FORMATS or wanted["kv_cache_dtype"] not in (None, "fp8"):
        raise NotImplementedError(f"stand-in: {wanted['qformat']} with KV cache {wanted['kv_cache_dtype']}")
    if (wanted["tp_size"], wanted["pp_size"], wanted["cp_size"]) != (1, 1, 1):
        raise NotImplementedError("the stand-in has one rank")
    _quantize(wanted)


def _quantize(wanted):
    import transformers

    from tensorrt_llm.models import MODEL_MAP
    from tensorrt_llm.models.automodel import config_of, weights_of
    from tensorrt_llm.models.modeling_utils import QuantConfig

    source = wanted["model_dir"]
    hf_config = transformers.AutoConfig.from_pretrained(source)
    cache = "FP8" if wanted["kv_cache_dtype"] == "fp8" else None
    algorithm = FORMATS[wanted["qformat"]]
    quantization = QuantConfig(algorithm, cache, exclude_modules=["lm_head"] if algorithm else None)
    config = config_of(hf_config, wanted["dtype"], quant_config=quantization)
    if config.architecture not in MODEL_MAP:
        raise NotImplementedError(f"Cannot export {config.architecture}")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, config.dtype)).eval()
    amax = _activations(loaded, _texts(wanted), source, wanted["calib_max_seq_length"])
    model = MODEL_MAP[config.architecture](config)
    weights = weights_of(loaded)
    for name in amax if algorithm else ():
        stem = f"transformer.{name}."
        weight = weights[f"{stem}weight"].float()
        scale = (weight.abs().max() / FP8_MAX).clamp(min=1e-12)
        weights[f"{stem}weight"] = (weight / scale).to(torch.float8_e4m3fn)
        weights[f"{stem}weights_scaling_factor"] = scale.reshape(1)
        weights[f"{stem}activation_scaling_factor"] = torch.tensor([max(amax[name], 1e-12) / FP8_MAX])
    if cache:
        for layer in range(config.num_hidden_layers):
            weights[f"transformer.layers.{layer}.attention.kv_cache_scaling_factor"] = torch.ones(1)
    model.load(weights)
    model.save_checkpoint(wanted["output_dir"])


def _texts(wanted):
    import datasets

    if not Path(wanted["calib_dataset"]).is_dir():
        raise ConnectionError(f"Couldn't reach {wanted['calib_dataset']!r} on the Hub")
    with tempfile.TemporaryDirectory() as cache:
        found = datasets.load_dataset(str(wanted["calib_dataset"]), split="train", cache_dir=cache)
        return list(found["text"][: wanted["calib_size"]])


def _activations(loaded, texts, source, max_length):
    """Largest input of every linear layer below the head, by its name in the base model."""
    from transformers import AutoTokenizer

    tokenizer, amax, hooks = AutoTokenizer.from_pretrained(source), {}, []
    for name, module in loaded.base_model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def look(module, inputs, name=name):
                amax[name] = max(amax.get(name, 0.0), float(inputs[0].abs().max()))

            hooks.append(module.register_forward_pre_hook(look))
    with torch.no_grad():
        for text in texts:
            ids = tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
            if ids:
                loaded(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return amax
