"""Gathered rows as torch tensors, single rows of them, and single rows put together again.

`collate` undoes `single_row`: a loader that takes rows one by one and this function give what whole batches give.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from extract.shards import schema as names
from extract.shards.tensors import shared_tensor
from extract.training_views.gathering import CU_SEQLENS
from extract.training_views.rows import TrainingRows


def as_tensors(batch: dict[str, Any], rows: TrainingRows) -> dict[str, Any]:
    """The arrays of a gathered batch as tensors, sharing their memory where the type stays; lists stay lists."""
    found = dict(batch)
    for name, value in batch.items():
        if isinstance(value, np.ndarray):
            is_states = name in rows.columns.states
            tensor = shared_tensor(value, bfloat16=is_states and value.dtype == np.uint16)
            found[name] = tensor.to(getattr(torch, rows.dtype)) if is_states and rows.dtype != "stored" else tensor
    return found


def single_row(batch: dict[str, Any], rows: TrainingRows) -> dict[str, Any]:
    """The one row of a batch of one, with memory of its own: numbers are tensors without dimensions."""
    found: dict[str, Any] = {}
    ragged = {names.INPUT_IDS, *(rows.columns.states if rows.spec.kind == "tokens" else ())}
    for name, value in batch.items():
        if name != CU_SEQLENS:
            one = value if name in ragged else value[0]
            found[name] = one.clone() if isinstance(one, torch.Tensor) else one
    return found


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows of a dataset as one batch, without padding.

    Args:
        items: B rows of one output.

    Returns:
        `input_ids` [T] and token states [T, H] end to end, with `cu_seqlens` int32 [B + 1]: row n has T from
        `cu_seqlens[n]` to `cu_seqlens[n + 1]`; pooled states [B, H]; numbers [B]; anything else a list of B values.
    """
    batch: dict[str, Any] = {}
    lengths: list[int] | None = None
    for name, first in items[0].items():
        values = [item[name] for item in items]
        if not isinstance(first, torch.Tensor):
            batch[name] = values
        elif name == names.INPUT_IDS or first.ndim == 2:
            batch[name], lengths = torch.cat(values), [len(value) for value in values]
        else:
            batch[name] = torch.stack(values)
    if lengths is not None:
        batch[CU_SEQLENS] = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return batch
