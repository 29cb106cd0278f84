"""A job spec, opened: contract, tokenizer, source and plan, before any weights load; and `plan`, its cost."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from extract.engine.contract import read_contract
from extract.engine.fetching import local_engine
from extract.errors import ExtractError, SpecError
from extract.estimate import Estimate, check_space, estimate
from extract.job import check_same, read_job
from extract.planning import Plan, make_plans
from extract.sources import Source, open_source
from extract.spec import JobSpec, as_table
from extract.storage import Place, locate
from extract.text.tokens import RowTokenizer, open_tokenizer


class Missing(SpecError):
    """A job without an engine or without a place for its output."""

    template = "the job names no {what}. Put {key} into the job spec, or give {option}."


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJob:
    """A planned job with its source and tokenizer open; no weights are loaded."""

    plan: Plan
    source: Source
    tokenizer: RowTokenizer
    engine: Path
    output: Place | None
    others: tuple[tuple[Path, Plan], ...] = ()
    """Engines for devices that `engine` does not fit, each with its plan of the same job."""


def open_job(spec: JobSpec) -> OpenJob:
    """Read contract, tokenizer and source layout, and resolve the plan.

    Raises:
        SpecError, SourceError, EngineRefused: whatever is wrong with any of them.
    """
    if spec.engine is None:
        raise Missing(what="engine", key='engine = "DIRECTORY"', option="--engine DIRECTORY")
    engine, *others = (local_engine(place) for place in (spec.engine, *spec.other_engines))
    contract = read_contract(engine)
    known = _known_fingerprint(spec)
    source = open_source(spec.source, known)
    try:
        plan, *plans = make_plans(_with_shard_size(spec), [contract, *map(read_contract, others)], source.layout())
        tokenizer = open_tokenizer(
            engine,
            contract.tokenizer,
            plan.spec.text,
            max_input_tokens=plan.max_input_tokens,
            input=spec.source.input,
            vocab_size=contract.checkpoint.vocab_size,
        )
    except BaseException:
        source.close()
        raise
    output = locate(spec.output) if spec.output is not None else None
    return OpenJob(
        plan=plan,
        source=source,
        tokenizer=tokenizer,
        engine=engine,
        output=output,
        others=tuple(zip(others, plans, strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """What `plan` found."""

    job: str
    spec: JobSpec
    engine: Mapping[str, Any]
    estimate: Estimate

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "job": self.job,
            "engine": dict(self.engine),
            "estimate": self.estimate.as_json(),
            "spec": as_table(self.spec),
        }


def plan(spec: JobSpec) -> PlannedJob:
    """Say what a job will do and cost.

    Raises:
        SpecError, SourceError, EngineRefused: whatever `run` would refuse.
        ResumeRefused: the output directory belongs to another job.
        OutOfSpace: the output will not fit on its disk.
    """
    job = open_job(spec)
    try:
        found = estimate(job.plan, job.source, job.tokenizer, job.output)
    finally:
        job.source.close()
    if job.output is not None:
        if (job.output / "job.json").is_file():
            check_same(read_job(job.output), job.plan.record)
        else:
            check_space(found, job.plan, job.output)
    contract = job.plan.engine
    engine = {
        "path": str(job.engine),
        "id": contract.engine_id,
        "checkpoint": contract.checkpoint.name,
        "architecture": contract.checkpoint.architecture,
        "runtime": contract.runtime.name,
        "layout": contract.runtime.layout,
        "device": contract.device.type,
        "precision": contract.precision.described,
        "width": contract.output.width,
        "limits": asdict(contract.limits),
        "tokens_per_s": contract.measured.tokens_per_s,
    }
    return PlannedJob(job=job.plan.record.job_id, spec=job.plan.spec, engine=engine, estimate=found)


def _known_fingerprint(spec: JobSpec) -> dict[str, Any] | None:
    """What an earlier run of this output directory knows of the source, so that it need not be hashed again."""
    if spec.output is None or not (locate(spec.output) / "job.json").is_file():
        return None
    try:
        return read_job(locate(spec.output)).fingerprint
    except ExtractError:
        return None


def _with_shard_size(spec: JobSpec) -> JobSpec:
    """An earlier run's shard size where none is asked for: a later version's default must not refuse a resume."""
    if spec.states.rows_per_shard is not None or spec.output is None:
        return spec
    if not (locate(spec.output) / "job.json").is_file():
        return spec
    stored = read_job(locate(spec.output))
    return replace(spec, states=replace(spec.states, rows_per_shard=stored.rows_per_shard))
