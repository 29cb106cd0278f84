"""What every source promises, run over every format; then what belongs to one format alone."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard

from extract.errors import SourceError
from extract.sources import arrow_ipc, files, fingerprints, hf, identity, jsonl, open_source, parquet
from extract.spec import SourceSpec

ROOT = Path(__file__).parents[1]


# --- writing one table in every format ------------------------------------------------------------------------------


def write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=7)


def write_arrow_file(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_arrow_stream(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_feather(table: pa.Table, path: Path) -> None:
    feather.write_feather(table, path, compression="zstd", chunksize=7)


def json_lines(table: pa.Table) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in table.to_pylist())


def write_jsonl(table: pa.Table, path: Path) -> None:
    data = json_lines(table)
    if path.suffix == ".gz":
        data = gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])  # two members
    elif path.suffix == ".zst":
        half = len(data) // 2
        data = b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))
    path.write_bytes(data)


FILES = {
    "parquet": (write_parquet, ".parquet"),
    "arrow": (write_arrow_file, ".arrow"),
    "stream": (write_arrow_stream, ".arrows"),
    "feather": (write_feather, ".feather"),
    "jsonl": (write_jsonl, ".jsonl"),
    "jsonl.gz": (write_jsonl, ".jsonl.gz"),
    "jsonl.zst": (write_jsonl, ".jsonl.zst"),
}
SAVED = ("hf saved", "hf dict", "hf shuffled")
LOADED = ("hf loaded", "hf streamed")
FORMATS = (*FILES, *SAVED, *LOADED)


@pytest.fixture(autouse=True)
def own_dataset_cache(tmp_path, monkeypatch):
    if "datasets" in sys.modules:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(format, table)` puts a table on disk (two files where the format has files) and gives the spec's keys."""

    def write_source(form: str, table: pa.Table) -> dict:
        if form in FILES:
            writer, extension = FILES[form]
            directory = tmp_path / "rows"
            directory.mkdir()
            cut = len(table) * 2 // 3
            writer(table.slice(0, cut), directory / f"a{extension}")
            writer(table.slice(cut), directory / f"b{extension}")
            return {"path": str(directory)}
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        if form in LOADED:
            directory = tmp_path / "rows"
            directory.mkdir()
            pq.write_table(table, directory / "a.parquet", row_group_size=7)
            return {"path": str(directory), "format": "hf", "streaming": form == "hf streamed"}
        dataset = datasets.Dataset(table)
        path = str(tmp_path / "saved")
        if form == "hf dict":
            datasets.DatasetDict({"train": dataset.select([]), "test": dataset}).save_to_disk(path)
            return {"path": path, "split": "test"}
        if form == "hf shuffled":
            order = np.random.default_rng(0).permutation(len(table))
            dataset = datasets.Dataset(table.take(order)).select(np.argsort(order))
        dataset.save_to_disk(path)
        return {"path": path}

    return write_source


def rows_of(source, start=0, stop=None, max_rows=5) -> list[dict]:
    batches = list(source.read(start, stop, max_rows))
    assert all(0 < batch.num_rows <= max_rows for batch in batches)
    assert all(batch.schema == source.layout().schema for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


def open_rows(**keys) -> list[dict]:
    source = open_source(SourceSpec(**keys))
    rows = rows_of(source)
    source.close()
    return rows


def error_of(**keys) -> str:
    with pytest.raises(SourceError) as caught:
        open_rows(**keys)
    assert caught.value.exit_code == 3
    return str(caught.value)


def texts(count: int) -> pa.Table:
    return pa.table({"text": [f"text {index} " + "x" * (index % 11) for index in range(count)]})


# --- every format ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_any_row_range_in_any_order_is_the_rows_at_these_positions(form, write):
    table = texts(50)
    source = open_source(SourceSpec(**write(form, table)))
    assert source.layout().num_rows == (None if form == "hf streamed" else 50)
    assert source.layout().schema == pa.schema([("text", pa.large_string())])
    expected = table.to_pylist()
    assert rows_of(source) == expected
    ranges = [(0, 1), (1, 8), (8, 9), (40, 50), (3, 3), (33, None), (49, 50), (0, 50), (45, 99), (50, 60)]
    for start, stop in ranges:
        assert rows_of(source, start, stop) == expected[start:stop], (start, stop)
    source.close()


@pytest.mark.parametrize("form", FORMATS)
def test_two_reads_taking_turns_do_not_disturb_each_other(form, write):
    source = open_source(SourceSpec(**write(form, texts(30))))
    first, second = source.read(0, 20, 4), source.read(9, 30, 3)
    taken = [next(first), next(second), next(first), next(second)]
    assert [batch["text"][0].as_py().split()[1] for batch in taken] == ["0", "9", "4", str(9 + len(taken[1]))]
    source.close()


@pytest.mark.parametrize("form", FORMATS)
def test_limit_gives_only_the_first_rows(form, write):
    table = texts(50)
    keys = write(form, table)
    for limit in (0, 1, 34, 49, 50, 51):
        source = open_source(SourceSpec(**keys, limit=limit))
        assert source.layout().num_rows == (None if form == "hf streamed" else min(limit, 50))
        assert rows_of(source) == table.to_pylist()[:limit]
        source.close()


@pytest.mark.parametrize("form", FORMATS)
def test_a_source_without_rows_has_a_layout_and_yields_nothing(form, write):
    if form in LOADED:
        pytest.skip("datasets itself refuses to load a split of zero rows from files")
    source = open_source(SourceSpec(**write(form, pa.table({"text": pa.array([], pa.string())}))))
    assert source.layout().num_rows == 0
    assert source.layout().schema == pa.schema([("text", pa.large_string())])
    assert rows_of(source) == []


@pytest.mark.parametrize("form", FORMATS)
def test_a_dot_steps_into_a_struct_and_a_null_struct_gives_a_null(form, write):
    docs = [{"text": "a", "tags": []}, None, {"text": None, "tags": ["x"]}, {"text": "d", "tags": None}]
    table = pa.table({"doc": docs, "n": [[1], [], None, [2, 3]]})
    rows = open_rows(**write(form, table), column="doc.text", carry=("n",))
    assert rows == [
        {"doc.text": "a", "n": [1]},
        {"doc.text": None, "n": []},
        {"doc.text": None, "n": None},
        {"doc.text": "d", "n": [2, 3]},
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_a_column_whose_own_name_has_dots_wins_over_a_struct(form, write):
    table = pa.table({"doc": [{"text": "inner"}] * 3, "doc.text": ["own"] * 3})
    assert open_rows(**write(form, table), column="doc.text") == [{"doc.text": "own"}] * 3


@pytest.mark.parametrize("form", FORMATS)
def test_id_and_carried_columns_keep_their_types_and_order(form, write):
    ids = ["a", "a", "x/y", "..", "", "z" * 300, None]
    table = pa.table(
        {"b": [True] * 7, "key": ids, "f": [0.5] * 7, "text": ["t"] * 7, "k": pa.array(range(7), pa.int64())}
    )
    source = open_source(SourceSpec(**write(form, table), id_column="key", carry=("k", "text", "f")))
    assert source.layout().schema.names == ["text", "key", "k", "f"]
    assert source.layout().schema.types == [pa.large_string(), pa.string(), pa.int64(), pa.float64()]
    assert [row["key"] for row in rows_of(source)] == ids
    source.close()


@pytest.mark.parametrize("form", FORMATS)
def test_a_missing_column_is_named_with_the_real_ones_and_the_nearest(form, write):
    keys = write(form, pa.table({"txet": ["a"] * 3, "doc": [{"n": 1}] * 3}))
    where = keys["path"] if form.startswith("hf") else Path(keys["path"], f"a{FILES[form][1]}")
    columns = "txet, doc" if form.startswith("jsonl") else "txet, doc, doc.n"
    assert error_of(**keys) == f'{where}: no column "text". Did you mean "txet"? Columns: {columns}.'


@pytest.mark.parametrize("form", FORMATS)
def test_messages_are_lists_of_structs(form, write):
    chat = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], [], None]
    rows = open_rows(**write(form, pa.table({"chat": chat})), column="chat", input="messages")
    assert [row["chat"] for row in rows] == chat


@pytest.mark.parametrize("form", FORMATS)
def test_input_ids_are_lists_of_integers(form, write):
    rows = open_rows(**write(form, pa.table({"ids": [[1, 2], [], None]})), column="ids", input="input_ids")
    assert [row["ids"] for row in rows] == [[1, 2], [], None]


@pytest.mark.parametrize("form", FORMATS)
def test_an_input_column_of_another_kind_is_refused(form, write):
    keys = write(form, pa.table({"n": [1, 2, 3]}))
    where = keys["path"] if form.startswith("hf") else Path(keys["path"], f"a{FILES[form][1]}")
    assert error_of(**keys, column="n") == (
        f'{where}: column "n" holds int64; input = "text" takes text: strings or bytes. Name another column or input.'
    )


@pytest.mark.parametrize("form", FORMATS)
def test_a_column_of_nulls_is_text_without_a_value(form, write):
    source = open_source(SourceSpec(**write(form, pa.table({"text": pa.nulls(3)}))))
    assert source.layout().schema == pa.schema([("text", pa.large_string())])
    assert rows_of(source) == [{"text": None}] * 3


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "hf streamed"])
def test_the_identity_is_that_of_the_rows_wherever_the_files_lie(form, write, tmp_path):
    keys = write(form, texts(20))
    first = open_source(SourceSpec(**keys)).layout().fingerprint
    json.dumps(first)
    if form == "hf loaded":
        return  # what datasets caches is identified by where it came from
    moved = shutil.move(keys["path"], tmp_path / "moved")
    for file in Path(moved).rglob("*.*"):
        os.utime(file)
    again = open_source(SourceSpec(**keys | {"path": str(moved)})).layout().fingerprint
    assert again != first
    assert identity(again) == identity(first)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "hf streamed"])
def test_the_identity_changes_with_one_value_and_with_one_row_on_top(form, write, tmp_path):
    def identity_of(table: pa.Table) -> dict:
        shutil.rmtree(tmp_path / "rows", ignore_errors=True)
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        return identity(open_source(SourceSpec(**write(form, table))).layout().fingerprint)

    table = texts(20)
    other = pa.table(
        {"text": ["other" if index == 13 else text for index, text in enumerate(table["text"].to_pylist())]}
    )
    found = [identity_of(table), identity_of(other), identity_of(pa.concat_tables([table[:1], table]))]
    assert found[0] != found[1] != found[2] != found[0]


@pytest.mark.parametrize("form", FILES)
def test_consecutive_reads_decode_no_row_twice(form, write, monkeypatch):
    decoded = []
    for cls in (parquet.ParquetFile, arrow_ipc.ArrowFile, jsonl.JsonLines):

        def counted(self, start, batches=cls.batches):
            for arrays in batches(self, start):
                decoded.append(len(arrays[0]))
                yield arrays

        monkeypatch.setattr(cls, "batches", counted)
    monkeypatch.setattr(jsonl, "DECODE_ROWS", 4)
    monkeypatch.setattr(arrow_ipc, "DECODE_ROWS", 4)
    source = open_source(SourceSpec(**write(form, texts(50))))
    for start in range(0, 50, 3):
        rows_of(source, start, start + 3, max_rows=2)
    assert sum(decoded) == 50
    source.close()


@pytest.mark.parametrize("form", FILES)
def test_a_file_that_changes_after_the_layout_is_refused_when_it_is_opened(form, write):
    keys = write(form, texts(50))
    path = Path(keys["path"], f"b{FILES[form][1]}")
    source = open_source(SourceSpec(**keys))
    digest = source.layout().fingerprint["files"][1]["sha256"][:12]
    size = path.stat().st_size
    os.utime(path, (1, 1))
    assert len(rows_of(source, 40, 50)) == 10  # another time, the same bytes
    data = bytearray(path.read_bytes())
    data[size // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, (2, 2))
    source.close()
    with pytest.raises(SourceError, match=f"^{path}: changed while the job ran \\(sha256 was {digest}, is "):
        rows_of(source, 40, 50)
    path.write_bytes(data + b"1")
    with pytest.raises(SourceError) as caught:
        rows_of(source, 40, 50)
    assert str(caught.value) == (
        f"{path}: changed while the job ran (size was {size:,}, is {size + 1:,}). "
        "Restore the file, or start a new job in another output directory."
    )
    path.unlink()
    with pytest.raises(SourceError, match=f"^{path}: changed while the job ran \\(size was {size:,}, is gone\\)"):
        rows_of(source, 40, 50)


@pytest.mark.parametrize("form", [form for form in FILES if form != "jsonl"])
def test_a_truncated_file_is_refused_before_anything_is_read(form, write):
    keys = write(form, texts(50))
    path = Path(keys["path"], f"b{FILES[form][1]}")
    whole = path.read_bytes()
    name = "jsonl" if form.startswith("jsonl") else "parquet" if form == "parquet" else "arrow"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    assert error_of(**keys).startswith(f"{path}: cannot be read as {name}: ")
    if name != "jsonl":
        path.write_bytes(b"")
        assert error_of(**keys).startswith(f"{path}: cannot be read as {name}: ")


@pytest.mark.parametrize("form", FILES)
def test_an_empty_file_among_others_adds_no_rows(form, write):
    table = texts(20)
    keys = write(form, table)
    writer, extension = FILES[form]
    for name in ("0", "aa", "z"):
        writer(table[:0], Path(keys["path"], name + extension))
    source = open_source(SourceSpec(**keys))
    assert source.layout().num_rows == 20
    assert rows_of(source) == table.to_pylist()
    assert rows_of(source, 13, 14) == table.to_pylist()[13:14]
    source.close()


# --- which files, in which order ------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Small Parquet files whose one row is their own path; relative paths start beside them."""
    monkeypatch.chdir(tmp_path)

    def plant(*names: str) -> None:
        for name in names:
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".parquet":
                pq.write_table(pa.table({"text": [name]}), path)
            elif path.suffix == ".jsonl":
                path.write_text(json.dumps({"text": name}) + "\n")
            else:
                path.write_text("not data")

    return plant


def names_read(path) -> list[str]:
    return [row["text"] for row in open_rows(path=path)]


def test_files_of_a_directory_are_read_by_name_without_hidden_ones(tree):
    tree(
        "d/b.parquet",
        "d/a.parquet",
        "d/sub/c.parquet",
        "d/.x.parquet",
        "d/_tmp/y.parquet",
        "d/_m.parquet",
        "d/README.md",
    )
    assert names_read("d") == ["d/a.parquet", "d/b.parquet", "d/sub/c.parquet"]
    assert names_read("d/_m.parquet") == ["d/_m.parquet"]


def test_a_glob_is_sorted_and_a_list_keeps_the_order_given(tree):
    tree("d/b.parquet", "d/a.parquet", "d/sub/c.parquet", "d/sub/_d.parquet", "e.parquet")
    assert names_read("d/*.parquet") == ["d/a.parquet", "d/b.parquet"]
    assert names_read("d/**/*.parquet") == ["d/a.parquet", "d/b.parquet", "d/sub/c.parquet"]
    assert names_read("d/sub/_*.parquet") == ["d/sub/_d.parquet"]
    assert names_read(("e.parquet", "d/*.parquet", "d/sub")) == [
        "e.parquet",
        "d/a.parquet",
        "d/b.parquet",
        "d/sub/c.parquet",
    ]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tree):
    tree("a[1].parquet", "a1.parquet")
    assert names_read("a[1].parquet") == ["a[1].parquet"]


def test_a_file_listed_twice_is_refused(tree):
    tree("d/a.parquet")
    assert error_of(path=("d/a.parquet", "./d")) == (
        "d/a.parquet: listed twice in the source; its rows would be read twice. Name each file once."
    )


def test_several_formats_in_one_source_are_refused_unless_one_is_named(tree):
    tree("d/a.parquet", "d/b.jsonl")
    assert error_of(path="d") == (
        "d/a.parquet is parquet and d/b.jsonl is jsonl; a source has one format. Set format, or path."
    )
    assert open_rows(path="d", format="jsonl") == [{"text": "d/b.jsonl"}]


def test_a_path_that_names_nothing_is_no_such_file(tree):
    tree("empty/README.md", "data.bin", "d/a.parquet")
    assert error_of(path="no.parquet") == "no.parquet: no such file or directory."
    assert error_of(path="./no") == "./no: no such file or directory."
    assert error_of(path=("d", "no")) == "no: no such file or directory."
    extensions = ", ".join(files.EXTENSIONS)
    assert error_of(path="empty") == f"empty: 1 files of no known format, expected files that end in {extensions}."
    assert error_of(path="d/*.jsonl") == f"d/*.jsonl: no files, expected files that end in {extensions}."
    assert error_of(path="empty", format="parquet") == (
        "empty: no parquet files, expected files that end in .parquet, .pq."
    )
    assert error_of(path="data.bin") == (
        'data.bin: the name does not say which format this is. Set format to "parquet", "arrow" or "jsonl".'
    )
    assert error_of(path="ftp://host/a.parquet") == (
        "ftp://host/a.parquet: addresses of this kind are not read. "
        "Give a path, s3://, gs://, or name a Hugging Face dataset."
    )


def test_a_named_format_reads_a_file_of_any_extension(tree):
    tree("a.parquet")
    shutil.move("a.parquet", "a.bin")
    assert open_rows(path="a.bin", format="parquet") == [{"text": "a.parquet"}]


def test_linked_directories_are_followed_once(tree):
    tree("d/a.parquet", "far/b.parquet")
    os.symlink("../far", "d/link")
    os.symlink("..", "far/back")
    assert names_read("d") == ["d/a.parquet", "far/b.parquet"]


def test_files_beyond_the_limit_are_not_opened(tree):
    tree("d/a.parquet", "d/b.parquet")
    Path("d/b.parquet").write_bytes(b"broken")
    source = open_source(SourceSpec(path="d", limit=1))
    assert rows_of(source) == [{"text": "d/a.parquet"}]
    assert [entry["name"] for entry in source.layout().fingerprint["files"]] == ["a.parquet"]


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_a_large_file_is_sampled_and_the_fingerprint_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "WHOLE_FILE_BYTES", 2**20)
    path = tmp_path / "a.bin"
    data = bytearray(os.urandom(3 * 2**20))
    path.write_bytes(data)
    first = fingerprints.describe_file(path, "a.bin", 1)
    assert first["sampled"] and first == fingerprints.describe_file(path, "a.bin", 1)
    data[-1] ^= 1
    path.write_bytes(data)
    assert fingerprints.describe_file(path, "a.bin", 1)["sha256"] != first["sha256"]
    monkeypatch.undo()
    assert not fingerprints.describe_file(path, "a.bin", 1)["sampled"]
    assert fingerprints.describe_file(path, "a.bin", 1, source_bytes=2**50)["sampled"]


def test_a_known_fingerprint_spares_hashing_files_of_the_same_size_and_time(tree, monkeypatch):
    tree("d/a.parquet", "d/b.parquet")
    known = open_source(SourceSpec(path="d")).layout().fingerprint
    os.utime("d/b.parquet", (1, 1))
    hashed = []
    digest = fingerprints.file_digest
    monkeypatch.setattr(fingerprints, "file_digest", lambda path: hashed.append(path.name) or digest(path))
    again = open_source(SourceSpec(path="d"), known).layout().fingerprint
    assert hashed == ["b.parquet"]
    assert identity(again) == identity(known)


# --- one type over all files ----------------------------------------------------------------------------------------


def two_files(tmp_path: Path, first: pa.Array, second: pa.Array, name: str = "c") -> tuple[str, str]:
    for file, array in (("1", first), ("2", second)):
        columns = {"text": ["t"] * len(array)} | {name: array}
        write_arrow_file(pa.table(columns), tmp_path / f"{file}.arrow")
    return str(tmp_path / "1.arrow"), str(tmp_path / "2.arrow")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.array(["a"]), pa.array(["b"], pa.large_string()), pa.large_string()),
        (pa.array(["a"]), pa.array(["b"]).dictionary_encode(), pa.string()),
        (pa.array(["a"], pa.string_view()), pa.array(["b"]), pa.large_string()),
        (pa.array([1], pa.int32()), pa.array([2], pa.int64()), pa.int64()),
        (pa.nulls(1), pa.array([[1]]), pa.list_(pa.int64())),
        (pa.array([[1]], pa.list_(pa.int32(), 1)), pa.array([[2]], pa.list_(pa.int32())), pa.list_(pa.int32())),
        (
            pa.array([{"a": 1}]),
            pa.array([{"b": "x", "a": 2}]),
            pa.struct([("a", pa.int64()), ("b", pa.string())]),
        ),
    ],
    ids=lambda value: None if isinstance(value, pa.Array) else str(value),
)
def test_stored_types_that_mean_the_same_are_unified(tmp_path, first, second, expected):
    source = open_source(SourceSpec(path=two_files(tmp_path, first, second), carry=("c",)))
    assert source.layout().schema.field("c").type == expected
    values = [row["c"] for row in rows_of(source)]
    assert values == pa.array([*first.to_pylist(), *second.to_pylist()], expected).to_pylist()
    source.close()


def test_types_that_do_not_join_name_both_files(tmp_path):
    first, second = two_files(tmp_path, pa.array(["a"]), pa.array([1]))
    assert error_of(path=(first, second), carry=("c",)) == (
        f'column "c" is string in {first} and int64 in {second}; '
        "one type cannot hold both. Convert the files, or leave the column out."
    )


def test_a_value_that_does_not_fit_the_joined_type_is_an_error_not_another_value(tmp_path):
    paths = two_files(tmp_path, pa.array([1], pa.int64()), pa.array([2**63], pa.uint64()))
    assert error_of(path=paths, carry=("c",)).startswith(
        f'{paths[1]}: column "c" does not fit int64, its type over all files: '
    )


def test_a_carried_column_that_one_file_lacks_names_that_file(tmp_path):
    write_parquet(pa.table({"text": ["a"], "c": [1]}), tmp_path / "1.parquet")
    write_parquet(pa.table({"text": ["a"]}), tmp_path / "2.parquet")
    assert error_of(path=str(tmp_path), carry=("c",)) == f'{tmp_path}/2.parquet: no column "c". Columns: text.'


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
@pytest.mark.parametrize("writer", [write_parquet, write_arrow_file])
def test_text_of_every_string_type_is_large_string(tmp_path, kind, writer):
    path = tmp_path / "a.data"
    writer(pa.table({"text": pa.array(["a", None, "é"]).cast(kind)}), path)
    form = "parquet" if writer is write_parquet else "arrow"
    source = open_source(SourceSpec(path=str(path), format=form))
    assert source.layout().schema.types == [pa.large_string()]
    assert rows_of(source) == [{"text": "a"}, {"text": None}, {"text": "é"}]


@pytest.mark.parametrize("writer", [write_parquet, write_arrow_file])
def test_bytes_that_are_not_utf8_are_passed_on_as_they_are(tmp_path, writer):
    data = pa.array([b"\xff\xfe", b"ok"])
    lying = pa.Array.from_buffers(pa.string(), 2, data.buffers())
    for name, array in (("bytes", data), ("strings", lying)):
        writer(pa.table({"text": array}), tmp_path / name)
        form = "parquet" if writer is write_parquet else "arrow"
        source = open_source(SourceSpec(path=str(tmp_path / name), format=form))
        batches = list(source.read(0, None, 10))
        assert source.layout().schema.types == [pa.large_binary() if name == "bytes" else pa.large_string()]
        assert batches[0]["text"].view(pa.large_binary()).to_pylist() == [b"\xff\xfe", b"ok"]


def test_text_is_bytes_for_all_files_when_one_holds_bytes(tmp_path):
    paths = two_files(tmp_path, pa.array([b"\xff"]), pa.array(["b"]))
    assert open_rows(path=paths, column="c") == [{"c": b"\xff"}, {"c": b"b"}]


def test_two_columns_of_one_name_are_refused_only_if_asked_for(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], ["x", "x", "text"])
    write_arrow_file(table, tmp_path / "a.arrow")
    write_parquet(table, tmp_path / "a.parquet")
    for path in (f"{tmp_path}/a.arrow", f"{tmp_path}/a.parquet"):
        assert open_rows(path=path) == [{"text": "c"}]
        assert error_of(path=path, column="x") == (
            f'{path}: 2 columns are named "x"; which one is meant cannot be told. Rename them in the file.'
        )


# --- Parquet ----------------------------------------------------------------------------------------------------------


def test_row_groups_outside_the_range_are_not_read(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(texts(100), path, row_group_size=10)
    monkeypatch.setattr(parquet, "DECODE_BYTES", 1)
    asked = []
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, **keys: asked.extend(keys["row_groups"]) or batches(self, **keys)
    )
    source = open_source(SourceSpec(path=str(path)))
    assert rows_of(source, 35, 42) == texts(100).to_pylist()[35:42]
    assert set(asked) == {3, 4}
    source.close()


def test_only_the_columns_asked_for_are_read(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"big": ["x" * 1000] * 50, "text": ["t"] * 50})
    pq.write_table(table, path, use_dictionary=False, compression=None, write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"x" * 1000, b"y" * 1000))
    assert open_rows(path=str(path)) == [{"text": "t"}] * 50
    assert error_of(path=str(path), column="big").startswith(f"{path}: cannot be read as parquet: ")


def test_a_flipped_byte_in_a_page_with_a_checksum_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["x" * 1000] * 50})
    pq.write_table(table, path, use_dictionary=False, compression=None, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert error_of(path=str(path)).startswith(f"{path}: cannot be read as parquet: ")


def test_a_file_that_is_not_parquet_is_refused_by_name(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 but no more of it")
    assert error_of(path=str(path)).startswith(f"{path}: cannot be read as parquet: ")
    path.write_bytes(b"")
    assert error_of(path=str(path)) == (
        f"{path}: cannot be read as parquet: Parquet file size is 0 bytes. "
        "Replace the file, or leave it out of the source."
    )


# --- JSONL ------------------------------------------------------------------------------------------------------------


def lines(tmp_path: Path, data: bytes, name: str = "a.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (b'{"text": ', "not JSON (Expecting value at column 10)"),
        (b"", "blank, expected a JSON object"),
        (b"[1]", "list found, expected a JSON object"),
        (b'{"text": 5}', 'column "text" has an integer, where the lines before have a string'),
        (b'{"text": "a", "n": 1e400}{', "not JSON (Extra data at column 26)"),
        (b'{"text": "a", "n": 9223372036854775808}', 'column "n" has an integer beyond 64 bits'),
        (
            b"[" * 100_000,
            "not JSON (maximum recursion depth exceeded while decoding a JSON array from a unicode string)",
        ),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, bad, problem):
    path = lines(tmp_path, b'{"text": "a", "n": 1}\n' * 3 + bad + b"\n" + b'{"text": "b", "n": 1}\n')
    assert error_of(path=path, carry=("n",)) == f"{path}, line 4: {problem}."


def test_blank_lines_at_the_end_and_a_missing_last_newline_are_fine(tmp_path):
    row = b'{"text": "a"}'
    assert open_rows(path=lines(tmp_path, row + b"\n\n \n")) == [{"text": "a"}]
    assert open_rows(path=lines(tmp_path, row + b"\r\n" + row)) == [{"text": "a"}] * 2
    assert open_rows(path=lines(tmp_path, b"\xef\xbb\xbf" + row)) == [{"text": "a"}]


def test_a_lone_surrogate_makes_the_text_bytes_and_does_not_end_the_job(tmp_path):
    path = lines(tmp_path, b'{"text": "\\ud800x"}\n{"text": "\\u00e9"}\n{"text": null}\n{"text": "\xff"}\n')
    source = open_source(SourceSpec(path=path))
    assert source.layout().schema.types == [pa.large_binary()]
    assert rows_of(source) == [
        {"text": b"\xed\xa0\x80x"},
        {"text": "é".encode()},
        {"text": None},
        {"text": b"\xed\xb3\xbf"},
    ]


def test_a_lone_surrogate_inside_messages_arrives_as_the_bytes_of_a_string(tmp_path):
    row = b'{"chat": [{"role": "user", "content": "\\ud800"}, {"role": "user", "content": "ok", "n": 1}]}\n'
    source = open_source(SourceSpec(path=lines(tmp_path, row + b'{"chat": null}\n'), column="chat", input="messages"))
    (batch,) = source.read(0, None, 5)
    content = batch["chat"].flatten().field("content")
    assert content.type == pa.string()
    assert content.view(pa.binary()).to_pylist() == [b"\xed\xa0\x80", b"ok"]
    assert len(batch) == 2


def test_a_lone_surrogate_outside_the_input_is_refused(tmp_path):
    path = lines(tmp_path, b'{"text": "a", "id": "b"}\n{"text": "a", "id": "\\udfff"}\n')
    assert error_of(path=path, id_column="id") == (
        f'{path}, line 2: column "id" has a string that is not valid Unicode; only the input column may.'
    )


def test_types_of_all_lines_are_joined_and_absent_keys_are_null(tmp_path):
    rows = [{"text": "a"}, {"text": "b", "n": 1, "d": {"x": []}}, {"n": 2.5, "d": {"y": "s", "x": [1]}}, {"n": None}]
    path = lines(tmp_path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    source = open_source(SourceSpec(path=path, carry=("n", "d", "d.y")))
    assert source.layout().schema.field("n").type == pa.float64()
    assert rows_of(source) == [
        {"text": "a", "n": None, "d": None, "d.y": None},
        {"text": "b", "n": 1.0, "d": {"x": [], "y": None}, "d.y": None},
        {"text": None, "n": 2.5, "d": {"x": [1], "y": "s"}, "d.y": "s"},
        {"text": None, "n": None, "d": None, "d.y": None},
    ]


def test_a_row_deep_in_a_plain_file_is_reached_from_a_near_line(tmp_path, monkeypatch):
    path = lines(tmp_path, json_lines(texts(5000)))
    source = open_source(SourceSpec(path=path))
    source.layout()
    parsed = []
    parse = jsonl._parse
    monkeypatch.setattr(jsonl, "_parse", lambda line, *rest: parsed.append(line) or parse(line, *rest))
    monkeypatch.setattr(jsonl, "DECODE_ROWS", 64)
    assert rows_of(source, 4500, 4503) == texts(5000).to_pylist()[4500:4503]
    assert len(parsed) <= jsonl.INDEX_ROWS
    source.close()


# --- Arrow ------------------------------------------------------------------------------------------------------------


def test_a_damaged_arrow_file_is_an_error_and_not_a_crash(tmp_path):
    path = tmp_path / "a.arrow"
    write_arrow_file(texts(50), path)
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(whole)
        for place in generator.integers(0, len(data), 3):
            data[place] = int(generator.integers(256))
        path.write_bytes(data)
        try:
            source = open_source(SourceSpec(path=str(path)))
            for batch in source.read(0, None, 10):
                batch.validate()
        except SourceError as error:
            assert str(path) in str(error)


def test_an_arrow_file_that_points_outside_its_own_bytes_is_refused(tmp_path):
    path = tmp_path / "a.arrow"
    write_arrow_file(pa.table({"text": pa.array(["ab", "cd", "efg"], pa.large_string())}), path)
    right, lying = (np.array(offsets, np.int64).tobytes() for offsets in ([0, 2, 4, 7], [0, 2, 4, 10_000_000]))
    assert path.read_bytes().count(right) == 1
    path.write_bytes(path.read_bytes().replace(right, lying))
    assert error_of(path=str(path)).startswith(f"{path}: cannot be read as arrow: ")


# --- Hugging Face datasets --------------------------------------------------------------------------------------------


def test_a_dataset_that_cannot_be_reached_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error_of(path="org/none") == (
        "org/none: no such file or directory, and no Hugging Face dataset that can be loaded: "
        "Couldn't reach 'org/none' on the Hub (OfflineModeIsEnabled)"
    )
    assert error_of(path="none", streaming=True).startswith("none: no such file or directory, and no Hugging Face ")
    assert error_of(path=("a", "b"), format="hf") == (
        "2 paths with format hf; a source is one dataset. Join the datasets first, or run a job for each."
    )


def test_a_split_that_is_not_there_is_refused(write):
    keys = write("hf dict", texts(5))
    path = keys["path"]
    assert error_of(**keys | {"split": "dev"}) == f'{path}: no split "dev". Splits: train, test.'
    assert open_source(SourceSpec(**keys | {"split": "train"})).layout().num_rows == 0


def test_an_unnamed_saved_split_is_not_taken_for_another_one(write):
    keys = write("hf saved", texts(5))
    assert error_of(**keys, split="test") == f'{keys["path"]}: no split "test". Splits: one, without a name.'


def test_a_missing_split_of_a_loaded_dataset_is_one_clear_line(write):
    keys = write("hf loaded", texts(5))
    for streaming in (False, True):
        message = error_of(**keys | {"streaming": streaming}, split="dev")
        assert message.startswith(f"{keys['path']}: not readable by datasets: ") and "dev" in message


def test_a_stream_is_read_once_for_consecutive_reads(write, monkeypatch):
    import datasets

    begun = []
    iterate = datasets.IterableDataset.iter
    source = open_source(SourceSpec(**write("hf streamed", texts(50))))
    source.layout()
    monkeypatch.setattr(datasets.IterableDataset, "iter", lambda self, **keys: begun.append(1) or iterate(self, **keys))
    for start in range(0, 60, 6):
        assert rows_of(source, start, start + 6) == texts(50).to_pylist()[start : start + 6]
    assert len(begun) == 1
    assert rows_of(source, 10, 12) == texts(50).to_pylist()[10:12]
    assert len(begun) == 2
    source.close()


def test_a_stream_names_its_files_in_the_fingerprint(write):
    fingerprint = open_source(SourceSpec(**write("hf streamed", texts(5)))).layout().fingerprint
    assert [entry["name"] for entry in fingerprint["files"]] == ["a.parquet"]
    json.dumps(fingerprint)


def test_a_stream_without_declared_types_takes_those_of_its_first_rows(tmp_path):
    (tmp_path / "rows").mkdir()
    write_jsonl(texts(9), tmp_path / "rows" / "a.jsonl")
    keys = {"path": str(tmp_path / "rows"), "format": "hf", "streaming": True}
    assert open_rows(**keys) == texts(9).to_pylist()
    assert error_of(**keys, column="body") == f'{tmp_path}/rows: no column "body". Columns: text.'


def test_a_saved_dataset_whose_state_points_elsewhere_is_refused(write, tmp_path):
    keys = write("hf saved", texts(5))
    state = Path(keys["path"], "state.json")
    table = json.loads(state.read_text())
    (name,) = (file["filename"] for file in table["_data_files"])
    shutil.move(Path(keys["path"], name), tmp_path / name)
    state.write_text(json.dumps(table | {"_data_files": [{"filename": f"../{name}"}]}))
    assert error_of(**keys) == f"{keys['path']}: its state names a file outside of it, {name}"


def test_a_module_beside_a_dataset_is_never_run(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    error_of(path=str(tmp_path / "rows"), format="hf")
    assert not (tmp_path / "ran").exists()


# --- the process ------------------------------------------------------------------------------------------------------


READ_ONE = """
import sys
from extract.sources import open_source
from extract.spec import SourceSpec
source = open_source(SourceSpec(path=sys.argv[1], limit=1, format=sys.argv[2], streaming=sys.argv[3] == "stream"))
source.layout()
assert sum(batch.num_rows for batch in source.read(0, None, 10)) == 1
print(sorted({"torch", "datasets", "transformers", "pandas"} & set(sys.modules)))
"""


@pytest.mark.parametrize("how", ["files", "stream"])
def test_a_process_that_read_one_row_of_many_files_ends_at_once(tmp_path, how):
    (tmp_path / "rows").mkdir()
    for index in range(20):
        pq.write_table(texts(2000), tmp_path / "rows" / f"{index:02}.parquet", row_group_size=100)
    form = "parquet" if how == "files" else "hf"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", READ_ONE, str(tmp_path / "rows"), form, how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"HF_HOME": str(tmp_path / "hf")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 30
    if how == "files":
        assert done.stdout == "[]\n"  # nor was anything heavy imported


def test_the_hub_module_is_imported_only_for_datasets():
    assert hf.open_dataset(SourceSpec(path="a", format="hf")) is not None
    code = "import sys, extract.sources; print([name for name in sys.modules if 'sources.' in name])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['extract.sources.base']\n"
