"""Several engines from one checkpoint, each for passes twice as large as the one before, until the next does not fit.

One checkpoint yields many engines: a run takes the tier that its card and its rows suit. A tier that is there already
is kept, so a build that was broken off goes on.
"""

from collections.abc import Callable
from pathlib import Path

from extract.engine.build_plan import plan_build
from extract.engine.builder import build
from extract.engine.contract import Contract, NotAnEngine, PassOutOfMemory, read_contract
from extract.engine.recipe import Recipe, override
from extract.engine.tensorrt_builder import check_can_build
from extract.errors import SpecError
from extract.tensorrt.open_runtime import NotLoaded
from extract.tensorrt.vendor_build import VendorBuildFailed


class NoTiers(SpecError):
    """A runtime whose engines are not committed to one budget."""

    template = "tiers: runtime {runtime} serves every token budget with one engine. Leave out --tiers."


def build_tiers(
    checkpoint: str | Path,
    output: Path,
    recipe: Recipe,
    *,
    reference: str | Path | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    say: Callable[[str], None] = lambda message: None,
) -> dict[Path, Contract]:
    """Build an engine for every token budget that fits the card, in `output/tokens-<budget>`.

    Args:
        checkpoint: as for `build`.
        output: a directory, which may hold tiers already.
        recipe: with runtime tensorrt-llm; its pass_tokens, if any, is the largest tier.
        reference: as for `build`.
        revision: as for `build`.
        allow_pickle: as for `build`.
        say: called with a line whenever a step begins.

    Raises:
        NoTiers: another runtime.
        EngineRefused: not even the first tier could be built.
    """
    if recipe.runtime != "tensorrt-llm":
        raise NoTiers(runtime=recipe.runtime)
    check_can_build(recipe, checkpoint)
    budgets = plan_build(checkpoint, recipe, revision=revision).tiers
    built: dict[Path, Contract] = {}
    for budget in budgets:
        directory = output / f"tokens-{budget}"
        try:
            built[directory] = read_contract(directory)
            say(f"{directory}: is there already")
            continue
        except NotAnEngine:
            pass
        say(f"tier of {budget:,} tokens a pass")
        try:
            built[directory] = build(
                checkpoint,
                directory,
                override(recipe, pass_tokens=budget),
                reference=reference,
                revision=revision,
                allow_pickle=allow_pickle,
                say=say,
            )
        except (VendorBuildFailed, NotLoaded, PassOutOfMemory) as error:
            if not built:
                raise
            say(f"tier of {budget:,} tokens does not fit: {error}")
            break
    return built
