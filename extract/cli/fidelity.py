"""`extract fidelity`: an engine against the unquantised model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from extract.cli.options import allow_pickle_option, choices_of, json_option, revision_option, steps_option
from extract.report import emit
from extract.spec import SourceSpec

DEFAULTS = SourceSpec(path="any")


@click.command("fidelity")
@click.argument("engine", metavar="ENGINE", type=click.Path(path_type=Path))
@click.option(
    "--reference", metavar="CHECKPOINT", required=True, help="Directory, hub id or GGUF file of the unquantised model."
)
@click.option(
    "--data",
    metavar="PATH",
    multiple=True,
    help="File, glob, directory or dataset; may be given several times.  [default: docstrings of the standard library]",
)
@click.option("--column", metavar="NAME", help=f"Input column; dots reach into structs.  [default: {DEFAULTS.column}]")
@click.option(
    "--input",
    "kind",
    type=click.Choice(choices_of(SourceSpec, "input")),
    help=f"What the input column holds.  [default: {DEFAULTS.input}]",
)
@click.option(
    "--rows",
    metavar="ROWS",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="How many rows, at even distances.",
)
@click.option("--write", is_flag=True, help="Put the figures into the engine's contract; its id stays the same.")
@click.option(
    "--max-kl",
    metavar="NATS",
    type=click.FloatRange(min=0),
    help="Fail with exit code 7 when the mean KL divergence is above this.  [default: none]",
)
@click.option(
    "--rank-layers",
    is_flag=True,
    help="Instead, measure what int8 does to each layer and each of its linears.",
)
@click.option(
    "--kl-budget",
    metavar="NATS",
    type=click.FloatRange(min=0, min_open=True),
    help="With --rank-layers: search linears to keep in bfloat16 for a mean KL of at most this; exit code 7 where none "
    "will do.  [default: none]",
)
@click.option(
    "-o",
    "--output",
    metavar="RECIPE",
    type=click.Path(path_type=Path),
    help="With --kl-budget: the recipe that builds the engine that was found.  [default: none]",
)
@click.option(
    "--threads",
    metavar="THREADS",
    type=click.IntRange(min=1),
    help="CPU threads of the engine.  [default: the engine's number]",
)
@revision_option
@allow_pickle_option
@steps_option
@json_option
def fidelity_command(
    engine: Path,
    reference: str,
    data: tuple[str, ...],
    column: str | None,
    kind: Any,
    rows: int,
    write: bool,
    max_kl: float | None,
    rank_layers: bool,
    kl_budget: float | None,
    output: Path | None,
    threads: int | None,
    revision: str | None,
    allow_pickle: bool,
    say: Callable[[str], None],
    as_json: bool,
) -> None:
    """Say how far an engine is from the unquantised model.

    Runs the engine as a job would, and the model of CHECKPOINT row by row in the highest precision that memory allows,
    over the same rows. Compares states, and through the checkpoint's own head the next token's distribution: KL
    divergence and how often the most likely token is the same, by position and row length, with intervals from
    resampling rows. Use it before a job with a quantised engine, and with --max-kl as a gate.

    With --rank-layers it measures what int8 does to each layer and linear of an engine of our own decoder, and with
    --kl-budget it finds a few to keep in bfloat16 so that the divergence stays within it.

    \b
    Example:
        extract fidelity engine --reference HuggingFaceTB/SmolLM2-135M --max-kl 0.01
        extract fidelity engine --reference model.gguf --data texts.parquet --column body --rows 1000
        extract fidelity engine --reference model.gguf --rank-layers --kl-budget 0.003 -o mixed.toml
    """
    from extract.fidelity_check.budget import check_budget
    from extract.fidelity_check.layer_ranking import rank_layers as ranked
    from extract.fidelity_check.measure import check, fidelity
    from extract.fidelity_check.ranking_table import ranking_text
    from extract.fidelity_check.table import fidelity_text

    if not data and (column is not None or kind is not None):
        raise click.UsageError("--column and --input go with --data.")
    if not rank_layers and (kl_budget is not None or output is not None):
        raise click.UsageError("--kl-budget and --output go with --rank-layers.")
    if rank_layers and (max_kl is not None or write):
        raise click.UsageError("--max-kl and --write do not go with --rank-layers.")
    if output is not None and kl_budget is None:
        raise click.UsageError("--output goes with --kl-budget.")
    source = SourceSpec(path=data, column=column or DEFAULTS.column, input=kind or DEFAULTS.input) if data else None

    compared: dict[str, Any] = {
        "source": source,
        "rows": rows,
        "threads": threads,
        "revision": revision,
        "allow_pickle": allow_pickle,
        "say": say,
    }
    if rank_layers:
        ranking = ranked(engine, reference, kl_budget=kl_budget, recipe=output, **compared)
        emit(ranking, ranking_text, as_json)
        check_budget(ranking)
        return
    found = fidelity(engine, reference, max_kl=max_kl, write=write, **compared)
    emit(found, fidelity_text, as_json)
    check(found)
