"""Try one layout on rows whose plain states are known. Measures only; `torch_proof` decides.

Rows are random token ids from a seed, so the same trial on another machine tries the same rows.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from extract.engine.contract import Proof
from extract.engine.torch_decoder import Layout, TorchDecoder
from extract.engine.torch_packed_pass import Boundaries


class Decoder(Protocol):
    """What is tried."""

    @property
    def layout(self) -> Layout:
        """How sequences share a pass."""

    def states(self, input_ids: torch.Tensor, cu_seqlens: Boundaries) -> torch.Tensor:
        """[T, H] of one pass."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of token ids and their plain states."""

    ids: list[torch.Tensor]
    plain: list[torch.Tensor]
    noise: float
    """Largest relative error between a row alone and the same row side by side with itself: rounding only."""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Max |found - expected| / max |expected|; infinite where either is not finite."""
    found, expected = found.float(), expected.float()
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    return error if error == error else float("inf")


class Draw:
    """Random rows; the same ones for the same seed on every device."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._vocab = vocab

    def row(self, length: int) -> torch.Tensor:
        """int64 [length]."""
        return torch.randint(self._vocab, (length,), generator=self._generator)


def plain_rows(plain: TorchDecoder, ids: list[torch.Tensor], max_tokens: int, *, noise: bool = True) -> Rows:
    """The states of each row alone, in a dense decoder with the family's own attention; `noise`: measure it too."""
    states = [plain.states(row, [0, len(row)]) for row in ids]
    moved = 0.0
    for row, state in zip(ids, states, strict=True) if noise else ():
        copies = min(2, max(1, max_tokens // len(row)))
        moved = max(moved, relative_error(_run(plain, [row] * copies)[-1], state))
    return Rows(ids, states, moved)


def try_layout(decoder: Decoder, rows: Rows, draw: Draw, max_input_tokens: int, max_tokens: int) -> Proof:
    """Compare `decoder` with the plain states, with a neighbour changed, and with a row moved through a full pass."""
    plain = neighbour = 0.0
    for members in _passes(decoder.layout, rows, max_tokens):
        ids = [rows.ids[index] for index in members]
        states = _run(decoder, ids)
        errors = [relative_error(state, rows.plain[index]) for state, index in zip(states, members, strict=True)]
        plain = max(plain, *errors)
        if len(ids) == 1:
            ids.append(draw.row(len(ids[0])))
            if sum(map(len, ids)) > max_tokens:
                continue
            states = _run(decoder, ids)
        # Another sequence of the same length in place of the longest one: all others must stay as they were.
        place = max(range(len(ids)), key=lambda index: len(ids[index]))
        others = _run(decoder, [*ids[:place], draw.row(len(ids[place])), *ids[place + 1 :]])
        changes = [relative_error(after, before) for before, after in zip(states, others, strict=True)]
        neighbour = max(neighbour, *changes[:place], *changes[place + 1 :])
    moved = _moved(decoder, rows, draw, max_input_tokens, max_tokens)
    return Proof(neighbour=neighbour, moved=moved, plain=plain)


def _passes(layout: Layout, rows: Rows, max_tokens: int) -> list[list[int]]:
    """Indices of `rows` by pass: any rows in their order for packed, rows of one length for dense."""
    passes: list[list[int]] = []
    order = list(range(len(rows.ids)))
    if layout == "dense":
        order.sort(key=lambda index: len(rows.ids[index]))
    tokens = 0
    for index in order:
        length = len(rows.ids[index])
        fits = bool(passes) and tokens + length <= max_tokens
        if fits and (layout == "packed" or length == len(rows.ids[passes[-1][0]])):
            passes[-1].append(index)
            tokens += length
        else:
            passes.append([index])
            tokens = length
    return passes


def _moved(decoder: Decoder, rows: Rows, draw: Draw, max_input_tokens: int, max_tokens: int) -> float:
    """A row at both ends of the fullest pass, against the plain model."""
    chosen = max(range(len(rows.ids)), key=lambda index: len(rows.ids[index]))
    row = rows.ids[chosen]
    length = len(row) if decoder.layout == "dense" else max_input_tokens
    fillers = max(0, (max_tokens - 2 * len(row)) // length)
    pass_rows = [row, *(draw.row(length) for _ in range(fillers))]
    if decoder.layout == "packed":
        left = max_tokens - sum(map(len, pass_rows)) - len(row)
        pass_rows += [draw.row(left)] if left > 0 else []
    if sum(map(len, pass_rows)) + len(row) <= max_tokens:
        pass_rows.append(row)
    states = _run(decoder, pass_rows)
    return max(relative_error(states[0], rows.plain[chosen]), relative_error(states[-1], rows.plain[chosen]))


def _run(decoder: Decoder, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    lengths = [len(row) for row in ids]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return list(torch.split(decoder.states(torch.cat(ids), bounds), lengths))
