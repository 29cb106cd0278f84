"""Rows of a Hugging Face dataset: a name on the hub, a `save_to_disk` directory, a directory that `datasets` can load.

Tables stay Arrow tables: rows never pass through Python objects. Code that comes with a dataset is never run. With
`streaming`, nothing is fetched before it is read and the length is unknown, whatever the dataset's card says; what
`save_to_disk` wrote is on disk already, so there `streaming` changes nothing.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from extract.errors import SourceError
from extract.sources.base import Source, SourceLayout, column_names, copied_columns
from extract.sources.column_types import conform, input_type, plain_type
from extract.sources.columns import ColumnPath, find_column, take_column
from extract.sources.cursor import Batches, RowCursor
from extract.sources.file_source import DECODE_BYTES, DECODE_ROWS
from extract.sources.fingerprints import describe_file
from extract.sources.formats import is_saved_dataset
from extract.spec import SourceSpec

FIRST_ROWS = 16
"""Rows fetched before the mean row size is known."""


class DatasetUnavailable(SourceError):
    """`datasets` cannot give the dataset, or not all of it."""

    template = "{path}: {problem}"


class NoSuchSplit(SourceError):
    """A saved dataset without the split asked for."""

    template = '{path}: no split "{split}". Splits: {splits}.'


class OneDatasetOnly(SourceError):
    """A list of datasets."""

    template = "{count} paths with format hf; a source is one dataset. Join the datasets first, or run a job for each."


def open_dataset(spec: SourceSpec) -> Source:
    """The source for a spec whose format is hf; loads nothing before `layout()`."""
    if len(spec.paths) > 1:
        raise OneDatasetOnly(count=len(spec.paths))
    if spec.streaming and not is_saved_dataset(Path(spec.paths[0])):
        return StreamedDataset(spec)
    return TableDataset(spec)


class TableDataset:
    """A dataset on disk, with any row at hand."""

    def __init__(self, spec: SourceSpec) -> None:
        self._spec = spec
        self._dataset: Any = None  # a datasets.Dataset in Arrow format
        self._columns: Columns | None = None
        self._layout: SourceLayout | None = None

    def layout(self) -> SourceLayout:
        """See `Source.layout`. Downloads a hub dataset that is not in the local cache."""
        if self._layout is None:
            spec, path = self._spec, self._spec.paths[0]
            with dataset_errors(spec):
                dataset = _load_saved(spec) if is_saved_dataset(Path(path)) else _load_named(spec)
                features = dataset.features.arrow_schema
            self._columns = Columns(features, spec)
            self._dataset = dataset.select_columns(self._columns.outer_names).with_format("arrow")
            num_rows = len(dataset)
            self._layout = SourceLayout(
                format="hf",
                num_rows=num_rows if spec.limit is None else min(num_rows, spec.limit),
                schema=self._columns.schema,
                fingerprint=_describe(spec)
                | {"fingerprint": dataset._fingerprint, "num_rows": num_rows, "features": str(dataset.features)}
                | ({"files": _saved_files(dataset, Path(path))} if is_saved_dataset(Path(path)) else {}),
            )
        return self._layout

    def read(self, start: int, stop: int | None, max_rows: int) -> Iterator[pa.RecordBatch]:
        """See `Source.read`. A shuffled or selected dataset is copied, in pieces of about `DECODE_BYTES`."""
        num_rows = self.layout().num_rows
        assert num_rows is not None and self._columns is not None
        row, end, step = start, num_rows if stop is None else min(stop, num_rows), FIRST_ROWS
        while row < end:
            with dataset_errors(self._spec):
                table = self._dataset[row : min(end, row + min(step, max_rows))]
            yield from self._columns.take(table, row)
            row += table.num_rows
            step = max(1, min(DECODE_ROWS, table.num_rows * DECODE_BYTES // max(table.nbytes, 1)))

    def close(self) -> None:
        """See `Source.close`."""
        self._dataset = self._columns = self._layout = None


class StreamedDataset:
    """A dataset read from its start, with a length that nobody knows."""

    def __init__(self, spec: SourceSpec) -> None:
        self._spec = spec
        self._dataset: Any = None  # a datasets.IterableDataset in Arrow format
        self._columns: Columns | None = None
        self._layout: SourceLayout | None = None
        self._cursor: RowCursor | None = None

    def layout(self) -> SourceLayout:
        """See `Source.layout`. Where the dataset declares no types, they are those of its first rows."""
        if self._layout is None:
            with dataset_errors(self._spec):
                dataset, files = _load_stream(self._spec)
                features = dataset.features.arrow_schema if dataset.features is not None else _first_schema(dataset)
            self._columns = Columns(features, self._spec)
            self._dataset = dataset.with_format("arrow")
            fingerprint = _describe(self._spec) | {"features": str(features), "streaming": True} | files
            self._layout = SourceLayout(
                format="hf", num_rows=None, schema=self._columns.schema, fingerprint=fingerprint
            )
        return self._layout

    def read(self, start: int, stop: int | None, max_rows: int) -> Iterator[pa.RecordBatch]:
        """See `Source.read`. Going back starts the stream again."""
        self.layout()
        ends = [end for end in (stop, self._spec.limit) if end is not None]
        row = start
        while not ends or row < min(ends):
            if self._cursor is None or self._cursor.row > row:
                self._rewind()
            assert self._cursor is not None
            batch = self._cursor.take(row, min([max_rows, *(end - row for end in ends)]))
            if batch is None:
                return
            row += batch.num_rows
            yield batch

    def close(self) -> None:
        """See `Source.close`."""
        if self._cursor is not None:
            self._cursor.close()
        self._cursor = self._dataset = self._columns = self._layout = None

    def _rewind(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
        self._cursor = RowCursor(self._batches(), 0)

    def _batches(self) -> Batches:
        assert self._columns is not None
        tables, row = self._dataset.iter(batch_size=DECODE_ROWS), 0
        while True:
            with dataset_errors(self._spec):
                table = next(tables, None)
            if table is None:
                return
            yield from self._columns.take(table, row)
            row += table.num_rows


class Columns:
    """The columns asked for, found in a dataset's features, and taken out of its tables."""

    def __init__(self, features: pa.Schema, spec: SourceSpec) -> None:
        self._path = spec.paths[0]
        names = column_names(spec)
        found = [find_column(features, name, self._path) for name in names]
        self._places: list[ColumnPath] = [place for place, _ in found]
        self.outer_names = list(dict.fromkeys(place[0] for place in self._places))
        types = [plain_type(kind) for _, kind in found]
        types[0] = input_type(spec.input, types[0], spec.column, self._path)
        self.schema = pa.schema(list(zip(names, types, strict=True)))
        self._copied = copied_columns(spec)

    def take(self, table: pa.Table, first_row: int) -> Iterator[pa.RecordBatch]:
        """The table's rows in the layout's schema; a batch ends where one of the table's chunks does.

        `first_row` is the position of the table's first row, for messages.
        """
        for batch in table.to_batches():
            # A streamed table may lack a column, or have moved it: it is found anew.
            places = [find_column(batch.schema, name, self._path)[0] for name in self.schema.names]
            arrays = [take_column(batch, place) for place in places]
            yield conform(arrays, self.schema, self._path, first_row, self._copied)
            first_row += batch.num_rows


@contextmanager
def dataset_errors(spec: SourceSpec) -> Iterator[None]:
    """Turn whatever `datasets` and its many back ends raise into one line that names the dataset.

    Raises:
        DatasetUnavailable: in place of any exception but ours.
    """
    try:
        yield
    except SourceError:
        raise
    except Exception as error:  # the hub client, file systems and decoders share no base class
        lines = str(error).splitlines() or [type(error).__name__]
        path = spec.paths[0]
        if Path(path).exists():
            problem = f"not readable by datasets: {lines[0][:300]}"
        else:
            problem = f"no such file or directory, and no Hugging Face dataset that can be loaded: {lines[0][:300]}"
        raise DatasetUnavailable(path=path, problem=problem) from error


def _load_saved(spec: SourceSpec) -> Any:
    import datasets

    path = Path(spec.paths[0])
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
        if spec.split not in splits:
            raise NoSuchSplit(path=path, split=spec.split, splits=", ".join(splits))
        path = path / spec.split
    state = json.loads((path / "state.json").read_bytes())
    own = state["_split"]
    if path == Path(spec.paths[0]) and spec.split not in ("train", own):  # "train" may be the spec's default, no wish
        raise NoSuchSplit(path=path, split=spec.split, splits=own or "one, without a name")
    if state["_data_files"]:
        return datasets.load_from_disk(path)
    features = datasets.DatasetInfo.from_directory(str(path)).features  # load_from_disk fails where there are no rows
    return datasets.Dataset(features.arrow_schema.empty_table(), fingerprint=state["_fingerprint"])


def _load_named(spec: SourceSpec) -> Any:
    import datasets

    return datasets.load_dataset(spec.paths[0], spec.name, split=spec.split, revision=spec.revision)


def _load_stream(spec: SourceSpec) -> tuple[Any, dict[str, Any]]:
    """The stream, and the files it comes from: local ones described, remote ones by address, which has a revision."""
    import datasets

    builder = datasets.load_dataset_builder(spec.paths[0], spec.name, revision=spec.revision)
    dataset = builder.as_streaming_dataset(spec.split)
    data_files = (builder.config.data_files or {}).get(spec.split, [])
    local = [Path(file) for file in data_files if Path(file).is_file()]
    files = [describe_file(file, file.name, None) for file in local]
    return dataset, {"config": builder.config.name, "files": files, "addresses": [f for f in data_files if "://" in f]}


def _first_schema(dataset: Any) -> pa.Schema:
    for table in dataset.with_format("arrow").iter(batch_size=FIRST_ROWS):
        return table.schema
    return pa.schema([])


def _saved_files(dataset: Any, directory: Path) -> list[dict[str, Any]]:
    root = directory.resolve()
    files = [Path(entry["filename"]).resolve() for entry in dataset.cache_files]
    for file in files:
        if not file.is_relative_to(root):
            raise DatasetUnavailable(path=directory, problem=f"its state names a file outside of it, {file.name}")
    total = sum(file.stat().st_size for file in files)
    return [describe_file(file, file.relative_to(root).as_posix(), None, source_bytes=total) for file in files]


def _describe(spec: SourceSpec) -> dict[str, Any]:
    return {
        "format": "hf",
        "name": None if Path(spec.paths[0]).exists() else spec.paths[0],  # a directory may be moved
        "config": spec.name,
        "split": spec.split,
        "revision": spec.revision,
    }
