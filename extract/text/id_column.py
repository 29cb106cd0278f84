"""An Arrow column of ready token ids. Nothing is added, and an id that the model does not have stops the job.

A bad id is never recorded as an outcome: it means that the ids come from another tokenizer; then all rows are wrong.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from extract.errors import SourceError
from extract.records import OUTCOME_CODE, Outcome
from extract.text.cuts import ContentIds
from extract.text.text_column import WrongColumnType, plain


class BadTokenId(SourceError):
    """A token id that the model has no embedding for."""

    template = "row {row}, token {position}: {found} is not a token id of the model (0 to {last}). {advice}"


def read_ids(column: pa.Array, first_row: int, *, vocab_size: int) -> ContentIds:
    """Ids of R rows; a null row is `NULL`, an empty list `EMPTY`.

    Raises:
        WrongColumnType: the column holds no lists of integers.
        BadTokenId: a null inside a list, or an id outside 0 to `vocab_size` - 1.
    """
    column = plain(column)
    kind = column.type
    if pa.types.is_null(kind):
        column = column.cast(pa.large_list(pa.int64()))
    elif not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)) or not (
        pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type)
    ):
        raise WrongColumnType(found=kind, input="input_ids", expected="lists of integers")
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    values = column.flatten()  # leaves out what lies under null rows
    if not pa.types.is_uint64(values.type):
        values = values.cast(pa.int64())
    lowest, end = pa.scalar(0, values.type), pa.scalar(vocab_size, values.type)
    bad = pc.fill_null(pc.or_(pc.less(values, lowest), pc.greater_equal(values, end)), True)
    index = pc.index(bad, True).as_py()
    if index >= 0:
        row = int(np.searchsorted(offsets, index, side="right")) - 1
        raise BadTokenId(
            row=first_row + row,
            position=index - int(offsets[row]),
            found="null" if values[index].as_py() is None else values[index].as_py(),
            last=vocab_size - 1,
            advice="Were these ids made with this model's tokenizer?",
        )
    outcome = np.where(lengths > 0, OUTCOME_CODE[Outcome.OK], OUTCOME_CODE[Outcome.EMPTY]).astype(np.uint8)
    outcome[column.is_null().to_numpy(zero_copy_only=False)] = OUTCOME_CODE[Outcome.NULL]
    input_ids = values.cast(pa.int32()).to_numpy(zero_copy_only=False).astype(np.int32)
    return ContentIds(outcome=outcome, num_tokens=lengths, offsets=offsets, input_ids=input_ids)
