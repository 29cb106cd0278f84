"""Job spec + engine contract + source layout -> a fixed split of the rows into shards, and the job's identity. Pure.

The split is arithmetic (shard k is rows [k S, (k + 1) S)), so a plan has the same size for ten shards and for a
million. S depends on worst-case lengths, never on sampled ones: planning again gives the same shards.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from extract.canonical import canonical_json, digest
from extract.engine.contract import Contract
from extract.errors import SpecError
from extract.schema import output_schema
from extract.sources import SourceLayout, identity
from extract.spec import JobSpec, SourceSpec, as_table
from extract.values import value_type

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job, resolved: nothing in it depends on who runs it or when.

    Attributes:
        spec: with every `None` that depends on the engine filled in.
        identity: what a resume must find unchanged, by field.
        num_rows: rows of the source; `None` for a stream, whose last shard's commit record says that it was the last.
    """

    spec: JobSpec
    contract: Contract
    identity: dict[str, Any]
    fingerprint: dict[str, Any]
    num_rows: int | None
    rows_per_shard: int
    max_input_tokens: int
    schema: pa.Schema

    @property
    def job_id(self) -> str:
        """First 16 hex digits of the identity's digest."""
        return job_id(self.identity)

    @property
    def num_shards(self) -> int | None:
        """How many shards; a source without rows still has one, an empty file with the schema."""
        return None if self.num_rows is None else max(1, -(-self.num_rows // self.rows_per_shard))

    def rows_of(self, shard: int) -> tuple[int, int]:
        """First row and one past the last of a shard; for a stream the end may lie beyond the last row."""
        start = shard * self.rows_per_shard
        stop = start + self.rows_per_shard
        return start, stop if self.num_rows is None else min(stop, self.num_rows)


def job_id(identity: dict[str, Any]) -> str:
    """First 16 hex digits of the identity's digest."""
    return digest(identity)[:16]


def make_plan(spec: JobSpec, contract: Contract, layout: SourceLayout) -> Plan:
    """Resolve a job.

    Raises:
        SpecError: the job asks for something that the engine or the source cannot give; the message says what can be.
    """
    max_input_tokens = _within("text.max_input_tokens", spec.text.max_input_tokens, contract, "max_input_tokens")
    run = dataclasses.replace(
        spec.run,
        max_sequences=_within("run.max_sequences", spec.run.max_sequences, contract, "max_sequences"),
        max_tokens=_within("run.max_tokens", spec.run.max_tokens, contract, "max_tokens"),
    )
    rows_per_shard = spec.states.rows_per_shard or _rows_per_shard(spec, contract, max_input_tokens)
    spec = dataclasses.replace(
        spec,
        text=dataclasses.replace(spec.text, max_input_tokens=max_input_tokens),
        states=dataclasses.replace(spec.states, rows_per_shard=rows_per_shard),
        run=run,
    )
    asked = _identity(spec, contract, layout)
    return Plan(
        spec=spec,
        contract=contract,
        identity=asked,
        fingerprint=layout.fingerprint,
        num_rows=layout.num_rows,
        rows_per_shard=rows_per_shard,
        max_input_tokens=max_input_tokens,
        schema=_schema(spec, contract, layout, asked),
    )


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
    states_per_row = max_input_tokens if spec.states.kind == "tokens" else 1
    by_bytes = TARGET_SHARD_BYTES // max(1, int(states_per_row * contract.output.width * stored))
    by_tokens = TARGET_SHARD_TOKENS[contract.device.type] // max_input_tokens
    return max(1, min(by_bytes, by_tokens, MAX_ROWS_PER_SHARD))


def _identity(spec: JobSpec, contract: Contract, layout: SourceLayout) -> dict[str, Any]:
    """In the order in which a difference is reported: the most telling field first."""
    source = as_table(spec.source)
    for place in ("path", "format"):  # where the files lie is not what they hold
        del source[place]
    states = as_table(spec.states)
    for habit in ("reserve_bytes", "record_batch_bytes"):
        del states[habit]
    return {
        "checkpoint": contract.checkpoint.sha256,
        "tokenizer": contract.tokenizer.sha256,
        "engine": contract.engine_id,
        "source": {"format": layout.format, "num_rows": layout.num_rows, **source, **identity(layout.fingerprint)},
        "text": as_table(spec.text),
        "states": states,
    }


def _schema(spec: JobSpec, contract: Contract, layout: SourceLayout, asked: dict[str, Any]) -> pa.Schema:
    extra = [layout.schema.field(name) for name in carried_columns(spec.source)]
    id_type = extra.pop(0).type if spec.source.id_column is not None else None
    policy: dict[str, Any] = {"input": spec.source.input, **as_table(spec.text)}
    policy |= {"prefix_ids": contract.tokenizer.prefix_ids, "suffix_ids": contract.tokenizer.suffix_ids}
    metadata = {
        "job": job_id(asked),
        "engine": contract.engine_id,
        "checkpoint": contract.checkpoint.sha256,
        "checkpoint_name": contract.checkpoint.name,
        "module": contract.output.module,
        "computed_in": contract.output.dtype,
        "tokens": canonical_json(policy).decode(),
    }
    chunked = spec.text.on_long == "chunk"
    return output_schema(spec.states, contract.output.width, id_type, extra, chunked, metadata)
