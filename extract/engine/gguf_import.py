"""Config and weights out of a GGUF file, dequantised, as transformers' base model.

Not through `from_pretrained(gguf_file=...)`: that wants accelerate, takes a minute for a small model, and leaves out
tensors that it has no name for and settings too (a GPT-2's positions, a Qwen3's head size, a Gemma 3's linear scaling).
Settings come from `gguf_settings`, names from the gguf package. An engine holds plain weights, so the import is paid
once, at build.
"""

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extract.engine.gguf_file import HEAD, GgufHeader, GgufTensor, read_gguf
from extract.engine.gguf_settings import GGUF_FAMILIES, config_settings

if TYPE_CHECKING:
    import numpy as np


def import_gguf(path: Path, dtype: str, attn_implementation: str | None) -> tuple[Any, Any, set[str]]:
    """Base model of a GGUF file, transformers' loading report, and the tensors of the file that have no place in it.

    Raises:
        ValueError, KeyError, RuntimeError, ...: from numpy, gguf or transformers; the caller puts a name to them.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    header = read_gguf(path)
    model_type = GGUF_FAMILIES[header.architecture].model_type
    config = AutoConfig.for_model(model_type, use_cache=False, **config_settings(header))
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


def gguf_head(path: Path) -> "np.ndarray | None":
    """The output embedding of a GGUF file, float32 [V, H]; `None` where it is the token embedding."""
    for tensor in read_gguf(path).tensors:
        if tensor.name == HEAD:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _dequantised(tensor, data)
    return None


def _names(header: GgufHeader, wanted: list[str]) -> dict[str, str]:
    """GGUF name to transformers' name, for the weights that the model wants."""
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    table = gguf.get_tensor_name_map(kind, header.setting("block_count"))
    names = {}
    for name in wanted:
        stem, _, ending = name.rpartition(".")
        # Converters name the weights of the model with its head; some tables know no other names.
        found = table.get_name(stem) or table.get_name(f"model.{stem}")
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
    if header.architecture in ("gemma2", "gemma3") and tensor.name.endswith("norm.weight"):
        # The file has the factor, transformers its distance from 1. Exact both ways: transformers adds the 1 again.
        weight = weight - np.float32(1)
    return np.ascontiguousarray(weight)
