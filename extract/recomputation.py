"""Compute some stored rows again with the plain model, alone and unpadded, and tokenise them again from the source.

This is the check that nothing else can replace: another forward (transformers' own), another batch (one row), another
path to the row (by position). A stored state must equal it within the engine's bound plus what its stored type rounds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from extract.commits import Commit
from extract.engine.contract import check_files, read_contract
from extract.engine.probe import relative_error
from extract.errors import EngineRefused, ExtractError
from extract.job import StoredJob
from extract.output import Output, Row
from extract.problems import Problem
from extract.records import STATELESS
from extract.shards.values import Float32, unit_length, value_type
from extract.sources import identity, open_source
from extract.text.tokens import open_tokenizer


class OtherEngine(EngineRefused):
    """The engine at hand is not the one that made the output."""

    template = (
        "{path}: this engine has id {found}, the output was made by {expected}. "
        "Say where that engine lies: --engine DIR"
    )


@dataclass(slots=True)
class Recomputed:
    """What was compared.

    Attributes:
        rows: how many.
        worst: largest relative error.
        bound: the most that was allowed for any of them.
        notes: what could not be compared, and why.
    """

    rows: int = 0
    worst: float = 0.0
    bound: float = 0.0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def recompute_rows(job: StoredJob, commits: list[Commit], count: int, engine: Path | None) -> Recomputed:
    """Compare `count` rows, spread evenly over the output; see `Recomputed`.

    Raises:
        EngineRefused: the engine is gone, changed, or another one.
    """
    from extract.engine.torch_runtime import PlainModel, load_engine_model

    directory = engine if engine is not None else Path(job.spec.engine or "")
    contract = read_contract(directory)
    if contract.engine_id != job.contract["engine_id"]:
        expected = job.contract["engine_id"][:16]
        raise OtherEngine(path=directory, found=contract.engine_id[:16], expected=expected)
    check_files(directory, contract)
    no_norm = contract.output.module.startswith("none")
    plain = PlainModel(load_engine_model(directory, "float32"), allow_no_final_norm=no_norm)
    seen = Recomputed(bound=contract.fidelity.bound)
    output = Output(job)
    again = _Tokens(job, directory, contract, seen)
    for row in _chosen(output, commits, count):
        shard = job.shard_of(row.row)
        ids = again.ids(row)
        if ids is not None and row.input_ids is not None and ids != row.input_ids.tolist():
            seen.problems.append(Problem(shard, f"row {row.row}: its ids are not those of the source's text"))
            continue
        ids = row.input_ids.tolist() if row.input_ids is not None else ids
        if ids is None or row.states is None:
            continue
        every_token = plain.states(ids)
        expected_states = _pooled(every_token, job)
        if row.states.size != expected_states.size:
            seen.problems.append(Problem(shard, f"row {row.row}: its text has {len(ids)} tokens, its states have not"))
            continue
        found = row.states.reshape(expected_states.shape)
        error = relative_error(found, expected_states)
        allowed = contract.fidelity.bound + 2 * _rounding(every_token, job) + 1e-6
        seen.rows += 1
        seen.worst = max(seen.worst, error)
        seen.bound = max(seen.bound, allowed)
        if error > allowed:
            what = (
                f"row {row.row}: differs from the plain model by {error:.1e} (relative), at most {allowed:.1e} expected"
            )
            seen.problems.append(Problem(shard, what))
    again.close()
    return seen


class _Tokens:
    """Ids of a row, tokenised again from the source; says why not, once, where the source is not there."""

    def __init__(self, job: StoredJob, engine: Path, contract: Any, seen: Recomputed) -> None:
        self._source: Any = None
        self._selection = job.selection
        spec = job.spec
        try:
            source = open_source(spec.source, job.fingerprint)
            if identity(source.layout().fingerprint) != identity(job.fingerprint):
                seen.notes.append("the source has changed since: ids were not compared with its texts")
                return
            self._tokenizer = open_tokenizer(
                engine,
                contract.tokenizer,
                spec.text,
                max_input_tokens=spec.text.max_input_tokens or contract.limits.max_input_tokens,
                input=spec.source.input,
                vocab_size=contract.checkpoint.vocab_size,
            )
            self._source = source
        except ExtractError as error:
            seen.notes.append(f"ids were not compared with the source's texts: {error}")

    def ids(self, row: Row) -> list[int] | None:
        if self._source is None:
            return None
        index = row.row if self._selection is None else self._selection.index_of(row.row)
        assert index is not None  # the output holds no row that was not selected
        for batch in self._source.read(index, index + 1, 1):
            rows = self._tokenizer.tokenize(batch.column(0), row.row)
            start, stop = rows.offsets[row.chunk : row.chunk + 2]
            return list(map(int, rows.input_ids[start:stop]))
        return []

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def _chosen(output: Output, commits: list[Commit], count: int) -> Iterator[Row]:
    """At most `count` rows, at even distances over all rows that have states."""
    per_shard = [
        sum(rows for outcome, rows in commit.outcomes.items() if outcome not in STATELESS) for commit in commits
    ]
    total = sum(per_shard)
    places = np.unique(np.arange(min(count, total)) * total // max(1, min(count, total)))
    start = 0
    for commit, rows in zip(commits, per_shard, strict=True):
        inside = places[(places >= start) & (places < start + rows)] - start
        start += rows
        if len(inside):
            yield from output.rows_of_shard(commit.shard, output.shard(commit.shard).with_states[inside].tolist())


def _pooled(states: Float32, job: StoredJob) -> Float32:
    kind = job.spec.states.kind
    if kind == "tokens":
        return states
    pooled = {"last": states[-1:], "first": states[:1], "mean": states.mean(axis=0, keepdims=True)}[kind]
    return unit_length(pooled)[0] if job.spec.states.normalize else pooled


def _rounding(states: Float32, job: StoredJob) -> float:
    """Relative error of these very states when they go through every stored type that the output went through."""
    steps = [(job.spec.states.kind, job.spec.states.dtype)]
    origin = job.derived_from
    while origin is not None:
        steps.append((origin["kind"], origin["dtype"]))
        origin = origin.get("derived_from")
    error = 0.0
    for kind, dtype in steps:
        stored = value_type(dtype)
        exact = states if kind == "tokens" else _pooled(states, job)
        encoded = stored.encode(np.ascontiguousarray(exact))
        error += relative_error(stored.decode(encoded.values, encoded.scales), exact)
    return error
