"""A GGUF file -> a plain Hugging Face directory: the weights that every peer loads.

Float32, since that is what the file's own types turn into without loss. `extract build` reads the GGUF itself; the
peers cannot, or take half a minute.

    python -m peers.make_checkpoint demo/SmolLM2-135M-Instruct.Q4_1.gguf build/bench/checkpoint
"""

import shutil
import sys
from pathlib import Path


def make_checkpoint(gguf: Path, directory: Path) -> None:
    """Write config, safetensors with a tied head, and tokenizer; the directory appears when it is whole."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from extract.engine.gguf_file import HEAD, read_gguf
    from extract.engine.gguf_import import import_gguf

    if any(tensor.name == HEAD for tensor in read_gguf(gguf).tensors):
        raise SystemExit(f"{gguf}: has a head of its own, which this script does not copy. Give a directory instead.")
    base, _, _ = import_gguf(gguf, "float32", None)
    config = base.config
    config.tie_word_embeddings = True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    setattr(model, model.base_model_prefix, base)
    model.tie_weights()
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
    unfinished.rename(directory)


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
