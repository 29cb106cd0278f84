"""Arrow columns and files in the shapes that people have, drawn by Hypothesis, and what a job makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from extract.errors import ExtractError
from extract.estimate import estimate
from extract.jobs import open_job
from extract.spec import JobSpec

HOSTILE = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

FORMATS = ("parquet", "arrow", "arrows")
TEXT_ENCODINGS = ("string", "large_string", "string_view", "dictionary", "large dictionary", "run ends", "binary")
COLUMN_NAMES = (
    *("", " ", ".", "..", "a.", ".a", "a.b", "a.b.c", "Text", "日本", "é", "e\u0301", "a b", "a\nb", '"q"', "*", "a/b"),
    *("list", "element", "item", "key_value", "list.element", "{x}", "\x00", "text.x", "text.", "a" * 300),
)


# --- columns --------------------------------------------------------------------------------------------------------


def texts(count: int) -> st.SearchStrategy[list[str | None]]:
    """Values of a text column, some of them null or empty, some alike."""
    text = st.text(alphabet="ab é\n日\U0001f600", max_size=12)
    return st.lists(st.one_of(st.none(), text, st.just("again")), min_size=count, max_size=count)


def encoded(values: Sequence[str | None], how: str) -> pa.Array:
    """Texts in one of `TEXT_ENCODINGS`."""
    match how:
        case "dictionary":
            return pa.array(values, pa.string()).dictionary_encode()
        case "large dictionary":
            return pa.array(values, pa.large_string()).dictionary_encode()
        case "run ends":
            return pc.run_end_encode(pa.array(values, pa.string()))
        case "binary":
            return pa.array([None if value is None else value.encode() for value in values], pa.binary())
    return pa.array(values, getattr(pa, how)())


def _integers(kind: pa.DataType) -> st.SearchStrategy[int]:
    signed = pa.types.is_signed_integer(kind)
    size = kind.bit_width - signed
    return st.integers(-(2**size) if signed else 0, 2**size - 1)


_MOMENTS = st.integers(-(2**40), 2**40)
_LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    **{kind: _integers(kind) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64())},
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.decimal128(9, 2): st.integers(-(10**9) + 1, 10**9 - 1).map(lambda cents: Decimal(cents).scaleb(-2)),
    pa.decimal256(60, 0): st.integers(-(10**50), 10**50).map(Decimal),
    pa.timestamp("s"): _MOMENTS.map(lambda moment: moment // 2**10),
    pa.timestamp("ns"): _MOMENTS,
    pa.timestamp("ns", "Europe/Berlin"): _MOMENTS,
    pa.timestamp("us", "UTC"): _MOMENTS,
    pa.duration("ns"): _MOMENTS,
    pa.duration("ms"): _MOMENTS,
    pa.date32(): st.integers(-(10**5), 10**5),
    pa.time64("us"): st.integers(0, 86_399_999_999),
    pa.string(): st.text(max_size=5),
    pa.large_string(): st.text(max_size=5),
    pa.string_view(): st.text(max_size=20),
    pa.binary(): st.binary(max_size=5),
    pa.binary_view(): st.binary(max_size=20),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["x", "y", "z"]),
}


def _nested(inner: st.SearchStrategy[tuple[pa.DataType, Any]]) -> st.SearchStrategy[tuple[pa.DataType, Any]]:
    def of(kind: tuple[pa.DataType, Any], how: str) -> tuple[pa.DataType, Any]:
        arrow, values = kind
        values = st.one_of(st.none(), values)
        many = st.lists(values, max_size=3)
        match how:
            case "list":
                return pa.list_(arrow), many
            case "large_list":
                return pa.large_list(arrow), many
            case "list_view":
                return pa.list_view(arrow), many
            case "large_list_view":
                return pa.large_list_view(arrow), many
            case "pair":
                return pa.list_(arrow, 2), st.lists(values, min_size=2, max_size=2)
            case "struct":
                return pa.struct([("a", arrow), ("b.c", pa.int32())]), st.fixed_dictionaries(
                    {"a": values, "b.c": st.one_of(st.none(), st.integers(0, 9))}
                )
        return pa.map_(pa.string(), arrow), st.dictionaries(st.sampled_from("klm"), values).map(lambda d: [*d.items()])

    hows = ("list", "large_list", "list_view", "large_list_view", "pair", "struct", "map")
    return st.builds(of, inner, st.sampled_from(hows))


_KINDS = st.recursive(st.sampled_from(list(_LEAVES.items())), _nested, max_leaves=2)


@st.composite
def columns(draw: st.DrawFn, count: int) -> pa.Array:
    """A column of any type, nested up to two deep, with nulls; sometimes run-end encoded, sometimes a slice."""
    kind, values = draw(_KINDS)
    drawn = draw(st.lists(st.one_of(st.none(), values), min_size=count, max_size=count))
    array = pa.array([None, *drawn], kind)[1:]
    if (pa.types.is_integer(kind) or pa.types.is_boolean(kind)) and draw(st.booleans()):
        return pc.run_end_encode(array)
    return array


# --- files ----------------------------------------------------------------------------------------------------------


def write(path: Path, table: pa.Table, rows_per_group: int = 3) -> bool:
    """Write in the format that the name says; false where pyarrow itself has no way to."""
    try:
        if path.suffix == ".parquet":
            pq.write_table(table, path, row_group_size=rows_per_group)
        else:
            new = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
            with new(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=rows_per_group)
    except pa.ArrowNotImplementedError:
        return False
    except pa.ArrowInvalid as error:
        if "Parquet" in str(error):
            return False
        raise
    return True


@dataclass(frozen=True)
class Refused:
    """One clear error: what every fault of the data must be, and before any engine is loaded."""

    code: int
    message: str


def rows_or_refusal(spec: JobSpec) -> pa.Table | Refused:
    """Open a job, estimate it as a run does before it loads the engine, then read its rows.

    An error of ours while the job is opened or estimated is a refusal; one after that, or any other, comes through.
    """
    try:
        opened = open_job(spec)
        try:
            estimate(opened.plan, opened.source, opened.tokenizer, opened.output)
        except BaseException:
            opened.source.close()
            raise
    except ExtractError as error:
        assert error.exit_code in (2, 3), error
        assert "\n" not in str(error).replace("a\nb", ""), error
        return Refused(error.exit_code, str(error))
    batches = list(opened.source.read(0, None, 5))
    opened.source.close()
    return pa.Table.from_batches(batches, opened.source.layout().schema)


def values(column: pa.Array | pa.ChunkedArray) -> str:
    """Values as a text in which NaN equals itself."""
    return repr(column.to_pylist())


def as_text(column: pa.ChunkedArray) -> list[str | None]:
    """Rows of an input column, whether it holds strings or bytes."""
    return [value.decode() if isinstance(value, bytes) else value for value in column.to_pylist()]
