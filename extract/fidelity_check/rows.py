"""Which rows are compared: the standard library's docstrings, or rows of a source, as the engine's tokenizer cuts them.

Rows of a source are taken at even distances, one by one: neighbours often are alike, and intervals are computed as if
rows were not. Knows no models.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from extract.engine.contract import Contract
from extract.errors import SourceError
from extract.records import TokenRows
from extract.sample import spread
from extract.sources import Source, open_source
from extract.spec import InputKind, SourceSpec, TextSpec
from extract.text.tokens import RowTokenizer, open_tokenizer

BLOCK_ROWS = 256
DOCSTRINGS = "docstrings of Python's standard library"


class NothingToCompare(SourceError):
    """No row of the source has a token."""

    template = "{rows}: none of {count} rows has a token to compare. Choose another --data or --column."


@dataclass(slots=True)
class Rows:
    """Sequences to compare, and where they come from.

    Attributes:
        described: in words.
        num_left_out: rows without a token (null, empty, no text), counted as they pass.
    """

    described: str
    _blocks: Iterator[TokenRows]
    num_left_out: int = 0

    def sequences(self) -> Iterator[list[int]]:
        """Token ids of each row, in order; once."""
        for rows in self._blocks:
            for start, stop in zip(rows.offsets[:-1].tolist(), rows.offsets[1:].tolist(), strict=True):
                if stop > start:
                    yield rows.input_ids[start:stop].tolist()
                else:
                    self.num_left_out += 1


def open_rows(engine: Path, contract: Contract, source: SourceSpec | None, count: int) -> Rows:
    """At most `count` rows of `source`; `None`: docstrings, or random ids for an engine without a tokenizer.

    Raises:
        SourceError, SpecError: whatever a job with this source and engine would refuse.
    """
    if source is not None:
        tokenizer = _tokenizer(engine, contract, source.input)
        opened = open_source(source)
        layout = opened.layout()
        tokenizer.tokenize(pa.array([], layout.schema.types[0]), 0)
        described = f"{', '.join(source.paths)}, column {source.column}"
        return Rows(described, _of_source(opened, layout.num_rows, count, tokenizer))
    if contract.tokenizer.kind == "none":
        return Rows("random token ids (the engine has no tokenizer)", iter([_random(contract, count)]))
    return Rows(DOCSTRINGS, _of_texts([one.text for one in spread(count)], _tokenizer(engine, contract, "text")))


def _tokenizer(engine: Path, contract: Contract, kind: InputKind) -> RowTokenizer:
    return open_tokenizer(
        engine,
        contract.tokenizer,
        TextSpec(),
        max_input_tokens=contract.limits.max_input_tokens,
        input=kind,
        vocab_size=contract.checkpoint.vocab_size,
    )


def _of_texts(texts: list[str], tokenizer: RowTokenizer) -> Iterator[TokenRows]:
    for start in range(0, len(texts), BLOCK_ROWS):
        yield tokenizer.tokenize(pa.array(texts[start : start + BLOCK_ROWS]), start)


def _of_source(source: Source, total: int | None, count: int, tokenizer: RowTokenizer) -> Iterator[TokenRows]:
    try:
        if total is None or total <= count:
            spans = [(0, count)]
        else:
            spans = [(place * total // count, place * total // count + 1) for place in range(count)]
        for start, stop in spans:
            row = start
            for batch in source.read(start, stop, BLOCK_ROWS):
                yield tokenizer.tokenize(batch.column(0), row)
                row += batch.num_rows
    finally:
        source.close()


def _random(contract: Contract, count: int) -> TokenRows:
    """Rows of all lengths up to the limit, which tell little of real text but something of the arithmetic."""
    draw = np.random.Generator(np.random.PCG64(0))
    lengths = draw.integers(1, contract.limits.max_input_tokens + 1, count)
    return TokenRows(
        source_index=np.arange(count, dtype=np.int32),
        chunk=np.zeros(count, np.int32),
        outcome=np.zeros(count, np.uint8),
        num_tokens_original=lengths.astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        input_ids=draw.integers(0, contract.checkpoint.vocab_size, lengths.sum()).astype(np.int32),
    )
