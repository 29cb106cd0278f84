"""Which columns of an output a training view hands out, and what each becomes: states, token ids, numbers or values.

Knows the schema and no rows. What a column becomes is a matter of its type alone, never of what a batch happens to
hold, so that a loop that ran on the first batch runs on all of them.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from extract.errors import SpecError
from extract.shards import schema as names
from extract.spec import StatesSpec
from extract.storage import Place

NOT_BY_DEFAULT = (names.OUTCOME, names.NUM_TOKENS, names.NUM_TOKENS_ORIGINAL)
"""What tells of rows instead of being trained on; handed out where it is asked for."""


class NotInOutput(SpecError):
    """A column that the output does not have."""

    template = '{path}: no column "{name}" in this output. It has: {known}.'


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingColumns:
    """Names of columns by what they become, each in the order in which they were asked for.

    Attributes:
        states: of the final norm and of other layers.
        input_ids: whether token ids are handed out.
        numbers: one number a row.
        others: text, lists, dates and whatever else, as Python values.
        stored: what is read for that; `None`: everything, where that costs no more than choosing.
    """

    states: tuple[str, ...]
    input_ids: bool
    numbers: tuple[str, ...]
    others: tuple[str, ...]
    stored: tuple[str, ...] | None


def training_columns(
    path: Place, schema: pa.Schema, spec: StatesSpec, asked: Sequence[str] | None = None
) -> TrainingColumns:
    """Sort the columns that are asked for.

    Args:
        path: of the output, for messages.
        schema: of its shards.
        spec: what was written.
        asked: names of columns; `None` is what is trained on: `row`, `chunk`, `id`, carried columns, `input_ids` and
            the output's own states, but not those of other layers.

    Raises:
        NotInOutput: a name that the output does not have. The scales of int8 have no name here: they are applied.
    """
    all_states = names.state_columns(spec)
    scales = {name + names.SCALE_SUFFIX for name in all_states} if spec.dtype == "int8" else set()
    known = [name for name in schema.names if name not in scales]
    if asked is None:
        asked = [name for name in known if name not in (*NOT_BY_DEFAULT, *all_states[1:])]
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise NotInOutput(path=path, name=name, known=", ".join(dict.fromkeys([*near, *known])))
    wanted = tuple(dict.fromkeys(asked))
    states = tuple(name for name in wanted if name in all_states)
    rest = [name for name in wanted if name not in states and name != names.INPUT_IDS]
    numbers = tuple(name for name in rest if _is_number(schema.field(name).type))
    needed = {*wanted, names.NUM_TOKENS, *(name + names.SCALE_SUFFIX for name in states if scales)}
    return TrainingColumns(
        states=states,
        input_ids=names.INPUT_IDS in wanted,
        numbers=numbers,
        others=tuple(name for name in rest if name not in numbers),
        stored=_worth_choosing([name for name in schema.names if name in needed], schema, spec),
    )


def _worth_choosing(needed: list[str], schema: pa.Schema, spec: StatesSpec) -> tuple[str, ...] | None:
    """The columns to read, or `None` for all of them.

    Arrow copies the bytes of chosen columns, also of a mapped file. What is not compressed is not even read from the
    disk until it is looked at. What is compressed costs its decompression: worth choosing where states are left out,
    or texts beside one state a row; beside states of every token, texts are nothing.
    """
    left_out = [schema.field(name) for name in schema.names if name not in needed]
    wide = [field for field in left_out if field.name in names.state_columns(spec)]
    if spec.kind != "tokens":
        narrow = (names.OUTCOME, names.INPUT_IDS)
        wide += [field for field in left_out if field.name not in narrow and not _is_number(field.type)]
    return tuple(needed) if wide and spec.compression != "none" else None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
