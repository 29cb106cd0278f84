"""`extract tune`: the fastest settings of an engine on this device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from extract.cli.options import NamesType, NumbersType, choices_of, json_option, steps_option
from extract.engine.recipe import Recipe
from extract.report import emit


@click.command("tune")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option(
    "-o", "--output", metavar="RECIPE", required=True, type=click.Path(path_type=Path), help="Recipe to write."
)
@click.option(
    "--plot",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Picture of the curves, .svg or .png.  [default: RECIPE with .svg]",
)
@click.option(
    "--precisions",
    metavar="LIST",
    type=NamesType(),
    help="Precisions to measure, as float32,bfloat16.  [default: float32, bfloat16, int8, fp8 if the device has them]",
)
@click.option(
    "--threads",
    metavar="LIST",
    type=NumbersType("1,2"),
    help="Numbers of CPU threads to measure, such as 1,2.  [default: all, half, 1]",
)
@click.option(
    "--max-input-tokens",
    metavar="TOKENS",
    type=click.IntRange(min=1),
    help=f"Longest row.  [default: {Recipe().max_input_tokens}]",
)
@click.option(
    "--seconds",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help="Time for the sweep with its build; what is not measured by then is left out.  [default: 150]",
)
@click.option(
    "--allow-int8", is_flag=True, help="Choose int8, or fp8 on a card, where it is fastest, though it is less exact."
)
@click.option(
    "--device",
    type=click.Choice(choices_of(Recipe, "device")),
    default="auto",
    show_default=True,
    help="What to tune for.",
)
@click.option(
    "--runtime",
    type=click.Choice(choices_of(Recipe, "runtime")),
    default="torch",
    show_default=True,
    help="What runs the engine; tensorrt-llm builds and measures one for each token budget, doubled "
    "until the card refuses.",
)
@click.option(
    "--reference",
    metavar="CHECKPOINT",
    help="tensorrt-llm: what builds compare with.  [default: CHECKPOINT, or what it was quantised from]",
)
@steps_option
@json_option
def tune_command(
    checkpoint: str,
    output: Path,
    plot: Path | None,
    precisions: tuple[str, ...] | None,
    threads: tuple[int, ...] | None,
    max_input_tokens: int | None,
    seconds: float | None,
    allow_int8: bool,
    device: str,
    runtime: Any,
    reference: str | None,
    say: Callable[[str], None],
    as_json: bool,
) -> None:
    """Find the fastest settings of an engine on this device.

    Builds the checkpoint in a temporary directory (TMPDIR), measures token budgets, threads and precisions on real
    passages, prints the table, draws its curves and writes a recipe for `extract build`. Do it once per checkpoint and
    machine, while nothing else runs there. The recipe is never less exact than the checkpoint's own precision, unless
    int8 is allowed. With tensorrt-llm each token budget is an engine of its own: allow it minutes (--seconds). An
    existing file is replaced only if this command wrote it.

    \b
    Example:
        extract tune HuggingFaceTB/SmolLM2-135M -o smollm2.toml
        extract tune HuggingFaceTB/SmolLM2-135M -o int8.toml --precisions float32,int8 --allow-int8
    """
    from extract.tuning.plot import draw, picture_format
    from extract.tuning.recipe_file import check_replaceable, write_recipe
    from extract.tuning.search import SECONDS, tune
    from extract.tuning.table import tuning_text

    if reference is not None and runtime == "torch":
        raise click.UsageError("--reference goes with --runtime tensorrt-llm.")
    picture = output.with_suffix(".svg") if plot is None else plot
    picture_format(picture)
    if picture == output:
        raise click.UsageError("-o and --plot name the same file.")
    check_replaceable(output, "-o")
    check_replaceable(picture, "--plot")
    found = tune(
        checkpoint,
        precisions=precisions,
        threads=threads,
        max_input_tokens=max_input_tokens,
        seconds=SECONDS if seconds is None else seconds,
        allow_int8=allow_int8,
        device=device,
        runtime=runtime,
        reference=reference,
        say=say,
    )
    table = tuning_text(found)
    write_recipe(output, found.recipe, table)
    draw(found, picture)
    then = f"written    {output}, {picture}\nnext       extract build {checkpoint} -o ENGINE --recipe {output}"
    emit(found, lambda _: f"{table}\n{then}", as_json)
