"""The models that every trial of numbers runs over: six families, a recurrent one, and both decoders where both can.

Windows are far shorter than the rows, every other tokenizer pads on the left or not at all, and the weights are those
of `rig`, under which a lost mask, scale, bias or norm shows. The yardstick is `job_rig.reference`: transformers' own
model, each row alone, without padding.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import rig
from job_rig import errors, job, parquet, reference, run, stored

from extract.engine.device import computes_in, this_device

LIMIT = 96
"""Most tokens of a row."""

WINDOW = 8

EXACT = 1e-5
"""Relative error of float32 states that are stored as float32."""

KINDS = ("tokens", "last", "first", "mean")

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "qwen3": {"family": "qwen3", "tied": True, "tokenizer": {"bos": False, "eos": True}},
    "gemma3": {
        "family": "gemma3_text",
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tokenizer": {"padding_side": "left"},
    },
    "mistral": {"family": "mistral", "sliding_window": WINDOW, "tokenizer": {"padding_side": "left", "pad": False}},
    "gpt2": {"family": "gpt2", "tied": True, "tokenizer": {"bos": False, "pad": False}},
    "gpt_neox": {"family": "gpt_neox", "tokenizer": {"bos": False, "padding_side": "left"}},
    "recurrent_gemma": {"family": "recurrent_gemma", "attention_window_size": WINDOW},
}

SUBJECTS = (
    *(f"{name}-{decoder}" for name in ("llama", "qwen3", "gemma3", "mistral") for decoder in ("own", "transformers")),
    "gpt2-transformers",
    "gpt_neox-transformers",
    "recurrent_gemma-transformers",
)
"""Checkpoint and decoder of each engine."""

BFLOAT16 = pytest.param(
    "bfloat16",
    marks=pytest.mark.skipif(
        not computes_in(this_device("cpu"), "bfloat16"), reason="this CPU has no bfloat16 arithmetic"
    ),
)

BOTH_DECODERS = ("llama", "qwen3", "gemma3", "mistral")


class Subjects:
    """Checkpoints by name and float32 engines by subject, made when they are first asked for; do not change them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def checkpoint(self, subject: str) -> Path:
        """The checkpoint of a subject, or of a name."""
        name = subject.partition("-")[0]
        path = self._root / "checkpoints" / name
        if not path.exists():
            settings = dict(CHECKPOINTS[name])
            rig.tiny_checkpoint(path, tokenizer=rig.tiny_tokenizer(**settings.pop("tokenizer", {})), **settings)
        return path

    def engine(self, subject: str) -> Path:
        """The engine of a subject."""
        path = self._root / subject
        if not path.exists():
            build_engine(self.checkpoint(subject), path, decoder=subject.partition("-")[2])
        return path

    def states(self, subject: str, ids: Sequence[Sequence[int]], output: Path, **settings: Any) -> list[Any]:
        """The stored states of rows of ids, after a whole job of its own in `output`."""
        return states_of(self.engine(subject), ids, output, **settings)

    def expected(self, subject: str, ids: Sequence[Sequence[int]], kind: str = "tokens") -> list[np.ndarray]:
        """What transformers gives for each row alone."""
        return reference(self.checkpoint(subject), ids, kind)


def build_engine(checkpoint: Path, engine: Path, **settings: Any) -> Path:
    """A float32 engine, unless `settings` of a recipe say otherwise."""
    from extract.engine.builder import build
    from extract.engine.recipe import Recipe

    recipe = {"dtype": "float32", "device": "cpu", "max_input_tokens": LIMIT, "max_tokens": 16_384, **settings}
    build(checkpoint, engine, Recipe(**recipe))
    return engine


def states_of(engine: Path, ids: Sequence[Sequence[int]], output: Path, **settings: Any) -> list[Any]:
    """The stored states of rows of ids, after a whole job."""
    output.mkdir(parents=True, exist_ok=True)
    source = parquet(output / "ids.parquet", {"ids": pa.array(ids, pa.list_(pa.int32()))})
    run(job(engine, source, output / "out", column="ids", input="input_ids", **settings))
    return stored(output / "out")


def worst(found: Sequence[Any], expected: Sequence[np.ndarray]) -> float:
    """The largest relative error of a row."""
    return float(errors(found, expected).max())
