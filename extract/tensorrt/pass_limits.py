"""The limits of an engine by arithmetic, before anything is built: tokens and sequences of a pass, memory of the card.

Weights and outputs are exact. Activations are an estimate: what one layer holds at its fullest moment, with a margin;
TensorRT plans its own reuse, and the true figure is read from the engine after the build and kept in its contract.
"""

from collections.abc import Callable
from dataclasses import dataclass

from extract.engine.recipe import MAX_TOKENS, Recipe
from extract.errors import CheckpointRefused
from extract.tensorrt.model_shape import BYTES, ModelShape
from extract.tensorrt.tensor_widths import largest_batch, largest_pass, tensor_widths, widest

GIB = 2**30
ACTIVATION_MARGIN = 1.25
CONTEXT_BYTES = 3 * GIB // 2
"""CUDA context, libraries and TensorRT's own code on the card."""
USABLE = 0.97
"""Part of a card's nominal memory that a process can have."""
FIRST_TIER = 8192
"""Smallest token budget that is worth an engine of its own; each next one is twice as large."""
SMALLEST_PASS = 1024
"""Fewer tokens than this leave a card idle most of the time: an engine that fits no more is refused."""
TILE = 128
"""Passes are whole multiples of this many tokens, as the products' tiles are."""
NUM_SMS = 132
"""Multiprocessors assumed where no card is at hand; only the attention plugin's workspace depends on them."""


class DoesNotFit(CheckpointRefused):
    """Not even the smallest pass fits the card."""

    template = (
        "{name}: weights of {weights} and a pass of {tokens:,} tokens need {needed}, a card of {card} gives {usable}. "
        "Use a larger card{advice}."
    )


class RowTooLong(CheckpointRefused):
    """A row would need more than one pass."""

    template = (
        "{name}: a row of {longest:,} tokens is more than the {tokens:,} of a pass, bound by {binding}. "
        "Use a smaller --max-input-tokens."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the card; `context` is what the libraries take."""

    weights: int
    activations: int
    outputs: int
    workspace: int
    cache: int = 0
    context: int = CONTEXT_BYTES

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.activations + self.outputs + self.workspace + self.cache + self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLimits:
    """What one pass of an engine may hold, and why not more.

    Attributes:
        pass_tokens: T of the largest pass.
        max_sequences: B of the largest pass.
        max_tokens: tokens of one batch, which the runtime splits into passes.
        binding: which of the reasons decided `pass_tokens`.
        widest: name of the widest tensor a token, `width` its elements, `element_limit` the T that it allows.
        memory: at `pass_tokens` and `max_sequences`.
        host_bytes: page-locked memory beside the card.
    """

    pass_tokens: int
    max_sequences: int
    max_tokens: int
    binding: str
    widest: str
    width: int
    element_limit: int
    memory: Memory
    card_bytes: int
    host_bytes: int

    @property
    def tiers(self) -> tuple[int, ...]:
        """Token budgets worth an engine of their own: doubled from the first until the next would not fit."""
        budgets = []
        budget = FIRST_TIER
        while budget < self.pass_tokens:
            budgets.append(budget)
            budget *= 2
        return (*budgets, self.pass_tokens)


def pass_limits(
    shape: ModelShape, recipe: Recipe, card_bytes: int, *, num_sms: int = NUM_SMS, name: str = "checkpoint"
) -> PassLimits:
    """Limits of the engine that `recipe` asks for.

    Args:
        shape: the decoder's sizes, in the precision that will be built.
        recipe: with runtime tensorrt-llm.
        card_bytes: nominal memory of the card.
        num_sms: its multiprocessors.
        name: the checkpoint's, for the message.

    Raises:
        DoesNotFit: the card is too small for any pass.
        RowTooLong: no pass holds a row of the longest length; a row is never split.
    """
    tensor, width = widest(tensor_widths(shape, recipe.mlp))
    longest = min(recipe.max_input_tokens, shape.max_positions or recipe.max_input_tokens)
    max_sequences = recipe.max_sequences
    if _has_head(recipe):
        max_sequences = min(max_sequences, largest_batch(shape.vocab_size))
    max_tokens = min(recipe.max_tokens or MAX_TOKENS, MAX_TOKENS)
    reasons = {
        f"TensorRT's limit of 2^31 elements ({tensor}, {width:,} a token)": largest_pass(width),
        f"{max_sequences:,} sequences of {longest:,} tokens": max_sequences * longest,
        "the token budget of a batch": max_tokens,
    }
    if recipe.pass_tokens is not None:
        reasons["the recipe's pass_tokens"] = recipe.pass_tokens
    binding = min(reasons, key=lambda reason: reasons[reason])
    if reasons[binding] < longest:
        raise RowTooLong(name=name, longest=longest, tokens=reasons[binding], binding=binding)
    tokens = _tiled(reasons[binding], longest)
    usable = int(card_bytes * USABLE)

    def memory(tokens: int) -> Memory:
        return _memory(shape, recipe, tokens, min(max_sequences, tokens), num_sms)

    if memory(tokens).total > usable:
        binding = f"{card_bytes / GIB:.0f} GiB of the card"
        least = min(tokens, max(SMALLEST_PASS, _tiled(longest, longest)))
        tokens = _largest(lambda budget: memory(budget).total <= usable, tokens)
        if tokens < least:
            needed = memory(least)
            raise DoesNotFit(
                name=name,
                weights=_gib(needed.weights),
                tokens=least,
                needed=_gib(needed.total),
                card=_gib(card_bytes),
                usable=_gib(usable),
                advice="" if shape.weights == "fp8" else ", or quantise the checkpoint first: extract quantize",
            )
    sequences = min(max_sequences, tokens)
    return PassLimits(
        pass_tokens=tokens,
        max_sequences=sequences,
        max_tokens=max(tokens, max_tokens),
        binding=binding,
        widest=tensor,
        width=width,
        element_limit=largest_pass(width),
        memory=memory(tokens),
        card_bytes=card_bytes,
        host_bytes=2 * _state_bytes(shape, recipe, tokens, sequences) + 8 * tokens,
    )


def _has_head(recipe: Recipe) -> bool:
    return recipe.keep_head or recipe.cache == "paged"


def _state_bytes(shape: ModelShape, recipe: Recipe, tokens: int, sequences: int) -> int:
    rows = tokens if recipe.states == "tokens" else sequences
    return rows * shape.hidden_size * BYTES[shape.dtype]


def _memory(shape: ModelShape, recipe: Recipe, tokens: int, sequences: int, num_sms: int) -> Memory:
    """Bytes at T `tokens` and B `sequences`.

    At its fullest a layer holds the residual stream, the normed input of a product (in the weights' type), the product,
    and the product's own successor: the attention's output, or the activated half of gate and up.
    """
    own, narrow = BYTES[shape.dtype], BYTES[shape.weights]
    entering = shape.hidden_size * (own + narrow)
    attention = entering + own * (shape.qkv_width + shape.num_heads * shape.head_size)
    wide = 2 * shape.intermediate_size if shape.gated and recipe.mlp != "swiglu-plugin" else shape.intermediate_size
    mlp = entering + own * wide + narrow * shape.intermediate_size
    # The attention plugin reserves room for generation too, with or without a cache.
    splits = max(1, -(-num_sms // shape.num_heads))
    logits = sequences * (shape.vocab_size if _has_head(recipe) else shape.hidden_size) * 4
    cache = 0
    if recipe.cache == "paged":
        cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * BYTES[shape.cache] * (tokens + sequences)
    return Memory(
        weights=shape.embedding_bytes * (2 if _has_head(recipe) else 1) + shape.layer_bytes,
        activations=int(ACTIVATION_MARGIN * tokens * max(attention, mlp)),
        outputs=2 * _state_bytes(shape, recipe, tokens, sequences) + logits,
        workspace=2 * sequences * shape.num_heads * shape.head_size * splits,
        cache=cache,
    )


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest whole multiple of the tile, up to `most`, that fits; 0 if none does."""
    low, high = 0, most // TILE
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * TILE) else (low, middle - 1)
    return low * TILE


def _tiled(tokens: int, longest: int) -> int:
    """Down to whole tiles, but never below one row."""
    return max(tokens // TILE * TILE, longest)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
