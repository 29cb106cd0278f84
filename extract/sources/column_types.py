"""The one type that a column has over all files, and the casts into it.

Stored types differ for reasons that mean nothing to a reader (dictionary encoding, 32 or 64 bit offsets, an all-null
file); those are unified. What would need a guess, text in one file and numbers in another, is refused.
"""

from collections.abc import Container, Sequence

import pyarrow as pa

from extract.errors import SourceError
from extract.sources.plain_arrays import plain_array
from extract.spec import InputKind

EXPECTED: dict[InputKind, str] = {
    "text": "text: strings or bytes",
    "messages": "lists of role, content structs or maps, or the same as JSON text",
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

    template = (
        '{path}: column "{column}" does not fit {expected}, its type over all files: {problem}. '
        "Convert the file, or leave the column out."
    )


class NotReadableText(SourceError):
    """A string that is to be copied to the output is not UTF-8: no reader would open the column it lands in."""

    template = (
        '{path}: column "{column}" holds a string that is not valid UTF-8 (row {row}), and is to be copied to the '
        "output. Repair the file, store the column as bytes, or leave it out of source.carry and source.id_column."
    )


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
        case "text" | "messages" if pa.types.is_string(plain) or pa.types.is_large_string(plain):
            return pa.large_string()
        case "text" | "messages" if _is_text(plain) or pa.types.is_fixed_size_binary(plain):
            return pa.large_binary()
        case "messages" if (message := _item_type(plain)) is not None:
            names = {message.field(index).name for index in range(message.num_fields)}
            if pa.types.is_null(message) or pa.types.is_map(message):
                return plain
            if pa.types.is_struct(message) and {"role", "content"} <= names:
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


def always_fits(stored: pa.DataType, unified: pa.DataType) -> bool:
    """Whether every value of one plain type has an equal one in another; if not, only the values can tell."""
    types = pa.types
    if stored == unified or types.is_null(stored) or (_is_text(stored) and _is_text(unified)):
        return True
    if types.is_integer(stored) and types.is_integer(unified):
        signs = (types.is_signed_integer(stored), types.is_signed_integer(unified))
        wider = unified.bit_width > stored.bit_width
        return bool(wider if signs == (False, True) else signs[0] == signs[1])
    if types.is_floating(unified):
        mantissa = {16: 11, 32: 24, 64: 53}[unified.bit_width]
        if types.is_floating(stored):
            return bool(unified.bit_width >= stored.bit_width)
        return bool(types.is_integer(stored) and stored.bit_width <= mantissa)
    if types.is_struct(stored) and types.is_struct(unified):
        members = [stored.field(index) for index in range(stored.num_fields)]
        return all(always_fits(member.type, unified.field(member.name).type) for member in members)
    items = _item_type(stored), _item_type(unified)
    if items[0] is None or items[1] is None or types.is_fixed_size_list(unified):
        return False
    return always_fits(items[0], items[1])


def conform(
    arrays: Sequence[pa.Array], schema: pa.Schema, path: object, first_row: int = 0, copied: Container[str] = ()
) -> pa.RecordBatch:
    """The arrays as one batch of exactly `schema`.

    `copied` are the columns that go to the output as they are; `first_row` is the batch's, for messages.

    Raises:
        CastFailed: a value does not fit, such as an unsigned integer above the signed range.
        NotReadableText: a string of a copied column is not UTF-8.
    """
    columns = []
    for array, field in zip(arrays, schema, strict=True):
        try:
            plain = plain_array(array)
            columns.append(plain if plain.type == field.type else plain.cast(field.type))
            if field.name in copied:
                columns[-1].validate(full=True)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowIndexError) as error:
            problem = str(error).splitlines()[0][:300].rstrip(".")
            if field.name in copied and "UTF8" in problem:
                row = first_row + _first_invalid(array)
                raise NotReadableText(path=path, column=field.name, row=row) from None
            raise CastFailed(path=path, column=field.name, expected=field.type, problem=problem) from error
    return pa.record_batch(columns, schema=schema)


def _first_invalid(array: pa.Array) -> int:
    for row in range(len(array)):
        try:
            array.slice(row, 1).validate(full=True)
        except pa.ArrowInvalid:
            return row
    return 0


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    is_string = types.is_string(kind) or types.is_large_string(kind)
    return bool(is_string or types.is_binary(kind) or types.is_large_binary(kind))


def _item_type(kind: pa.DataType) -> pa.DataType | None:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return kind.value_type if is_list else None
