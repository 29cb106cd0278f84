"""`extract verify`, `extract reprocess`."""

from typing import Any, get_args

import click

from extract.cli.options import PLACE, json_option, progress_option, row_options, say_on_stderr
from extract.progress import Progress
from extract.report import derived_text, emit, summary_text, verification_text
from extract.spec import Compression, ValueType
from extract.storage import Place


@click.command("verify")
@click.argument("out", metavar="OUT", type=PLACE)
@click.option(
    "--recompute",
    metavar="ROWS",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Also compute this many rows again with the plain model, and tokenise them again from the source.",
)
@click.option(
    "--engine",
    metavar="DIR",
    type=PLACE,
    help="Where the job's engine lies now, for --recompute.  [default: where it lay]",
)
@click.option(
    "--reference",
    metavar="CHECKPOINT",
    help="Unquantised checkpoint, or torch engine of it, for --recompute.  [default: the engine's own weights; "
    "tensorrt-llm engines have none]",
)
@click.option("--repair", is_flag=True, help="Move shards that fail aside; the next run makes them again.")
@json_option
def verify_command(
    out: Place, recompute: int, engine: Place | None, reference: str | None, repair: bool, as_json: bool
) -> None:
    """Check every shard of an output, finished or not.

    Use it after a run, a copy or a crash. Reads each file once, at the speed of the disk, and compares it with its
    commit record: hashes, sizes, schema, rows in order and complete, outcomes, states per row, finite values, and that
    the shards tile the source. Needs no engine unless rows are recomputed.

    \b
    Example:
        extract verify out --recompute 64
    """
    from extract.verification import verify

    found = verify(
        out,
        recompute=recompute,
        repair=repair,
        engine=engine,
        reference=reference,
        say=say_on_stderr,
    )
    emit(found, verification_text, as_json)


@click.command("reprocess")
@click.argument("out", metavar="OUT", type=PLACE)
@click.option("-o", "--output", metavar="OUT2", required=True, type=PLACE, help="New output directory.")
@click.option("--shards", metavar="RANGES", help="Only these shards, such as 3,5-7.  [default: all]")
@row_options
@click.option("--engine", metavar="DIR", help="Compute with this engine.  [default: the one that made OUT]")
@click.option("--cast", type=click.Choice(get_args(ValueType)), help="Stored type.  [default: as in OUT]")
@click.option("--pool", type=click.Choice(["last", "mean", "first"]), help="One state a row.  [default: as in OUT]")
@click.option(
    "--rows-per-shard",
    metavar="ROWS",
    type=click.IntRange(min=1),
    help="Source rows of a shard file.  [default: as in OUT; by size where rows are computed]",
)
@click.option(
    "--compression", type=click.Choice(get_args(Compression)), help="Of the shard files.  [default: as in OUT]"
)
@click.option("--compression-level", metavar="1-19", type=click.IntRange(1, 19), help="Of zstd.  [default: as in OUT]")
@progress_option
@json_option
def reprocess_command(
    out: Place,
    output: Place,
    shards: str | None,
    rows: str | None,
    outcomes: tuple[str, ...],
    engine: str | None,
    cast: Any,
    pool: Any,
    rows_per_shard: int | None,
    compression: Any,
    compression_level: int | None,
    progress: Progress,
    as_json: bool,
) -> None:
    """Make another output from OUT; never in place.

    With --shards, --rows, --outcome or --engine, the chosen rows are computed again from the source with the engine:
    after a fix, or to look closer. With only --cast, --pool, --rows-per-shard or --compression, what is stored is
    rewritten without the model.

    \b
    Example:
        extract reprocess out --pool last --cast float32 -o out-last
        extract reprocess out --outcome non_finite --cast float32 -o out-again
    """
    from extract.derivation import Change, derive
    from extract.reprocessing import respec
    from extract.runners.local import run

    change = Change(
        dtype=cast,
        pool=pool,
        rows_per_shard=rows_per_shard,
        compression=compression,
        compression_level=compression_level,
    )
    if shards or rows or outcomes or engine:
        spec = respec(out, output, shards=shards, rows=rows, outcomes=outcomes, engine=engine, change=change)
        emit(run(spec, progress=progress), summary_text, as_json)
        return
    if change == Change():
        raise click.UsageError("Nothing to do: choose rows, or what to change.")
    emit(derive(out, output, change, progress), derived_text, as_json)
