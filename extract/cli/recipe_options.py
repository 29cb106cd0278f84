"""The options of `build` that are keys of a recipe, and how they become one: a TOML file first, options over it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from extract import assets
from extract.cli.options import value_type
from extract.engine.recipe import Recipe, load_recipe, override

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RecipeOption:
    """One option, and the key of the recipe that it sets."""

    key: str
    flag: str
    help: str
    default: str
    """What stands where neither the option nor the recipe says anything."""
    metavar: str | None = None


RECIPE_OPTIONS = (
    RecipeOption(
        "runtime", "--runtime", "What runs the engine; tensorrt-llm needs NVIDIA's package and card.", Recipe().runtime
    ),
    RecipeOption("device", "--device", "Where the engine will run.", Recipe().device),
    RecipeOption(
        "dtype",
        "--dtype",
        "Precision; auto is the checkpoint's own where the device computes in it, fp8 with tensorrt-llm takes a "
        "checkpoint that `extract quantize` made.",
        Recipe().dtype,
    ),
    RecipeOption(
        "max_input_tokens", "--max-input-tokens", "Longest row.", f"{Recipe().max_input_tokens}", metavar="TOKENS"
    ),
    RecipeOption(
        "max_sequences",
        "--max-sequences",
        "Most sequences of one pass.",
        f"{Recipe().max_sequences:,}",
        metavar="SEQUENCES",
    ),
    RecipeOption(
        "max_tokens",
        "--max-tokens",
        "Most tokens of one batch.",
        "131,072 on a card, 16,384 on a CPU with our own decoder, 4,096 with transformers', 1,048,576 with "
        "tensorrt-llm",
        metavar="TOKENS",
    ),
    RecipeOption(
        "pass_tokens",
        "--pass-tokens",
        "On a card: most tokens of one pass, several of which make a batch.",
        "all that fit",
        metavar="TOKENS",
    ),
    RecipeOption(
        "decoder",
        "--decoder",
        "Whose code runs it: our own packed decoder (auto: where it is proven), or transformers'.",
        Recipe().decoder,
    ),
    RecipeOption(
        "compile",
        "--compile",
        "Our own decoder on a card: ahead compiles it into the engine, for this card and torch; jit at every start.",
        Recipe().compile,
    ),
    RecipeOption(
        "micro_batch",
        "--micro-batch",
        "Tokens that one thread of our own decoder carries through all layers.",
        "256",
        metavar="TOKENS",
    ),
    RecipeOption(
        "threads",
        "--threads",
        "CPU threads of a run that names no number.",
        "all that it may use",
        metavar="THREADS",
    ),
    RecipeOption(
        "layout", "--layout", "How sequences share a pass; auto takes the first that is proven.", Recipe().layout
    ),
    RecipeOption(
        "states",
        "--states",
        "tensorrt-llm: put out every token's state, or the last one's only.",
        Recipe().states,
    ),
    RecipeOption(
        "cache",
        "--cache",
        "tensorrt-llm: paged runs in the vendor's executor, with one generated token.",
        Recipe().cache,
    ),
    RecipeOption(
        "card_memory_gib",
        "--card-memory",
        "tensorrt-llm: memory of the card to plan for.",
        "the card at hand",
        metavar="GIB",
    ),
)
"""What any engine has, then what our own decoder and transformers' have, then what tensorrt-llm has."""


def recipe_options(command: F) -> F:
    """Add `--recipe` and every option of a recipe; the command receives one `recipe: Recipe`."""

    @functools.wraps(command)
    def with_recipe(*, recipe: str | None, **given: Any) -> Any:
        chosen = load_recipe(assets.find("engines", recipe)) if recipe is not None else Recipe()
        options = {option.key: given.pop(f"recipe_{option.key}") for option in RECIPE_OPTIONS}
        return command(recipe=override(chosen, **options), **given)

    wrapped: Any = with_recipe
    for option in reversed(RECIPE_OPTIONS):
        wrapped = click.option(
            option.flag,
            f"recipe_{option.key}",
            type=value_type(Recipe, option.key),
            metavar=option.metavar,
            help=f"{option.help}  [default: the recipe's, {option.default}]",
        )(wrapped)
    decorated: F = click.option(
        "--recipe", metavar="RECIPE", help="Recipe: a TOML file, or the name of a shipped one.  [default: none]"
    )(wrapped)
    return decorated
