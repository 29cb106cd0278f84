"""A Hugging Face dataset directory with every row and column, ready for `load_from_disk` and `push_to_hub`."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from extract.exporting.hf_directory import describe, features_of, write_stream
from extract.exporting.parquet import cell_values
from extract.exporting.rows import plain_columns
from extract.exporting.target import Part, Target, Written
from extract.shards import schema as names
from extract.shards.views import BatchView


class HfTarget(Target):
    """`data-00000.arrow`, ..., `state.json`, `dataset_info.json`."""

    kind = "hf"
    title = "a Hugging Face dataset directory with every row and column"
    cannot_carry = (
        "Features have no bfloat16: its bits are uint16 (--cast float32 or float16 gives numbers). Columns of maps are "
        "refused. The metadata of the schema is in export.json instead."
    )
    reading = 'import datasets\nrows = datasets.load_from_disk("{path}")'
    with_states_only = False

    @cached_property
    def features(self) -> Any:
        """The `datasets.Features` of the rows."""
        empty = BatchView(pa.RecordBatch.from_pylist([], schema=self.stream.schema), self.stream.spec)
        return features_of(plain_columns(empty).schema, self.stream.output.path)

    def refuse(self) -> None:
        """See `Target.refuse`."""
        super().refuse()
        _ = self.features

    def write(self, shard: int, first_row: int, batches: Iterator[BatchView], done: Sequence[Part]) -> Written:
        """One stream file."""
        name = f"data-{shard:05d}.arrow"
        rows = write_stream(self.folder / name, self.features, (plain_columns(batch) for batch in batches))
        return Written(files=(name,) if rows else ())

    def finish(self, parts: Sequence[Part]) -> tuple[str, ...]:
        """The two JSON files."""
        return describe(self.folder, self.features, [name for part in parts for name in part.files])

    def read_back(self, parts: Sequence[Part], row: int) -> npt.NDArray[Any] | None:
        """See `Target.read_back`."""
        table = self._rows[row : row + 1]
        return cell_values(table.column(names.states_name(self.stream.spec))[0])

    @cached_property
    def _rows(self) -> Any:
        import datasets

        return datasets.load_from_disk(str(self.folder)).with_format("arrow")


TARGET = HfTarget
