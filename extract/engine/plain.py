"""What a build reads off the plain model while that is in memory, which is once.

Its states on real passages, what our own decoder is tried with, and its weights in the type that the engine stores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extract.engine.comparison import available_memory, passage_ids
from extract.engine.next_token import TiedHead, tied_head
from extract.engine.probe import Float32
from extract.engine.recipe import Recipe
from extract.errors import OutOfSpace
from extract.store import clear_write_errors, free_bytes

if TYPE_CHECKING:
    from extract.engine.checkpoint import Checkpoint
    from extract.engine.torch_own_trial import PlainFacts

STORED_TYPES = ("float32", "bfloat16", "float16")


class NoRoomForEngine(OutOfSpace):
    """The engine does not fit on the disk."""

    template = "{path}: the engine needs {expected:,} bytes, {found:,} are free."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStates:
    """The plain model's word, in the precision that memory allows.

    Attributes:
        dtype: that precision.
        stored: type of the weights written, if any are.
        ids, states: real passages and their states, float32 [L, H] each.
        model: what a contract says of the model.
        facts: what our own decoder is tried with; `None` where it does not know the model.
        not_own: why it does not.
        head: the output embedding where it is the token embedding, for the next token's distribution.
    """

    dtype: str
    stored: str
    ids: list[list[int]]
    states: list[Float32]
    max_positions: int | None
    notes: tuple[str, ...]
    model: dict[str, Any]
    facts: "PlainFacts | None"
    not_own: str | None
    head: TiedHead | None


def read_plain(
    draft: Path | None,
    opened: "Checkpoint",
    recipe: Recipe,
    dtype: str,
    tokenizer: Any,
    *,
    allow_no_final_norm: bool,
    say: Callable[[str], None],
) -> PlainStates:
    """Load the checkpoint once, read all that is needed of it, and write its weights into `draft`.

    Without a draft only its states are read, for an engine that another runtime builds.
    """
    from extract.engine.decoder import load_decoder
    from extract.engine.torch_decoder import vocab_size
    from extract.engine.torch_runtime import PlainModel

    stored = dtype
    if dtype in ("int8", "fp8"):  # rounded whenever the engine is loaded, so that the plain model stays in the engine
        stored = opened.dtype if opened.dtype in STORED_TYPES else "float32"
    in_float32 = opened.decoder_bytes * (1 if opened.dtype == "float32" else 2)
    reference = "float32" if in_float32 < 0.6 * available_memory() else stored
    say(f"loading {opened.name} ({opened.architecture}, {opened.dtype}) in {reference}, without its head")
    decoder = load_decoder(opened, reference)
    model: Any = decoder.model
    max_positions = getattr(decoder.config, "max_position_embeddings", None)
    limit = min(recipe.max_input_tokens, max_positions or recipe.max_input_tokens)
    vocabulary = vocab_size(model)
    ids = passage_ids(tokenizer, limit, vocabulary)
    plain = PlainModel(model, allow_no_final_norm=allow_no_final_norm)
    states = [plain.states(one) for one in ids]
    plain.close()
    head = tied_head(model)
    facts, not_own = None, None
    if draft is not None:
        _save(model, stored, draft)
        facts, not_own = _facts(model, recipe, dtype, limit)
    return PlainStates(
        dtype=reference,
        stored=stored,
        ids=ids,
        states=states,
        max_positions=max_positions,
        notes=decoder.notes,
        model={
            "architecture": type(model).__name__,
            "model_type": model.config.model_type,
            "num_layers": num_layers(model.config),
            "hidden_size": model.config.hidden_size,
            "vocab_size": vocabulary,
        },
        facts=facts,
        not_own=not_own,
        head=head,
    )


DOUBLE_MEMORY = 0.7
"""Part of the free memory that the plain model may take in float64."""


def _facts(model: Any, recipe: Recipe, dtype: str, limit: int) -> "tuple[PlainFacts | None, str | None]":
    if recipe.decoder == "transformers" or recipe.layout == "dense" or dtype == "float16":
        return None, None
    from extract.engine.own_architecture import NoOwnArchitecture, architecture_of
    from extract.engine.torch_own_trial import plain_facts

    try:
        architecture = architecture_of(model, limit)
    except NoOwnArchitecture as error:
        return None, str(error)
    if dtype == "fp8":
        from extract.cuda.fp8 import unfit

        problem = unfit(architecture)
        if problem is not None:
            return None, problem
    in_float64 = 8 * sum(parameter.numel() for parameter in model.parameters())
    if in_float64 < DOUBLE_MEMORY * available_memory():
        model.double()  # nothing else is asked of it any more
    return plain_facts(model, architecture, limit, 4 * limit), None


def _save(model: Any, dtype: str, draft: Path) -> None:
    """Write the base model's weights in the engine's type and its config, as any transformers can read them."""
    import torch

    from extract.engine.quiet_transformers import quiet_transformers

    target = getattr(torch, dtype)
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    weights = {
        name: tensor.to(target) if tensor.is_floating_point() and not any(part in name for part in kept) else tensor
        for name, tensor in model.state_dict().items()
    }
    needed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if free_bytes(draft) < needed:
        raise NoRoomForEngine(path=draft.parent, expected=needed, found=free_bytes(draft))
    model.config.dtype = target
    with clear_write_errors(draft), quiet_transformers():
        model.save_pretrained(draft, state_dict=weights, max_shard_size="1000TB")


def num_layers(config: Any) -> int:
    """Layers, by the names that families give them; 0 where none of these is there."""
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return 0
