"""Which tokens of a row a drafter learns from: those that the assistant wrote, all, or what a carried column says.

An output holds token ids and no roles. Where its input was conversations, they are read again from the source, written
down by the engine's own chat template and tokenised; the ids must come out as they are stored, so that a mask never
belongs to other tokens. A conversation that the template writes differently as a whole than turn by turn (some leave
out earlier thoughts) gets a mask of zeros, and is counted.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from extract.engine.contract import read_contract
from extract.errors import ExtractError, SpecError
from extract.exporting.request import Request
from extract.exporting.rows import RowStream
from extract.exporting.target import Part
from extract.job import StoredJob
from extract.shards import schema as names
from extract.shards.views import BatchView
from extract.sources import identity, open_source
from extract.text.chat import ChatRenderer
from extract.text.encoders import FastEncoder, open_encoder

Mask = npt.NDArray[np.int64]


class NoLossMask(SpecError):
    """Nothing says which tokens are the assistant's."""

    template = (
        "{path}: which tokens the assistant wrote cannot be told: {problem}. Choose another --loss-mask: all (every "
        "token counts), or the name of a carried column that holds lists of 0 and 1."
    )


class LossMask(ABC):
    """Masks of rows, and how many there were."""

    name: str

    def __init__(self) -> None:
        self._counts = {"tokens": 0, "learned": 0, "unknown_rows": 0}

    def masks(self, batch: BatchView) -> list[Mask]:
        """int64 [L] of each row of a batch, all of whose rows have tokens."""
        masks = self._masks(batch)
        self._counts["tokens"] += sum(map(len, masks))
        self._counts["learned"] += int(sum(mask.sum() for mask in masks))
        return masks

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return counts

    def summary(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Sums over the parts of an export."""
        return {"from": self.name, **{key: sum(part.facts["masks"][key] for part in parts) for key in self._counts}}

    @abstractmethod
    def _masks(self, batch: BatchView) -> list[Mask]: ...


class EveryToken(LossMask):
    """Ones."""

    name = "all"

    def _masks(self, batch: BatchView) -> list[Mask]:
        return [np.ones(length, np.int64) for length in batch.num_tokens.tolist()]


class CarriedMask(LossMask):
    """Lists of 0 and 1 that the source had for the uncut rows."""

    def __init__(self, stream: RowStream, column: str) -> None:
        super().__init__()
        self.name = column
        self._stream = stream
        if column not in stream.output.job.spec.source.carry:
            raise NoLossMask(path=stream.output.path, problem=f'the output carries no column "{column}"')

    def _masks(self, batch: BatchView) -> list[Mask]:
        found = []
        job = self._stream.output.job
        chunks = _chunks(batch, job)
        for n, length in enumerate(batch.num_tokens.tolist()):
            cell = batch.arrow.column(self.name)[n].as_py()
            problem = None
            if not isinstance(cell, list) or any(value not in (0, 1) for value in cell):
                problem = "is no list of 0 and 1"
            else:
                start = window_start(job, len(cell), length, chunks[n])
                mask = np.array(cell[start : start + length], np.int64)
                if len(mask) != length or (len(cell) > length and not _is_cut(job)):
                    problem = f"has {len(cell)} values for {length} tokens"
            if problem is not None:
                raise NoLossMask(
                    path=self._stream.output.path, problem=f"row {batch.row[n]}: column {self.name} {problem}"
                )
            found.append(mask)
        return found


class AssistantTokens(LossMask):
    """Ones where an assistant's turn was, by the engine's chat template."""

    name = "roles"

    def __init__(self, stream: RowStream, engine: str | None) -> None:
        super().__init__()
        self._stream, self._job = stream, stream.output.job
        spec = self._job.spec
        self._engine = directory = Path(engine or spec.engine or "")
        try:
            contract = read_contract(directory)
            split = spec.text.split_special_tokens
            encoder = open_encoder(directory, contract.tokenizer, split_special_tokens=split)
            if not isinstance(encoder, FastEncoder):
                raise self._cannot("the tokenizer is Python code that does not say where its tokens lie in the text")
            self._encoder = encoder
            self._renderer = ChatRenderer(directory, encoder, add_generation_prompt=spec.text.add_generation_prompt)
            self._source = open_source(spec.source, self._job.fingerprint)
            if identity(self._source.layout().fingerprint) != identity(self._job.fingerprint):
                raise self._cannot("the source has changed since the job read it")
        except NoLossMask:
            raise
        except ExtractError as error:
            raise self._cannot(str(error).rstrip(".")) from error
        self._last: tuple[int, tuple[Any, Mask | None]] | None = None

    def _masks(self, batch: BatchView) -> list[Mask]:
        chunks = _chunks(batch, self._job)
        found = []
        for n, length in enumerate(batch.num_tokens.tolist()):
            row = int(batch.row[n])
            if self._last is None or self._last[0] != row:
                self._last = row, self._whole(row)
            ids, mask = self._last[1]
            start = window_start(self._job, len(ids), length, chunks[n])
            if not np.array_equal(ids[start : start + length], batch.input_ids[batch.id_spans[n]]):
                clock = " (its chat template writes the date)" if self._renderer.reads_clock else ""
                raise self._cannot(
                    f"row {row} of the source has other token ids by the tokenizer of {self._engine}{clock}"
                )
            self._counts["unknown_rows"] += mask is None
            found.append(np.zeros(length, np.int64) if mask is None else mask[start : start + length])
        return found

    def _whole(self, row: int) -> tuple[Any, Mask | None]:
        """Ids and mask of an uncut row; no mask where the turns cannot be told."""
        chosen = self._job.selection
        index = row if chosen is None else chosen.index_of(row)
        assert index is not None  # the output holds no row that was not selected
        batch = next(iter(self._source.read(index, index + 1, 1)), None)
        text, turns = ("", None) if batch is None else self._renderer.assistant_turns(batch.column(0))
        ids, starts, stops = self._encoder.places(text)
        if turns is None:
            return ids, None
        mask = np.zeros(len(ids), np.int64)
        for first, last in turns:
            mask[(starts >= first) & (starts < last) & (stops > starts)] = 1
        return ids, mask

    def _cannot(self, problem: str) -> NoLossMask:
        return NoLossMask(path=self._stream.output.path, problem=problem)


def open_loss_mask(stream: RowStream, request: Request) -> LossMask:
    """What a request's `loss_mask` names; by default roles, where there were any.

    Raises:
        NoLossMask: it cannot be had.
    """
    job = stream.output.job
    asked = request.loss_mask
    if asked == "all":
        return EveryToken()
    if asked not in (None, "roles"):
        return CarriedMask(stream, str(asked))
    if job.spec.source.input != "messages":
        problem = f'the job\'s input was "{job.spec.source.input}", without roles'
        raise NoLossMask(path=stream.output.path, problem=problem)
    return AssistantTokens(stream, request.engine)


def window_start(job: StoredJob, whole: int, length: int, chunk: int) -> int:
    """Where a stored sequence of `length` tokens begins in its uncut row of `whole` tokens."""
    if job.chunked:
        policy = _policy(job)
        around = len(policy["prefix_ids"]) + len(policy["suffix_ids"])
        return int(chunk * (policy["max_input_tokens"] - around - policy["chunk_overlap"]))
    return max(0, whole - length) if length < whole and _policy(job)["truncation_side"] == "left" else 0


def _is_cut(job: StoredJob) -> bool:
    return job.spec.text.on_long in ("truncate", "chunk")


def _policy(job: StoredJob) -> dict[str, Any]:
    """How the job made token ids, as the output's schema tells."""
    stored = (job.schema.metadata or {}).get(f"{names.METADATA_PREFIX}tokens".encode(), b"{}")
    policy: dict[str, Any] = {
        "prefix_ids": [],
        "suffix_ids": [],
        "max_input_tokens": job.spec.text.max_input_tokens,
        "chunk_overlap": job.spec.text.chunk_overlap,
        "truncation_side": job.spec.text.truncation_side,
        **json.loads(stored),
    }
    return policy


def _chunks(batch: BatchView, job: StoredJob) -> list[int]:
    if not job.chunked:
        return [0] * batch.num_rows
    chunks: list[int] = batch.arrow.column(names.CHUNK).to_pylist()
    return chunks
