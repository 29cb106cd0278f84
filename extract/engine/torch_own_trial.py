"""Try our own packed decoder on a checkpoint: the proof of a layout, with transformers' plain model as the judge.

What the plain model says is written down while it is in memory; the own decoder is loaded from what the build wrote,
as a run would, and compared afterwards. Both are never needed at once. The judge computes in float64 where memory
allows: on rows of random tokens its float32 is itself up to 1e-5 from the truth, which would count against us.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from extract.cpu.architecture import Architecture
from extract.engine.contract import Proof, Runtime
from extract.engine.families import float32_bound
from extract.engine.torch_decoder import Layout, TorchDecoder, vocab_size
from extract.engine.torch_final_norm import FinalNorm, find_final_norm
from extract.engine.torch_head import head_input
from extract.engine.torch_packed_pass import Boundaries
from extract.engine.torch_proof import MOST_NOISE, NOISE_MARGIN, PROBE_LENGTHS
from extract.engine.torch_trial import Draw, Rows, plain_rows, try_layout
from extract.records import TokenBatch
from extract.shards.values import as_float32

SEED = 0

ROUNDED_BOUNDS = {"bfloat16": 0.3, "int8": 0.5, "fp8": 0.5}
"""Relative error of random rows beyond which a precision is broken, not rounded; the build measures the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFacts:
    """What the plain model said, for a decoder that is tried without it.

    Attributes:
        architecture: what the own decoder will compute.
        rows: random rows and their plain states.
        final_norm: where the states come from.
        head_input: how the head sees them.
        noise_bound: float32's bound for this family and these weights.
    """

    architecture: Architecture
    rows: Rows
    final_norm: FinalNorm
    head_input: str
    noise_bound: float


def plain_facts(model: Any, architecture: Architecture, max_input_tokens: int, max_tokens: int) -> PlainFacts:
    """Run random rows through the plain model `model`, float64 or float32, which keeps its own attention."""
    draw = Draw(vocab_size(model), SEED)
    probe = draw.row(min(8, max_input_tokens))
    norm = find_final_norm(model, probe)
    plain = TorchDecoder(model, layout="dense", final_norm=norm)
    try:
        lengths = (min(length, max_input_tokens) for length in (*PROBE_LENGTHS, max_input_tokens))
        exact = next(model.parameters()).dtype == torch.float64
        rows = plain_rows(plain, [draw.row(length) for length in lengths], max_tokens, noise=not exact)
        seen_by_head = head_input(plain, probe)
    finally:
        plain.close()
    usual = float32_bound(architecture.family)
    return PlainFacts(
        architecture=architecture,
        rows=rows,
        final_norm=norm,
        head_input=seen_by_head,
        noise_bound=min(max(usual, NOISE_MARGIN * rows.noise), MOST_NOISE * usual),
    )


def try_own(runtime: Runtime, facts: PlainFacts) -> tuple[Proof, float, str | None]:
    """Compare the own decoder with the plain rows.

    Returns:
        What was seen, the bound it was held to, and why it is refused (`None`: it is proven).
    """
    limits, precision = runtime.contract.limits, runtime.contract.precision.activations
    bound = ROUNDED_BOUNDS.get(precision, facts.noise_bound)
    draw = Draw(facts.architecture.vocab_size, SEED + 1)
    proof = try_layout(_Decoder(runtime), facts.rows, draw, limits.max_input_tokens, min(limits.max_tokens, 4096))
    if max(proof.neighbour, proof.moved, proof.plain) <= bound:
        return proof, bound, None
    reason = (
        f"own decoder: relative error {proof.plain:.1e} against the plain model, {proof.moved:.1e} when moved, "
        f"{proof.neighbour:.1e} when a neighbour changes, {bound:.1e} expected at most"
    )
    return proof, bound, reason


class _Decoder:
    """A runtime in the shape that a trial takes."""

    layout: Layout = "packed"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def states(self, input_ids: torch.Tensor, cu_seqlens: Boundaries) -> torch.Tensor:
        """float32 [T, H]."""
        bounds = np.asarray(cu_seqlens, dtype=np.int32)
        ids = input_ids.numpy().astype(np.int32)
        members = np.arange(len(bounds) - 1, dtype=np.int64)
        batch = TokenBatch(input_ids=ids, cu_seqlens=bounds, members=members)
        return torch.from_numpy(as_float32(self._runtime.hidden_states(batch, "tokens")))
