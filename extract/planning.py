"""Job spec + engine contract + source layout -> a fixed split of the rows into shards, and the job's identity. Pure.

The split is arithmetic (shard k is rows [k S, (k + 1) S)), so a plan has the same size for ten shards and for a
million. S depends on worst-case lengths, never on sampled ones: planning again gives the same shards.
"""

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from extract.canonical import canonical_json
from extract.engine.contract import Contract, Precision
from extract.engine.layer_numbers import layer_numbers
from extract.errors import SpecError
from extract.job import JobRecord, job_id
from extract.shards.schema import output_schema
from extract.shards.values import value_type
from extract.sources import SourceLayout, identity
from extract.spec import JobSpec, SourceSpec, as_table
from extract.text.policy import describe_policy

TARGET_SHARD_BYTES = 256 * 2**20
TARGET_SHARD_TOKENS = {"cpu": 2**18, "cuda": 2**22}
"""A kill costs at most one shard: minutes on a CPU, under a minute on a card."""
MAX_ROWS_PER_SHARD = 65_536


class BeyondEngine(SpecError):
    """The job asks for more than the engine was built for."""

    template = (
        "{key} is {found}, more than the engine's {expected} ({binding}). "
        "Ask for less, or build an engine with a higher limit: extract build ... --{option} {found}"
    )


class EnginesDiffer(SpecError):
    """Several engines of which not every one may make every shard."""

    template = "the engines of the job differ: {field} is {found}, the first one's is {expected}. {advice}."


class StatesNotGiven(SpecError):
    """The job asks for states that the engine does not put out."""

    template = (
        "states.kind is {found}, but this engine puts out the {expected} token's state only. "
        "Build an engine with --states tokens, or ask for the {expected} one with --kind {expected}"
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job, resolved, with the engine that it was resolved against. Nothing in it depends on who runs it or when."""

    record: JobRecord
    engine: Contract

    @property
    def spec(self) -> JobSpec:
        """Every `None` that depends on the engine is filled in."""
        return self.record.spec

    @property
    def num_rows(self) -> int | None:
        """Rows to read; `None` for a stream."""
        return self.record.num_rows

    @property
    def num_shards(self) -> int | None:
        """How many shards; a source without rows still has one, an empty file with the schema."""
        return self.record.num_shards

    @property
    def max_input_tokens(self) -> int:
        """Most tokens of a row."""
        resolved = self.spec.text.max_input_tokens
        assert resolved is not None  # by make_plan
        return resolved

    @property
    def max_tokens(self) -> int:
        """Token budget of a pass."""
        resolved = self.spec.run.max_tokens
        assert resolved is not None  # by make_plan
        return resolved

    @property
    def max_sequences(self) -> int:
        """Most sequences of a pass."""
        resolved = self.spec.run.max_sequences
        assert resolved is not None  # by make_plan
        return resolved

    def rows_of(self, shard: int) -> tuple[int, int]:
        """First row and one past the last of a shard; for a stream the end may lie beyond the last row."""
        start = shard * self.record.rows_per_shard
        stop = start + self.record.rows_per_shard
        return start, stop if self.num_rows is None else min(stop, self.num_rows)


def make_plan(spec: JobSpec, contract: Contract, layout: SourceLayout) -> Plan:
    """Resolve a job.

    Raises:
        SpecError: the job asks for something that the engine or the source cannot give; the message says what can be.
    """
    if contract.output.states == "last" and spec.states.kind != "last":
        raise StatesNotGiven(found=spec.states.kind, expected="last")
    max_input_tokens = _within("text.max_input_tokens", spec.text.max_input_tokens, contract, "max_input_tokens")
    run = dataclasses.replace(
        spec.run,
        max_sequences=_within("run.max_sequences", spec.run.max_sequences, contract, "max_sequences"),
        max_tokens=_within("run.max_tokens", spec.run.max_tokens, contract, "max_tokens"),
    )
    rows_per_shard = spec.states.rows_per_shard or _rows_per_shard(spec, contract, max_input_tokens)
    layers = layer_numbers(spec.states.layers, contract)
    spec = dataclasses.replace(
        spec,
        text=dataclasses.replace(spec.text, max_input_tokens=max_input_tokens),
        states=dataclasses.replace(spec.states, rows_per_shard=rows_per_shard, layers=layers),
        run=run,
    )
    asked = _identity(spec, contract, layout)
    record = JobRecord(
        spec=spec,
        identity=asked,
        fingerprint=layout.fingerprint,
        num_rows=layout.num_rows,
        rows_per_shard=rows_per_shard,
        schema=_schema(spec, contract, layout, asked),
        contract=_kept(contract),
    )
    return Plan(record=record, engine=contract)


def make_plans(spec: JobSpec, contracts: Sequence[Contract], layout: SourceLayout) -> tuple[Plan, ...]:
    """Resolve a job that several engines may work on: a plan for each, with one identity, one split and one schema.

    The job's identity is then the checkpoint and the list of engines, in whatever order they are named. One engine, or
    copies of one, make the job that `make_plan` makes.

    Raises:
        EnginesDiffer: they are not of one checkpoint and precision, or more than one where `exact` is asked for.
    """
    if len({contract.engine_id for contract in contracts}) == 1:
        return tuple(make_plan(spec, contract, layout) for contract in contracts)
    _check_alike(contracts, spec.run.fingerprint)
    max_input_tokens = spec.text.max_input_tokens or min(one.limits.max_input_tokens for one in contracts)
    rows_per_shard = spec.states.rows_per_shard or min(
        _rows_per_shard(spec, contract, max_input_tokens) for contract in contracts
    )
    spec = dataclasses.replace(
        spec,
        text=dataclasses.replace(spec.text, max_input_tokens=max_input_tokens),
        states=dataclasses.replace(spec.states, rows_per_shard=rows_per_shard),
    )
    plans = [make_plan(spec, contract, layout) for contract in contracts]
    first = min(plans, key=lambda plan: plan.engine.engine_id)  # so that their order does not matter
    ids = sorted({contract.engine_id for contract in contracts})
    asked = {**first.record.identity, "engine": ids}
    schema = _schema(first.spec, first.engine, layout, asked, " ".join(ids))
    contract = {**first.record.contract, "engines": ids}
    return tuple(
        Plan(
            record=dataclasses.replace(plan.record, identity=asked, schema=schema, contract=contract),
            engine=plan.engine,
        )
        for plan in plans
    )


def _check_alike(contracts: Sequence[Contract], fingerprint: str) -> None:
    first = contracts[0]
    if fingerprint == "exact":
        raise EnginesDiffer(
            field="id",
            found=next(one.engine_id[:16] for one in contracts if one.engine_id != first.engine_id),
            expected=first.engine_id[:16],
            advice="Give one engine, or allow several with --fingerprint any, if other low bits are fine",
        )
    for place in (
        "checkpoint.sha256",
        "tokenizer.sha256",
        "precision",
        "output.width",
        "output.dtype",
        "output.states",
    ):
        values = [operator.attrgetter(place)(contract) for contract in contracts]
        for value in values:
            if value != values[0]:
                raise EnginesDiffer(
                    field=place,
                    found=_shown(value),
                    expected=_shown(values[0]),
                    advice="Build them from one checkpoint in one precision",
                )


def _shown(value: object) -> str:
    return str(value) if not isinstance(value, Precision) else f"{value.weights} weights, {value.activations}"


def _kept(contract: Contract) -> dict[str, Any]:
    """What an output keeps of the contract of the engine that makes it."""
    parts = ("checkpoint", "runtime", "device", "output", "fidelity")
    return {"engine_id": contract.engine_id, **{part: dataclasses.asdict(getattr(contract, part)) for part in parts}}


def carried_columns(source: SourceSpec) -> tuple[str, ...]:
    """Source columns that the output holds: the id column (if asked) and the carried ones."""
    return (*(() if source.id_column is None else (source.id_column,)), *source.carry)


def _within(key: str, asked: int | None, contract: Contract, option: str) -> int:
    limit: int = getattr(contract.limits, option)
    if asked is not None and asked > limit:
        raise BeyondEngine(
            key=key, found=asked, expected=limit, binding=contract.limits.binding, option=option.replace("_", "-")
        )
    return asked or limit


def _rows_per_shard(spec: JobSpec, contract: Contract, max_input_tokens: int) -> int:
    stored = value_type(spec.states.dtype).bytes_per_value
    states_per_row = (max_input_tokens if spec.states.kind == "tokens" else 1) * (1 + len(spec.states.layers))
    by_bytes = TARGET_SHARD_BYTES // max(1, int(states_per_row * contract.output.width * stored))
    by_tokens = TARGET_SHARD_TOKENS[contract.device.type] // max_input_tokens
    return max(1, min(by_bytes, by_tokens, MAX_ROWS_PER_SHARD))


def _identity(spec: JobSpec, contract: Contract, layout: SourceLayout) -> dict[str, Any]:
    """In the order in which a difference is reported: the most telling field first."""
    source = as_table(spec.source)
    for place in ("path", "format"):  # where the files lie is not what they hold
        del source[place]
    return {
        "checkpoint": contract.checkpoint.sha256,
        "tokenizer": contract.tokenizer.sha256,
        "engine": contract.engine_id,
        "source": {"format": layout.format, "num_rows": layout.num_rows, **source, **identity(layout.fingerprint)},
        "text": as_table(spec.text),
        "states": spec.states.identity,
    }


def _schema(
    spec: JobSpec, contract: Contract, layout: SourceLayout, asked: dict[str, Any], engines: str | None = None
) -> pa.Schema:
    extra = [layout.schema.field(name) for name in carried_columns(spec.source)]
    id_type = extra.pop(0).type if spec.source.id_column is not None else None
    policy = describe_policy(contract.tokenizer, spec.text, spec.source.input)
    metadata = {
        "job": job_id(asked),
        "engine": engines or contract.engine_id,
        "checkpoint": contract.checkpoint.sha256,
        "checkpoint_name": contract.checkpoint.name,
        "module": contract.output.module,
        "computed_in": contract.output.dtype,
        "tokens": canonical_json(policy).decode(),
    }
    chunked = spec.text.on_long == "chunk"
    return output_schema(spec.states, contract.output.width, id_type, extra, chunked, metadata)
