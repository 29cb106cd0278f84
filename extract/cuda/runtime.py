"""The runtime of engines that our own packed decoder runs on a card: token batches -> states, one pass ahead.

`submit` queues a batch and returns at once; `wait` on what it returns waits for it. Whoever asks for one batch at a
time (`hidden_states`) gets the same numbers, and only the copies inside the batch overlap. States have the computing
type (bfloat16, or float32), because they cross the bus and lie in host memory: the final norm itself is float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from extract.cuda.decoder import PackedDecoder
from extract.cuda.passes import Pass, plan_batch
from extract.cuda.transfers import Target, Transfers
from extract.engine.contract import Contract, PassOutOfMemory, Pending, check_lengths
from extract.engine.torch_memory import is_out_of_memory
from extract.records import Int32, Int64, States, TokenBatch, UInt8
from extract.spec import OutputKind
from extract.tensorrt.card import Card

SHORTEST_BUCKET = 16
"""Longest sequences of a pass are rounded up to a power of two from here on: few shapes, and little padding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submitted:
    """A batch that was submitted. See `extract.engine.contract.Pending`.

    Attributes:
        last_pass: number of its last pass.
        shared: what sequences share is computed once: outputs [num_outputs, H] that are copied to more places.
        index: int32, which output is whose; `None`: they are where they belong already.
        finite: uint8 [passes, arrays]: whether all states of a pass are finite, the final ones and each layer's.
        shares: bool [passes], in which sequences share.
        alone: submits the batch again, without sharing.
    """

    transfers: Transfers
    last_pass: int
    into: Sequence[States]
    rows: Int64 | slice
    shared: Sequence[States]
    index: Int32 | None
    finite: UInt8
    shares: npt.NDArray[np.bool_]
    alone: Callable[[], Pending]

    def wait(self) -> tuple[bool, ...]:
        """Until the states are where they belong; see `Pending.wait`.

        A token that is not finite spoils the earlier ones of its sequence (zero times it counts in attention), and so
        those that share them. That is no fault of these, so such a batch is computed again, each sequence by itself.
        """
        self.transfers.deliver(self.last_pass)
        if not self.finite[self.shares, 0].all():
            return tuple(self.alone().wait())
        if self.index is not None:
            for array, outputs in zip(self.into, self.shared, strict=True):
                array[self.rows] = outputs[self.index]
        return tuple(bool(column.all()) for column in self.finite.T)


class CudaRuntime:
    """A loaded engine. See `extract.engine.contract.Runtime`.

    Args:
        contract: of the engine.
        decoder: its weights on the card.
        card: that card.
        share: compute common prefixes and exact duplicates of a pass once.

    Attributes:
        decoder: what passes run.
    """

    def __init__(self, contract: Contract, decoder: PackedDecoder, card: Card, *, share: bool) -> None:
        self.contract, self.share = contract, share
        self.decoder, self._card = decoder, card
        self._transfers = Transfers(card)

    @property
    def arithmetic(self) -> str:
        """What decides the last bits: torch's release is in the contract, so is the card."""
        return f"torch cuda ({self.decoder.precision})"

    @property
    def pass_tokens(self) -> int:
        """Tokens of the largest pass."""
        return self.contract.limits.pass_tokens or self.contract.limits.max_tokens

    def hidden_states(self, batch: TokenBatch, kind: OutputKind) -> States:
        """[T, H] for "tokens", else [B, H]; see `Runtime.hidden_states`."""
        return self.layer_states(batch, kind, ())[0]

    def layer_states(self, batch: TokenBatch, kind: OutputKind, layers: Sequence[int]) -> tuple[States, ...]:
        """The same, then those after each of `layers`; see `LayerRuntime.layer_states`."""
        shape = (batch.num_tokens if kind == "tokens" else batch.num_sequences, self.contract.output.width)
        into = tuple(np.empty(shape, self._dtype_of(kind)) for _ in range(1 + len(layers)))
        self.submit(batch, kind, layers, into, None).wait()
        return into

    def submit(
        self, batch: TokenBatch, kind: OutputKind, layers: Sequence[int], into: Sequence[States], rows: Int64 | None
    ) -> Submitted:
        """Queue the passes of a batch; see `AheadRuntime.submit`."""
        return self._submit(batch, kind, layers, into, rows, share=self.share)

    def _submit(
        self,
        batch: TokenBatch,
        kind: OutputKind,
        layers: Sequence[int],
        into: Sequence[States],
        rows: Int64 | None,
        *,
        share: bool,
    ) -> Submitted:
        check_lengths(batch, self.contract.limits)
        plan = plan_batch(batch.input_ids, batch.cu_seqlens, kind, pass_tokens=self.pass_tokens, share=share)
        place: Int64 | slice = slice(None) if rows is None else rows
        outputs = into
        if plan.output_index is not None:
            shape = (plan.num_outputs, self.contract.output.width)
            outputs, place = tuple(np.empty(shape, self._dtype_of(kind)) for _ in into), slice(None)
        number, finite = 0, np.zeros((len(plan.passes), len(into)), np.uint8)
        try:
            for place_of_pass, one in enumerate(plan.passes):
                flag = Target(finite, slice(place_of_pass, place_of_pass + 1))
                number = self._start(one, kind, tuple(layers), outputs, place, flag)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(batch) from error
        return Submitted(
            transfers=self._transfers,
            last_pass=number,
            into=into,
            rows=slice(None) if rows is None else rows,
            shared=outputs,
            index=plan.output_index,
            finite=finite,
            shares=np.array([one.cu_keys is not None for one in plan.passes]),
            alone=partial(self._submit, batch, kind, layers, into, rows, share=False),
        )

    def close(self) -> None:
        """Give the card's memory back."""
        self._transfers.close()
        for module in self.decoder.modules():
            vars(module).pop("forward", None)  # a compiled region and its code hold each other, and what both read
        del self.decoder
        self._card.close()

    def _start(
        self,
        one: Pass,
        kind: OutputKind,
        layers: tuple[int, ...],
        outputs: Sequence[States],
        place: Int64 | slice,
        finite: Target,
    ) -> int:
        arrays = [one.input_ids, one.positions, one.cu_queries]
        if one.cu_keys is not None and one.key_index is not None:
            arrays += [one.cu_keys, one.key_index]
        count = len(one.cu_queries) - 1 if kind in ("last", "mean") else len(one.input_ids)
        longest = _bucket(one.longest, self.decoder.max_positions)

        @torch.no_grad()
        def work(given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            cu_keys, key_index = given[3:] if len(given) == 5 else (None, None)
            found = self.decoder.layer_states(
                given[0],
                given[1],
                given[2],
                longest,
                layers,
                last=kind == "last",
                cu_keys=cu_keys,
                key_index=key_index,
            )
            if kind == "mean":
                found = tuple(_means(part, one, given[2] if cu_keys is None else cu_keys, key_index) for part in found)
            return *found, torch.cat([_all_finite(part) for part in found]).reshape(1, -1)

        rows = slice(one.first_output, one.first_output + count)
        own = rows if isinstance(place, slice) else place[rows]
        return self._transfers.start(arrays, work, (*(Target(array, own) for array in outputs), finite))

    def _dtype_of(self, kind: OutputKind) -> type[np.generic]:
        return np.uint16 if self.decoder.output_dtype == torch.bfloat16 and kind != "mean" else np.float32

    def _out_of_memory(self, batch: TokenBatch) -> PassOutOfMemory:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        tokens = min(batch.num_tokens, self.pass_tokens)
        return PassOutOfMemory(
            tokens=f"{tokens:,}", sequences=f"{batch.num_sequences:,}", device=self.contract.device.name
        )


def _means(states: torch.Tensor, one: Pass, cu_seqlens: torch.Tensor, key_index: torch.Tensor | None) -> torch.Tensor:
    """Mean over each sequence, float32 [B, H]: each sum in the order of its tokens, and without asking the card.

    Where sequences share, some of them at a time, so that their states are not all there several times at once.
    """
    if key_index is None or one.cu_keys is None:
        return _segment_means(states, cu_seqlens)
    ends = np.arange(len(states), one.cu_keys[-1] + len(states), len(states))
    cuts = np.unique(np.searchsorted(one.cu_keys, ends).clip(1, len(one.cu_keys) - 1)).tolist()
    parts = []
    for low, high in zip([0, *cuts[:-1]], cuts, strict=True):
        first, last = int(one.cu_keys[low]), int(one.cu_keys[high])
        parts.append(_segment_means(states[key_index[first:last]], cu_seqlens[low : high + 1] - first))
    return torch.cat(parts)


def _segment_means(states: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return torch.segment_reduce(states.float(), "mean", offsets=cu_seqlens.long(), axis=0, unsafe=True)


def _all_finite(states: torch.Tensor) -> torch.Tensor:
    """uint8 [1], without asking the card or filling another tensor: a NaN is both the least and the largest."""
    return torch.isfinite(torch.stack(torch.aminmax(states))).all().to(torch.uint8).reshape(1)


def _bucket(longest: int, max_positions: int) -> int:
    """A bound on the lengths of a pass that takes few values."""
    return min(max_positions, max(SHORTEST_BUCKET, 1 << (longest - 1).bit_length()))
