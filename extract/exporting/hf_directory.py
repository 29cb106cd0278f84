"""A directory that `datasets.load_from_disk` opens, written file by file without holding rows in memory.

`datasets` writes such directories only from datasets that it made itself; its layout is a stream file a shard, and two
JSON files that name the files and the features.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from extract.canonical import digest
from extract.errors import SpecError
from extract.storage import Place
from extract.store import clear_write_errors, replace_file


class ColumnNotForDatasets(SpecError):
    """A carried column has a type that Hugging Face datasets do not know."""

    template = (
        '{path}: column "{column}" has type {found}, for which Hugging Face datasets have none. '
        "Export to parquet, or run the job without carrying it."
    )


def features_of(schema: pa.Schema, path: Place) -> Any:
    """The `datasets.Features` of an Arrow schema.

    Raises:
        ColumnNotForDatasets: see there.
    """
    import datasets

    found: dict[str, Any] = {}
    for field in schema:
        try:
            found |= datasets.Features.from_arrow_schema(pa.schema([field.remove_metadata()]))
        except (ValueError, TypeError):
            raise ColumnNotForDatasets(path=path, column=field.name, found=field.type) from None
    return datasets.Features(found)


def write_stream(path: Path, features: Any, tables: Iterable[pa.Table]) -> int:
    """Write one file of a dataset, if there are rows.

    Returns:
        how many rows.
    """
    schema, rows = features.arrow_schema, 0
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for table in tables:
                stream.write_table(table.cast(schema))
                rows += table.num_rows
        if not rows:
            path.unlink()
    return rows


def describe(folder: Path, features: Any, files: Sequence[str], *, format_type: str | None = None) -> tuple[str, ...]:
    """Write `state.json` and `dataset_info.json`; a dataset of no rows gets a file of none.

    Returns:
        the files that were written.
    """
    written: tuple[str, ...] = ("state.json", "dataset_info.json")
    if not files:
        files = ["data-00000.arrow"]
        with clear_write_errors(folder), (folder / files[0]).open("wb") as file:
            pa.ipc.new_stream(file, features.arrow_schema).close()
        written = (*written, files[0])
    described = features.to_dict()
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": digest({"files": list(files), "features": json.loads(json.dumps(described))})[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": format_type,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": described, "homepage": "", "license": ""}
    replace_file(folder / "state.json", json.dumps(state, indent=2).encode())
    replace_file(folder / "dataset_info.json", json.dumps(info, indent=2).encode())
    return written
