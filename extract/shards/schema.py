"""The one Arrow schema of a job: columns, their types, and in its metadata how to read them without this package.

Knows nothing of rows or files. Text and binary columns become their 64-bit-offset kinds, and dictionaries their values,
so that no reader meets an offset overflow and no two shards disagree on a dictionary. bfloat16 is uint16 under an
extension name on the innermost field: readers that do not know it see plain integers, those that carry it on keep it.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from extract.errors import SpecError
from extract.records import OUTCOMES
from extract.shards.values import value_type
from extract.spec import StatesSpec

FORMAT_VERSION = 1
METADATA_PREFIX = "extract."
BFLOAT16_EXTENSION = "extract.bfloat16"
POSITION = "post_final_norm"
LAYER_POSITION = "residual_after_layer_{layer}"

ROW, ID, CHUNK, OUTCOME = "row", "id", "chunk", "outcome"
NUM_TOKENS, NUM_TOKENS_ORIGINAL, INPUT_IDS = "num_tokens", "num_tokens_original", "input_ids"
TOKEN_STATES, POOLED_STATES = "hidden_states", "hidden_state"
SCALE_SUFFIX = "_scale"

OUTCOME_VALUES = pa.array([str(outcome) for outcome in OUTCOMES], pa.string())
"""Dictionary of the outcome column, the same in every batch; `records.OUTCOMES` gives its order."""


class ColumnTaken(SpecError):
    """A carried column has the name of a column that the output has already."""

    template = (
        'source.carry: column "{name}" would appear twice in the output, {reason}. '
        "Leave it out of source.carry, or rename it in the source.{hint}"
    )


class ColumnNotStorable(SpecError):
    """A carried or id column has a type that an Arrow file cannot hold for every reader."""

    template = 'source: column "{name}" has type {found}, which cannot be copied to the output. Leave it out.'


def output_schema(
    states: StatesSpec,
    width: int,
    id_type: pa.DataType | None,
    carried: Sequence[pa.Field],
    chunked: bool,
    metadata: Mapping[str, str],
) -> pa.Schema:
    """The schema of every shard of a job.

    Args:
        states: what is written for each row.
        width: hidden size H.
        id_type: type of the source's id column, or `None` if none was asked for.
        carried: source columns copied as they are, under the names they were asked by.
        chunked: a row may have several chunks.
        metadata: facts of the job (job id, engine id, checkpoint, tokenizer policy); keys get the prefix `extract.`.

    Raises:
        ColumnTaken: a carried column has the name of another output column.
        ColumnNotStorable: a carried or id column has a type that cannot be copied.
    """
    fields = [pa.field(ROW, pa.int64(), nullable=False)]
    if id_type is not None:
        fields.append(pa.field(ID, _storable(ID, id_type)))
    if chunked:
        fields.append(pa.field(CHUNK, pa.int32(), nullable=False))
    carried_fields = [pa.field(field.name, _storable(field.name, field.type)) for field in carried]
    own_fields = [
        pa.field(OUTCOME, pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field(NUM_TOKENS, pa.int32(), nullable=False),
        pa.field(NUM_TOKENS_ORIGINAL, pa.int32()),
    ]
    if states.input_ids:
        own_fields.append(pa.field(INPUT_IDS, pa.list_(pa.field("item", pa.int32(), nullable=False))))
    own_fields += _state_fields(states_name(states), states, width)
    for layer in states.layers:
        own_fields += _state_fields(layer_name(layer), states, width, LAYER_POSITION.format(layer=layer))
    _check_names({field.name for field in (*fields, *own_fields)}, carried_fields)
    facts = {**_reading_facts(states, width), **metadata}
    return pa.schema(
        [*fields, *carried_fields, *own_fields],
        metadata={METADATA_PREFIX + key.removeprefix(METADATA_PREFIX): value for key, value in facts.items()},
    )


def states_name(states: StatesSpec) -> str:
    """Name of the column that holds the final states."""
    return TOKEN_STATES if states.kind == "tokens" else POOLED_STATES


def layer_name(layer: int) -> str:
    """Name of the column that holds the states after decoder layer `layer` (0: the embeddings)."""
    return f"layer_{layer}"


def state_columns(states: StatesSpec) -> tuple[str, ...]:
    """Every column of states, the final ones first."""
    return states_name(states), *map(layer_name, states.layers)


def storable_type(kind: pa.DataType) -> pa.DataType:
    """The type a source column of type `kind` is stored in: 64-bit text offsets, no dictionaries, no extensions.

    Raises:
        pa.ArrowNotImplementedError: no such type.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return storable_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return storable_type(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary(kind) or pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([_storable_field(kind.field(index)) for index in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(storable_type(kind.key_type), storable_type(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_storable_field(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_storable_field(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(_storable_field(kind.value_field))
    if pa.types.is_nested(kind) or pa.types.is_run_end_encoded(kind):
        raise pa.ArrowNotImplementedError(str(kind))
    return kind


def _storable_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, storable_type(field.type), nullable=field.nullable)


def _storable(name: str, kind: pa.DataType) -> pa.DataType:
    try:
        return storable_type(kind)
    except pa.ArrowNotImplementedError:
        raise ColumnNotStorable(name=name, found=kind) from None


def _state_fields(name: str, states: StatesSpec, width: int, position: str | None = None) -> list[pa.Field]:
    """A column of states, and that of scales where the stored type has them.

    Where the states of a column were taken stands on the column, but for the final ones, of which the schema says it.
    """
    stored = value_type(states.dtype)
    bfloat16 = {"ARROW:extension:name": BFLOAT16_EXTENSION, "ARROW:extension:metadata": ""}
    value = pa.field(
        "item",
        pa.from_numpy_dtype(stored.storage),
        nullable=False,
        metadata=bfloat16 if stored.name == "bfloat16" else None,
    )
    state, scale = pa.list_(value, width), pa.float32()
    if states.kind == "tokens":
        state = pa.list_(pa.field("item", state, nullable=False))
        scale = pa.list_(pa.field("item", scale, nullable=False))
    facts = {"dtype": stored.name}
    if position is not None:
        facts |= {"position": position, "width": str(width)}
    fields = [pa.field(name, state, metadata={METADATA_PREFIX + key: value for key, value in facts.items()})]
    return [*fields, pa.field(name + SCALE_SUFFIX, scale)] if stored.scaled else fields


def _check_names(own: set[str], carried: Sequence[pa.Field]) -> None:
    seen: set[str] = set()
    for field in carried:
        if field.name in own:
            hint = " Or set states.input_ids = false." if field.name == INPUT_IDS else ""
            raise ColumnTaken(name=field.name, reason="which has a column of that name itself", hint=hint)
        if field.name in seen:
            raise ColumnTaken(name=field.name, reason="because it is listed twice", hint="")
        seen.add(field.name)


def _reading_facts(states: StatesSpec, width: int) -> dict[str, str]:
    """What a reader needs to know of the numbers."""
    name = states_name(states)
    values = f"values is {name} as a numpy array [K, {width}]"
    scales = f", scale is {name}{SCALE_SUFFIX} as float32 [K]" if value_type(states.dtype).scaled else ""
    layers = {"layers": ",".join(map(str, states.layers))} if states.layers else {}
    beside = f"; {', '.join(map(layer_name, states.layers))} likewise" if states.layers else ""
    return {
        "format_version": str(FORMAT_VERSION),
        "kind": states.kind,
        "position": POSITION,
        "dtype": states.dtype,
        "width": str(width),
        **layers,
        "normalized": "true" if states.normalize else "false",
        "read": f"# {values}{scales}; null rows left out{beside}\n{value_type(states.dtype).recipe(width)}",
    }
