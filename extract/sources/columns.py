"""Find a column by its dotted name in a schema, and take it out of a batch.

A dot steps into a struct (`doc.text`), but a column whose own name holds the dots wins. A null struct gives a null.
"""

import difflib

import pyarrow as pa
import pyarrow.compute as pc

from extract.errors import SourceError

ColumnPath = tuple[str, ...]
"""Names from the outermost column inwards."""

MAX_NAMES_SHOWN = 30


class NoSuchColumn(SourceError):
    """A column that a file does not have."""

    template = '{path}: no column "{column}".{hint} Columns: {columns}.'


class AmbiguousColumn(SourceError):
    """Several columns of one name."""

    template = (
        '{path}: {count} columns are named "{column}"; which one is meant cannot be told. Rename them in the file.'
    )


def find_column(schema: pa.Schema, name: str, path: object) -> tuple[ColumnPath, pa.DataType]:
    """Where the column `name` is, and its type as stored. `path` names the file in messages.

    Raises:
        NoSuchColumn: no such column; the message gives the real ones and the nearest.
        AmbiguousColumn: more than one.
    """
    found = _find(list(schema), name, path)
    if found is None:
        raise missing_column(name, _dotted_names(schema), path)
    return found


def take_column(batch: pa.RecordBatch, path: ColumnPath) -> pa.Array:
    """The column at `path`, null where any struct around it is null."""
    array = batch.column(batch.schema.get_field_index(path[0]))
    for name in path[1:]:
        array = pc.struct_field(array, [array.type.get_field_index(name)])
    return array


def missing_column(name: str, names: list[str], path: object) -> NoSuchColumn:
    """The error for a column that is not among `names`."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    more = f" and {len(names) - MAX_NAMES_SHOWN:,} more" if len(names) > MAX_NAMES_SHOWN else ""
    shown = ", ".join(names[:MAX_NAMES_SHOWN]) + more if names else "none"
    return NoSuchColumn(path=path, column=name, hint=hint, columns=shown)


def _find(fields: list[pa.Field], name: str, path: object) -> tuple[ColumnPath, pa.DataType] | None:
    for head, rest in _splits(name):
        matches = [field for field in fields if field.name == head]
        if len(matches) > 1:
            raise AmbiguousColumn(path=path, column=head, count=len(matches))
        if not matches:
            continue
        kind = matches[0].type
        if rest is None:
            return (head,), kind
        if pa.types.is_struct(kind):
            inner = _find([kind.field(index) for index in range(kind.num_fields)], rest, path)
            if inner is not None:
                return (head, *inner[0]), inner[1]
    return None


def _splits(name: str) -> list[tuple[str, str | None]]:
    """("a.b.c", None), ("a.b", "c"), ("a", "b.c"): the longest own name first. "a." asks for a member without name."""
    parts = name.split(".")
    inner = [(".".join(parts[:size]), ".".join(parts[size:])) for size in range(len(parts) - 1, 0, -1)]
    return [(name, None), *inner]


def _dotted_names(schema: pa.Schema) -> list[str]:
    names: list[str] = []
    for field in schema:
        names.append(field.name)
        if pa.types.is_struct(field.type):
            names += [f"{field.name}.{field.type.field(index).name}" for index in range(field.type.num_fields)]
    return names
