"""An array of any encoding as the plain array of the same values: what `plain_type` says of types, done to values.

Arrow's own casts do most of it, but not all: none leaves a run-end encoding inside a list, one of a list view writes an
array that Arrow then refuses, and one of a dictionary trusts its indices, which a damaged file may point anywhere. What
lies under a null struct or list is made null first: its indices may mean nothing, and are no fault.

Knows values alone; which type a column has over all files is decided in `column_types`.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def plain_array(array: pa.Array) -> pa.Array:
    """The same values without extension, dictionary, run-end or list-view encoding, at any depth.

    Text views stay, since Arrow's cast is right for them. An array without such an encoding is returned as it is.

    Raises:
        pa.ArrowException: an index or a view that points outside of the values.
    """
    kind = array.type
    if not _is_encoded(kind):
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return plain_array(array.storage)
    if pa.types.is_dictionary(kind):
        return plain_array(array.dictionary).take(array.indices)
    if pa.types.is_run_end_encoded(kind):
        rows = np.arange(array.offset, array.offset + len(array))
        runs = np.searchsorted(array.run_ends.to_numpy(), rows, side="right")
        return plain_array(array.values).take(pa.array(runs))
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return _list_of_view(array)
    if pa.types.is_struct(kind):
        return _struct(array)
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        values = array.values.slice(array.offset * size, len(array) * size)
        hidden = np.repeat(array.is_null().to_numpy(zero_copy_only=False), size)
        values = values.take(pa.array(np.arange(len(values)), mask=hidden))
        return pa.FixedSizeListArray.from_arrays(plain_array(values), size, mask=array.is_null())
    return _list_or_map(array)


def _is_encoded(kind: pa.DataType) -> bool:
    """The type, or one inside it, is an encoding of another. Unions are left alone: nothing stores them."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType) or types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return True
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return True
    if not types.is_nested(kind) or types.is_union(kind):
        return False
    return any(_is_encoded(kind.field(index).type) for index in range(kind.num_fields))


def _list_of_view(array: pa.Array) -> pa.Array:
    array.validate(full=True)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    large = pa.types.is_large_list_view(array.type)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pa.int64() if large else pa.int32())
    made = pa.LargeListArray if large else pa.ListArray
    return made.from_arrays(offsets, plain_array(array.flatten()), mask=array.is_null())


def _struct(array: pa.Array) -> pa.Array:
    members = [plain_array(member) for member in array.flatten()]
    fields = [pa.field(array.type.field(index).name, member.type) for index, member in enumerate(members)]
    return pa.StructArray.from_arrays(members, fields=fields, mask=array.is_null())


def _list_or_map(array: pa.Array) -> pa.Array:
    """A list, large list or map with encoded values; the mask needs offsets that begin at the array's own first row."""
    offsets = array.offsets.to_numpy()
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    begins = pa.array(offsets - first, array.offsets.type)
    if pa.types.is_map(array.type):
        keys, items = (plain_array(part.slice(first, count)) for part in (array.keys, array.items))
        return pa.MapArray.from_arrays(begins, keys, items, mask=array.is_null())
    values = plain_array(array.values.slice(first, count))
    made = pa.LargeListArray if pa.types.is_large_list(array.type) else pa.ListArray
    return made.from_arrays(begins, values, mask=array.is_null())
