"""Config and weights out of a GGUF file, dequantised, as transformers' base model.

Not through `from_pretrained(gguf_file=...)`: that wants accelerate, takes a minute for a small model, and leaves out
tensors that it has no name for and settings too (a GPT-2's positions, a Qwen3's head size). The tables here are short
because few architectures are accepted, and tests compare each with its original. Names come from the gguf package. An
engine holds plain weights, so the import is paid once, at build.
"""

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extract.engine.gguf_file import HEAD, GgufHeader, GgufTensor, read_gguf

if TYPE_CHECKING:
    import numpy as np

_ROPE_DECODER = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_KEYS = {
    "gpt2": {
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    "llama": _ROPE_DECODER,
    "qwen2": _ROPE_DECODER,
    "qwen3": _ROPE_DECODER,
}


def import_gguf(path: Path, dtype: str, attn_implementation: str | None) -> tuple[Any, Any, set[str]]:
    """Base model of a GGUF file, transformers' loading report, and the tensors of the file that have no place in it.

    Raises:
        ValueError, KeyError, RuntimeError, ...: from numpy, gguf or transformers; the caller puts a name to them.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    header = read_gguf(path)
    config = AutoConfig.for_model(header.architecture, use_cache=False, **config_settings(header))
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.device("meta"):
        skeleton = AutoModel.from_config(config, **options)
    names = _names(header, list(skeleton.state_dict()))
    weights, target = {}, getattr(torch, dtype)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for tensor in header.tensors:
            if tensor.name in names:
                array = _original(header, tensor, _dequantised(tensor, data))
                weights[names[tensor.name]] = torch.from_numpy(array).to(target)
    model, report = type(skeleton).from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=target,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported instead of raised without details
        **options,
    )
    return model, report, {tensor.name for tensor in header.tensors} - set(names) - {HEAD}


def config_settings(header: GgufHeader) -> dict[str, Any]:
    """A GGUF header's settings under transformers' names."""
    settings = {name: header.setting(key) for key, name in _KEYS[header.architecture].items()}
    settings = {name: value for name, value in settings.items() if value is not None}
    settings["vocab_size"] = header.setting("vocab_size") or header.metadata.get("tokenizer.ggml.tokens")
    settings["tie_word_embeddings"] = all(tensor.name != HEAD for tensor in header.tensors)
    if header.architecture != "gpt2":
        settings["head_dim"] = head_dim(header)
        theta = header.setting("rope.freq_base") or 10_000.0
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    for special in ("bos", "eos"):
        settings[f"{special}_token_id"] = header.metadata.get(f"tokenizer.ggml.{special}_token_id")
    return settings


def head_dim(header: GgufHeader) -> int:
    """Size of an attention head."""
    stated = header.setting("attention.key_length") or header.setting("rope.dimension_count")
    return int(stated or header.setting("embedding_length") // header.setting("attention.head_count"))


def _names(header: GgufHeader, wanted: list[str]) -> dict[str, str]:
    """GGUF name to transformers' name, for the weights that the model wants."""
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    table = gguf.get_tensor_name_map(kind, header.setting("block_count"))
    names = {}
    for name in wanted:
        stem, _, ending = name.rpartition(".")
        found = table.get_name(stem)
        if found is not None:
            names[f"{found}.{ending}"] = name
    return names


def _dequantised(tensor: GgufTensor, data: mmap.mmap) -> "np.ndarray":
    """float32, in the tensor's shape; a copy, so the file can be closed."""
    import gguf
    import numpy as np

    raw = np.frombuffer(data[tensor.offset : tensor.offset + tensor.num_bytes], dtype=np.uint8)
    plain = {"F32": np.float32, "F16": np.float16}.get(tensor.type)
    if plain is not None:
        return raw.view(plain).reshape(tensor.shape).astype(np.float32)
    kind = gguf.GGMLQuantizationType[tensor.type]
    rows = raw.reshape(gguf.quant_shape_to_byte_shape(tensor.shape, kind))
    values: np.ndarray = gguf.dequantize(rows, kind).reshape(tensor.shape)
    return values.astype(np.float32)


def _original(header: GgufHeader, tensor: GgufTensor, weight: "np.ndarray") -> "np.ndarray":
    """Undo what llama.cpp's converter does to the layout of some weights."""
    import numpy as np

    if header.architecture == "llama" and (".attn_q." in tensor.name or ".attn_k." in tensor.name):
        heads = header.setting("attention.head_count")
        if ".attn_k." in tensor.name:
            heads = header.setting("attention.head_count_kv") or heads
        # Rotary pairs lie side by side in the file and half a head apart in transformers.
        weight = weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    if header.architecture == "gpt2" and weight.ndim == 2 and tensor.name.startswith("blk."):
        weight = weight.T  # Conv1D is [in, out]
    return np.ascontiguousarray(weight)
