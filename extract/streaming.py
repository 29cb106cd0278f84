"""`stream`: rows in, hidden states out, batch by batch in memory, without files.

For programs that use states at once. Lazy and plain: no thread runs ahead, texts are taken when a batch is asked for,
and no more states are held than those of one batch. Nothing is resumed or verified here; what is to be kept is a job
(`run`). A text's states are those that a job would store, whatever stands beside it.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from extract.engine.contract import Contract, Runtime, layer_states, read_contract
from extract.engine.fetching import local_engine
from extract.engine.layer_numbers import layer_numbers
from extract.errors import BadValue
from extract.packing import TokenBudget, pack, token_positions
from extract.records import OUTCOMES, Int32, Int64, Outcome, TokenRows
from extract.settings import parse
from extract.shards.values import Encoded, Fault, as_float32, unit_length, value_type
from extract.spec import InputKind, OutputKind, StatesSpec, TextSpec
from extract.streaming_input import check_rows, columns_of
from extract.text.tokens import RowRefused, RowTokenizer, open_tokenizer

ROWS = 256
"""Texts of a batch, unless they are long or another number is asked for."""
MAX_STATE_BYTES = 128 * 2**20
"""Of a batch; one pass of the engine is always allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRow:
    """One text, or one chunk of it.

    Attributes:
        row: position of the text in the stream.
        chunk: 0 for the first (or only) chunk of a text.
        outcome: how it ended, as in an output.
        input_ids: int32 [L], empty where there are no states.
        states: float32 or float16 [L, H], [H] for one state a row, `None` where the outcome has none. A view of the
            batch's array: copy it to keep a few rows of many batches.
        layers: the same after each decoder layer that was asked for, by its number from 0 on; empty where `states` is
            `None`.
    """

    row: int
    chunk: int
    outcome: Outcome
    input_ids: Int32
    states: npt.NDArray[Any] | None
    layers: dict[int, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedBatch:
    """Consecutive rows of a stream; iterates over them."""

    rows: tuple[StreamedRow, ...]

    def __iter__(self) -> Iterator[StreamedRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def stream(
    engine: str | Path,
    texts: Iterable[Any],
    *,
    input: InputKind = "text",
    kind: OutputKind = "tokens",
    dtype: Literal["float32", "float16"] = "float32",
    normalize: bool = False,
    layers: Sequence[int] = (),
    rows_per_batch: int = ROWS,
    threads: int | None = None,
    runtime: Runtime | None = None,
    **text: Any,
) -> Generator[StreamedBatch, None, None]:
    """Hidden states of texts, in order, a batch at a time.

    Nothing is loaded or taken before the first batch is asked for. The engine is closed with the last batch, or when
    the stream is: leaving a loop early is enough, `contextlib.closing` says it at a place of your own.

    Args:
        engine: engine directory, or the address of one.
        texts: any iterable, also an endless one: a list, a generator, an Arrow array, a column of a data frame. A
            `None` or a text that is not valid UTF-8 becomes a row with that outcome.
        input: what its items are. "text": str or bytes. "messages": conversations, lists of dictionaries with `role`
            and `content`. "input_ids": lists, arrays or tensors of ready token ids.
        kind: states of every token, or one a row.
        dtype: of the arrays.
        normalize: scale pooled states to unit length.
        layers: decoder layers whose states come beside the final one; as `layers` of a job spec.
        rows_per_batch: texts that are taken together; fewer where they are long.
        threads: CPU threads of the forward pass.
        runtime: the engine, if `load_runtime` opened it already; it stays open.
        **text: the text policy: keys of `[text]` of a job spec, such as `prefix` or `on_long`.

    Raises:
        SpecError, EngineRefused: at once, for an engine or a policy that does not go; with the first batch, where only
            the weights can tell.
        RowRefused: a row that the policy says to stop at.

    Example:
        >>> for batch in extract.stream("engine", ["one text", "another", None], kind="last"):
        ...     for row in batch:
        ...         print(row.row, row.outcome, len(row.input_ids), row.states is not None)
    """
    if input not in get_args(InputKind):
        expected = " or ".join(f'"{kind}"' for kind in get_args(InputKind))
        raise BadValue(where="stream", key="input", found=f'"{input}"', expected=expected)
    check_rows(texts, input)
    directory = local_engine(str(engine))
    contract = read_contract(directory)
    given = {"kind": kind, "dtype": dtype, "normalize": normalize, "layers": layers}
    asked = parse(StatesSpec, given, "stream")
    asked = replace(asked, layers=layer_numbers(asked.layers, contract))
    if dtype not in ("float32", "float16"):
        raise BadValue(where="stream", key="dtype", found=f'"{dtype}"', expected='"float32" or "float16"')
    if rows_per_batch < 1:
        raise BadValue(where="stream", key="rows_per_batch", found=rows_per_batch, expected="1 or more")
    if contract.output.states == "last" and kind != "last":
        raise BadValue(where="stream", key="kind", found=f'"{kind}"', expected='"last", all that this engine puts out')
    if runtime is not None and runtime.contract.engine_id != contract.engine_id:
        found, expected = f"engine {runtime.contract.engine_id[:12]}", f"{engine} ({contract.engine_id[:12]}), loaded"
        raise BadValue(where="stream", key="runtime", found=found, expected=expected)
    policy = parse(TextSpec, text, "stream")
    limit = contract.limits.max_input_tokens
    if (policy.max_input_tokens or limit) > limit:
        expected = f"at most the engine's {limit}"
        raise BadValue(where="stream", key="max_input_tokens", found=policy.max_input_tokens, expected=expected)
    tokenizer = open_tokenizer(
        directory,
        contract.tokenizer,
        policy,
        max_input_tokens=policy.max_input_tokens or limit,
        input=input,
        vocab_size=contract.checkpoint.vocab_size,
    )
    windows = _windows(columns_of(texts, input, rows_per_batch), tokenizer, contract, asked, rows_per_batch)
    return _batches(windows, directory, contract, asked, policy, threads, runtime)


def _batches(
    windows: Iterator[tuple[int, TokenRows]],
    directory: Path,
    contract: Contract,
    asked: StatesSpec,
    policy: TextSpec,
    threads: int | None,
    runtime: Runtime | None,
) -> Generator[StreamedBatch, None, None]:
    from extract.engine.runtimes import load_runtime

    loaded = runtime or load_runtime(directory, threads=threads)
    budget = TokenBudget(
        max_tokens=contract.limits.max_tokens,
        max_sequences=contract.limits.max_sequences,
        equal_length=contract.runtime.layout == "dense",
        shared=contract.runtime.decoder == "own",
    )
    try:
        for first_row, rows in windows:
            yield _streamed(first_row, rows, _states(loaded, rows, budget, asked), asked, policy)
    finally:
        if runtime is None:
            loaded.close()


def _windows(
    columns: Iterator[tuple[int, pa.Array]],
    tokenizer: RowTokenizer,
    contract: Contract,
    asked: StatesSpec,
    num_rows: int,
) -> Iterator[tuple[int, TokenRows]]:
    """Position of the first text, and token rows of no more states than a batch may hold."""
    token_bytes = 4 * contract.output.width * (1 + len(asked.layers)) if asked.kind == "tokens" else 1
    held = MAX_STATE_BYTES // token_bytes
    max_tokens = max(contract.limits.max_tokens, held)
    for first_row, column in columns:
        rows = tokenizer.tokenize(column, first_row)
        start, count = 0, len(rows.outcome)
        while start < count:
            most = int(rows.offsets[start]) + max_tokens
            stop = int(np.searchsorted(rows.offsets, most, side="right")) - 1
            stop = min(max(start + 1, stop), start + num_rows, count)
            yield first_row, _part(rows, start, stop)
            start = stop


def _part(rows: TokenRows, start: int, stop: int) -> TokenRows:
    """Sequences `start` to `stop`."""
    offsets = rows.offsets[start : stop + 1]
    own = slice(start, stop)
    return replace(
        rows,
        source_index=rows.source_index[own],
        chunk=rows.chunk[own],
        outcome=rows.outcome[own],
        num_tokens_original=rows.num_tokens_original[own],
        offsets=offsets - offsets[0],
        input_ids=rows.input_ids[offsets[0] : offsets[-1]],
    )


def _states(runtime: Runtime, rows: TokenRows, budget: TokenBudget, asked: StatesSpec) -> list[Encoded]:
    """[T, H] in row order for kind "tokens", else [sequences with tokens, H], in the type that is asked for.

    The final states, then those of each layer.
    """
    has_tokens = np.diff(rows.offsets) > 0
    place = np.cumsum(has_tokens) - 1
    count = len(rows.input_ids) if asked.kind == "tokens" else int(np.count_nonzero(has_tokens))
    states = [np.empty((count, runtime.contract.output.width), np.float32) for _ in range(1 + len(asked.layers))]
    for batch in pack(rows, budget):
        where = token_positions(rows.offsets, batch.members) if asked.kind == "tokens" else place[batch.members]
        for kept, found in zip(states, layer_states(runtime, batch, asked.kind, asked.layers), strict=True):
            kept[where] = as_float32(found)
    if not asked.normalize:
        return [value_type(asked.dtype).encode(one) for one in states]
    scaled, zero = unit_length(states[0])  # layers are not given with unit length
    encoded = value_type(asked.dtype).encode(scaled)
    encoded.faults[zero] = Fault.ZERO_NORM
    return [encoded]


def _streamed(
    first_row: int, rows: TokenRows, encoded: list[Encoded], asked: StatesSpec, policy: TextSpec
) -> StreamedBatch:
    lengths: Int64 = np.diff(rows.offsets)
    ends = np.cumsum(lengths if asked.kind == "tokens" else lengths > 0)
    made = []
    for index, length in enumerate(lengths.tolist()):
        row, outcome = first_row + int(rows.source_index[index]), OUTCOMES[rows.outcome[index]]
        ids = rows.input_ids[rows.offsets[index] : rows.offsets[index + 1]]
        own = slice(int(ends[index]) - (length if asked.kind == "tokens" else 1), int(ends[index]))
        states: list[npt.NDArray[Any]] = []
        if length and any(one.bad[own].any() for one in encoded):
            if policy.on_non_finite == "error":
                problem = f"its states cannot be given as {asked.dtype}: not finite, too large, or without a length"
                advice = 'Leave such rows out, or set on_non_finite = "record" to have them marked.'
                raise RowRefused(row=row, problem=problem, advice=advice)
            outcome = Outcome.NON_FINITE
        elif length:
            states = [one.values[own if asked.kind == "tokens" else own.start] for one in encoded]
        made.append(
            StreamedRow(
                row=row,
                chunk=int(rows.chunk[index]),
                outcome=outcome,
                input_ids=ids,
                states=states[0] if states else None,
                layers=dict(zip(asked.layers, states[1:], strict=bool(states))),
            )
        )
    return StreamedBatch(rows=tuple(made))
