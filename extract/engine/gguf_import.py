"""Weights, config and tokenizer out of a GGUF file, through transformers' own tables, dequantised.

`AutoModel.from_pretrained(gguf_file=...)` wants accelerate and drops tensors that its tables do not name without a
word; so the same loader is called one step lower, and what it dropped is returned. Converted in memory: an engine
holds plain weights, so the import is paid once, at build.
"""

from pathlib import Path
from typing import Any

from extract.engine.gguf_file import HEAD, read_gguf


def import_gguf(path: Path, dtype: str, attn_implementation: str | None) -> tuple[Any, Any, set[str]]:
    """Base model of a GGUF file, transformers' loading report, and the tensors of the file that it did not use.

    Raises:
        ValueError, KeyError, RuntimeError, ...: as transformers does; the caller puts a name to them.
    """
    import torch
    from transformers import AutoConfig, AutoModel
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        load_gguf_checkpoint,
    )

    header = read_gguf(path)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    config.use_cache = False
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    with torch.device("meta"):
        skeleton = AutoModel.from_config(config)
    target = getattr(torch, dtype)
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=skeleton, torch_dtype=target)
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=loaded["config"])
    mapped = set(get_gguf_hf_weights_map(skeleton, processor))
    # Some come as transposed views, which matrix products round in another way than the original's layout.
    weights = {name: weight.contiguous() for name, weight in loaded["tensors"].items()}
    model, report = type(skeleton).from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=target,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return model, report, {tensor.name for tensor in header.tensors} - mapped - {HEAD}
