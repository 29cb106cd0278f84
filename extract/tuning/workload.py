"""What a run computes: real passages as the checkpoint's tokenizer cuts them, in any number of tokens.

Passages are shuffled once, so that any number of tokens has the same mix of lengths, and begin again where they end.
That is harmless because points are measured without sharing: what a decoder saves on rows that are alike depends on the
rows, not on settings.
"""

import itertools
from typing import Any

import numpy as np

from extract.records import Int32, Int64, TokenRows
from extract.sample import passages

NUM_PASSAGES = 1000
SEED = 0


class Workload:
    """Rows of many lengths.

    Attributes:
        input_ids: int32 [T], all rows end to end.
        lengths: int64 [N].
    """

    def __init__(self, rows: list[list[int]]) -> None:
        order = np.random.Generator(np.random.PCG64(SEED)).permutation(len(rows))
        self.input_ids: Int32 = np.concatenate([np.array(rows[place], np.int32) for place in order])
        self.lengths: Int64 = np.array([len(rows[place]) for place in order], np.int64)

    @property
    def mean_tokens(self) -> float:
        """Of a row."""
        return float(self.lengths.mean())

    def rows(self, num_tokens: int) -> TokenRows:
        """As many rows as `num_tokens` hold, one at least."""
        copies = num_tokens // len(self.input_ids) + 1
        ends = np.cumsum(np.tile(self.lengths, copies))
        ends = ends[: max(1, int(np.searchsorted(ends, num_tokens, side="right")))]
        return TokenRows(
            source_index=np.arange(len(ends), dtype=np.int32),
            chunk=np.zeros(len(ends), np.int32),
            outcome=np.zeros(len(ends), np.uint8),
            num_tokens_original=np.diff(ends, prepend=0).astype(np.int32),
            offsets=np.concatenate([[0], ends]).astype(np.int64),
            input_ids=np.tile(self.input_ids, copies)[: ends[-1]],
        )


def workload(tokenizer: Any, limit: int, vocabulary: int) -> Workload:
    """Passages of at most `limit` tokens; random ids, of all lengths up to it, where there is no tokenizer."""
    if tokenizer is not None:
        texts = [passage.text for passage in itertools.islice(passages(), NUM_PASSAGES)]
        found = tokenizer(texts, truncation=True, max_length=limit)["input_ids"] if texts else []
        rows = [ids for ids in found if ids and max(ids) < vocabulary]
        if rows:
            return Workload(rows)
    draw = np.random.Generator(np.random.PCG64(SEED))
    return Workload([draw.integers(0, vocabulary, length).tolist() for length in range(1, limit + 1)])
