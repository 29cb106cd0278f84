"""`extract quantize`: an FP8 checkpoint for engines of TensorRT-LLM."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from extract.cli.options import json_option, revision_option, steps_option
from extract.engine.recipe import Recipe
from extract.report import emit, quantized_text
from extract.spec import SourceSpec

DEFAULTS = SourceSpec(path="any")
CALIBRATION_ROWS = 512


@click.command("quantize")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option(
    "-o", "--output", metavar="DIR", required=True, type=click.Path(path_type=Path), help="The quantised checkpoint."
)
@click.option("--to", type=click.Choice(["fp8"]), default="fp8", show_default=True, help="Precision of the linears.")
@click.option(
    "--calibration",
    metavar="PATH",
    multiple=True,
    help="Rows that activations are measured on; file, glob, directory or dataset.  [default: docstrings of the "
    "standard library]",
)
@click.option(
    "--column", metavar="NAME", help=f"Their text column; dots reach into structs.  [default: {DEFAULTS.column}]"
)
@click.option(
    "--rows",
    metavar="ROWS",
    type=click.IntRange(min=1),
    default=CALIBRATION_ROWS,
    show_default=True,
    help="How many of them, from the first on.",
)
@click.option(
    "--max-input-tokens",
    metavar="TOKENS",
    type=click.IntRange(min=1),
    default=Recipe().max_input_tokens,
    show_default=True,
    help="They are cut at this length: that of the rows that engines will run.",
)
@click.option(
    "--cache",
    type=click.Choice(["none", "fp8"]),
    default="none",
    show_default=True,
    help="Type of the cache of engines with --cache paged; fp8 measures its scales too.",
)
@revision_option
@steps_option
@json_option
def quantize_command(
    checkpoint: str,
    output: Path,
    to: str,
    calibration: tuple[str, ...],
    column: str | None,
    rows: int,
    max_input_tokens: int,
    cache: Any,
    revision: str | None,
    say: Callable[[str], None],
    as_json: bool,
) -> None:
    """Quantise a checkpoint, once, for every engine built from it.

    CHECKPOINT is a Hugging Face directory or the hub id of one in the local cache. NVIDIA's quantiser (in TensorRT-LLM,
    with nvidia-modelopt and a card) writes FP8 weights and the scales of activations, measured on real rows; the head
    stays as it is. `extract build --runtime tensorrt-llm` takes the result, `extract fidelity` says what it cost.

    \b
    Example:
        extract quantize meta-llama/Llama-3.1-8B --calibration rows.parquet -o llama-8b-fp8
    """
    from extract.quantizing import quantize

    if column is not None and not calibration:
        raise click.UsageError("--column goes with --calibration.")
    source = SourceSpec(path=calibration, column=column or DEFAULTS.column) if calibration else None
    found = quantize(
        checkpoint,
        output,
        calibration=source,
        num_rows=rows,
        max_input_tokens=max_input_tokens,
        cache=cache,
        revision=revision,
        say=say,
    )
    emit(found, quantized_text, as_json)
