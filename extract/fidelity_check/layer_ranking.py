"""`rank_layers`: what int8 does to each layer and linear, and which of them to keep in bfloat16 for a divergence.

The engine is loaded twice: exact but for what is in int8 alone, then in int8 but for sets that are kept in bfloat16,
whose states are bit for bit those of the engine that a recipe with that set builds. Nothing is built for a trial.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from extract.cpu.architecture import read_architecture
from extract.cpu.kernels import HIGH, Precision
from extract.cpu.linear_names import LINEARS, linear_names, linears_of, short_names
from extract.cpu.movable_runtime import MovableRuntime
from extract.engine.comparison import available_memory
from extract.engine.contract import Contract, check_files, read_contract
from extract.engine.device import computes_in, this_device
from extract.engine.next_token import LOGITS_BYTES
from extract.engine.recipe import Recipe
from extract.errors import EngineRefused
from extract.fidelity_check.budget import Choice, choose
from extract.fidelity_check.dealt_rows import DealtRows, deal
from extract.fidelity_check.measure import NUM_ROWS, SAY_EVERY_S, NothingToHold
from extract.fidelity_check.ranking_results import Confirmed, Damage, LayerRanking
from extract.fidelity_check.ranking_table import ranking_text
from extract.fidelity_check.reference import check_tokenizer, open_reference
from extract.fidelity_check.rows import open_rows
from extract.fidelity_check.set_trials import Trials, costs, speeds
from extract.spec import SourceSpec
from extract.tuning.recipe_file import check_replaceable, write_recipe

MEMORY_PART = 0.6
"""Of the free memory that packed weights may take when single linears are ranked."""

WRITER = "extract fidelity"


class NotRankable(EngineRefused):
    """An engine whose layers cannot be had in several precisions."""

    template = "{path}: --rank-layers cannot rank its layers: {problem}."


def rank_layers(
    engine: str | Path,
    reference: str | Path,
    *,
    source: SourceSpec | None = None,
    rows: int = NUM_ROWS,
    kl_budget: float | None = None,
    recipe: str | Path | None = None,
    threads: int | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    seed: int = 0,
    logits_bytes: int = LOGITS_BYTES,
    say: Callable[[str], None] = lambda message: None,
) -> LayerRanking:
    """Rank the layers and linears of an engine by what int8 does to them; see `LayerRanking`.

    Args:
        engine: an engine of our own decoder, in any precision: the weights that it holds are the plain ones.
        reference: as for `fidelity`.
        source: as there.
        rows: as there; they are dealt into three parts.
        threads: as there.
        revision: as there.
        allow_pickle: as there.
        seed: as there.
        logits_bytes: as there.
        kl_budget: search linears to keep in bfloat16 so that the mean KL is at most this, in nats; `check_budget` holds
            the result to it.
        recipe: where to write what builds that engine.
        say: called with a line whenever a step begins, and every few seconds.

    Raises:
        NotRankable: the engine is not of our own decoder, or this CPU has no arithmetic for bfloat16.
        EngineRefused, CheckpointRefused, SourceError, SpecError: as `fidelity`.
    """
    from extract.engine.checkpoint import open_checkpoint

    started = time.perf_counter()
    engine, recipe = Path(engine), None if recipe is None else Path(recipe)
    contract = read_contract(engine)
    _check_rankable(engine, contract)
    if recipe is not None:
        check_replaceable(recipe, "-o", WRITER)
    check_files(engine, contract)
    checkpoint = open_checkpoint(reference, revision=revision, allow_pickle=allow_pickle)
    notes = check_tokenizer(engine, contract, checkpoint)
    chosen_rows = open_rows(engine, contract, source, rows)
    ids = list(chosen_rows.sequences())
    say(f"loading {checkpoint.name} ({checkpoint.architecture}, {checkpoint.dtype})")
    plain = open_reference(engine, contract, checkpoint)
    if kl_budget is not None and plain.head is None:
        raise NothingToHold(option="--kl-budget", problem=plain.no_head)
    parts = deal(plain, ids, seed, logits_bytes, say)
    architecture = read_architecture(engine)
    num_layers = len(architecture.layers)
    cost = costs(architecture)

    rest = _rest(contract)
    say(f"packing the engine's weights in int8 and {rest}")
    runtime = MovableRuntime(engine, contract, rest=rest, moved="int8", threads=threads)
    try:
        linears = _damages(runtime, parts.rank, linear_names(num_layers), cost, say)
        layers = _damages(runtime, parts.rank, [str(layer) for layer in range(num_layers)], cost, say)
    finally:
        runtime.close()
    say(f"packing them in int8 and {HIGH}")
    runtime = MovableRuntime(engine, contract, rest="int8", moved=HIGH, threads=threads)
    try:
        chosen = Choice()
        if kl_budget is not None:
            damage = {one.name: harm(one) for one in linears}
            chosen = choose(runtime, parts, damage, cost, kl_budget, say)
        say("comparing on the rows that confirm, and measuring speeds by turns")
        confirmed = _confirmed(runtime, parts, cost, chosen.tried)
    finally:
        runtime.close()
    found = LayerRanking(
        engine=str(engine),
        engine_id=contract.engine_id,
        arithmetic=runtime.arithmetic,
        checkpoint=plain.name,
        reference=plain.dtype,
        rest=rest,
        rows=chosen_rows.described,
        rank_rows=len(parts.rank.ids),
        search_rows=len(parts.search.ids),
        held_rows=len(parts.held.ids),
        linears=linears,
        layers=layers,
        kl_budget=kl_budget,
        path=chosen.path,
        chosen=short_names(chosen.tried, num_layers) if chosen.tried is not None and chosen.confirmed else None,
        looks=chosen.looks,
        confirmed=confirmed,
        no_head=plain.no_head,
        notes=notes,
        seconds=time.perf_counter() - started,
    )
    if recipe is None or found.chosen is None:
        return found
    found = replace(found, recipe=str(recipe))
    write_recipe(recipe, recipe_of(contract, found), ranking_text(found), WRITER)
    return found


def recipe_of(contract: Contract, found: LayerRanking) -> Recipe:
    """What builds the engine that was chosen, with the limits of the one that was ranked."""
    assert found.chosen is not None
    shown = {one.name: one.kl.mean for one in found.confirmed if one.kl is not None}
    return Recipe(
        device="cpu",
        dtype="int8",
        high_precision=found.chosen,
        max_input_tokens=contract.limits.max_input_tokens,
        max_sequences=contract.limits.max_sequences,
        max_tokens=contract.limits.max_tokens,
        micro_batch=contract.runtime.micro_batch,
        threads=contract.runtime.threads,
        description=(
            f"{found.checkpoint}: mean KL {shown['chosen']:.2e} on {found.held_rows:,} rows that chose nothing "
            f"({shown['int8']:.2e} in int8 alone, {shown['bfloat16']:.2e} in bfloat16)"
        ),
    )


def _check_rankable(engine: Path, contract: Contract) -> None:
    problem = None
    if contract.runtime.decoder == "vendor":
        problem = "it was quantised before it was built; only engines of our own decoder hold the plain weights"
    elif contract.runtime.decoder != "own":
        problem = "it runs with transformers' own model; only our own decoder (on a CPU) has int8"
    elif contract.device.type != "cpu":
        problem = "it runs on a card, which has no int8; rank one that is built with --device cpu"
    elif not computes_in(this_device("cpu"), HIGH):
        problem = f"this CPU has no fast arithmetic for {HIGH}, to leave some of them in"
    if problem is not None:
        raise NotRankable(path=engine, problem=problem)


def _rest(contract: Contract) -> Precision:
    """What linears compute in while others are in int8 alone: float32, whose own error is nothing, if memory allows."""
    stored = sum(file.size for file in contract.files if file.name.endswith(".safetensors"))
    weights = stored // (4 if contract.precision.weights == "float32" else 2)
    return "float32" if 5 * weights < MEMORY_PART * available_memory() else HIGH


def _damages(
    runtime: MovableRuntime, rows: Trials, names: list[str], cost: dict[str, float], say: Callable[[str], None]
) -> tuple[Damage, ...]:
    """Each linear or layer alone in int8, the one that does most harm for what it costs first."""
    found, said = [], time.perf_counter()
    for number, name in enumerate(names):
        linears = linears_of([name], len(cost) // len(LINEARS))
        seen = rows.seen(runtime, linears)
        whole = sum(cost[linear] for linear in linears)
        found.append(Damage(name=name, kl=seen.kl, rel_error=seen.rel_error, cost=whole))
        if time.perf_counter() - said > SAY_EVERY_S:
            said = time.perf_counter()
            say(f"ranking: {number + 1:,} of {len(names):,} {'linears' if '.' in name else 'layers'}")
    return tuple(sorted(found, key=lambda one: -harm(one) / one.cost))


def harm(one: Damage) -> float:
    """In nats; without a head the squared error, which adds up as divergences do."""
    return one.rel_error.mean**2 if one.kl is None else one.kl.mean


def _confirmed(
    runtime: MovableRuntime, parts: DealtRows, cost: dict[str, float], chosen: frozenset[str] | None
) -> tuple[Confirmed, ...]:
    """int8, the set, bfloat16 on the rows that confirm."""
    sets: dict[Literal["int8", "chosen", "bfloat16"], frozenset[str]] = {"int8": frozenset()}
    if chosen is not None:
        sets["chosen"] = chosen
    sets["bfloat16"] = frozenset(cost)
    rates = dict(zip(sets, speeds(runtime, parts.search.ids, sets.values()), strict=True))
    found = []
    for name, moved in sets.items():
        seen = parts.held.seen(runtime, moved)
        share = sum(cost[linear] for linear in moved)
        seconds = (1 - share) / rates["int8"] + share / rates["bfloat16"]
        found.append(
            Confirmed(
                name=name,
                num_linears=len(moved),
                cost=share,
                kl=seen.kl,
                rel_error=seen.rel_error,
                top1=seen.top1,
                tokens_per_s=rates[name],
                expected_tokens_per_s=1 / seconds if name == "chosen" else None,
            )
        )
    return tuple(found)
