"""`extract build`, `extract families`."""

from collections.abc import Callable
from pathlib import Path

import click

from extract.cli.options import allow_pickle_option, json_option, revision_option, steps_option
from extract.cli.recipe_options import recipe_options
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
@recipe_options
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
@revision_option
@allow_pickle_option
@click.option("--allow-no-final-norm", is_flag=True, help="Take the output as it is where a model has no final norm.")
@steps_option
@json_option
def build_command(
    checkpoint: str,
    output: Path | None,
    recipe: Recipe,
    reference: str | None,
    tiers: bool,
    dry_run: bool,
    revision: str | None,
    allow_pickle: bool,
    allow_no_final_norm: bool,
    say: Callable[[str], None],
    as_json: bool,
) -> None:
    """Build an engine from a checkpoint.

    CHECKPOINT is a Hugging Face directory, the hub id of one in the local cache, or a GGUF file; for tensorrt-llm the
    first two, or what `extract quantize` wrote. The engine holds the decoder without its head, the tokenizer, and a
    contract that says what was built, for which device and limits, and how near it is to the plain model. The build
    proves that and refuses what it cannot prove. Do it once per checkpoint, device and precision; a job needs nothing
    but the engine directory.

    \b
    Example:
        extract build HuggingFaceTB/SmolLM2-135M -o engine --dtype float32
    """
    from extract.cpu.implementations import engine_kernels
    from extract.engine.build_plan import plan_build
    from extract.engine.builder import build
    from extract.engine.tiers import build_tiers

    if dry_run:
        emit(plan_build(checkpoint, recipe, revision=revision, allow_pickle=allow_pickle), build_plan_text, as_json)
        return
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output'.")
    if reference is not None and recipe.runtime == "torch":
        raise click.UsageError("--reference goes with --runtime tensorrt-llm; extract fidelity compares any engine.")
    if tiers:
        built = build_tiers(
            checkpoint, output, recipe, reference=reference, revision=revision, allow_pickle=allow_pickle, say=say
        )
        emit(built, tiers_text, as_json)
        return
    contract = build(
        checkpoint,
        output,
        recipe,
        revision=revision,
        allow_pickle=allow_pickle,
        allow_no_final_norm=allow_no_final_norm,
        reference=reference,
        say=say,
    )
    emit(contract, lambda found: contract_text(found, output, engine_kernels(found)), as_json)


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
