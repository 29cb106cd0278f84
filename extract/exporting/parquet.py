"""Parquet files, one a shard: states byte-stream-split and zstd, row groups of bounded bytes, metadata kept.

float16 is Parquet's own FLOAT16. bfloat16 has no type there: its bits are uint16, and the column's metadata says so.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from extract.exporting.rows import plain_columns
from extract.exporting.target import Part, Target, Written, part_of
from extract.exporting.working_directory import new_file
from extract.shards import schema as names
from extract.shards.views import BatchView
from extract.store import clear_write_errors

ROW_GROUP_BYTES = 2**25
"""Of a row group before compression, if a single record batch is not larger."""


class ParquetTarget(Target):
    """`data/part-00000.parquet`, ..."""

    kind = "parquet"
    title = "Parquet files, one a shard, with every row and column"
    cannot_carry = (
        "bfloat16 has no Parquet type: its bits are uint16 (--cast float32 or float16 gives numbers). DuckDB reads no "
        "byte-stream-split halves: --cast float32 for it."
    )
    reading = 'import pyarrow.parquet\ntable = pyarrow.parquet.read_table("{path}/data")'
    with_states_only = False

    def write(self, shard: int, first_row: int, batches: Iterator[BatchView], done: Sequence[Part]) -> Written:
        """One file; a shard of which no row was chosen becomes none."""
        name = f"data/part-{shard:05d}.parquet"
        tables = (plain_columns(batch) for batch in batches)
        split = names.state_columns(self.stream.spec)
        groups = write_parquet(new_file(self.folder / name), tables, split)
        return Written(files=(name,) if groups else (), facts={"row_groups": groups})

    def finish(self, parts: Sequence[Part]) -> tuple[str, ...]:
        """An export of no rows is one file of none, so that readers find the columns."""
        if any(part.files for part in parts):
            return ()
        empty = BatchView(pa.RecordBatch.from_pylist([], schema=self.stream.schema), self.stream.spec)
        write_parquet(new_file(self.folder / "data/part-00000.parquet"), [plain_columns(empty)], (), empty=True)
        return ("data/part-00000.parquet",)

    def read_back(self, parts: Sequence[Part], row: int) -> npt.NDArray[Any] | None:
        """See `Target.read_back`."""
        part = part_of(parts, row)
        place = row - part.first_row
        file = pq.ParquetFile(self.folder / part.files[0])
        column = names.states_name(self.stream.spec)
        for number, rows in enumerate(part.facts["row_groups"]):
            if place < rows:
                cell = file.read_row_group(number, columns=[column]).column(column)[place]
                return cell_values(cell)
            place -= rows
        raise AssertionError(row)


def write_parquet(path: Path, tables: Iterable[pa.Table], split: Sequence[str], *, empty: bool = False) -> list[int]:
    """Write a durable file; columns of states (`split`) are byte-stream-split, others dictionary-encoded.

    Returns:
        rows of each row group; none (and no file) if there are no tables.
    """
    writer: pq.ParquetWriter | None = None
    groups: list[int] = []
    with clear_write_errors(path):
        try:
            for table in grouped(tables):
                if writer is None:
                    leaves = _leaves(table.schema, split)
                    others = [leaf for leaf in _leaves(table.schema, table.schema.names) if leaf not in leaves]
                    writer = pq.ParquetWriter(
                        path,
                        table.schema,
                        compression="zstd",
                        use_dictionary=others or False,
                        use_byte_stream_split=leaves or False,
                    )
                if table.num_rows or empty:
                    writer.write_table(table, row_group_size=max(1, table.num_rows))
                    groups.append(table.num_rows)
        finally:
            if writer is not None:
                writer.close()
    return groups


def grouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables joined to about `ROW_GROUP_BYTES`."""
    held: list[pa.Table] = []
    num_bytes = 0
    for table in tables:
        if held and num_bytes + table.nbytes > ROW_GROUP_BYTES:
            yield pa.concat_tables(held)
            held, num_bytes = [], 0
        held.append(table)
        num_bytes += table.nbytes
    if held:
        yield pa.concat_tables(held)


def cell_values(cell: pa.Scalar) -> npt.NDArray[Any] | None:
    """Numbers of one cell of a column of states: [L, H] or [H]."""
    if not cell.is_valid:
        return None
    lists = cell.values
    if not pa.types.is_nested(lists.type):
        values: npt.NDArray[Any] = lists.to_numpy(zero_copy_only=False)
        return values
    flat: npt.NDArray[Any] = lists.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(lists), -1)


def _leaves(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Paths of the leaf columns as Parquet names them."""
    empty = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), empty)
    found = pq.ParquetFile(pa.BufferReader(empty.getvalue())).schema
    paths = [found.column(place).path for place in range(len(found))]
    wanted = set(columns)
    return [path for path in paths if _owner(path, schema.names) in wanted]


def _owner(path: str, columns: Sequence[str]) -> str:
    """The column whose leaf this is; names may hold dots, so the longest that fits counts."""
    return max((name for name in columns if path == name or path.startswith(f"{name}.")), key=len, default="")


TARGET = ParquetTarget
