"""Run a transformers base model over token batches and return the final norm's output, in either of two layouts.

`packed`: sequences end to end in one row, positions restart, attention inside each sequence. `dense`: sequences of
equal length side by side, no mask, the family's own attention. Nothing is ever padded, nothing is cached.

Knows no files, no tokens and no contract. Whether a layout gives a family's right numbers is not decided here but by
`torch_proof`. States are caught by a hook on the module that `torch_final_norm` found, because some families scale or
project the norm's output before they return it.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from extract.engine.torch_attention import PACKED_ATTENTION, register_packed_attention
from extract.engine.torch_final_norm import FinalNorm, family_of, find_final_norm, first_tensor, last_hidden_state
from extract.engine.torch_layers import DecoderLayers, find_decoder_layers
from extract.engine.torch_packed_pass import Boundaries, Group, groups_of, packed_pass
from extract.engine.torch_pooling import pool
from extract.errors import EngineRefused
from extract.records import Int64
from extract.spec import OutputKind

Layout = Literal["packed", "dense"]

PROBE_IDS = 8
"""Tokens of the row that finds the final norm."""


class PackedRefused(EngineRefused):
    """A family does not let its attention be replaced, or does not use the one it was given."""

    template = "{family}: layout packed is not possible: {problem}. Build this checkpoint with layout dense."


class UnequalLengths(EngineRefused):
    """A dense pass was given sequences of different lengths."""

    template = "a pass of layout dense takes sequences of one length; this one has {shortest} to {longest} tokens."


class TorchDecoder:
    """A base model that turns token batches into final-norm states.

    Args:
        model: a transformers base model in eval mode, without a head.
        layout: how sequences share a pass.
        device: where it runs; the model is moved there.
        final_norm: what `find_final_norm` said of this model; found here if not given.

    Raises:
        PackedRefused: layout packed, and the family keeps its own attention.
        NoFinalNorm: see `find_final_norm`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layout: Layout,
        device: str | torch.device = "cpu",
        final_norm: FinalNorm | None = None,
    ) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self.model = cast("Any", model.to(self.device).eval())
        self.own_attention = str(self.model.config._attn_implementation)
        if final_norm is None:
            final_norm = find_final_norm(model, torch.arange(PROBE_IDS, device=self.device) % vocab_size(model))
        self.final_norm = final_norm
        self.attention_calls: int | None = None
        """Calls of packed attention in every pass, learned from the first one."""
        self._dynamic_rope = [module for module in self.model.modules() if _is_dynamic_rope(module)]
        self._captured: torch.Tensor | None = None
        self._hook = self.model.get_submodule(final_norm.path).register_forward_hook(self._capture)
        if layout == "packed":
            self._pack()

    def close(self) -> None:
        """Give the model its own attention back and remove the hook."""
        self._hook.remove()
        if self.model.config._attn_implementation != self.own_attention:
            self.model.set_attn_implementation(self.own_attention)

    @torch.inference_mode()
    def states(self, input_ids: torch.Tensor, cu_seqlens: Boundaries) -> torch.Tensor:
        """Final-norm states of one pass.

        Args:
            input_ids: integers [T], sequences end to end.
            cu_seqlens: B + 1 cumulative lengths, first 0, last T. Sequences of equal length should be neighbours: each
                run of them is one attention call.

        Returns:
            [T, H] in the model's own type, on its device, freshly allocated.

        Raises:
            UnequalLengths: layout dense, and lengths differ.
            PackedRefused: layout packed, and the number of attention calls changed.
            PackedAttentionRefused: the model asks for an attention that packing does not compute.
        """
        return self._states(input_ids, _as_array(cu_seqlens))

    @torch.inference_mode()
    def layer_states(
        self, input_ids: torch.Tensor, cu_seqlens: Boundaries, kind: OutputKind, layers: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """`states`, then the residual stream after each of `layers`, ascending; [T, H] or, of pooled kinds, [B, H].

        Pooled are the last or first token's state, or the mean over each sequence (accumulated in float32, float32).

        Raises:
            NoLayerStates: see `find_decoder_layers`, which is asked once.
        """
        bounds = _as_array(cu_seqlens)
        shape = int(bounds[-1]), self.final_norm.width

        def of_kind(states: torch.Tensor) -> torch.Tensor:
            return states if kind == "tokens" else pool(states, bounds, kind)

        def kept(states: torch.Tensor) -> torch.Tensor:
            states = states.reshape(shape)
            return states.clone() if kind == "tokens" else of_kind(states)

        # without layers nobody asks which modules they are
        with self.layers.taking(layers, kept) if layers else nullcontext(()) as taken:
            states = self._states(input_ids, bounds)
        return of_kind(states), *taken

    @cached_property
    def layers(self) -> DecoderLayers:
        """The model's decoder layers."""
        ids = (torch.arange(PROBE_IDS, device=self.device) % vocab_size(self.model))[None]

        def forward(**options: Any) -> Any:
            with torch.inference_mode(), packed_pass((Group(0, 1, PROBE_IDS),), PROBE_IDS):
                return self.model(input_ids=ids, use_cache=False, **options)

        count = getattr(self.model.config, "num_hidden_layers", None)
        found = find_decoder_layers(self.model, self.final_norm, count, forward)
        self._captured = None
        return found

    def _states(self, input_ids: torch.Tensor, bounds: Int64) -> torch.Tensor:
        num_tokens = int(bounds[-1])
        groups = groups_of(bounds)
        ids = input_ids.to(self.device, torch.int64, non_blocking=True)
        for module in self._dynamic_rope:
            _forget_longer_rows(module)
        if self.layout == "packed":
            self._run_packed(ids, groups, bounds)
        else:
            self._run_dense(ids, groups)
        captured, self._captured = self._captured, None
        assert captured is not None, f"{self.final_norm.path} did not run"
        return captured.reshape(num_tokens, self.final_norm.width)

    def _run_packed(self, ids: torch.Tensor, groups: tuple[Group, ...], bounds: Int64) -> None:
        positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
        position_ids = torch.from_numpy(positions).to(self.device, non_blocking=True)
        with packed_pass(groups, len(ids)) as this_pass:
            self.model(input_ids=ids[None], position_ids=position_ids[None], use_cache=False)
        if self.attention_calls is None:
            if this_pass.calls == 0:
                raise PackedRefused(family=family_of(self.model), problem="its layers never called the attention given")
            self.attention_calls = this_pass.calls
        if this_pass.calls != self.attention_calls:
            problem = f"attention ran {this_pass.calls} times in a pass, {self.attention_calls} expected"
            raise PackedRefused(family=family_of(self.model), problem=problem)

    def _run_dense(self, ids: torch.Tensor, groups: tuple[Group, ...]) -> None:
        if len(groups) != 1:
            lengths = [group.length for group in groups]
            raise UnequalLengths(shortest=min(lengths), longest=max(lengths))
        self.model(input_ids=ids.view(groups[0].num_sequences, groups[0].length), use_cache=False)

    def _pack(self) -> None:
        register_packed_attention()
        # transformers only logs a warning where a family cannot change its attention, so ask before and look after.
        if self.model._can_set_attn_implementation():
            self.model.set_attn_implementation(PACKED_ATTENTION)
        if self.model.config._attn_implementation != PACKED_ATTENTION:
            self._hook.remove()
            raise PackedRefused(family=family_of(self.model), problem="it has attention code of its own")

    def _capture(self, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        # A looped model runs its norm several times; the last one counts.
        self._captured = last_hidden_state(output) if self.final_norm.how == "none" else first_tensor(output)


def vocab_size(model: nn.Module) -> int:
    """Number of token ids that the model's embedding knows."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


def _as_array(cu_seqlens: Boundaries) -> Int64:
    if isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = cu_seqlens.cpu().numpy()
    return np.asarray(cu_seqlens, dtype=np.int64)


def _is_dynamic_rope(module: nn.Module) -> bool:
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else (kind,)
    return hasattr(module, "max_seq_len_cached") and any("dynamic" in str(one) for one in kinds)


def _forget_longer_rows(module: nn.Module) -> None:
    """Undo what a longer row did to dynamic rotary frequencies: the same row must always give the same states."""
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(module, name, module.original_max_seq_len)
    for name, original in list(module.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            module.register_buffer(name.replace("original_", ""), original, persistent=False)
