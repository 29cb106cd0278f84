"""`extract inspect`, `extract sample`."""

from pathlib import Path

import click

from extract.cli.options import json_option
from extract.report import contract_text, emit, output_text, sample_text


@click.command("inspect")
@click.argument("path", metavar="ENGINE|OUT", type=click.Path(path_type=Path))
@click.option("--row", metavar="ROW", type=int, help="Of an output: show this source row.")
@json_option
def inspect_command(path: Path, row: int | None, as_json: bool) -> None:
    """Show what an engine promises, or what an output directory holds.

    Of an engine: its contract. Of an output: schema, metadata, shards, and one row if asked.

    \b
    Example:
        extract inspect out --row 7
    """
    from extract.engine.contract import CONTRACT_FILE, read_contract
    from extract.inspection import inspect_output

    if (path / CONTRACT_FILE).is_file() or not (path / "job.json").is_file():
        if row is not None:
            raise click.UsageError("--row is for output directories; this is an engine.")
        emit(read_contract(path), lambda found: contract_text(found, path), as_json)
    else:
        emit(inspect_output(path, row), output_text, as_json)


@click.command("sample")
@click.option("-o", "--output", metavar="FILE", required=True, type=click.Path(path_type=Path), help="Parquet file.")
@click.option("--rows", metavar="ROWS", type=click.IntRange(min=1), default=1000, show_default=True, help="How many.")
@json_option
def sample_command(output: Path, rows: int, as_json: bool) -> None:
    """Write a Parquet file of real passages to try things on: docstrings of Python's standard library.

    Columns `id`, `module` and `text`; passages are taken at even distances, so the same Python gives the same file.

    \b
    Example:
        extract sample -o passages.parquet --rows 1000
    """
    from extract.sample import write_sample

    written = write_sample(output, rows)
    emit({"path": str(output), "rows": written, "columns": ["id", "module", "text"]}, sample_text, as_json)
