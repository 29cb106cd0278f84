"""A token batch -> the plan of its pass: what its rows share, what is kept, where micro-batches begin.

Tokens that several micro-batches need are computed before all others in one micro-batch, whose keys and values are
kept, because threads never read from each other. Sharing needs the order of ids; where it would save little the batch
stays as it is, since plain contiguous micro-batches attend fastest and give their states in order.
"""

from typing import Literal

import numpy as np

from extract.cpu.balance import equal_runs, num_runs
from extract.cpu.micro_batches import PassPlan, lay_out
from extract.cpu.sharing import Rows, kept_prefixes, plain_rows, shared_rows
from extract.packing import MIN_SAVING, MIN_SHARED
from extract.records import Int32, Int64
from extract.spec import OutputKind

MAX_KEPT = 1024
"""Kept tokens of one pass, unless told otherwise: their keys and values of all layers are held in memory."""


def plan_pass(
    input_ids: Int32,
    cu_seqlens: Int32,
    kind: OutputKind,
    *,
    budget: int,
    threads: int,
    share: bool,
    min_shared: int = MIN_SHARED,
    max_kept: int = MAX_KEPT,
) -> PassPlan:
    """Plan one pass of a causal model. A function of its arguments alone.

    Args:
        input_ids: int32 [T].
        cu_seqlens: int32 [B + 1], cumulative lengths; no sequence is empty.
        kind: which states are asked for; "mean" needs every token's, "first" computes nothing but first tokens.
        budget: most tokens of a micro-batch; a longer sequence runs alone.
        threads: micro-batches that run side by side; their number is a multiple of it where tokens are enough.
        share: compute common prefixes and exact duplicates once where that saves `MIN_SAVING` of all tokens.
        min_shared: shorter common prefixes are not shared.
        max_kept: most tokens whose keys and values are kept for other micro-batches.

    Returns:
        Micro-batches, the largest first. States lie in the order of `first_output`; without sharing they are in the
        order of the batch and `output_index` is `None`.
    """
    if kind == "first":
        input_ids = input_ids[cu_seqlens[:-1]]
        cu_seqlens = np.arange(len(cu_seqlens), dtype=np.int32)
    states: Literal["all", "last"] = "last" if kind == "last" else "all"
    plain = plain_rows(input_ids, cu_seqlens)
    enough = (1 - MIN_SAVING) * len(input_ids)
    if share and len(cu_seqlens) > 2:
        rows = shared_rows(input_ids, cu_seqlens, min_shared)
        if rows.num_own <= enough:
            likely = num_runs(-(-rows.num_own // budget), rows.num_own, threads)
            kept = kept_prefixes(rows, num_runs=likely, threads=threads, max_kept=max_kept)
            plan = lay_out(rows, kept, _starts(rows, kept, budget, threads), states)
            if plan.num_computed <= enough:
                return plan
    return lay_out(plain, plain.shared, _starts(plain, plain.shared, budget, threads), states)


def _starts(rows: Rows, kept: Int64, budget: int, threads: int) -> Int64:
    """First row of each micro-batch. Rows that are kept as a whole compute nothing: none begins with one."""
    own = rows.lengths - np.maximum(rows.shared, kept)
    left = np.flatnonzero(own)
    missing = np.maximum(rows.shared - kept, 0)
    return left[equal_runs(own[left], missing[left], budget=budget, threads=threads)]
