"""`extract build`, `extract families`."""

import functools
from pathlib import Path

import click

from extract.cli.options import choices_of, json_option
from extract.engine.recipe import Recipe
from extract.report import build_plan_text, contract_text, emit, families_text, tiers_text


@click.command("build")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Engine directory; with --tiers, of several.  [required unless --dry-run]",
)
@click.option("--recipe", metavar="RECIPE", help="Recipe: a TOML file, or the name of a shipped one.  [default: none]")
@click.option(
    "--runtime",
    type=click.Choice(choices_of(Recipe, "runtime")),
    help="What runs the engine; tensorrt-llm needs NVIDIA's package and card.  [default: the recipe's, torch]",
)
@click.option(
    "--device",
    type=click.Choice(choices_of(Recipe, "device")),
    help="Where the engine will run.  [default: the recipe's, auto]",
)
@click.option(
    "--dtype",
    type=click.Choice(choices_of(Recipe, "dtype")),
    help="Precision; auto is the checkpoint's own where the device computes in it, fp8 takes a checkpoint that "
    "`extract quantize` made.  [default: the recipe's, auto]",
)
@click.option(
    "--max-input-tokens",
    metavar="TOKENS",
    type=int,
    help=f"Longest row.  [default: the recipe's, {Recipe().max_input_tokens}]",
)
@click.option(
    "--max-sequences",
    metavar="SEQUENCES",
    type=int,
    help=f"Most sequences of one pass.  [default: the recipe's, {Recipe().max_sequences:,}]",
)
@click.option(
    "--max-tokens",
    metavar="TOKENS",
    type=int,
    help="Most tokens of one batch.  [default: the recipe's, 16,384 with our own decoder, else 4,096 on a CPU, 131,072 "
    "on a card, 1,048,576 with tensorrt-llm]",
)
@click.option(
    "--pass-tokens",
    metavar="TOKENS",
    type=int,
    help="On a card: most tokens of one pass, several of which make a batch.  [default: the recipe's, all that fit]",
)
@click.option(
    "--states",
    type=click.Choice(choices_of(Recipe, "states")),
    help="tensorrt-llm: put out every token's state, or the last one's only.  [default: the recipe's, tokens]",
)
@click.option(
    "--cache",
    type=click.Choice(choices_of(Recipe, "cache")),
    help="tensorrt-llm: paged runs in the vendor's executor, with one generated token.  [default: the recipe's, none]",
)
@click.option(
    "--card-memory",
    metavar="GIB",
    type=float,
    help="tensorrt-llm: memory of the card to plan for.  [default: the recipe's, the card at hand]",
)
@click.option(
    "--reference",
    metavar="CHECKPOINT",
    help="tensorrt-llm: unquantised checkpoint, or float32 torch engine of it, to compare with.  [default: CHECKPOINT, "
    "or what it was quantised from]",
)
@click.option(
    "--tiers", is_flag=True, help="tensorrt-llm: an engine for each token budget that fits, doubled each time."
)
@click.option("--dry-run", is_flag=True, help="Say limits and memory, and build nothing; needs no card.")
@click.option(
    "--decoder",
    type=click.Choice(choices_of(Recipe, "decoder")),
    help="Whose code runs it: our own packed decoder (auto: where it is proven), or transformers'.  "
    "[default: the recipe's, auto]",
)
@click.option(
    "--compile",
    "compile_how",
    type=click.Choice(choices_of(Recipe, "compile")),
    help="Our own decoder on a card: ahead compiles it into the engine, for this card and torch; jit at every start.  "
    "[default: the recipe's, auto]",
)
@click.option(
    "--micro-batch",
    metavar="TOKENS",
    type=int,
    help="Tokens that one thread of our own decoder carries through all layers.  [default: the recipe's, 256]",
)
@click.option(
    "--threads",
    metavar="THREADS",
    type=int,
    help="CPU threads of a run that names no number.  [default: the recipe's, all that it may use]",
)
@click.option(
    "--layout",
    type=click.Choice(choices_of(Recipe, "layout")),
    help="How sequences share a pass; auto takes the first that is proven.  [default: the recipe's, auto]",
)
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub checkpoint.  [default: main]")
@click.option("--allow-pickle", is_flag=True, help="Read weights from pickled .bin files, through the safe loader.")
@click.option("--allow-no-final-norm", is_flag=True, help="Take the output as it is where a model has no final norm.")
@click.option("--quiet", is_flag=True, help="No steps on stderr.")
@json_option
def build_command(
    checkpoint: str,
    output: Path | None,
    recipe: str | None,
    runtime: str | None,
    device: str | None,
    dtype: str | None,
    max_input_tokens: int | None,
    max_sequences: int | None,
    max_tokens: int | None,
    pass_tokens: int | None,
    states: str | None,
    cache: str | None,
    card_memory: float | None,
    reference: str | None,
    tiers: bool,
    dry_run: bool,
    decoder: str | None,
    compile_how: str | None,
    micro_batch: int | None,
    threads: int | None,
    layout: str | None,
    revision: str | None,
    allow_pickle: bool,
    allow_no_final_norm: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Build an engine from a checkpoint.

    CHECKPOINT is a Hugging Face directory, the hub id of one in the local cache, or a GGUF file; for tensorrt-llm the
    first two, or what `extract quantize` wrote. The engine holds the
    decoder without its head, the tokenizer, and a contract that says what was built, for which device and limits, and
    how near it is to the plain model. The build proves that and refuses what it cannot prove. Do it once per
    checkpoint, device and precision; a job needs nothing but the engine directory.

    \b
    Example:
        extract build HuggingFaceTB/SmolLM2-135M -o engine --dtype float32
    """
    from extract import assets
    from extract.cpu.implementations import engine_kernels
    from extract.engine.build_plan import plan_build
    from extract.engine.builder import build
    from extract.engine.recipe import load_recipe, override
    from extract.engine.tiers import build_tiers

    chosen = load_recipe(assets.find("engines", recipe)) if recipe is not None else Recipe()
    chosen = override(
        chosen,
        runtime=runtime,
        device=device,
        dtype=dtype,
        max_input_tokens=max_input_tokens,
        max_sequences=max_sequences,
        max_tokens=max_tokens,
        pass_tokens=pass_tokens,
        states=states,
        cache=cache,
        card_memory_gib=card_memory,
        decoder=decoder,
        compile=compile_how,
        micro_batch=micro_batch,
        threads=threads,
        layout=layout,
    )
    if dry_run:
        emit(plan_build(checkpoint, chosen, revision=revision, allow_pickle=allow_pickle), build_plan_text, as_json)
        return
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output'.")
    if reference is not None and chosen.runtime == "torch":
        raise click.UsageError("--reference: only with --runtime tensorrt-llm; extract fidelity compares any engine.")
    say = functools.partial(_say, quiet)
    if tiers:
        built = build_tiers(
            checkpoint, output, chosen, reference=reference, revision=revision, allow_pickle=allow_pickle, say=say
        )
        emit(built, tiers_text, as_json)
        return
    contract = build(
        checkpoint,
        output,
        chosen,
        revision=revision,
        allow_pickle=allow_pickle,
        allow_no_final_norm=allow_no_final_norm,
        reference=reference,
        say=say,
    )
    emit(contract, lambda found: contract_text(found, output, engine_kernels(found)), as_json)


def _say(quiet: bool, message: str) -> None:
    if not quiet:
        click.echo(message, err=True)


@click.command("families")
@json_option
def families_command(as_json: bool) -> None:
    """List the model families that were tried, and how each runs.

    A build does not consult this table: it proves the checkpoint at hand. packed: sequences of any length share a pass;
    dense: sequences of equal length do; refused: not a causal decoder.

    \b
    Example:
        extract families
    """
    from extract.engine.families import FAMILIES

    emit(FAMILIES, families_text, as_json)
