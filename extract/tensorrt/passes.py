"""A batch that is larger than a pass -> the passes that make it up. Knows lengths only."""

from collections.abc import Iterator

import numpy as np

from extract.records import TokenBatch


def split(batch: TokenBatch, max_tokens: int, max_sequences: int) -> Iterator[TokenBatch]:
    """Consecutive sequences of `batch` in passes of at most `max_tokens` and `max_sequences`; no sequence is cut.

    A single sequence longer than `max_tokens` is a pass of its own.
    """
    bounds = batch.cu_seqlens
    start = 0
    while start < batch.num_sequences:
        stop = int(np.searchsorted(bounds, bounds[start] + max_tokens, side="right")) - 1
        stop = max(start + 1, min(stop, start + max_sequences))
        yield TokenBatch(
            input_ids=batch.input_ids[bounds[start] : bounds[stop]],
            cu_seqlens=bounds[start : stop + 1] - bounds[start],
            members=batch.members[start:stop],
        )
        start = stop
