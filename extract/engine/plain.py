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
    from extract.cpu.architecture import Architecture
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
        stored: type of the weights written, if any are; "fp8" is E4M3 linears with their scales.
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
    if dtype in ("int8", "fp8"):  # int8 is packed for the kernels at hand whenever an engine is loaded
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
        architecture, not_own = _own(model, recipe, dtype, limit)
        if dtype != "fp8":
            _save(model, stored, draft)
        elif architecture is not None:  # else the build is refused
            say("rounding its linears to FP8")
            _save_fp8(model, architecture, stored, draft)
            stored = "fp8"
        if architecture is not None:
            facts = _facts(model, architecture, limit)
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


def _own(model: Any, recipe: Recipe, dtype: str, limit: int) -> "tuple[Architecture | None, str | None]":
    """What our own decoder would compute, or why it does not run this model in this precision."""
    if recipe.decoder == "transformers" or recipe.layout == "dense" or dtype == "float16":
        return None, None
    from extract.engine.own_architecture import NoOwnArchitecture, architecture_of

    try:
        architecture = architecture_of(model, limit)
    except NoOwnArchitecture as error:
        return None, str(error)
    if dtype == "fp8":
        from extract.cuda.fp8 import unfit

        problem = unfit(architecture)
        if problem is not None:
            return None, problem
    return architecture, None


def _facts(model: Any, architecture: "Architecture", limit: int) -> "PlainFacts":
    from extract.engine.torch_own_trial import plain_facts

    in_float64 = 8 * sum(parameter.numel() for parameter in model.parameters())
    if in_float64 < DOUBLE_MEMORY * available_memory():
        model.double()  # nothing else is asked of it any more
    return plain_facts(model, architecture, limit, 4 * limit)


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
    _check_room(draft, sum(tensor.numel() * tensor.element_size() for tensor in weights.values()))
    model.config.dtype = target
    with clear_write_errors(draft), quiet_transformers():
        model.save_pretrained(draft, state_dict=weights, max_shard_size="1000TB")


def _save_fp8(model: Any, architecture: "Architecture", norms: str, draft: Path) -> None:
    """Write the weights of an FP8 engine, each linear rounded on the card if there is one, and the config beside it."""
    import torch

    from extract.cpu.weights import WEIGHTS_FILE
    from extract.cuda.fp8_weights import fp8_kinds, fp8_tensors
    from extract.cuda.weights_writing import file_bytes, write_tensors
    from extract.engine.quiet_transformers import quiet_transformers

    kept, device = getattr(torch, norms), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = fp8_kinds(architecture, kept)
    _check_room(draft, file_bytes(kinds))
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.bfloat16
    with clear_write_errors(draft), quiet_transformers():
        model.config.save_pretrained(draft)
        write_tensors(draft / WEIGHTS_FILE, kinds, fp8_tensors(model.state_dict(), architecture, kept, device))


def _check_room(draft: Path, needed: int) -> None:
    found = free_bytes(draft)
    if found < needed:
        raise NoRoomForEngine(path=draft.parent, expected=needed, found=found)


def num_layers(config: Any) -> int:
    """Layers, by the names that families give them; 0 where none of these is there."""
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return 0
