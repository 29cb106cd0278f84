"""The numbers of a decoder that decide what fits: read from a `config.json` alone, Hugging Face's or the vendor's.

No weights are opened and no vendor package is needed, so a plan for a card can be made on any machine. A family whose
MLP is not known to be ungated counts as gated, whose widest tensor is the wider one: an estimate may be too careful,
never too bold.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from extract.errors import CheckpointRefused

CONFIG = "config.json"

UNGATED = frozenset(
    {
        *("GPTForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM", "GPTNeoXForCausalLM"),
        *("OPTForCausalLM", "BloomForCausalLM", "FalconForCausalLM", "MPTForCausalLM", "PhiForCausalLM"),
    }
)
"""Architectures, in either package's spelling, whose MLP has one product in and one out."""

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


class NoShape(CheckpointRefused):
    """A config that does not say how large the model is."""

    template = "{path}: {problem}. A build for tensorrt-llm needs a checkpoint directory with a full config.json."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one decoder.

    Attributes:
        source: whose config it was: Hugging Face's, or the vendor's own checkpoint format.
        dtype: type of weights that are not quantised, and of the states.
        weights: type of the linears' weights: `dtype`, or fp8.
        cache: type of a paged cache's entries: `dtype`, or fp8.
        num_experts: 0 without a mixture of experts.
        world_size: ranks that a vendor checkpoint was split into.
    """

    source: Literal["huggingface", "vendor"]
    architecture: str
    dtype: str
    weights: str
    cache: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    num_experts: int = 0
    world_size: int = 1

    @property
    def gated(self) -> bool:
        """The MLP multiplies by gate and up."""
        return self.architecture not in UNGATED

    @property
    def qkv_width(self) -> int:
        """Width of the fused query, key and value product."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the token embedding; an output head has as many."""
        return self.vocab_size * self.hidden_size * BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of all layers."""
        attention = self.hidden_size * (self.qkv_width + self.num_heads * self.head_size)
        mlp = (3 if self.gated else 2) * self.hidden_size * self.intermediate_size * max(1, self.num_experts)
        norms = 2 * self.hidden_size * BYTES[self.dtype]
        return self.num_layers * ((attention + mlp) * BYTES[self.weights] + norms)


def read_shape(directory: Path) -> ModelShape:
    """Read `config.json` of a Hugging Face or a TensorRT-LLM checkpoint.

    Raises:
        NoShape: no such file, not JSON, or a size is missing.
    """
    path = directory / CONFIG
    if not path.is_file():
        problem = "a file, where a directory is expected" if directory.is_file() else f"it holds no {CONFIG}"
        raise NoShape(path=directory, problem=problem if directory.exists() else "no such directory")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise NoShape(path=path, problem=f"not JSON: {error}") from None
    if not isinstance(config, dict):
        raise NoShape(path=path, problem=f"{type(config).__name__} found, an object expected")
    return _vendor(path, config) if is_vendor_config(config) else _huggingface(path, config)


def is_vendor_config(config: dict[str, Any]) -> bool:
    """Whether this is the config of a TensorRT-LLM checkpoint: one architecture, a mapping of ranks, no list."""
    return isinstance(config.get("architecture"), str) and "architectures" not in config


def _vendor(path: Path, config: dict[str, Any]) -> ModelShape:
    quantization = config.get("quantization") or {}
    algorithm, cache = quantization.get("quant_algo"), quantization.get("kv_cache_quant_algo")
    if algorithm not in (None, "FP8"):
        problem = f"quantised with {algorithm!r}, only FP8 or no quantisation is supported"
        raise NoShape(path=path, problem=problem)
    dtype = _dtype(path, config.get("dtype"))
    mixture: dict[str, Any] = config["moe"] if isinstance(config.get("moe"), dict) else {}
    return _shape(
        path,
        config,
        source="vendor",
        architecture=config["architecture"],
        dtype=dtype,
        weights="fp8" if algorithm == "FP8" else dtype,
        cache="fp8" if cache == "FP8" else dtype,
        head_size=config.get("head_size"),
        num_experts=_optional(mixture, "num_experts") or _optional(config, "moe_num_experts") or 0,
        world_size=int((config.get("mapping") or {}).get("world_size", 1)),
    )


def _huggingface(path: Path, config: dict[str, Any]) -> ModelShape:
    architectures = config.get("architectures") or []
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    dtype = _dtype(path, text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "float32")
    return _shape(
        path,
        text,
        source="huggingface",
        architecture=str(architectures[0]) if architectures else str(config.get("model_type")),
        dtype=dtype,
        weights=dtype,
        cache=dtype,
        head_size=text.get("head_dim"),
        num_experts=_optional(text, "num_local_experts", "num_experts", "n_routed_experts") or 0,
    )


def _shape(path: Path, config: dict[str, Any], *, head_size: Any, **given: Any) -> ModelShape:
    hidden = _number(path, config, "hidden_size", "n_embd", "d_model")
    heads = _number(path, config, "num_attention_heads", "n_head", "n_heads")
    intermediate = _optional(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    if given["num_experts"]:
        intermediate = _optional(config, "moe_intermediate_size") or intermediate
    return ModelShape(
        hidden_size=hidden,
        num_layers=_number(path, config, "num_hidden_layers", "n_layer", "n_layers"),
        num_heads=heads,
        num_kv_heads=_optional(config, "num_key_value_heads", "num_kv_heads") or heads,
        head_size=int(head_size) if head_size else hidden // heads,
        intermediate_size=intermediate or 4 * hidden,
        vocab_size=_number(path, config, "vocab_size"),
        max_positions=_optional(config, "max_position_embeddings", "n_positions", "max_seq_len"),
        **given,
    )


def _optional(config: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _number(path: Path, config: dict[str, Any], *names: str) -> int:
    found = _optional(config, *names)
    if found is None:
        raise NoShape(path=path, problem=f"it gives no whole number for {' or '.join(names)}")
    return found


def _dtype(path: Path, found: Any) -> str:
    name = str(found).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise NoShape(path=path, problem=f"dtype is {found!r}, expected float32, float16 or bfloat16")
    return name
