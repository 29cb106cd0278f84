"""The packed decoder in torch: token ids of sequences laid end to end -> final-norm states. Read `Layer` first.

One module tree, the same on a card and on a CPU; only attention and FP8 products differ there (see `attention.py`,
`fp8.py`). Nothing in the forward pass asks the device for a number, so it never waits, and `torch.export` can trace it:

    decoder(input_ids, positions, cu_seqlens, max_seqlen)              -> [T, H]
    decoder(input_ids, positions, cu_seqlens, max_seqlen, last=True)   -> [B, H]

    input_ids, positions: int32 [T], T any number; positions restart at 0 in each sequence
    cu_seqlens: int32 [B + 1], cumulative lengths, B any number
    max_seqlen: a Python number that no length exceeds (a constant of a traced graph; it may be `max_positions`)
    last: a Python flag; the last layer then computes queries and all behind them for last tokens alone

Sequences that share a prefix compute it once: `input_ids` then holds each different token once, `cu_seqlens` counts the
tokens that a sequence computes itself (its last ones), `cu_keys` int32 [B + 1] its whole lengths, and `key_index` int32
[cu_keys[B]] says which computed token each of its positions is. All layers run in step, so a shared token's keys are
there when they are needed, and nothing has to be computed before the rest.

The residual stream is float32 in every precision; branches come out of products in the computing type. Knows no files,
no contract and no text.
"""

import torch
from torch import nn

from extract.cpu.architecture import Architecture, LayerKind
from extract.cuda.attention import Backend, Spans, attend
from extract.cuda.linears import Linear, Operand, ScaledLinear
from extract.cuda.regions import AddAndRead, Embed, Gated, Heads, Read, Round


class Layer(nn.Module):
    """Attention, then an MLP; each branch is added to the residual stream, which is read for the next one at once."""

    def __init__(
        self,
        architecture: Architecture,
        kind: LayerKind,
        backend: Backend,
        *,
        qkv: Linear | ScaledLinear,
        query: Heads,
        key: Heads,
        attended: Round,
        output: Linear | ScaledLinear,
        after_attention: AddAndRead,
        gate_up: Linear | ScaledLinear,
        gated: Gated,
        down: Linear | ScaledLinear,
        after_mlp: AddAndRead,
    ) -> None:
        super().__init__()
        self.backend: Backend = backend
        self.window, self.softcap = kind.window, architecture.softcap
        self.attention_scale = architecture.attention_scale
        self.query_width, self.kv_width = architecture.query_width, architecture.kv_width
        self.qkv, self.query, self.key, self.attended, self.output = qkv, query, key, attended, output
        self.after_attention, self.gate_up, self.gated, self.down = after_attention, gate_up, gated, down
        self.after_mlp = after_mlp

    def forward(
        self,
        x: torch.Tensor,
        read: Operand,
        positions: torch.Tensor,
        spans: Spans,
        key_index: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Operand]:
        """One layer.

        Args:
            x: residual stream, float32 [T, H].
            read: what the layer's products read of it.
            positions: int32 [T].
            spans: the queries that are computed, and all keys.
            key_index: int32, the computed token of each key; `None`: keys are the tokens as they are.
            wanted: int32 [w], tokens that go on from here; `None`: all.

        Returns:
            The stream float32 [T or w, H], and what the next layer (or who wants states) reads of it.
        """
        x, read = self.after_attention(
            x if wanted is None else x[wanted], self._attended(read, positions, spans, key_index, wanted)
        )
        added: tuple[torch.Tensor, Operand] = self.after_mlp(x, self.down(self.gated(self.gate_up(read))))
        return added

    def _attended(
        self,
        read: Operand,
        positions: torch.Tensor,
        spans: Spans,
        key_index: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """The attention branch [T or w, H]; a function of its own so that queries and keys go before the MLP comes."""
        if wanted is None:
            projected = self.qkv(read)
            queries, keys, values = projected.split((self.query_width, self.kv_width, self.kv_width), dim=-1)
        else:
            projected = self.qkv(read, self.query_width)
            keys, values = projected.split((self.kv_width, self.kv_width), dim=-1)
            queries = self.qkv(_rows(read, wanted), 0, self.query_width)
        query = self.query(queries, positions if wanted is None else positions[wanted])
        key = self.key(keys, positions)
        value = values.view(key.shape)
        if key_index is not None:
            key, value = key[key_index], value[key_index]
        found = attend(
            self.backend,
            query,
            key,
            value,
            spans,
            scale=self.attention_scale,
            window=self.window,
            softcap=self.softcap,
        )
        branch: torch.Tensor = self.output(self.attended(found.flatten(1)))
        return branch


class PackedDecoder(nn.Module):
    """All layers. See the module's docstring; `extract.cuda.weights.load_decoder` makes one.

    Attributes:
        architecture: what it computes.
        precision: "float32", "bfloat16" or "fp8".
        output_dtype: of the states.
        max_positions: longest sequence.
    """

    def __init__(
        self,
        architecture: Architecture,
        precision: str,
        *,
        embed: Embed,
        read: Read,
        layers: list[Layer],
        output_dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        super().__init__()
        self.architecture, self.precision = architecture, precision
        self.output_dtype, self.max_positions = output_dtype, max_positions
        self.embed, self.read, self.layers = embed, read, nn.ModuleList(layers)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        *,
        last: bool = False,
        cu_keys: torch.Tensor | None = None,
        key_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Final-norm states [T, H], or [B, H] of last tokens, in `output_dtype`; see the module's docstring."""
        states = self.layer_states(
            input_ids, positions, cu_seqlens, max_seqlen, (), last=last, cu_keys=cu_keys, key_index=key_index
        )
        return states[0]

    def layer_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        layers: tuple[int, ...],
        *,
        last: bool = False,
        cu_keys: torch.Tensor | None = None,
        key_index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The same, then the residual stream after each of `layers` (0: the embeddings), of the same tokens."""
        if cu_keys is None:
            cu_keys = cu_seqlens
        spans = Spans(cu_queries=cu_seqlens, cu_keys=cu_keys, max_queries=max_seqlen, max_keys=max_seqlen)
        wanted = None
        x = self.embed(input_ids)
        read = self.read(x)
        final, ends = len(self.layers), cu_seqlens[1:] - 1
        streams = {0: x} if 0 in layers else {}
        for number, layer in enumerate(self.layers, start=1):
            if last and number == final:
                wanted = ends
                one_each = torch.arange(cu_seqlens.shape[0], dtype=torch.int32, device=cu_seqlens.device)
                spans = Spans(cu_queries=one_each, cu_keys=cu_keys, max_queries=1, max_keys=max_seqlen)
            x, read = layer(x, read, positions, spans, key_index, wanted)
            if number in layers:
                streams[number] = x
        if last:
            streams = {number: one if number == final else one[ends] for number, one in streams.items()}
        return read[0], *(streams[number].to(self.output_dtype) for number in layers)


def _rows(read: Operand, wanted: torch.Tensor) -> Operand:
    values, scales = read
    return values[wanted], None if scales is None else scales[wanted]
