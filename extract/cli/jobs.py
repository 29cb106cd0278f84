"""`extract plan`, `extract run`, `extract status`."""

import click

from extract.cli.options import PLACE, job_options, json_option
from extract.report import emit, plan_text, status_text, summary_text
from extract.spec import JobSpec
from extract.storage import Place


@click.command("plan")
@job_options
@json_option
def plan_command(spec: JobSpec, as_json: bool) -> None:
    """Say what a job will do and cost, before any weights load.

    Use it before every long run. Reads the source's layout and tokenises a sample of its rows: rows, tokens,
    truncations, shards, bytes, time, free disk, and one row as the model will see it. Refuses what `run` would refuse.
    SPEC is a job spec (TOML) or the name of one that comes with extract; options go over it.

    \b
    Example:
        extract plan --engine engine --data texts.parquet --kind last -o out
    """
    from extract.jobs import plan

    emit(plan(spec), plan_text, as_json)


@click.command("run")
@job_options
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    metavar="PROCESSES",
    help="Processes, each with an engine and a share of the threads, or a card.  [default: 1]",
)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
def run_command(spec: JobSpec, workers: int, quiet: bool, as_json: bool) -> None:
    """Run a job, or go on with it after a stop, a kill or a crash.

    Every row of the source ends in one outcome, in source order. Finished shards are never made again: run the same
    command until it says complete. Several processes may run the same command on one output directory and share the
    work; --workers starts several on this machine, and replaces one that dies. Batch size and threads may
    differ from run to run; anything that would change the numbers is refused.

    \b
    Example:
        extract run jobs/demo.toml --engine engine -o out
    """
    from extract.progress import Progress
    from extract.runners.local import run

    emit(run(spec, progress=Progress(quiet=quiet), workers=workers), summary_text, as_json)


@click.command("status")
@click.argument("out", metavar="OUT", type=PLACE)
@json_option
def status_command(out: Place, as_json: bool) -> None:
    """Say how far a job is, finished, running or killed.

    Use it from another terminal or machine while a job runs. Reads the commit records only: no engine, no data file.

    \b
    Example:
        extract status out
    """
    from extract.status import status

    emit(status(out), status_text, as_json)
