"""The model that an engine is compared with: a checkpoint's own decoder, row by row, and its own head.

In float32 where memory allows, whatever the engine computes in, so that only the engine's rounding is seen. Refuses a
checkpoint that is not of the engine's model.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extract.engine.comparison import available_memory
from extract.engine.contract import Contract
from extract.engine.next_token import Head
from extract.engine.probe import Float32
from extract.errors import EngineRefused

if TYPE_CHECKING:
    from extract.engine.checkpoint import Checkpoint

MEMORY_PART = 0.6
"""Of the free memory that the decoder may take in float32."""


class NotOneModel(EngineRefused):
    """Engine and reference are different models."""

    template = (
        "{path}: the engine has {field} {expected}, {name} has {found}. They are not one model; name the checkpoint "
        "that the engine was made from ({made_from}), or the unquantised one behind it."
    )


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The plain model in memory.

    Attributes:
        name, sha256: of its checkpoint.
        dtype: what it computes in.
        head: `None` where the checkpoint holds none.
        no_head: why.
    """

    name: str
    sha256: str
    dtype: str
    head: Head | None
    no_head: str | None
    _plain: Any

    def states(self, input_ids: list[int]) -> Float32:
        """float32 [L, H] of one row by itself."""
        states: Float32 = self._plain.states(input_ids)
        return states


def check_tokenizer(engine: Path, contract: Contract, checkpoint: "Checkpoint") -> tuple[str, ...]:
    """Compare tokenizers, before any weights are read; returns what is worth a note.

    Files that differ (as another format's do) are no matter where they do the same to a hard text: both models are
    given the engine's ids.

    Raises:
        NotOneModel: the checkpoint's tokenizer gives other ids.
    """
    from extract.engine.checkpoint_tokenizer import load_tokenizer
    from extract.text.tokenizer_export import export_tokenizer

    if contract.tokenizer.kind == "none":
        return ()
    if checkpoint.kind == "gguf" and checkpoint.sha256 == contract.checkpoint.sha256:
        return ()  # one file with tokenizer and weights; a directory's digest says nothing of its tokenizer
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        return (f"{checkpoint.name} has no tokenizer to compare with the engine's",)
    with tempfile.TemporaryDirectory() as scratch:
        found = export_tokenizer(tokenizer, Path(scratch))
    expected = contract.tokenizer
    if found.sha256 == expected.sha256:
        return ()
    if found.probe_ids != expected.probe_ids:
        raise NotOneModel(
            path=engine,
            field="a tokenizer with sha256",
            expected=str(expected.sha256)[:12],
            name=checkpoint.name,
            found=f"one with {str(found.sha256)[:12]}, which gives other ids",
            made_from=contract.checkpoint.name,
        )
    return (f"{checkpoint.name} has other tokenizer files, which give the same ids for a hard text",)


def open_reference(engine: Path, contract: Contract, checkpoint: "Checkpoint") -> Reference:
    """Load the checkpoint's decoder and head.

    Raises:
        CheckpointRefused: it cannot be loaded as it stands.
        NotOneModel: another width, number of layers or vocabulary.
    """
    from extract.engine.decoder import load_decoder
    from extract.engine.plain import num_layers
    from extract.engine.torch_causal_head import causal_head
    from extract.engine.torch_decoder import vocab_size
    from extract.engine.torch_runtime import PlainModel

    in_float32 = checkpoint.decoder_bytes * (1 if checkpoint.dtype == "float32" else 2)
    dtype = "float32" if in_float32 < MEMORY_PART * available_memory() else checkpoint.dtype
    model: Any = load_decoder(checkpoint, dtype).model
    known = contract.checkpoint
    for field, expected, found in (
        ("hidden size", known.hidden_size, model.config.hidden_size),
        ("layers", known.num_layers, num_layers(model.config)),
        ("vocabulary", known.vocab_size, vocab_size(model)),
    ):
        if found != expected:
            raise NotOneModel(
                path=engine,
                field=field,
                expected=f"{expected:,}",
                name=checkpoint.name,
                found=f"{found:,}",
                made_from=known.name,
            )
    plain = PlainModel(model, allow_no_final_norm=contract.output.module.startswith("none"))
    head = causal_head(model, checkpoint, plain.states)
    no_head = head if isinstance(head, str) else None
    return Reference(
        name=checkpoint.name,
        sha256=checkpoint.sha256,
        dtype=dtype,
        head=None if isinstance(head, str) else head,
        no_head=no_head,
        _plain=plain,
    )
