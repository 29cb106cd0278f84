"""Every file of the public corpus of unusual and malformed Parquet files, as a source: right rows, or one clear error.

The corpus is not part of this repository. It is looked for in the directory that EXTRACT_PARQUET_TESTING names, else in
shared/cases/parquet-testing beside the checkout; its files lie in `data` and `bad_data` there.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from extract.errors import SourceError
from extract.sources import open_source, parquet
from extract.spec import SourceSpec

BESIDE = Path(__file__).parents[3] / "shared" / "cases" / "parquet-testing"
CORPUS = Path(os.environ.get("EXTRACT_PARQUET_TESTING", BESIDE))
FILES = sorted(CORPUS.glob("*/*.parquet"))
MISSING = "no corpus here: set EXTRACT_PARQUET_TESTING to the directory of parquet-testing that holds data and bad_data"

pytestmark = pytest.mark.skipif(not FILES, reason=MISSING)


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def as_pyarrow_reads(path: Path, column: str) -> pa.Table | None:
    """One column of a file in one piece, or nothing where pyarrow cannot read it."""
    try:
        return pq.read_table(path, columns=[column], page_checksum_verification=True, use_threads=False)
    except (pa.ArrowException, OSError):
        return None


def columns_of(path: Path) -> list[str]:
    """Own names, each once; one that no file has where even the footer is unreadable."""
    try:
        return list(dict.fromkeys(pq.ParquetFile(path).schema_arrow.names))
    except (pa.ArrowException, OSError):
        return ["text"]


def read(path: Path, column: str, **keys: object) -> pa.Table | str:
    """The rows that a source gives, or its error."""
    source = open_source(SourceSpec(path=str(path), column=column, **keys))
    try:
        return pa.Table.from_batches(list(source.read(0, None, 1000)), source.layout().schema)
    except SourceError as error:
        return str(error)
    finally:
        source.close()


def same(found: pa.ChunkedArray, expected: pa.ChunkedArray) -> bool:
    expected = expected.cast(found.type)
    return found.equals(expected) or repr(found.to_pylist()) == repr(expected.to_pylist())  # in repr NaN equals itself


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_each_column_as_text_gives_its_rows_or_one_error_that_names_the_file(path):
    for column in columns_of(path):
        found = read(path, column)
        if isinstance(found, str):
            assert found.startswith(f"{path}: ") and "\n" not in found
            assert " holds " in found or as_pyarrow_reads(path, column) is None  # of another type, or unreadable
            continue
        expected = as_pyarrow_reads(path, column)
        assert expected is not None and same(found[column], expected[column]), column


def texts_and_neighbours() -> Iterator[tuple[Path, str, str]]:
    """Every file, its first column that can be read as text, and each other column of it."""
    for path in FILES:
        names = columns_of(path)
        text = next((name for name in names if not isinstance(read(path, name), str)), None)
        if text is not None:
            yield from ((path, text, other) for other in names if other != text)


def test_each_column_beside_a_text_is_carried_as_pyarrow_reads_it_or_is_named_in_the_error():
    num_read = 0
    for path, text, column in texts_and_neighbours():
        expected, found = as_pyarrow_reads(path, column), read(path, text, carry=(column,))
        if isinstance(found, str):
            assert found.startswith(f"{path}: ") and f'column "{column}"' in found and "\n" not in found
            assert expected is None or "valid UTF-8" in found or " together: " in found, found
            continue
        assert expected is not None and same(found[column], expected[column]), (path, column)
        num_read += 1
    assert num_read > 50


def test_all_columns_together_are_decoded_as_pyarrow_reads_them():
    num_read = 0
    for path in FILES:
        if "large_string_map" in path.name:
            continue  # one value of two gigabytes: half a minute
        try:
            expected = pq.read_table(path, page_checksum_verification=True, use_threads=False)
        except (pa.ArrowException, OSError):
            continue
        columns = [name for name in expected.schema.names if expected.schema.names.count(name) == 1]
        batches = list(parquet.ParquetFile(path, tuple(columns)).batches(0))
        for index, column in enumerate(columns):
            found = pa.chunked_array([arrays[index] for arrays in batches], expected[column].type)
            assert same(found, expected[column]), (path, column)
            num_read += 1
    assert num_read > 200
