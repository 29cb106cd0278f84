"""One schema a job: names, types, nulls, and metadata that explain the numbers."""

import pyarrow as pa
import pytest

from extract.records import OUTCOMES
from extract.shards.schema import BFLOAT16_EXTENSION, OUTCOME_VALUES, ColumnNotStorable, ColumnTaken, output_schema
from extract.spec import StatesSpec

KINDS = ("tokens", "last", "mean", "first")
DTYPES = ("float16", "float32", "bfloat16", "int8")


def schema_of(*, carried=(), id_type=None, chunked=False, metadata=None, **states):
    return output_schema(StatesSpec(**states), 64, id_type, carried, chunked, metadata or {})


def test_columns_stand_in_a_fixed_order():
    fields = [pa.field("meta.url", pa.string()), pa.field("n", pa.int16())]
    schema = schema_of(carried=fields, id_type=pa.int64(), chunked=True)
    assert schema.names == [
        "row",
        "id",
        "chunk",
        "meta.url",
        "n",
        "outcome",
        "num_tokens",
        "num_tokens_original",
        "input_ids",
        "hidden_states",
    ]


def test_what_was_not_asked_for_has_no_column():
    schema = schema_of(kind="last", input_ids=False)
    assert schema.names == ["row", "outcome", "num_tokens", "num_tokens_original", "hidden_state"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_states_are_lists_of_vectors_and_pooled_states_vectors(dtype):
    value = {"float16": pa.float16(), "float32": pa.float32(), "bfloat16": pa.uint16(), "int8": pa.int8()}[dtype]
    tokens = schema_of(dtype=dtype).field("hidden_states").type
    pooled = schema_of(dtype=dtype, kind="mean").field("hidden_state").type
    assert pa.types.is_list(tokens)
    for vector in (tokens.value_type, pooled):
        assert pa.types.is_fixed_size_list(vector)
        assert vector.list_size == 64
        assert vector.value_type == value


def test_int8_has_a_column_of_scales():
    assert schema_of(dtype="int8").field("hidden_states_scale").type.value_type == pa.float32()
    assert schema_of(dtype="int8", kind="last").field("hidden_state_scale").type == pa.float32()
    assert "hidden_states_scale" not in schema_of(dtype="float16").names


def test_bfloat16_carries_an_extension_name_and_others_none():
    values = schema_of(dtype="bfloat16").field("hidden_states").type.value_type.value_field
    assert values.metadata[b"ARROW:extension:name"].decode() == BFLOAT16_EXTENSION
    assert schema_of(dtype="float16").field("hidden_states").type.value_type.value_field.metadata is None


def test_only_columns_that_always_have_a_value_are_not_null():
    schema = schema_of(id_type=pa.int64(), chunked=True)
    assert [field.name for field in schema if not field.nullable] == ["row", "chunk", "outcome", "num_tokens"]


def test_the_outcome_dictionary_is_the_list_of_outcomes():
    assert OUTCOME_VALUES.to_pylist() == [str(outcome) for outcome in OUTCOMES]
    assert schema_of().field("outcome").type == pa.dictionary(pa.int8(), pa.string())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_metadata_say_what_the_numbers_are(kind, dtype):
    metadata = schema_of(kind=kind, dtype=dtype, metadata={"job": "j1", "extract.engine": "e1"}).metadata
    facts = {key.decode(): value.decode() for key, value in metadata.items()}
    assert facts.pop("extract.read").startswith("# values is hidden_state")
    assert facts == {
        "extract.format_version": "1",
        "extract.kind": kind,
        "extract.position": "post_final_norm",
        "extract.dtype": dtype,
        "extract.width": "64",
        "extract.normalized": "false",
        "extract.job": "j1",
        "extract.engine": "e1",
    }


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (pa.string(), pa.large_string()),
        (pa.string_view(), pa.large_string()),
        (pa.binary(), pa.large_binary()),
        (pa.dictionary(pa.int8(), pa.string()), pa.large_string()),
        (pa.list_(pa.string()), pa.list_(pa.large_string())),
        (pa.struct([("a", pa.string()), ("b", pa.int8())]), pa.struct([("a", pa.large_string()), ("b", pa.int8())])),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.large_string(), pa.int8())),
        (pa.list_(pa.float32(), 3), pa.list_(pa.float32(), 3)),
        (pa.json_(), pa.large_string()),
        (pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC")),
        (pa.decimal128(10, 2), pa.decimal128(10, 2)),
        (pa.null(), pa.null()),
    ],
)
def test_carried_types_lose_32_bit_text_dictionaries_and_extensions(given, stored):
    schema = schema_of(carried=[pa.field("c", given)], id_type=given)
    assert schema.field("c").type == stored
    assert schema.field("id").type == stored


def test_a_carried_column_with_a_name_of_ours_is_refused():
    with pytest.raises(ColumnTaken) as refused:
        schema_of(carried=[pa.field("outcome", pa.string())])
    assert str(refused.value) == (
        'source.carry: column "outcome" would appear twice in the output, which has a column of that name itself. '
        "Leave it out of source.carry, or rename it in the source."
    )
    assert refused.value.exit_code == 2


def test_carried_input_ids_may_take_the_place_of_ours():
    with pytest.raises(ColumnTaken, match=r"Or set states.input_ids = false\.$"):
        schema_of(carried=[pa.field("input_ids", pa.list_(pa.int32()))])
    assert "input_ids" in schema_of(carried=[pa.field("input_ids", pa.list_(pa.int32()))], input_ids=False).names


def test_a_column_carried_twice_is_refused():
    with pytest.raises(ColumnTaken, match="because it is listed twice"):
        schema_of(carried=[pa.field("a", pa.int8()), pa.field("a", pa.int8())])


def test_a_name_of_ours_that_this_job_does_not_use_is_free():
    assert schema_of(carried=[pa.field("chunk", pa.int8()), pa.field("id", pa.int8())]).names[:3] == [
        "row",
        "chunk",
        "id",
    ]


def test_a_type_that_not_every_reader_has_is_refused_by_name():
    union = pa.sparse_union([pa.field("a", pa.int8())])
    with pytest.raises(ColumnNotStorable) as refused:
        schema_of(carried=[pa.field("u", union)])
    assert str(refused.value) == (
        'source: column "u" has type sparse_union<a: int8=0>, which cannot be copied to the output. Leave it out.'
    )
