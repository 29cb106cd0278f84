"""Files as other programs write, cut, lock and misname them: their rows, or one error with their name."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from arrow_shapes import write

from extract.errors import SourceError
from extract.sources import open_source
from extract.spec import SourceSpec

TABLE = pa.table(
    {
        "text": [None if row % 7 == 3 else f"row {row} " * (row % 5) for row in range(200)],
        "n": [row * row if row % 3 else None for row in range(200)],
        "tags": [[str(row)] * (row % 4) for row in range(200)],
        "note": ["a note"] * 200,
    }
)


def read(path: Path | str, **keys: object) -> list[dict]:
    source = open_source(SourceSpec(path=str(path), **keys))
    try:
        return [row for batch in source.read(0, None, 64) for row in batch.to_pylist()]
    finally:
        source.close()


def refusal(path: Path, **keys: object) -> str:
    with pytest.raises(SourceError) as caught:
        read(path, **keys)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
    return str(caught.value)


# --- Parquet as writers write it --------------------------------------------------------------------------------------

WRITERS = {
    "without statistics": {"write_statistics": False},
    "with a page index": {"write_page_index": True, "data_page_size": 64},
    "with pages of version 2": {"data_page_version": "2.0", "data_page_size": 64},
    "of format version 1.0": {"version": "1.0"},
    "without an Arrow schema": {"store_schema": False},
    "without dictionaries": {"use_dictionary": False},
    "with delta encodings": {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    "with content-defined chunks": {"use_content_defined_chunking": True},
    "with checksums": {"write_page_checksum": True},
    "with two-level lists": {"use_compliant_nested_type": False},
    "with sorting columns": {"sorting_columns": [pq.SortingColumn(0)]},
    "with one giant row group": {"row_group_size": 10**9},
    "with a row group a row": {"row_group_size": 1},
    **{f"compressed by {name}": {"compression": name} for name in ("none", "gzip", "brotli", "lz4", "zstd")},
}


@pytest.mark.parametrize("how", WRITERS)
def test_parquet_is_read_however_it_was_written(how, tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(TABLE, path, **{"row_group_size": 30, **WRITERS[how]})
    assert read(path, carry=("n", "tags", "note")) == TABLE.to_pylist()
    source = open_source(SourceSpec(path=str(path)))
    for start, stop in ((150, 200), (7, 9), (29, 31), (0, 1)):
        found = [row["text"] for batch in source.read(start, stop, 64) for row in batch.to_pylist()]
        assert found == TABLE["text"].to_pylist()[start:stop]
    source.close()


def test_thousands_of_row_groups_of_one_row_are_read_in_order(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [f"row {row}" for row in range(5_000)]
    pq.write_table(pa.table({"text": rows}), path, row_group_size=1)
    assert [row["text"] for row in read(path)] == rows


class Keys(encryption.KmsClient):
    """Keys that protect nothing."""

    def __init__(self, configuration: object) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return key_bytes.hex().encode()

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return bytes.fromhex(wrapped_key.decode())


def write_encrypted(path: Path, *, plaintext_footer: bool) -> None:
    configuration = encryption.EncryptionConfiguration(
        footer_key="footer", column_keys={"column": ["text"]}, plaintext_footer=plaintext_footer, double_wrapping=False
    )
    properties = encryption.CryptoFactory(Keys).file_encryption_properties(
        encryption.KmsConnectionConfig(), configuration
    )
    with pq.ParquetWriter(path, TABLE.schema, encryption_properties=properties) as writer:
        writer.write_table(TABLE)


def test_an_encrypted_file_is_refused_as_that(tmp_path):
    path = tmp_path / "rows.parquet"
    write_encrypted(path, plaintext_footer=False)
    assert refusal(path) == f"{path}: it is encrypted, and no keys are taken here. Decrypt the file first."


def test_an_encrypted_column_is_refused_by_name_and_the_others_are_read(tmp_path):
    path = tmp_path / "rows.parquet"
    write_encrypted(path, plaintext_footer=True)
    assert [row["note"] for row in read(path, column="note")] == TABLE["note"].to_pylist()
    for keys in ({"column": "text"}, {"column": "note", "carry": ("text",)}):
        assert refusal(path, **keys) == (
            f'{path}: column "text" is encrypted, and no keys are taken here. '
            "Decrypt the file first, or name another column."
        )


# --- cut and misnamed files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["parquet", "arrow", "arrows"])
def test_a_file_cut_anywhere_is_refused_and_never_read_as_fewer_rows(form, tmp_path):
    path = tmp_path / f"rows.{form}"
    write(path, TABLE.select(["text"])[:12], 3)
    whole = path.read_bytes()
    for size in {*range(0, len(whole), 11), *range(len(whole) - 20, len(whole))}:
        path.write_bytes(whole[:size])
        try:
            assert len(read(path)) == 12  # the footer of an Arrow file is followed by a few bytes that nothing reads
        except SourceError as error:
            assert str(error).startswith(f"{path}: "), error


def test_a_stream_whose_writer_was_stopped_between_two_batches_is_refused_unless_a_limit_says_how_far(tmp_path):
    path = tmp_path / "rows.arrows"
    write(path, TABLE.select(["text"]), 50)
    path.write_bytes(path.read_bytes()[:-8])
    assert refusal(path) == (
        f"{path}: cannot be read as arrow: it has no end-of-stream mark, so its writer was stopped and rows may be "
        "missing. Replace the file, or leave it out of the source."
    )
    assert len(read(path, limit=200)) == 200


def test_streams_joined_into_one_file_are_refused_and_not_read_as_the_first_of_them(tmp_path):
    path = tmp_path / "rows.arrows"
    write(path, TABLE.select(["text"]), 50)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() * 2)
    assert refusal(path) == (
        f"{path}: cannot be read as arrow: {size:,} bytes follow the end of its stream, as where streams were joined "
        "into a file. Replace the file, or leave it out of the source."
    )


NOT_PARQUET = {
    "empty": b"",
    "text": b"just some text, and not a little of it",
    "JSON lines": b'{"text": "a"}\n' * 9,
    "a gzip file": gzip.compress(b"PAR1" * 9),
    "the magic alone": b"PAR1PAR1",
    "a footer of absurd length": b"PAR1" + b"\xff\xff\xff\x7fPAR1",
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("what", NOT_PARQUET)
@pytest.mark.parametrize(("form", "name"), [("parquet", "parquet"), ("arrow", "arrow"), ("arrows", "arrow")])
def test_a_file_of_something_else_is_refused_by_name(form, name, what, tmp_path):
    write(tmp_path / f"0.{form}", TABLE)
    (tmp_path / f"1.{form}").write_bytes(NOT_PARQUET[what])
    message = refusal(tmp_path)
    assert message.startswith((f"{tmp_path}/1.{form}: cannot be read as {name}: ", f"{tmp_path}/1.{form}: no column"))


def test_a_directory_that_cannot_be_listed_is_refused_and_its_rows_are_not_left_out(tmp_path, monkeypatch):
    import os

    write(tmp_path / "0.parquet", TABLE)
    (tmp_path / "more").mkdir()
    scan = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert refusal(tmp_path) == (
        f"{tmp_path}/more: cannot be listed: Permission denied. Allow it, or name the files that are to be read."
    )
