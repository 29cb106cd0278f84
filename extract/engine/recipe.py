"""The recipe: what to build from a checkpoint. About ten scalars, TOML, no code (`engines/<family>/<name>.toml`)."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from extract.settings import parse, read_toml

DType = Literal["auto", "float32", "bfloat16", "float16", "int8"]

MAX_SEQUENCES = 8192
MAX_TOKENS = 1_048_576


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an engine is built."""

    runtime: Literal["torch"] = "torch"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: DType = "auto"
    """"auto" is the checkpoint's own type where the device computes in it, else float32. int8 (own decoder, CPU) rounds
    weights and inputs of every linear to 8 bits after a Hadamard rotation."""
    decoder: Literal["auto", "own", "transformers"] = "auto"
    """own: our packed decoder, on a CPU, for the families it knows; auto takes it where it is proven."""
    max_input_tokens: int = 128
    max_sequences: int = MAX_SEQUENCES
    max_tokens: int | None = None
    """Token budget of one pass; `None` is 16,384 on a CPU (4,096 with transformers' decoder), 131,072 on a card."""
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
        if self.decoder == "transformers" and self.dtype == "int8":
            raise ValueError('decoder: "auto" or "own" with dtype int8, which only our own decoder has')
        if self.decoder == "own" and self.layout == "dense":
            raise ValueError('layout: "auto" or "packed" with our own decoder')
        for key in ("micro_batch", "threads"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key}: a whole number, 1 or more")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_TOKENS:
            raise ValueError(f"max_tokens: 1 to {MAX_TOKENS}")


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; unknown keys and bad values are errors that name the file."""
    return parse(Recipe, read_toml(path), str(path))


def override(recipe: Recipe, **options: object) -> Recipe:
    """The recipe with every option that is not `None` put in its place."""
    given = {key: value for key, value in options.items() if value is not None}
    return parse(Recipe, {**dataclasses.asdict(recipe), **given}, "options")
