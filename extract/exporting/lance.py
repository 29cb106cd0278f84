"""A Lance dataset: states as a column of fixed-size vectors that Lance's search and indices take.

Fragments are written one a shard and committed together at the end, so that a dataset of half the rows never opens.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from extract.exporting.parquet import cell_values
from extract.exporting.rows import plain_columns
from extract.exporting.target import MissingPackage, Part, Target, TargetCannotHold, Written
from extract.shards import schema as names
from extract.shards.views import BatchView
from extract.store import clear_write_errors

FOLDER = "rows.lance"


class LanceTarget(Target):
    """`rows.lance`."""

    kind = "lance"
    title = "a Lance dataset, for vector search (needs the package pylance)"
    cannot_carry = (
        "bfloat16 is refused, because Lance searches float16 and float32 only: --cast one of them. Dots in names of "
        "columns become underscores."
    )
    reading = 'import lance\nrows = lance.dataset("{path}/rows.lance")'
    with_states_only = False

    def refuse(self) -> None:
        """See `Target.refuse`."""
        super().refuse()
        _lance()
        if self.stream.dtype == "bfloat16":
            raise TargetCannotHold(
                path=self.stream.output.path,
                problem="holds bfloat16",
                kind=self.kind,
                advice="Choose what Lance searches: --cast float16 or float32.",
            )
        if len(set(self._schema.names)) < len(self._schema.names):
            raise TargetCannotHold(
                path=self.stream.output.path,
                problem="has columns whose names differ in dots and underscores alone",
                kind=self.kind,
                advice="Rename one of them in the source.",
            )

    def write(self, shard: int, first_row: int, batches: Iterator[BatchView], done: Sequence[Part]) -> Written:
        """One fragment, or some, that nothing refers to yet."""
        lance = _lance()
        first = next(batches, None)
        if first is None:
            return Written(facts={"fragments": []})

        def arrow() -> Iterator[pa.RecordBatch]:
            yield from self._table(first).to_batches()
            for batch in batches:
                yield from self._table(batch).to_batches()

        schema = self._schema
        reader = pa.RecordBatchReader.from_batches(schema, arrow())
        path = self.folder / FOLDER
        with clear_write_errors(path):
            fragments = lance.fragment.write_fragments(reader, str(path), schema=schema, mode="create")
        files = [f"{FOLDER}/data/{file.path}" for fragment in fragments for file in fragment.files]
        return Written(
            files=tuple(files), facts={"fragments": [json.loads(json.dumps(one.to_json())) for one in fragments]}
        )

    def finish(self, parts: Sequence[Part]) -> tuple[str, ...]:
        """Commit all fragments at once."""
        lance = _lance()
        path = self.folder / FOLDER
        fragments = [
            lance.FragmentMetadata.from_json(json.dumps(one)) for part in parts for one in part.facts["fragments"]
        ]
        with clear_write_errors(path):
            if fragments:
                lance.LanceDataset.commit(str(path), lance.LanceOperation.Overwrite(self._schema, fragments))
            else:
                lance.write_dataset(self._schema.empty_table(), str(path))
        own = {name for part in parts for name in part.files}
        found = (str(file.relative_to(self.folder)) for file in path.rglob("*") if file.is_file())
        return tuple(sorted(name for name in found if name not in own))

    def read_back(self, parts: Sequence[Part], row: int) -> npt.NDArray[Any] | None:
        """See `Target.read_back`."""
        column = names.states_name(self.stream.spec)
        table = _lance().dataset(str(self.folder / FOLDER)).take([row], columns=[column])
        return cell_values(table.column(column)[0])

    @cached_property
    def _schema(self) -> pa.Schema:
        """Of the dataset: Lance keeps dots for fields of structs, so a column with dots gets underscores instead."""
        empty = BatchView(pa.RecordBatch.from_pylist([], schema=self.stream.schema), self.stream.spec)
        schema = plain_columns(empty).schema
        fields = [field.with_name(field.name.replace(".", "_")) for field in schema]
        return pa.schema(fields, metadata=schema.metadata)

    def _table(self, batch: BatchView) -> pa.Table:
        return plain_columns(batch).rename_columns(self._schema.names)


def _lance() -> Any:
    try:
        import lance
        import lance.fragment
    except ImportError:
        raise MissingPackage(kind="lance", package="pylance") from None
    return lance


TARGET = LanceTarget
