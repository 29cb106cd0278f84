"""The shard file writer: windows in, one Arrow IPC file and its facts out.

Knows nothing of commits or names: it writes the path it is given, and who gave it renames it once `close` has returned.
Bytes are hashed as they pass, since the IPC writer only ever appends; reading the file again to hash it would cost as
much as writing it. Same windows, same bytes, whatever number of threads encodes and compresses their record batches.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from extract.errors import ExtractError
from extract.records import NOT_COUNTED, OUTCOMES, Int64, States, TokenRows
from extract.shards import schema as names
from extract.shards.batches import Cut, EncodedRows, as_stored, bytes_by_row, cuts, encoded_part, record_batch
from extract.shards.hashed_file import HashedFile
from extract.shards.in_order import in_order
from extract.shards.threaded_ipc import ipc_file
from extract.shards.values import Fault, as_float32, value_type
from extract.spec import OnBad, StatesSpec
from extract.store import clear_write_errors


class NonFiniteStates(ExtractError):
    """A state cannot be stored, and the job asked to stop there."""

    exit_code = 6
    template = (
        "shard {shard:05d}, row {row}, {place}: {bad:,} of {width:,} values cannot be stored as {dtype} "
        "({nan:,} NaN, {inf:,} inf, {over:,} beyond {largest:.6g}). Nothing was written for this shard. {advice}"
    )


class ZeroState(ExtractError):
    """A state of zeros cannot be scaled to unit length, and the job asked to stop there."""

    exit_code = 6
    template = (
        "shard {shard:05d}, row {row}: a state of zeros has no unit length. Nothing was written for this shard. "
        'Set states.normalize = false, or text.on_non_finite = "record" to go on without such rows.'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What was written.

    Attributes:
        sha256, num_bytes: of the file.
        num_rows: rows in the file.
        num_batches: record batches in the file.
        num_tokens: tokens that went through the model.
        num_tokens_original: tokens before any cut, each source row once, where they were counted.
        outcomes: rows by outcome, only those that occur.
        overflowed: rows whose states are finite but too large for the stored type (`non_finite` in `outcomes`).
    """

    sha256: str
    num_bytes: int
    num_rows: int
    num_batches: int
    num_tokens: int
    num_tokens_original: int
    outcomes: dict[str, int]
    overflowed: int


class ShardWriter:
    """Writes one shard file, window by window. One thread calls it."""

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        states: StatesSpec,
        width: int,
        shard: int,
        on_non_finite: OnBad = "record",
        threads: int = 1,
    ) -> None:
        """Open `path`, a temporary file that nobody else reads.

        Args:
            path: file to write; what is there is replaced.
            schema: `output_schema` of the job.
            states: what is written for each row.
            width: hidden size H.
            shard: number of the shard, for messages.
            on_non_finite: "record" writes such a row without states and says so in its outcome; "error" raises.
            threads: that encode and compress record batches; where there are several, hashing has one of its own.
                Writing stays with who calls. The bytes are the same.

        Raises:
            DiskFull, CannotWrite: from here, `write` and `close`.
        """
        self.path = path
        self._schema, self._spec, self._width, self._shard = schema, states, width, shard
        self._on_non_finite, self._threads = on_non_finite, threads
        self._outcomes: Int64 = np.zeros(len(OUTCOMES), np.int64)
        self._num_batches = self._num_tokens = self._num_tokens_original = self._overflowed = 0
        with clear_write_errors(path):
            self._file = HashedFile(path, ahead=threads > 1)
            self._ipc = ipc_file(self._file, schema, write_options(states), threads)

    def write(
        self,
        rows: TokenRows,
        source: pa.RecordBatch,
        positions: Int64,
        states: States,
        layers: Sequence[States] = (),
        finite: Sequence[bool] = (),
    ) -> None:
        """Append one window.

        Args:
            rows: N output rows with T tokens.
            source: id (if asked) and carried columns of the R source rows.
            positions: int64 [R], where the window's source rows stand in the source.
            states: [T, H] for kind "tokens", else one for each row that has tokens, in row order.
            layers: the same of each of the job's `states.layers`, in their order.
            finite: of `states` and each of `layers`: whether all of them are known to be finite, so that nobody need
                look; none: nothing is known.

        Raises:
            NonFiniteStates, ZeroState: a state cannot be stored and `on_non_finite` is "error".
        """
        if not len(rows.outcome):
            return
        assert len(layers) == len(self._spec.layers), (len(layers), self._spec.layers)
        for column in (states, *layers):
            _check_shape(rows, column, self._spec, self._width)
        source = as_stored(source, self._schema)
        source_bytes = bytes_by_row(source, int(rows.source_index[-1]) + 1)

        def prepared(cut: Cut) -> tuple[EncodedRows, pa.RecordBatch, Any]:
            part = encoded_part(cut, rows, states, self._spec, layers, finite)
            batch = record_batch(part, rows, source, positions, self._spec, self._schema)
            return part, batch, self._ipc.prepared(batch)

        parts = cuts(rows, self._width, self._spec, source_bytes)
        for part, batch, message in in_order(prepared, parts, self._threads):
            if self._on_non_finite == "error" and part.faults.any():
                self._refuse(part, rows, positions)
            with clear_write_errors(self.path):
                self._ipc.append(message)
            self._num_batches += 1
            self._overflowed += int(np.count_nonzero(part.faults == Fault.OVERFLOW))
            self._outcomes += np.bincount(np.asarray(batch.column("outcome").indices), minlength=len(OUTCOMES))
        counted = (rows.chunk == 0) & (rows.num_tokens_original != NOT_COUNTED)
        self._num_tokens += len(rows.input_ids)
        self._num_tokens_original += int(rows.num_tokens_original[counted].sum(dtype=np.int64))

    def close(self) -> ShardFacts:
        """Finish the file, make it durable, and say what it holds."""
        with clear_write_errors(self.path):
            self._ipc.close()
            self._file.sync_and_close()
        return ShardFacts(
            sha256=self._file.sha256,
            num_bytes=self._file.num_bytes,
            num_rows=int(self._outcomes.sum()),
            num_batches=self._num_batches,
            num_tokens=self._num_tokens,
            num_tokens_original=self._num_tokens_original,
            outcomes={str(name): int(count) for name, count in zip(OUTCOMES, self._outcomes, strict=True) if count},
            overflowed=self._overflowed,
        )

    def abort(self) -> None:
        """Drop the file; safe at any time, also twice and after `close`.

        A disk that broke does not let go of it either, and its first error is the one to tell: the next worker on the
        shard, or the end of the job, removes what is left.
        """
        self._file.drop()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _refuse(self, part: EncodedRows, rows: TokenRows, positions: Int64) -> None:
        """Raise for the first state of a part that cannot be stored."""
        bad = np.stack([encoded.bad for encoded in part.encoded], axis=1)  # [K, columns]
        first, column = (int(place) for place in np.argwhere(bad)[0])
        owner = int(part.owners[first])
        row = int(positions[rows.source_index[part.start + owner]])
        if part.encoded[column].faults[first] == Fault.ZERO_NORM:
            raise ZeroState(shard=self._shard, row=row)
        state = as_float32(part.states[column][first : first + 1])[0]
        finite, largest = np.isfinite(state), value_type(self._spec.dtype).largest
        nan = int(np.isnan(state).sum())
        over = int(np.count_nonzero(np.abs(state[finite]) > largest))
        inf = len(state) - int(finite.sum()) - nan
        place = f"token {first - int(np.searchsorted(part.owners, owner))}" if self._spec.kind == "tokens" else "state"
        if column:
            place += f" of {names.state_columns(self._spec)[column]}"
        raise NonFiniteStates(
            shard=self._shard,
            row=row,
            place=place,
            bad=nan + inf + over,
            width=len(state),
            dtype=self._spec.dtype,
            nan=nan,
            inf=inf,
            over=over,
            largest=largest,
            advice=_OVERFLOW_ADVICE if nan + inf == 0 else _NON_FINITE_ADVICE,
        )


_OVERFLOW_ADVICE = (
    'Store states.dtype = "bfloat16" or "float32", or set text.on_non_finite = "record" to go on without such rows.'
)
_NON_FINITE_ADVICE = (
    "The model itself computed them: build the engine with dtype float32 or bfloat16, "
    'or set text.on_non_finite = "record" to go on without such rows.'
)


def write_options(states: StatesSpec) -> pa.ipc.IpcWriteOptions:
    """How record batches are compressed."""
    codecs = {"none": None, "lz4": "lz4", "zstd": pa.Codec("zstd", compression_level=states.compression_level)}
    return pa.ipc.IpcWriteOptions(compression=codecs[states.compression], use_threads=False)


def _check_shape(rows: TokenRows, states: States, spec: StatesSpec, width: int) -> None:
    count = len(rows.input_ids) if spec.kind == "tokens" else int(np.count_nonzero(np.diff(rows.offsets)))
    assert states.shape == (count, width), (states.shape, (count, width))
