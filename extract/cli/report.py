"""`extract report`: an output as a page to look at."""

from pathlib import Path

import click

from extract.cli.options import PLACE, json_option
from extract.report import emit
from extract.storage import Place


@click.command("report")
@click.argument("out", metavar="OUT", type=PLACE)
@click.option("-o", "--output", metavar="FILE", required=True, type=click.Path(path_type=Path), help="HTML page.")
@click.option(
    "--rows",
    metavar="ROWS",
    type=click.IntRange(1, 10_000),
    default=2_000,
    show_default=True,
    help="How many rows to look at with their states.",
)
@json_option
def report_command(out: Place, output: Path, rows: int, as_json: bool) -> None:
    """Draw an output as one HTML page that a person can look at.

    Outcomes by source file, lengths, speed over time, norms and dimensions of the states, a map of sampled rows with
    their texts and neighbours, near duplicates, and whether the files are intact. Works on unfinished outputs. The page
    is one file that loads nothing; an earlier page of that name is replaced. Needs no engine. Takes seconds, whatever
    the size of the output, and about a minute more where umap-learn is installed, which draws a second map.

    \b
    Example:
        extract report out -o report.html
    """
    from extract.report_page.page import size_text, write_report

    report = write_report(out, output, rows)

    def text(_: object) -> str:
        seen = 0 if report.sample is None else len(report.sample.rows)
        return f"{output}: {seen:,} of {report.num_rows_out:,} rows shown, {size_text(output.stat().st_size)}"

    emit(report, text, as_json)
