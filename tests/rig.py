"""Small real parts for all tests: tokenizers of three kinds, random checkpoints of many families, reference states.

Everything is built from seeds, so a test that fails fails again. The weights are not the usual initialisation, which
makes attention nearly uniform and norms the identity, and so hides a lost mask, scale, bias or norm: norm weights are
spread over 0.2 to 3, biases are set, projections keep the size of their input. Plain functions instead of fixtures: a
test chooses what it needs and where it lies.
"""

import argparse
import collections
import functools
import inspect
import json
import pathlib
import string
import textwrap
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

TokenizerKind = Literal["bpe", "unigram", "wordpiece"]

BOS, EOS, PAD, UNK = "<s>", "</s>", "<pad>", "<unk>"
VOCAB_SIZE = 400
"""At most; WordPiece and Unigram may end up a little below."""

_FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 32},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 32},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "rope_parameters": None},
    "gptj": {"rotary_dim": 8},
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_scaling": 8.0,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "mixtral": {"num_local_experts": 4},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 128},
    "phi3": {"original_max_position_embeddings": 256},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "smollm3": {"no_rope_layer_interval": 2},
}
_WITHOUT_HEAD_DIM = ("bloom", "codegen", "falcon", "gpt2", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt", "phi")


def passages(count: int | None = None) -> list[str]:
    """English texts of 1 to some 700 words: the docstrings of a few standard modules, in a fixed order."""
    found: dict[str, None] = {}
    for module in (string, textwrap, json, argparse, collections, threading, inspect, pathlib):
        found.setdefault(inspect.cleandoc(module.__doc__ or ""))
        for _, member in sorted(vars(module).items()):
            text = getattr(member, "__doc__", None)
            if (inspect.isclass(member) or inspect.isfunction(member)) and isinstance(text, str):
                found.setdefault(inspect.cleandoc(text))
    found.pop("", None)
    return list(found)[:count]


@functools.cache
def _trained(kind: TokenizerKind) -> str:
    """A trained tokenizer as JSON, without post-processor."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = [UNK, BOS, EOS, PAD]
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=special, unk_token=UNK, show_progress=False
        )
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, show_progress=False)
    else:
        raise ValueError(f"no tokenizer of kind {kind!r}")
    tokenizer.train_from_iterator(passages(), trainer)
    return str(tokenizer.to_str())


def tiny_tokenizer(
    kind: TokenizerKind = "bpe",
    *,
    bos: bool = True,
    eos: bool = False,
    pad: bool = True,
    padding_side: Literal["left", "right"] = "right",
    truncation_side: Literal["left", "right"] = "right",
    chat_template: str | None = None,
) -> Any:
    """A fast tokenizer of at most `VOCAB_SIZE` tokens, trained on `passages()`.

    The tokens `<s>`, `</s>` and `<unk>` always exist and are always named; `bos` and `eos` say whether the
    post-processor puts them around a text; without `pad` there is no padding token, as in most decoders.
    """
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(_trained(kind))
    around = ([BOS] if bos else []), ([EOS] if eos else [])
    if bos or eos:
        single = " ".join([*(f"{token}:0" for token in around[0]), "$A:0", *(f"{token}:0" for token in around[1])])
        pair = " ".join(
            [single, *(f"{token}:1" for token in around[0]), "$B:1", *(f"{token}:1" for token in around[1])]
        )
        specials = [(token, tokenizer.token_to_id(token)) for token in (*around[0], *around[1])]
        template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)
        byte_level = [processors.ByteLevel(trim_offsets=False)] if kind == "bpe" else []
        tokenizer.post_processor = processors.Sequence([*byte_level, template])
    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD if pad else None,
        padding_side=padding_side,
        truncation_side=truncation_side,
        model_max_length=100_000,
    )
    if chat_template is not None:
        built.chat_template = chat_template
    return built


def tiny_config(family: str, *, tied: bool = False, vocab_size: int = VOCAB_SIZE, **settings: Any) -> Any:
    """A config of `family` with hidden size 64 and 3 layers; `settings` override anything."""
    from transformers import AutoConfig

    base: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "unk_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    if family in _WITHOUT_HEAD_DIM:
        del base["head_dim"]
    return AutoConfig.for_model(family, **{**base, **_FAMILY_SETTINGS.get(family, {}), **settings})


def randomise(model: Any, seed: int = 0) -> None:
    """Give every norm, bias and projection of `model` telling random values, in place (see the module's docstring)."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: Any, std: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    seen: set[int] = set()  # a tied head is the embedding: it is set once
    with torch.no_grad():
        for module_name, module in model.named_modules():
            kind = type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                if "norm" in kind.lower() and parameter.ndim == 1 and name == "weight":
                    offset = 1.0 if not parameter.any() else 0.0  # Gemma multiplies by 1 + weight, which starts at 0
                    parameter.copy_(0.2 + 2.8 * torch.rand(parameter.shape, generator=generator) - offset)
                elif name == "bias" and not module_name.endswith("dt_proj"):
                    normal(parameter, 0.2)
                elif name == "sinks":
                    normal(parameter, 1.0)
                elif kind == "Embedding":
                    normal(parameter, 0.5)
                elif parameter.ndim in (2, 3) and kind != "Conv1d" and not name.startswith("A_"):
                    # Conv1D of the GPT-2 line is [in, out], everything else [..., out, in].
                    fan_in = parameter.shape[0] if kind == "Conv1D" else parameter.shape[-1]
                    normal(parameter, fan_in**-0.5)


def tiny_checkpoint(
    directory: str | Path,
    family: str = "llama",
    *,
    tied: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    shards: int = 1,
    tokenizer: Any = "bpe",
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Write a random causal LM of `family` (safetensors) with its tokenizer, as `save_pretrained` does.

    Args:
        directory: made if need be.
        family: transformers' model_type: llama, qwen3, gemma2, gpt2, ...
        tied: the head shares the embedding's weights (and is not stored).
        dtype: of the weights on disk.
        shards: about how many weight files; more than one come with an index.
        tokenizer: a kind, a tokenizer of `tiny_tokenizer`, or `None` for none.
        seed: of the weights.
        settings: config keys that override `tiny_config`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, str):
        tokenizer = tiny_tokenizer(tokenizer)  # type: ignore[arg-type]
    config = tiny_config(family, tied=tied, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    model = model.to(getattr(torch, dtype))
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(directory, max_shard_size=size // shards if shards > 1 else "50GB")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return directory


def reference_states(
    model: str | Path | Any, sequences: Iterable[Sequence[int]], *, dtype: str = "float32", attention: str = "eager"
) -> list[np.ndarray]:
    """Post-final-norm states by transformers' own base model, each sequence alone, without padding, mask or cache.

    Args:
        model: a checkpoint directory, or a loaded model (then `dtype` and `attention` are its own).
        sequences: token ids, each of at least one token.
        dtype: the precision that a directory is loaded in.
        attention: transformers' name of the attention implementation.

    Returns:
        float32 [L, H] per sequence.
    """
    import torch
    from transformers import AutoModel

    if isinstance(model, (str, Path)):
        model = AutoModel.from_pretrained(
            Path(model), dtype=getattr(torch, dtype), attn_implementation=attention, local_files_only=True
        )
    model = getattr(model, "base_model", model).eval()
    states = []
    with torch.no_grad():
        for sequence in sequences:
            output = model(input_ids=torch.tensor([list(sequence)]), use_cache=False)
            states.append(output.last_hidden_state[0].float().numpy())
    return states


def random_sequences(lengths: Iterable[int], *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Token ids of the given lengths, drawn from the ordinary tokens (ids 4 and up)."""
    generator = np.random.default_rng(seed)
    return [generator.integers(4, vocab_size, size=length).tolist() for length in lengths]


def relative_error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Largest, over sequences, of max |difference| / max |expected|."""
    assert len(found) == len(expected)
    return max(
        float(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True)
    )


def edit_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Set keys of a JSON file; a value of `None` removes the key."""
    table = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}, indent=2))
