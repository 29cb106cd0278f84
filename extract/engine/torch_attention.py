"""Attention inside each sequence of a packed row, for any model that asks transformers' interface for it.

Two functions are registered under one name. The mask function returns the pattern that the model asks for (plain
causal, window, chunk) instead of a mask of the whole row; the attention function computes each group of consecutive
sequences of equal length as one batch.

Refuses to know layers, positions and rotations. An argument without a known meaning is an error, never ignored: a model
that hands over a bias, an index or a sink under another name would otherwise be computed without it.

Letters: T tokens of the row, n sequences of a group, L their length, D head size, Dv head size of the values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from extract.engine.torch_packed_pass import PackedAttentionRefused, PackedPass, current_pass

PACKED_ATTENTION = "extract_packed"
"""The name under which transformers finds the two functions of this module."""

MAX_SCORES = 2**26
"""Attention scores that are written out at once where no fused kernel applies (256 MiB in float32)."""

# What models hand down together with the arguments of attention, and what changes nothing in its result.
WITHOUT_EFFECT = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states", "cache"})


def register_packed_attention() -> None:
    """Make the name known to transformers; doing it again changes nothing."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, packed_mask)


class MaskPattern:
    """Which keys a query of one sequence sees, on the sequence's own positions.

    Models hand it down in the place of a mask of shape [1, 1, T, T] and may slice it, as long as everything is kept.
    The pattern is evaluated on the longest sequence: masks are functions of two positions, so a shorter sequence's
    pattern is the corner of it. `None` stands for plain causal, which fused kernels do by themselves.
    """

    ndim = 4

    def __init__(self, visible: torch.Tensor, num_tokens: int) -> None:
        self.shape = (1, 1, num_tokens, num_tokens)
        self._visible = visible
        differs = (visible != torch.ones_like(visible).tril()).nonzero()
        self._causal_up_to = int(differs.amax(1).min()) if len(differs) else len(visible)

    def for_length(self, length: int) -> torch.Tensor | None:
        """Bool [L, L], or `None` for plain causal."""
        return None if length <= self._causal_up_to else self._visible[:length, :length]

    def __getitem__(self, index: object) -> "MaskPattern":
        parts = index if isinstance(index, tuple) else (index,)
        for part, size in zip(parts, self.shape, strict=False):
            if not isinstance(part, slice) or part.indices(size) != (0, size, 1):
                raise PackedAttentionRefused(
                    module="the model", found=f"a part {part} of its mask", expected="all of it was expected"
                )
        return self


def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **ignored: object,
) -> MaskPattern:
    """What transformers calls to make a mask: evaluate `mask_function` on the longest sequence's own indices."""
    this_pass = current_pass()
    tokens = this_pass.num_tokens
    # Some families make a mask of ones for themselves where none is given.
    padded = attention_mask is not None and not bool(attention_mask.all())
    if (
        padded
        or mask_function is None
        or (batch_size, q_length, kv_length, q_offset, kv_offset) != (1, tokens, tokens, 0, 0)
    ):
        found = f"a mask of {batch_size} x {q_length} x {kv_length}"
        expected = f"1 x {tokens} x {tokens} without padding was expected"
        raise PackedAttentionRefused(module="the model", found=found, expected=expected)
    start, _, length = this_pass.longest
    index = torch.arange(start, start + length, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    visible = mask_function(zero, zero, index[:, None], index[None, :])
    return MaskPattern(visible.to(torch.bool).expand(length, length), this_pass.num_tokens)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskPattern | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each sequence to itself.

    Args:
        module: the layer that asks.
        query: [1, heads, T, D].
        key: [1, kv_heads, T, D], not repeated for grouped queries.
        value: [1, kv_heads, T, Dv].
        attention_mask: the pattern made by `packed_mask`; `None` where the model makes no mask, and then
            `sliding_window` and `is_causal` say what is seen.
        dropout: must be 0.
        scaling: of the scores; `None` is D**-0.5.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        s_aux: [heads], a score per head that takes part in the softmax and gives nothing (attention sink).
        sliding_window: a query sees the last so many keys, itself included.
        is_causal: as in transformers, `None` is what the layer itself says.
        others: refused unless `None` or known to have no effect.

    Returns:
        [1, T, heads, Dv], and no attention weights.
    """
    this_pass = current_pass()
    this_pass.calls += 1
    num_tokens, name = this_pass.num_tokens, type(module).__name__
    for argument, given in others.items():
        if given is not None and argument not in WITHOUT_EFFECT:
            raise PackedAttentionRefused(module=name, found=f"the argument {argument!r}", expected="which is not known")
    if dropout:
        raise PackedAttentionRefused(module=name, found=f"dropout {dropout}", expected="0 was expected")
    if query.shape[2] != num_tokens or key.shape[2] != num_tokens or query.shape[0] != 1:
        found = f"{query.shape[0]} x {query.shape[2]} queries and {key.shape[2]} keys"
        raise PackedAttentionRefused(module=name, found=found, expected=f"1 x {num_tokens} of each were expected")
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = _pattern_without_mask(causal, sliding_window, this_pass, query.device)
    elif not isinstance(attention_mask, MaskPattern):
        found = f"a mask of type {type(attention_mask).__name__}"
        raise PackedAttentionRefused(module=name, found=found, expected="the pattern given to it was expected")

    heads, width = query.shape[1], value.shape[3]
    output: torch.Tensor | None = None
    for start, count, length in this_pass.groups:
        stop = start + count * length
        # Views: [1, heads, T, D] -> [n, heads, L, D].
        q, k, v = (
            torch.unflatten(states[0, :, start:stop], 1, (count, length)).transpose(0, 1)
            for states in (query, key, value)
        )
        visible = attention_mask.for_length(length) if attention_mask is not None else None
        if softcap is None and s_aux is None:
            attended = functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=visible,
                is_causal=visible is None,
                scale=scaling,
                enable_gqa=k.shape[1] != heads,
            )
        else:
            attended = _written_out(q, k, v, visible, scaling, softcap, s_aux)
        in_order = attended.transpose(1, 2)  # [n, L, heads, Dv]
        if count * length == num_tokens:
            return in_order.reshape(1, num_tokens, heads, width).contiguous(), None
        if output is None:
            output = value.new_empty(1, num_tokens, heads, width)
        torch.unflatten(output[0, start:stop], 0, (count, length)).copy_(in_order)
    assert output is not None
    return output, None


def _pattern_without_mask(
    causal: bool, sliding_window: int | None, this_pass: PackedPass, device: torch.device
) -> MaskPattern | None:
    if causal and sliding_window is None:
        return None
    index = torch.arange(this_pass.longest.length, device=device)
    ahead = index[None, :] - index[:, None]  # key minus query
    visible = ahead <= 0 if causal else ahead == ahead
    if sliding_window is not None:
        visible = visible & (ahead > -sliding_window)
    return MaskPattern(visible, this_pass.num_tokens)


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one group with softcap or sinks, which fused kernels do not offer: [n, heads, L, Dv]."""
    count, heads, length, head_size = query.shape
    repeats = heads // key.shape[1]
    if visible is None:
        visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scale = head_size**-0.5 if scaling is None else scaling
    parts: list[torch.Tensor] = []
    step = max(1, MAX_SCORES // (heads * length * length))
    for first in range(0, count, step):
        q, k, v = (states[first : first + step] for states in (query, key, value))
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        scores = (q @ k.transpose(2, 3)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.float().masked_fill(~visible, float("-inf"))
        if s_aux is None:
            weights = scores.softmax(-1)
        else:
            sinks = s_aux.reshape(1, heads, 1, 1).float().expand(len(q), heads, length, 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        parts.append(weights.to(v.dtype) @ v)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
