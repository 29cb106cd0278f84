"""Causal attention inside sequences that lie end to end: torch's variable-length kernel, and a plain twin of it.

Queries of a sequence are its last positions, keys are all its positions from 0 on; where a prefix is shared there are
more keys than queries, and both implementations align them at the end. The plain one pads queries and keys to the
longest sequence and masks: it runs anywhere, in any type, with a softcap, and can be traced, but spends memory on the
padding. Which one an engine takes is asked of torch's own signature and of the architecture, never tried out on data:
a kernel that ignores an option it does not know would be wrong in silence.
"""

import inspect
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from extract.cpu.architecture import Architecture

Backend = Literal["varlen", "plain"]

LARGEST_HEAD = 256
"""Channels of a head that flash attention takes."""
FIRST_CAPABILITY = 8.0
"""Compute capability that flash attention needs."""
PLAIN_SCORES = 2**28
"""Scores that the plain twin has in memory at once: 1 GiB in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A backend, and why it is not the faster one (empty where it is)."""

    backend: Backend
    reason: str = ""

    @property
    def described(self) -> str:
        """As a contract says it."""
        return self.backend + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Where the queries and keys of B sequences lie. Tensors are on the device that computes.

    Attributes:
        cu_queries: int32 [B + 1], cumulative numbers of queries.
        cu_keys: int32 [B + 1], cumulative numbers of keys.
        max_queries, max_keys: no sequence has more; they may be larger than the largest.
    """

    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    max_queries: int
    max_keys: int


def choose_backend(architecture: Architecture, dtype: torch.dtype, device: str, capability: str | None) -> Chosen:
    """The fastest backend that computes exactly this attention.

    Args:
        architecture: what is to be computed.
        dtype: of queries, keys and values.
        device: "cuda" or "cpu".
        capability: compute capability of the card, "9.0".
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return Chosen(backend="plain", reason="this torch has no variable-length attention")
    missing = {"scale", "window_size", "enable_gqa"} - set(inspect.signature(varlen_attn).parameters)
    reasons = {
        "no card": device != "cuda",
        f"compute capability {capability}, {FIRST_CAPABILITY} needed": float(capability or 0) < FIRST_CAPABILITY,
        f"its variable-length attention has no {' and no '.join(sorted(missing))}": bool(missing),
        f"type {str(dtype).removeprefix('torch.')}": dtype not in (torch.bfloat16, torch.float16),
        "a softcap": architecture.softcap is not None,
        f"heads of {architecture.head_dim} channels": architecture.head_dim > LARGEST_HEAD
        or architecture.head_dim % 8 > 0,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return Chosen(backend="plain", reason=found[0]) if found else Chosen(backend="varlen")


def attend(
    backend: Backend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Spans,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of all sequences.

    Args:
        backend: which implementation.
        query: [Tq, heads, D].
        key: [Tk, KV heads, D]; the last dimension is contiguous.
        value: as `key`.
        spans: where the sequences lie.
        scale: multiplies query times key.
        window: a query sees only keys at positions > its own - window.
        softcap: scores become softcap * tanh(score / softcap).

    Returns:
        [Tq, heads, D] in the queries' type.
    """
    if window is not None and window >= spans.max_keys:
        window = None
    if backend == "plain":
        return plain_attention(query, key, value, spans, scale=scale, window=window, softcap=softcap)
    assert softcap is None, "variable-length attention has no softcap"
    from torch.nn.attention.varlen import varlen_attn

    found = varlen_attn(
        query,
        key,
        value,
        spans.cu_queries,
        spans.cu_keys,
        spans.max_queries,
        spans.max_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # aligned at the end; the own position is not counted
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(found, torch.Tensor)
    return found


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Spans,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """See `attend`. Some sequences at a time, so that padded scores stay small; one step where it is traced."""
    num_queries, num_sequences = query.shape[0], spans.cu_queries.shape[0] - 1
    scores = spans.max_queries * spans.max_keys * query.shape[1]
    step = num_sequences if torch.compiler.is_compiling() else max(1, PLAIN_SCORES // scores)
    first = torch.arange(spans.max_queries, device=query.device)
    out = query.new_empty((num_queries + 1, *query.shape[1:]))  # padding goes to the last row: no length is asked for
    for start in (0,) if step >= num_sequences else range(0, num_sequences, step):
        stop = min(start + step, num_sequences)
        cu_queries, cu_keys = spans.cu_queries[start : stop + 1], spans.cu_keys[start : stop + 1]
        place = cu_queries[:-1, None] + first
        place = torch.where(place < cu_queries[1:, None], place, num_queries)
        out[place] = _padded_attention(query, key, value, cu_queries, cu_keys, spans, scale, window, softcap)
    return out[:num_queries]


def _padded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    spans: Spans,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[B, max_queries, heads, D]; what lies beyond a sequence's queries means nothing.

    Padding repeats a sequence's own last key: a masked value still counts if it is not finite, as zero times that.
    """
    group = query.shape[1] // key.shape[1]
    place = torch.arange(spans.max_queries, device=query.device)
    position = torch.arange(spans.max_keys, device=query.device)
    num_keys, num_queries = cu_keys.diff()[:, None], cu_queries.diff()[:, None]
    q = query[cu_queries[:-1, None] + torch.minimum(place, num_queries - 1)].transpose(1, 2)
    at = cu_keys[:-1, None] + torch.minimum(position, num_keys - 1)
    k, v = (one[at].transpose(1, 2).repeat_interleave(group, dim=1) for one in (key, value))
    own = torch.minimum(num_keys - num_queries + place, num_keys - 1)[:, :, None]
    seen = position <= own
    if window is not None:
        seen = seen & (position > own - window)
    if softcap is None:
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale)
    else:
        scores = softcap * torch.tanh(q.float() @ k.float().transpose(2, 3) * scale / softcap)
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=-1)
        found = (weights @ v.float()).to(query.dtype)
    return found.transpose(1, 2)
