"""What an engine of another vendor is compared with: the plain model of a checkpoint, or a torch engine made from it.

The vendor's packages pin an older transformers than ours, so on the machine that builds a TensorRT engine the plain
model may not be at hand. An engine that our own decoder runs needs no transformers, was proven against the plain model
where it was built, and brings the tokenizer along.
"""

import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from extract.engine.contract import CONTRACT_FILE, Contract, TokenizerIdentity, read_contract
from extract.engine.plain import PlainStates, read_plain
from extract.engine.recipe import Recipe
from extract.errors import CheckpointRefused

NOT_TOKENIZER = frozenset({"model.safetensors", "config.json", "decoder.json", "generation_config.json"})
"""Files of a torch engine that are not the tokenizer's."""


class OtherReference(CheckpointRefused):
    """The reference is not the checkpoint that the engine is built from."""

    template = (
        "{path}: its checkpoint has {field} {found}, the one to build from has {expected}. "
        "Give the checkpoint that it was made from, or a torch engine of that: --reference"
    )


class NotAReference(CheckpointRefused):
    """The reference cannot give the plain model's states."""

    template = "{path}: {problem}. Give a checkpoint, or a float32 torch engine of it: --reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The plain model's word and the tokenizer, wherever they came from.

    Attributes:
        plain: states of real passages.
        tokenizer: its identity; its files lie in the draft.
        name: of the checkpoint.
        sha256: its identity.
        dtype: its own type.
        notes: what to know of it.
    """

    plain: PlainStates
    tokenizer: TokenizerIdentity
    name: str
    sha256: str
    dtype: str
    notes: tuple[str, ...]


def is_engine(path: Path) -> bool:
    """Whether a reference is an engine directory."""
    return (path / CONTRACT_FILE).is_file()


def from_checkpoint(
    source: str | Path, recipe: Recipe, draft: Path, *, revision: str | None, allow_pickle: bool, say: Any
) -> Reference:
    """Read the plain model of a Hugging Face checkpoint; raises as a torch build does."""
    from extract.engine.checkpoint import open_checkpoint
    from extract.engine.checkpoint_tokenizer import load_tokenizer
    from extract.text.tokenizer_export import export_tokenizer

    opened = open_checkpoint(source, revision=revision, allow_pickle=allow_pickle)
    if opened.kind == "gguf":
        raise NotAReference(path=source, problem="a GGUF file, which tensorrt-llm does not read")
    tokenizer = load_tokenizer(opened)
    identity = export_tokenizer(tokenizer, draft) if tokenizer is not None else TokenizerIdentity(kind="none")
    plain = read_plain(None, opened, recipe, "float32", tokenizer, allow_no_final_norm=False, say=say)
    return Reference(
        plain=plain,
        tokenizer=identity,
        name=opened.name,
        sha256=opened.sha256,
        dtype=opened.dtype,
        notes=(*opened.notes, *plain.notes),
    )


def from_engine(directory: Path, recipe: Recipe, draft: Path, *, say: Any) -> Reference:
    """Let a torch engine speak for the plain model.

    Raises:
        NotAReference: it is not exact enough to be one.
        EngineRefused: it does not load.
    """
    from extract.engine.replay import states_of
    from extract.engine.runtimes import load_runtime

    contract = read_contract(directory)
    checkpoint = contract.checkpoint
    if contract.runtime.name != "torch" or contract.precision.activations != "float32":
        precision = f"{contract.runtime.name} engine in {contract.precision.activations}"
        raise NotAReference(path=directory, problem=f"a {precision}, whose own rounding would count as the engine's")
    say(f"loading {directory}, which speaks for the plain model")
    runtime = load_runtime(directory)
    try:
        limit = min(recipe.max_input_tokens, contract.limits.max_input_tokens)
        ids = _passages(directory, contract, limit)
        states = states_of(runtime, ids)
    finally:
        runtime.close()
    for file in contract.files:
        if file.name not in NOT_TOKENIZER:
            shutil.copyfile(directory / file.name, draft / file.name)
    model = {
        name: getattr(checkpoint, name)
        for name in ("architecture", "model_type", "num_layers", "hidden_size", "vocab_size")
    }
    plain = PlainStates(
        dtype="float32",
        stored=contract.precision.weights,
        ids=ids,
        states=[np.ascontiguousarray(one) for one in states],
        max_positions=checkpoint.max_positions,
        notes=(),
        model=model,
        facts=None,
        not_own=None,
        head=None,
    )
    return Reference(
        plain=plain,
        tokenizer=contract.tokenizer,
        name=checkpoint.name,
        sha256=checkpoint.sha256,
        dtype=checkpoint.dtype,
        notes=(*checkpoint.notes, f"compared with a torch engine, {contract.engine_id[:12]}"),
    )


def _passages(directory: Path, contract: Contract, limit: int) -> list[list[int]]:
    """Ids of the build's passages, by the engine's own tokenizer; random ones where it has none."""
    import pyarrow as pa

    from extract.engine.comparison import NUM_PASSAGES, passage_ids
    from extract.sample import passages
    from extract.spec import TextSpec
    from extract.text.tokens import open_tokenizer

    vocabulary = contract.checkpoint.vocab_size
    if contract.tokenizer.kind == "none":
        return passage_ids(None, limit, vocabulary)
    tokenizer = open_tokenizer(
        directory, contract.tokenizer, TextSpec(), max_input_tokens=limit, input="text", vocab_size=vocabulary
    )
    texts = [passage.text for passage in itertools.islice(passages(), NUM_PASSAGES)]
    rows = tokenizer.tokenize(pa.array(texts), 0)
    return [rows.input_ids[start:stop].tolist() for start, stop in itertools.pairwise(rows.offsets) if stop > start]
