"""`extract plan`, `extract run`, `extract finalize`, `extract status`."""

import click

from extract.cli.job_options import job_options
from extract.cli.options import PLACE, json_option, progress_option, say_on_stderr
from extract.progress import Progress
from extract.report import emit, finalized_text, plan_text, status_text, stripe_text, summary_text
from extract.runners.patience import USUAL_PATIENCE, Patience
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
    type=int,
    metavar="PROCESSES",
    help="Processes, each with an engine and a share of the threads, or a card.  [default: 1; all that fit on ray]",
)
@click.option(
    "--worker-index",
    type=int,
    metavar="INDEX",
    help="Make only shards INDEX, INDEX + COUNT, ...: one of COUNT workers of an array job.  [default: none]",
)
@click.option("--worker-count", type=int, metavar="COUNT", help="Of --worker-index.  [default: none]")
@click.option(
    "--on", type=click.Choice(["here", "ray"]), default="here", help="Where the work is done.  [default: here]"
)
@click.option("--address", metavar="ADDRESS", help="Of a Ray cluster, such as auto.  [default: this machine]")
@click.option(
    "--boot-timeout",
    type=float,
    metavar="SECONDS",
    help="With several workers: replace one that has not loaded its engine by then.  "
    f"[default: {USUAL_PATIENCE.boot_timeout_s:.0f}]",
)
@click.option(
    "--stall-timeout",
    type=float,
    metavar="SECONDS",
    help="With several workers: replace one that makes no progress for so long.  "
    f"[default: {USUAL_PATIENCE.stall_timeout_s:.0f}]",
)
@progress_option
@json_option
def run_command(
    spec: JobSpec,
    workers: int | None,
    worker_index: int | None,
    worker_count: int | None,
    on: str,
    address: str | None,
    boot_timeout: float | None,
    stall_timeout: float | None,
    progress: Progress,
    as_json: bool,
) -> None:
    """Run a job, or go on with it after a stop, a kill or a crash.

    Every row of the source ends in one outcome, in source order. Finished shards are never made again: run the same
    command until it says complete. Several processes may run the same command on one output directory and share the
    work; --workers starts several on this machine, and replaces one that dies. Batch size and threads may
    differ from run to run; anything that would change the numbers is refused.

    \b
    Example:
        extract run jobs/demo.toml --engine engine -o out
    """
    from extract.runners.local import run
    from extract.runners.stripes import run_stripe

    if (worker_index is None) != (worker_count is None):
        raise click.UsageError("--worker-index and --worker-count go together.")
    if workers is not None and workers < 1:
        raise click.UsageError("--workers is 1 or more.")
    if on != "ray" and address is not None:
        raise click.UsageError("--address goes with --on ray.")
    if on == "ray" and worker_index is not None:
        raise click.UsageError("--worker-index does not go with --on ray, where a driver hands out the shards.")
    for option, asked in {"--boot-timeout": boot_timeout, "--stall-timeout": stall_timeout}.items():
        if asked is not None and not asked > 0:
            raise click.UsageError(f"{option} is more than 0 seconds.")
        if asked is not None and on != "ray" and (workers or 1) == 1:
            raise click.UsageError(f"{option} goes with --workers 2 or more, or --on ray.")
    patience = Patience(
        boot_timeout_s=boot_timeout or USUAL_PATIENCE.boot_timeout_s,
        stall_timeout_s=stall_timeout or USUAL_PATIENCE.stall_timeout_s,
    )
    if on == "ray":
        from extract.runners.ray_driver import run_on_ray
        from extract.runners.ray_places import RaySettings

        settings = RaySettings(address=address, max_workers=workers, patience=patience)
        emit(run_on_ray(spec, settings, progress=progress), summary_text, as_json)
        return
    workers = workers or 1
    if worker_index is not None and worker_count is not None:
        part = run_stripe(spec, worker_index, worker_count, progress=progress, workers=workers, patience=patience)
        emit(part, stripe_text, as_json)
        return
    emit(run(spec, progress=progress, workers=workers, patience=patience), summary_text, as_json)


@click.command("finalize")
@click.argument("out", metavar="OUT", type=PLACE)
@json_option
def finalize_command(out: Place, as_json: bool) -> None:
    """End a job whose shards an array of workers made.

    Use it after `extract run --worker-index`, when all workers have ended: it checks that the shards cover every row of
    the source exactly once and writes the manifest. Where shards are missing it lists them and ends with code 6. Reads
    the commit records only: no engine, no source, no data file.

    \b
    Example:
        extract finalize out
    """
    from extract.runners.finalizing import finalize_output

    emit(finalize_output(out), finalized_text, as_json)


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

    emit(status(out, say=say_on_stderr), status_text, as_json)
