"""`extract embed`: one vector a row, as a directory of sentence-transformers says."""

from pathlib import Path
from typing import Any, get_args

import click

from extract.cli.job_options import chosen_job_options
from extract.cli.options import json_option, progress_option, revision_option
from extract.engine.recipe import DType
from extract.progress import Progress
from extract.report import embedded_text, emit
from extract.spec import JobSpec, OutputKind, ValueType

TAKEN = (
    "format",
    "column",
    "id_column",
    "carry",
    "limit",
    "name",
    "split",
    "max_input_tokens",
    "special_tokens",
    "reserve_bytes",
    "max_tokens",
    "threads",
)
"""Keys of a job spec that are options here as they are there."""


@click.command("embed")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.argument("data", metavar="DATA")
@click.option("-o", "--output", metavar="DIR", required=True, help="Output directory.")
@click.option(
    "--pool",
    type=click.Choice([kind for kind in get_args(OutputKind) if kind != "tokens"]),
    help="State that a row's embedding is.  [default: the checkpoint's, last]",
)
@click.option(
    "--normalize/--no-normalize",
    default=None,
    help="Scale embeddings to unit length.  [default: as the checkpoint does]",
)
@click.option(
    "--prompt",
    metavar="TEXT",
    help="Text put before each row's text; may be empty.  [default: the checkpoint's own, none]",
)
@click.option(
    "--prompt-name", metavar="NAME", help="One of the checkpoint's prompts.  [default: its own default, none]"
)
@click.option("--engine", metavar="DIR", help="Engine of CHECKPOINT.  [default: built once, in the user's cache]")
@click.option(
    "--precision",
    type=click.Choice([kind for kind in get_args(DType) if kind != "fp8"]),
    default="auto",
    show_default=True,
    help="Of an engine that is built; auto is the checkpoint's own where the device computes in it.",
)
@click.option(
    "--dtype", type=click.Choice(get_args(ValueType)), default="float32", show_default=True, help="Stored type."
)
@revision_option
@click.option("--workers", type=click.IntRange(min=1), default=1, metavar="PROCESSES", help="As of run.  [default: 1]")
@progress_option
@chosen_job_options(*TAKEN)
@json_option
def embed_command(
    checkpoint: str,
    data: str,
    output: str,
    pool: OutputKind | None,
    normalize: bool | None,
    prompt: str | None,
    prompt_name: str | None,
    engine: str | None,
    precision: str,
    dtype: str,
    revision: str | None,
    workers: int,
    progress: Progress,
    as_json: bool,
    tables: dict[str, dict[str, Any]],
) -> None:
    """Embed a dataset with a decoder: one vector a row.

    CHECKPOINT is a directory of sentence-transformers, whose pooling, normalisation, prompts and longest row are then
    taken as that library takes them, or a plain checkpoint (directory, hub id, GGUF file). An engine for this machine
    is built into the user's cache and found there next time. The output is that of an ordinary job: run the same
    command to go on, then status, verify, report and export. What was taken from where is printed.

    \b
    Example:
        extract embed Qwen/Qwen3-Embedding-0.6B texts.parquet -o embeddings
    """
    from extract.embedding import embed
    from extract.engine.recipe import Recipe, override
    from extract.settings import parse

    if prompt is not None and prompt_name is not None:
        raise click.UsageError("--prompt and --prompt-name do not go together.")
    tables["source"]["path"] = data
    tables["states"] |= {"dtype": dtype, "kind": "last"}
    spec = parse(JobSpec, tables, "options")
    embedded = embed(
        checkpoint if not Path(checkpoint).exists() else Path(checkpoint),
        spec.source,
        output,
        pool=pool,
        normalize=normalize,
        prompt=prompt,
        prompt_name=prompt_name,
        engine=engine,
        recipe=override(Recipe(), dtype=precision),
        text=spec.text,
        states=spec.states,
        run_spec=spec.run,
        revision=revision,
        progress=progress,
        workers=workers,
    )
    emit(embedded, embedded_text, as_json)
