"""Compute some stored rows again with the plain model, alone and unpadded, and tokenise them again from the source.

This is the check that nothing else can replace: another forward (transformers' own), another batch (one row), another
path to the row (by position). A stored state must equal it within the engine's bound plus what its stored type rounds.
An engine whose linears are stored as FP8 holds the model as it multiplies it: such rows are compared with that one, in
float32, and a note says so; what rounding the weights did is seen against the checkpoint alone (`reference`).

Other layers are held to the same bound, but token by token: in the residual stream of many models one token's state is
hundreds of times as large as all others, and beside it every error of theirs would look like none.

A precision that rounds can now and then decide a threshold of the model otherwise, and then a single state lies outside
any bound; in float32 a model amplifies rounding at such a place, transformers' own as well. Such a row is right if the
engine gives it again by itself: that is asked, and said.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from extract.commits import Commit
from extract.engine.contract import CONTRACT_FILE, Contract, Runtime, check_files, layer_states, read_contract
from extract.engine.fetching import local_engine
from extract.engine.probe import relative_error, token_error
from extract.engine.runtimes import load_runtime
from extract.errors import EngineRefused, ExtractError
from extract.job import StoredJob
from extract.output import Output, Row
from extract.problems import Problem
from extract.records import STATELESS, TokenBatch
from extract.shards.values import Float32, as_float32, unit_length, value_type
from extract.sources import identity, open_source
from extract.storage import Place
from extract.text.tokens import open_tokenizer

if TYPE_CHECKING:
    from extract.engine.torch_runtime import PlainModel

MOST_AMPLIFIED = 100
"""Times the bound that a float32 state may be off and still be called amplified rounding."""
AMPLIFIED_ONE_IN = 4
"""A float32 engine may be off by amplified rounding in one row of so many, and one more; else it is off itself."""


class OtherEngine(EngineRefused):
    """The engine at hand is not the one that made the output."""

    template = (
        "{path}: this engine has id {found}, the output was made by {expected}. "
        "Say where that engine lies: --engine DIR"
    )


class NoPlainModel(EngineRefused):
    """An engine that holds no plain model, and nothing says where it is."""

    template = (
        "{path}: an engine of {runtime} holds no plain model to compute rows again with. "
        "Say where the unquantised checkpoint, or a torch engine of it, lies: --reference CHECKPOINT"
    )


class OtherPlainModel(EngineRefused):
    """The reference is another checkpoint than the engine's."""

    template = (
        "{path}: its checkpoint has sha256 {found}, the engine was made from {expected}. "
        "Give the checkpoint that the engine was made from: --reference CHECKPOINT"
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


def recompute_rows(
    job: StoredJob, commits: list[Commit], count: int, engine: Place | None, reference: str | Path | None = None
) -> Recomputed:
    """Compare `count` rows, spread evenly over the output; see `Recomputed`.

    Args:
        job: the job.
        commits: its committed shards.
        count: how many rows.
        engine: where it lies now; `None`: where it lay.
        reference: checkpoint or torch engine that the plain model is read from; `None`: the engine itself.

    Raises:
        EngineRefused: the engine is gone, changed, or another one; or it holds no plain model.
    """
    directory = local_engine(engine if engine is not None else job.spec.engine or "")
    contract = read_contract(directory)
    if contract.engine_id not in job.engine_ids:
        expected = job.contract["engine_id"][:16]
        raise OtherEngine(path=directory, found=contract.engine_id[:16], expected=expected)
    check_files(directory, contract)
    plain = _plain_model(directory, contract, reference)
    seen = Recomputed(bound=contract.fidelity.bound)
    if reference is None and contract.precision.weights == "fp8":
        seen.notes.append(
            "rows were compared with the engine's own FP8 weights, computed in float32: what rounding the weights did "
            "is not seen. To compare with the checkpoint: --reference CHECKPOINT"
        )
    output = Output(job)
    again, engine_itself = _Tokens(job, directory, contract, seen), _EngineItself(directory, contract, job)
    beyond: list[int] = []
    for row in _chosen(output, commits, count):
        shard = job.shard_of(row.row)
        ids = again.ids(row)
        if ids is not None and row.input_ids is not None and ids != row.input_ids.tolist():
            seen.problems.append(Problem(shard, f"row {row.row}: its ids are not those of the source's text"))
            continue
        ids = row.input_ids.tolist() if row.input_ids is not None else ids
        if ids is None or row.states is None:
            continue
        every_token = plain.layer_states(ids, output.layers)
        expected = [_pooled(states, job) for states in every_token]
        stored = [row.states, *row.layers.values()]
        if any(one.size != other.size for one, other in zip(stored, expected, strict=True)):
            seen.problems.append(Problem(shard, f"row {row.row}: its text has {len(ids)} tokens, its states have not"))
            continue
        found = [one.reshape(other.shape) for one, other in zip(stored, expected, strict=True)]
        rounded = [2 * _rounding(states, job, column) + 1e-6 for column, states in enumerate(every_token)]
        errors = _errors(found, expected)
        allowed = [contract.fidelity.bound + one for one in rounded]
        seen.rows += 1
        seen.bound = max(seen.bound, *allowed)
        off = [column for column, error in enumerate(errors) if error > allowed[column]]
        if off and engine_itself.gives(ids, found, rounded, max(errors)):
            beyond.append(row.row)
            continue
        seen.worst = max(seen.worst, *errors)
        for column in off:
            where = f", layer {output.layers[column - 1]}" if column else ""
            what = (
                f"row {row.row}{where}: differs from the plain model by {errors[column]:.1e} (relative), at most "
                f"{allowed[column]:.1e} expected"
            )
            seen.problems.append(Problem(shard, what))
    again.close()
    engine_itself.close()
    if beyond:
        precision, rows = contract.precision.activations, ", ".join(map(str, beyond[:5]))
        said = (
            f"{len(beyond)} of {seen.rows} rows ({rows}) lie further from the plain model than the bound, and the "
            "engine gives them so again"
        )
        if precision != "float32":
            seen.notes.append(f"{said}: {precision} decides a threshold of the model otherwise there")
        elif len(beyond) <= 1 + seen.rows // AMPLIFIED_ONE_IN:
            seen.notes.append(f"{said}: the model amplifies the rounding of float32 there")
        else:
            seen.problems.append(Problem(None, f"{said}: too many for amplified rounding"))
    return seen


class _EngineItself:
    """The engine's own word on a row, alone; loaded when it is first asked for."""

    def __init__(self, directory: Path, contract: Contract, job: StoredJob) -> None:
        self._directory, self._contract, self._job = directory, contract, job
        self._runtime: Runtime | None = None
        self._gone = False

    def gives(self, input_ids: list[int], found: list[Float32], rounded: list[float], error: float) -> bool:
        """Whether the engine gives the stored states for these ids again, but for what storing and moving rounds.

        Args:
            input_ids: of one row.
            found: its stored states of each column.
            rounded: what storing rounds of each.
            error: largest of their errors against the plain model.
        """
        contract = self._contract
        exact = contract.precision.activations == "float32"
        if self._gone or (exact and error > MOST_AMPLIFIED * contract.fidelity.bound + max(rounded)):
            return False
        if self._runtime is None:
            try:
                self._runtime = load_runtime(self._directory)
            except EngineRefused:  # no card here, say: then nobody can tell
                self._gone = True
                return False
        ids = np.array(input_ids, np.int32)
        batch = TokenBatch(input_ids=ids, cu_seqlens=np.array([0, len(ids)], np.int32), members=np.zeros(1, np.int64))
        kind = contract.output.states  # "last" of an engine that puts out no others
        again = layer_states(self._runtime, batch, kind, self._job.spec.states.layers)
        errors = _errors(found, [_pooled(as_float32(states), self._job) for states in again])
        moved = 2 * contract.proof.moved
        if exact:
            moved = max(moved, contract.fidelity.bound)
        return all(one <= lost + moved for one, lost in zip(errors, rounded, strict=True))

    def close(self) -> None:
        """Give the engine's memory back."""
        if self._runtime is not None:
            self._runtime.close()


def _plain_model(directory: Path, contract: Contract, reference: str | Path | None) -> "PlainModel":
    """The engine's checkpoint as transformers runs it, in float32."""
    from extract.engine.torch_runtime import PlainModel, load_engine_model, load_fp8_model

    no_norm = contract.output.module.startswith("none")
    if reference is None:
        if contract.runtime.name != "torch":
            raise NoPlainModel(path=directory, runtime=contract.runtime.name)
        fp8 = contract.precision.weights == "fp8"
        model = load_fp8_model(directory) if fp8 else load_engine_model(directory, "float32")
        return PlainModel(model, allow_no_final_norm=no_norm)
    path = Path(reference)
    if (path / CONTRACT_FILE).is_file():
        other = read_contract(path)
        if other.runtime.name != "torch" or other.precision.weights == "fp8":
            runtime = f"{other.runtime.name} with FP8 weights" if other.runtime.name == "torch" else other.runtime.name
            raise NoPlainModel(path=path, runtime=runtime)
        _check_same(path, other.checkpoint.sha256, contract)
        check_files(path, other)
        return PlainModel(load_engine_model(path, "float32"), allow_no_final_norm=no_norm)
    from extract.engine.checkpoint import open_checkpoint
    from extract.engine.decoder import load_decoder

    opened = open_checkpoint(reference)
    _check_same(path, opened.sha256, contract)
    return PlainModel(load_decoder(opened, "float32").model, allow_no_final_norm=no_norm)


def _check_same(path: Path, found: str, contract: Contract) -> None:
    expected = contract.checkpoint.origin_sha256 or contract.checkpoint.sha256
    if found != expected:
        raise OtherPlainModel(path=path, found=found[:12], expected=expected[:12])


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


def _errors(found: list[Float32], expected: list[Float32]) -> list[float]:
    """Relative error of each column of a row: of the final states as a whole, of layers token by token."""
    pairs = zip(found, expected, strict=True)
    return [(token_error if column else relative_error)(*pair) for column, pair in enumerate(pairs)]


def _rounding(states: Float32, job: StoredJob, column: int) -> float:
    """Error of these very states, as `_errors` counts it, by every stored type that the output went through."""
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
        decoded = stored.decode(encoded.values, encoded.scales)
        error += token_error(decoded, exact) if column else relative_error(decoded, exact)
    return error
