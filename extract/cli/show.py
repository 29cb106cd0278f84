"""`extract inspect`, `extract sample`."""

from pathlib import Path

import click

from extract.cli.options import PLACE, json_option
from extract.report import contract_text, emit, output_text, sample_text
from extract.storage import Place


@click.command("inspect")
@click.argument("path", metavar="ENGINE|OUT", type=PLACE)
@click.option(
    "--row", metavar="ROW", type=click.IntRange(min=0), help="Of an output: also show this source row.  [default: none]"
)
@json_option
def inspect_command(path: Place, row: int | None, as_json: bool) -> None:
    """Show what an engine promises, or what an output holds.

    Of an engine: its contract. Of an output: schema, metadata, shards, and one row if asked. Use it to see what made
    an output, and to read a row without writing code. Reads no weights.

    \b
    Example:
        extract inspect out --row 7
    """
    from extract.cpu.implementations import engine_kernels
    from extract.engine.contract import read_contract
    from extract.engine.fetching import local_engine
    from extract.inspection import holds_engine, inspect_output

    if holds_engine(path):
        if row is not None:
            raise click.UsageError("--row is for output directories; this is an engine.")
        engine = local_engine(path)
        emit(read_contract(engine), lambda found: contract_text(found, engine, engine_kernels(found)), as_json)
    else:
        emit(inspect_output(path, row), output_text, as_json)


@click.command("sample")
@click.option("-o", "--output", metavar="FILE", required=True, type=click.Path(path_type=Path), help="Parquet file.")
@click.option(
    "--rows",
    metavar="ROWS",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="How many passages; all, if there are fewer.",
)
@json_option
def sample_command(output: Path, rows: int, as_json: bool) -> None:
    """Write a Parquet file of real passages to try things on.

    They are docstrings of Python's standard library, with columns `id`, `module` and `text`, taken at even distances,
    so the same Python gives the same file. An existing file is never overwritten.

    \b
    Example:
        extract sample -o passages.parquet --rows 1000
    """
    from extract.sample import write_sample

    written = write_sample(output, rows)
    emit({"path": str(output), "rows": written, "columns": ["id", "module", "text"]}, sample_text, as_json)
