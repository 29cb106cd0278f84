"""The recipe: what to build from a checkpoint. Scalars, TOML, no code (`engines/<family>/<name>.toml`)."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from extract.cpu.linear_names import is_name
from extract.settings import parse, read_toml

DType = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]

MAX_SEQUENCES = 8192
MAX_TOKENS = 1_048_576


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an engine is built."""

    runtime: Literal["torch", "tensorrt-llm"] = "torch"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: DType = "auto"
    """"auto" is the checkpoint's own type where the device computes in it, else float32. int8 (own decoder, CPU) rounds
    weights and inputs of every linear to 8 bits after a Hadamard rotation, fp8 (own decoder, cards from compute
    capability 8.9 on) to E4M3, each row and each output channel by its own scale. With tensorrt-llm fp8 is not a
    rounding that a build makes: it takes a checkpoint that `extract quantize` wrote."""
    high_precision: tuple[str, ...] = ()
    """int8: layers ("2") and linears ("5.qkv", "5.o", "5.gate_up", "5.down") that compute in bfloat16 instead. `extract
    fidelity --rank-layers` finds which are worth it."""
    decoder: Literal["auto", "own", "transformers"] = "auto"
    """own: our packed decoder, for the families it knows; auto takes it where it is proven."""
    max_input_tokens: int = 128
    max_sequences: int = MAX_SEQUENCES
    max_tokens: int | None = None
    """Token budget of one batch; `None` is 16,384 on a CPU (4,096 with transformers' decoder), 131,072 on a card, and
    1,048,576 with tensorrt-llm, whose runtime splits a batch into passes."""
    pass_tokens: int | None = None
    """On a card (tensorrt-llm, or our own decoder): most tokens of one pass; `None` is the most that the widest tensor
    and the card's memory allow."""
    compile: Literal["auto", "ahead", "jit", "none"] = "auto"
    """Our own decoder on a card, what lies between its products: ahead compiles it into the engine, for this kind of
    card and this release of torch, jit at every start (auto: where Triton is), none runs it as it is."""
    states: Literal["tokens", "last"] = "tokens"
    """tensorrt-llm: the states that the engine puts out, of every token or of each sequence's last one."""
    cache: Literal["none", "paged"] = "none"
    """tensorrt-llm: paged is the vendor's executor, with a cache and one generated token."""
    mlp: Literal["fused", "separate", "swiglu-plugin"] = "fused"
    """tensorrt-llm: how gate and up are multiplied. Fused is the widest tensor of a model, twice its intermediate size;
    separate products, or Hopper's FP8 plugin, make it half as wide and so allow passes of twice the tokens."""
    keep_head: bool = False
    """tensorrt-llm: leave the head in an engine that has no cache, where it is dropped otherwise."""
    card_memory_gib: float | None = None
    """tensorrt-llm: memory of the card that it is built for; `None` is that of the card at hand."""
    micro_batch: int | None = None
    """Tokens that one thread of the own decoder carries through all layers; `None` is 256."""
    threads: int | None = None
    """Threads of a run that names no number; `None` is as many as it may use."""
    layout: Literal["auto", "packed", "dense"] = "auto"
    architectures: tuple[str, ...] = ()
    """Architectures that the recipe is meant for; empty means any."""
    description: str = ""

    def __post_init__(self) -> None:
        if self.max_input_tokens < 1:
            raise ValueError("max_input_tokens: a whole number, 1 or more")
        if not 1 <= self.max_sequences <= MAX_SEQUENCES:
            raise ValueError(f"max_sequences: 1 to {MAX_SEQUENCES}")
        if self.decoder == "transformers" and self.dtype in ("int8", "fp8"):
            raise ValueError(f'decoder: "auto" or "own" with dtype {self.dtype}, which only our own decoder has')
        if self.high_precision and self.dtype != "int8":
            raise ValueError("high_precision: left out, or dtype int8")
        for name in self.high_precision:
            if not is_name(name):
                raise ValueError(f'high_precision: layers and linears such as "2" and "5.down", not "{name}"')
        if self.decoder == "own" and self.layout == "dense":
            raise ValueError('layout: "auto" or "packed" with our own decoder')
        if self.runtime == "torch":
            self._refuse_vendor_keys()
        else:
            self._refuse_torch_keys()
        for key in ("micro_batch", "threads", "pass_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key}: a whole number, 1 or more")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_TOKENS:
            raise ValueError(f"max_tokens: 1 to {MAX_TOKENS}")
        if self.card_memory_gib is not None and not self.card_memory_gib > 0:
            raise ValueError("card_memory_gib: a number above 0")

    def _refuse_vendor_keys(self) -> None:
        for key in VENDOR_KEYS:
            if getattr(self, key) != _default(key):
                raise ValueError(f'{key}: left out, or runtime "tensorrt-llm"')
        for key in ("pass_tokens", "compile"):
            if getattr(self, key) != _default(key) and (self.device == "cpu" or self.decoder == "transformers"):
                raise ValueError(f"{key}: left out, or our own decoder on a card")
        if (self.pass_tokens or self.max_input_tokens) < self.max_input_tokens:
            raise ValueError(f"pass_tokens: at least max_input_tokens ({self.max_input_tokens})")
        if self.dtype == "fp8" and self.device == "cpu":
            raise ValueError('dtype: any but fp8 with device "cpu"')

    def _refuse_torch_keys(self) -> None:
        if self.device == "cpu":
            raise ValueError('device: "auto" or "cuda" with runtime "tensorrt-llm"')
        if self.dtype == "int8":
            raise ValueError('dtype: any but int8 with runtime "tensorrt-llm"')
        for key in ("max_tokens", "pass_tokens"):
            if (getattr(self, key) or self.max_input_tokens) < self.max_input_tokens:
                raise ValueError(f"{key}: at least max_input_tokens ({self.max_input_tokens})")
        for key in ("decoder", "layout", "micro_batch", "threads", "compile"):
            if getattr(self, key) != _default(key):
                raise ValueError(f'{key}: left out with runtime "tensorrt-llm"')
        if self.cache == "paged" and self.states != "tokens":
            raise ValueError(
                'states: "tokens" with a paged cache, whose executor gives every token or a generated one\'s'
            )
        if self.cache == "paged" and self.keep_head:
            raise ValueError("keep_head: left out with a paged cache, whose engine always has its head")


VENDOR_KEYS = ("states", "cache", "mlp", "keep_head", "card_memory_gib")
"""Keys that mean something to tensorrt-llm only."""


def _default(key: str) -> object:
    return next(field.default for field in dataclasses.fields(Recipe) if field.name == key)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; unknown keys and bad values are errors that name the file."""
    return parse(Recipe, read_toml(path), str(path))


def override(recipe: Recipe, **options: object) -> Recipe:
    """The recipe with every option that is not `None` put in its place."""
    given = {key: value for key, value in options.items() if value is not None}
    return parse(Recipe, {**dataclasses.asdict(recipe), **given}, "options")
