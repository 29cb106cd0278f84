"""The one type that a column has over all files, and the casts into it.

Stored types differ for reasons that mean nothing to a reader (dictionary encoding, 32 or 64 bit offsets, an all-null
file); those are unified. What would need a guess, text in one file and numbers in another, is refused.
"""

from collections.abc import Sequence

import pyarrow as pa

from extract.errors import SourceError
from extract.spec import InputKind

EXPECTED: dict[InputKind, str] = {
    "text": "text: strings or bytes",
    "messages": "a list of structs with role and content",
    "input_ids": "a list of integers",
}


class WrongInputType(SourceError):
    """The input column cannot be what `input` says it is."""

    template = (
        '{path}: column "{column}" holds {found}; input = "{kind}" takes {expected}. Name another column or input.'
    )


class TypesDiffer(SourceError):
    """One column, two types that no cast joins."""

    template = (
        'column "{column}" is {first_type} in {first} and {second_type} in {second}; '
        "one type cannot hold both. Convert the files, or leave the column out."
    )


class CastFailed(SourceError):
    """A value does not fit the type that its column has over all files."""

    template = '{path}: column "{column}" does not fit {expected}, its type over all files: {problem}'


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The same values without dictionary, view or extension types, field metadata and non-null marks."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in fields])
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(plain_type(kind.value_type))
    if pa.types.is_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind


def input_type(kind: InputKind, stored: pa.DataType, column: str, path: object) -> pa.DataType:
    """The type that an input column stored as `stored` is read as.

    Raises:
        WrongInputType: it cannot be an input of this kind.
    """
    plain = plain_type(stored)
    if pa.types.is_null(plain):
        return {"text": pa.large_string(), "messages": plain, "input_ids": pa.list_(pa.int32())}[kind]
    match kind:
        case "text":
            if pa.types.is_string(plain) or pa.types.is_large_string(plain):
                return pa.large_string()
            if pa.types.is_binary(plain) or pa.types.is_large_binary(plain) or pa.types.is_fixed_size_binary(plain):
                return pa.large_binary()
        case "messages" if (message := _item_type(plain)) is not None:
            names = {message.field(index).name for index in range(message.num_fields)}
            if pa.types.is_null(message) or (pa.types.is_struct(message) and {"role", "content"} <= names):
                return plain
        case "input_ids" if (item := _item_type(plain)) is not None:
            if pa.types.is_null(item):
                return pa.list_(pa.int32())
            if pa.types.is_integer(item):
                return pa.large_list(item) if pa.types.is_large_list(plain) else pa.list_(item)
    raise WrongInputType(path=path, column=column, found=stored, kind=kind, expected=EXPECTED[kind])


def unify(column: str, types: Sequence[pa.DataType], paths: Sequence[object]) -> pa.DataType:
    """The type that holds the values of all files; `types[i]` is that of `paths[i]`.

    Raises:
        TypesDiffer: names the two files whose types do not join.
    """
    unified, since = types[0], 0
    for index, kind in enumerate(types):
        if kind == unified:
            continue
        schemas = [pa.schema([(column, unified)]), pa.schema([(column, kind)])]
        try:
            joined = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        except (pa.ArrowTypeError, pa.ArrowInvalid):
            raise TypesDiffer(
                column=column, first=paths[since], first_type=unified, second=paths[index], second_type=kind
            ) from None
        if joined != unified:
            unified, since = joined, index
    return unified


def conform(arrays: Sequence[pa.Array], schema: pa.Schema, path: object) -> pa.RecordBatch:
    """The arrays as one batch of exactly `schema`.

    Raises:
        CastFailed: a value does not fit, such as an unsigned integer above the signed range.
    """
    columns = []
    for array, field in zip(arrays, schema, strict=True):
        plain = array.storage if isinstance(array, pa.ExtensionArray) else array
        try:
            columns.append(plain if plain.type == field.type else plain.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            problem = str(error).splitlines()[0][:300]
            raise CastFailed(path=path, column=field.name, expected=field.type, problem=problem) from error
    return pa.record_batch(columns, schema=schema)


def _item_type(kind: pa.DataType) -> pa.DataType | None:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return kind.value_type if is_list else None
