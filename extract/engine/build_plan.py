"""What a build would make, before it starts: precision, limits and what binds them, memory. Reads headers, no weights.

For tensorrt-llm it needs no card and no vendor package, so engines can be planned on a laptop: `--card-memory` names
the card. For torch, memory is what surely will be held: weights and the states of a batch.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extract.engine.contract import EngineDoesNotFit
from extract.engine.recipe import Recipe
from extract.errors import SpecError

STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class WhichCard(SpecError):
    """No card is at hand, and none was named."""

    template = "{checkpoint}: for which card? There is none here that torch can use. Say its memory: --card-memory GIB"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build would make.

    Attributes:
        weights: type of the linears' weights; `dtype` of everything else and of the states.
        pass_tokens: tokens of one forward pass, `max_tokens` of one batch.
        binding: why a pass holds no more.
        widest: the widest tensor, `width` its elements a token, `element_limit` the tokens that TensorRT allows for it.
        memory: bytes by use; "total" on a card only.
        disk_bytes: about what the engine's weights take on the disk; `None` with tensorrt-llm.
        tiers: token budgets that `--tiers` would build.
    """

    checkpoint: str
    architecture: str
    runtime: str
    device: str
    dtype: str
    weights: str
    hidden_size: int
    vocab_size: int
    max_input_tokens: int
    max_sequences: int
    max_tokens: int
    pass_tokens: int
    binding: str
    memory: dict[str, int]
    disk_bytes: int | None = None
    states: str = "tokens"
    cache: str = "none"
    widest: str | None = None
    width: int | None = None
    element_limit: int | None = None
    card_bytes: int | None = None
    host_bytes: int | None = None
    tiers: tuple[int, ...] = ()


def plan_build(
    checkpoint: str | Path, recipe: Recipe, *, revision: str | None = None, allow_pickle: bool = False
) -> BuildPlan:
    """Say what `build` with these arguments would make.

    Raises:
        CheckpointRefused, EngineRefused, SpecError: as `build` would, as far as can be known from headers.
    """
    if recipe.runtime == "tensorrt-llm":
        return _tensorrt(checkpoint, recipe, revision)
    return _torch(checkpoint, recipe, revision, allow_pickle)


def _tensorrt(checkpoint: str | Path, recipe: Recipe, revision: str | None) -> BuildPlan:
    from extract.engine.tensorrt_builder import limits_on, open_source
    from extract.tensorrt.pass_limits import GIB, pass_limits

    source = open_source(checkpoint, recipe, revision=revision, hashed=False)
    shape = source.shape
    if recipe.card_memory_gib is not None:
        limits = pass_limits(shape, recipe, int(recipe.card_memory_gib * GIB), name=source.name)
        device = f"a card of {recipe.card_memory_gib:g} GiB"
    else:
        from extract.tensorrt.cuda_card import claim_card

        try:
            card = claim_card(None, source.name)
        except EngineDoesNotFit as error:
            if error.facts["field"] != "device":  # there are cards, and others have them
                raise
            raise WhichCard(checkpoint=source.name) from None
        try:
            limits, device = limits_on(card, source, recipe), card.device.name
        finally:
            card.close()
    memory = {name: size for name, size in dataclasses.asdict(limits.memory).items() if size}
    return BuildPlan(
        checkpoint=source.name,
        architecture=shape.architecture,
        runtime=recipe.runtime,
        device=device,
        dtype=shape.dtype,
        weights=shape.weights,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_input_tokens=min(recipe.max_input_tokens, shape.max_positions or recipe.max_input_tokens),
        max_sequences=limits.max_sequences,
        max_tokens=limits.max_tokens,
        pass_tokens=limits.pass_tokens,
        binding=limits.binding,
        memory={**memory, "total": limits.memory.total},
        states=recipe.states,
        cache=recipe.cache,
        widest=limits.widest,
        width=limits.width,
        element_limit=limits.element_limit,
        card_bytes=limits.card_bytes,
        host_bytes=limits.host_bytes,
        tiers=limits.tiers,
    )


def _torch(checkpoint: str | Path, recipe: Recipe, revision: str | None, allow_pickle: bool) -> BuildPlan:
    from extract.engine.builder import check_architecture, check_linears, resolve_dtype
    from extract.engine.checkpoint import open_checkpoint
    from extract.engine.device import this_device
    from extract.engine.own_families import FAMILIES
    from extract.engine.proven import MAX_TOKENS

    opened = open_checkpoint(checkpoint, revision=revision, allow_pickle=allow_pickle)
    check_architecture(opened.architecture, recipe)
    check_linears(opened.config, recipe)
    device = this_device(recipe.device)
    dtype = resolve_dtype(recipe, device, opened.dtype)
    text: Any = opened.config.get("text_config")
    config = text if isinstance(text, dict) else opened.config

    def number(names: tuple[str, ...]) -> int:
        return next((found for name, found in config.items() if name.endswith(names) and isinstance(found, int)), 0)

    hidden = number(HIDDEN_SIZES)
    own = recipe.decoder != "transformers" and recipe.layout != "dense" and dtype != "float16"
    own_on_cpu = own and device.type == "cpu"
    max_tokens = recipe.max_tokens or MAX_TOKENS["own" if own_on_cpu else device.type]
    per_state = 4 if own_on_cpu else STATE_BYTES.get(dtype, 2)
    stored = STATE_BYTES.get(opened.dtype, 4)
    weights = opened.decoder_bytes // stored * STATE_BYTES.get(dtype, 1)
    on_disk = opened.decoder_bytes if dtype == "int8" else weights  # int8 is packed by the load
    plan = BuildPlan(
        checkpoint=opened.name,
        architecture=opened.architecture,
        runtime=recipe.runtime,
        device=device.name,
        dtype=dtype,
        weights=dtype,
        hidden_size=hidden,
        vocab_size=number(("vocab_size",)),
        max_input_tokens=recipe.max_input_tokens,
        max_sequences=recipe.max_sequences,
        max_tokens=max_tokens,
        pass_tokens=max_tokens,
        binding="the recipe" if recipe.max_tokens else "the default; extract tune measures what is fastest",
        memory={"weights": weights, "outputs": max_tokens * hidden * per_state},
        disk_bytes=on_disk,
    )
    if own and device.type == "cuda" and config.get("model_type") in FAMILIES:
        return _own_on_card(plan, opened.path, recipe)
    return plan


def _own_on_card(plan: BuildPlan, checkpoint: Path, recipe: Recipe) -> BuildPlan:
    """The plan of our own decoder on the card at hand, from the sizes that the config names, where it names them."""
    from extract.cpu.architecture import Architecture, LayerKind
    from extract.cuda.memory import weight_bytes
    from extract.cuda.opening import terms_on_card
    from extract.engine.contract import Limits
    from extract.tensorrt.model_shape import NoShape, read_shape

    try:
        shape = read_shape(checkpoint)
    except NoShape:
        return plan
    sizes = Architecture(
        family="",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        intermediate_size=shape.intermediate_size,
        norm_eps=0.0,
        activation="silu",
        attention_scale=1.0,
        layers=(LayerKind(rotary=None),) * shape.num_layers,
        rotary=(),
    )
    limits = Limits(
        max_input_tokens=recipe.max_input_tokens,
        max_sequences=recipe.max_sequences,
        max_tokens=plan.max_tokens,
        binding=plan.binding,
        pass_tokens=recipe.pass_tokens,
    )
    how = None if recipe.compile == "auto" else recipe.compile
    terms = terms_on_card(sizes, plan.dtype, limits, path=plan.checkpoint, how=how)
    pass_tokens, total = terms.limits.pass_tokens, terms.limits.memory_bytes
    assert pass_tokens is not None and total is not None
    weights = weight_bytes(sizes, plan.dtype, recipe.max_input_tokens)
    return dataclasses.replace(
        plan,
        pass_tokens=pass_tokens,
        memory={"weights": weights, "a pass": total - weights, "total": total},
        disk_bytes=weights,  # the file holds what the card does, but for tables of positions
        card_bytes=terms.card_bytes,
    )


HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model", "embedding_length")
"""What configs, and GGUF files, call H."""
