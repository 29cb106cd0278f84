"""One decoder for the common families, over packed tokens: read it top down, a layer is attention and then an MLP.

Everything that differs between families is in `Architecture`, everything that is arithmetic is in `Kernels`. One thread
carries one micro-batch through all layers in buffers that it owns, so threads never wait for each other; only a prefix
that several micro-batches share is computed before them. Knows no files, no contract and no text.
"""

import threading
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from extract.cpu.architecture import Architecture, LayerKind
from extract.cpu.kernels import (
    AttentionShape,
    Float32,
    HeadsNorm,
    Kernels,
    Linear,
    Matrix,
    Norm,
    Operand,
    Precision,
    RotaryTable,
    Weights,
)
from extract.cpu.linear_names import LINEARS
from extract.cpu.mapped_weights import WeightsFile
from extract.cpu.micro_batches import MicroBatch, PassPlan
from extract.cpu.sign_flips import flip_signs
from extract.cpu.weights import LayerWeights, embedding, final_norm, layer_tensors, layer_weights
from extract.records import Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """One layer, ready to run. `qkv` is one linear; the last layer has `query` and `key_value` in its place."""

    attention: AttentionShape
    rotary: RotaryTable | None
    qkv: Linear | None
    query: Linear | None
    key_value: Linear | None
    output: Linear
    gated: Linear
    down: Linear
    attention_norm: Norm | None
    mlp_norm: Norm | None
    post_attention_norm: Norm | None
    post_mlp_norm: Norm | None
    query_norm: HeadsNorm | None
    key_norm: HeadsNorm | None


_FIELDS = {"qkv": ("qkv", "query", "key_value"), "o": ("output",), "gate_up": ("gated",), "down": ("down",)}
"""Where a layer holds each linear."""


def with_linears(layer: Layer, other: Layer, linears: AbstractSet[str]) -> Layer:
    """The layer, but with these linears ("qkv", "down") of another packing of it."""
    return replace(layer, **{field: getattr(other, field) for linear in linears for field in _FIELDS[linear]})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exceptions:
    """Linears that compute in another precision than the rest.

    Attributes:
        kernels: of that precision, and of the same implementation as those of the rest.
        linears: their names, as `extract.cpu.linear_names` gives them.
    """

    kernels: Kernels
    linears: AbstractSet[str]


class Workspace:
    """The buffers of one thread, for micro-batches of up to `rows` tokens; operands by precision."""

    def __init__(self, architecture: Architecture, kernels: Kernels, other: Kernels | None, rows: int) -> None:
        self.rows = rows
        hidden, query, kv = architecture.hidden_size, architecture.query_width, architecture.kv_width
        self.x: Float32 = np.zeros((rows, hidden), np.float32)
        self.input = _operands(kernels, other, rows, hidden)
        self.qkv = kernels.heads(rows, query + 2 * kv)
        self.query = kernels.heads(rows, query)
        self.key_value = kernels.heads(rows, 2 * kv)
        self.attended = _operands(kernels, other, rows, query)
        self.gated = _operands(kernels, other, rows, architecture.intermediate_size)
        self.branch = kernels.matrix(rows if architecture.norms != "pre" else 0, hidden)


@dataclass(frozen=True, slots=True, eq=False)
class _Outputs:
    """Where the states of a pass go, [num_outputs, H] each: after the final norm, and after other layers."""

    final: Float32
    layers: dict[int, Float32]

    def take(self, layer: int, batch: MicroBatch, x: Float32) -> None:
        """Copy what is wanted of a micro-batch's residual stream, if it is asked for after this layer.

        Not for the last layer, which leaves the wanted rows together.
        """
        if layer in self.layers:
            rows = x[: len(batch.input_ids)] if batch.wanted is None else x[batch.wanted]
            self.layers[layer][batch.first_output : batch.first_output + len(rows)] = rows


class PackedDecoder:
    """Weights packed for one set of kernels.

    Args:
        architecture: what to compute.
        weights: its weights, by name; packed copies are made, only the embedding is read in place.
        kernels: with what.
        max_positions: longest sequence that will come.
        micro_batch: tokens that one thread carries through all layers.
        threads: how many micro-batches run at once.
        max_kept: most tokens of a pass that are computed before the others and kept.
        exceptions: linears of another precision; the residual stream is float32 between all of them.

    Attributes:
        layers: what a pass runs; other packings of this decoder's layers may take their place between passes.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: WeightsFile,
        kernels: Kernels,
        *,
        max_positions: int,
        micro_batch: int,
        threads: int,
        max_kept: int = 0,
        exceptions: Exceptions | None = None,
    ) -> None:
        self.architecture = architecture
        self.kernels = kernels
        self.micro_batch = micro_batch
        self.threads = threads
        self._embedding: Weights = embedding(weights, architecture)
        self._final_norm = Norm(final_norm(weights, architecture), architecture.norm_eps)
        self._rotary = [rotary_table(rotary.inv_freq, rotary.scaling, max_positions) for rotary in architecture.rotary]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="extract-decoder", initializer=kernels.enter_thread)
        self._other = None if exceptions is None else exceptions.kernels
        self.layers = self.packed(weights, frozenset() if exceptions is None else exceptions.linears)
        rows = max(micro_batch, max_positions)
        self._spaces = [Workspace(architecture, kernels, self._other, rows) for _ in range(threads)]
        self._kept_space = Workspace(architecture, kernels, self._other, max(rows, max_kept)) if max_kept else None
        self._kept: list[Matrix] = []
        self._kept_rows = 0

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def packed(self, weights: WeightsFile, others: AbstractSet[str]) -> list[Layer]:
        """All layers, packed with the linears `others` in the precision of the exceptions."""
        numbers = range(len(self.architecture.layers))
        return list(self._pool.map(lambda number: self._pack(weights, number, others), numbers))

    def states(self, plan: PassPlan) -> Float32:
        """Final-norm states [plan.num_outputs, H] of one pass, in the order of the plan's outputs."""
        return self.layer_states(plan, ())[0]

    def layer_states(self, plan: PassPlan, layers: Sequence[int]) -> tuple[Float32, ...]:
        """Final-norm states, and the residual stream after each of `layers` (0: the embeddings), of the same outputs.

        Returns:
            1 + len(layers) arrays [plan.num_outputs, H], in the order of the plan's outputs.
        """
        shape = plan.num_outputs, self.architecture.hidden_size
        out = _Outputs(np.empty(shape, np.float32), {layer: np.empty(shape, np.float32) for layer in layers})
        if plan.kept is not None:
            assert self._kept_space is not None
            self._reserve(len(plan.kept.input_ids))
            self._pool.submit(self._forward, plan.kept, self._kept_space, out, keep=True).result()
        todo = _Shared(iter(plan.micro_batches))

        def work(space: Workspace) -> None:
            for micro_batch in todo:
                self._forward(micro_batch, space, out, keep=False)

        used = self._spaces[: len(plan.micro_batches)]
        for future in [self._pool.submit(work, space) for space in used]:
            future.result()
        return out.final, *(out.layers[layer] for layer in layers)

    def _forward(self, batch: MicroBatch, space: Workspace, out: _Outputs, *, keep: bool) -> None:
        n = len(batch.input_ids)
        self.kernels.embed(self._embedding, batch.input_ids, self.architecture.embedding_scale, space.x)
        out.take(0, batch, space.x)
        for number, layer in enumerate(self.layers[:-1]):
            self._attend(layer, batch, space, number, keep=keep)
            self._feed_forward(layer, n, space)
            out.take(number + 1, batch, space.x)
        n = self._attend_last(self.layers[-1], batch, space, keep=keep)
        self._feed_forward(self.layers[-1], n, space)
        own = slice(batch.first_output, batch.first_output + n)
        if len(self.layers) in out.layers:
            out.layers[len(self.layers)][own] = space.x[:n]
        self.kernels.final_norm(space.x, n, self._final_norm, out.final[own])

    def _attend(self, layer: Layer, batch: MicroBatch, space: Workspace, number: int, *, keep: bool) -> None:
        kernels, shape, n = self.kernels, self.architecture, len(batch.input_ids)
        assert layer.qkv is not None
        kernels.project(self._read(layer.attention_norm, n, layer.qkv, space), n, layer.qkv, space.qkv)
        self._prepare(layer, space.qkv, n, 0, batch.positions, query=True)
        self._prepare(layer, space.qkv, n, shape.query_width, batch.positions, query=False)
        if keep:
            self._kept[number].array[:n] = space.qkv.array[:n, shape.query_width :]
        kept = self._kept[number] if batch.sequences.num_kept else None
        attended = space.attended[layer.output.precision]
        kernels.attend(space.qkv, space.qkv, shape.query_width, kept, batch.sequences, layer.attention, attended)
        self._add(attended, layer.output, layer.post_attention_norm, n, space)

    def _attend_last(self, layer: Layer, batch: MicroBatch, space: Workspace, *, keep: bool) -> int:
        """Keys and values of all tokens, but queries and all that follows only of the wanted ones; returns how many."""
        kernels, n, number = self.kernels, len(batch.input_ids), len(self.layers) - 1
        assert layer.query is not None and layer.key_value is not None
        read = self._read(layer.attention_norm, n, layer.key_value, space)
        kernels.project(read, n, layer.key_value, space.key_value)
        self._prepare(layer, space.key_value, n, 0, batch.positions, query=False)
        if keep:
            self._kept[number].array[:n] = space.key_value.array[:n]
        sequences, positions = batch.sequences, batch.positions
        if batch.wanted is not None:
            assert batch.wanted_sequences is not None
            sequences, positions, n = batch.wanted_sequences, positions[batch.wanted], len(batch.wanted)
            space.x[:n] = space.x[batch.wanted]
            self._read(layer.attention_norm, n, layer.query, space)
        kernels.project(read, n, layer.query, space.query)
        self._prepare(layer, space.query, n, 0, positions, query=True)
        kept = self._kept[number] if sequences.num_kept else None
        attended = space.attended[layer.output.precision]
        kernels.attend(space.query, space.key_value, 0, kept, sequences, layer.attention, attended)
        self._add(attended, layer.output, layer.post_attention_norm, n, space)
        return n

    def _feed_forward(self, layer: Layer, n: int, space: Workspace) -> None:
        read, gated = self._read(layer.mlp_norm, n, layer.gated, space), space.gated[layer.down.precision]
        self.kernels.project_gated(read, n, layer.gated, gated)
        self._add(gated, layer.down, layer.post_mlp_norm, n, space)

    def _read(self, norm: Norm | None, n: int, linear: Linear, space: Workspace) -> Operand:
        """The residual stream as the input of a linear, in its precision."""
        operand = space.input[linear.precision]
        if norm is None:
            self.kernels.quantize(space.x, n, operand)
        else:
            self.kernels.norm(space.x, n, norm, operand)
        return operand

    def _add(self, operand: Operand, linear: Linear, norm: Norm | None, n: int, space: Workspace) -> None:
        """Project a branch and add it to the residual stream."""
        scale = self.architecture.residual_scale
        if norm is None:
            self.kernels.project_add(operand, n, linear, scale, space.x)
        else:
            self.kernels.project(operand, n, linear, space.branch)
            self.kernels.add_norm(space.branch, n, norm, scale, space.x)

    def _prepare(self, layer: Layer, heads: Matrix, n: int, column: int, positions: Int32, *, query: bool) -> None:
        shape = self.architecture
        norm = layer.query_norm if query else layer.key_norm
        if norm is None and layer.rotary is None:
            return
        num_heads = shape.num_heads if query else shape.num_kv_heads
        self.kernels.prepare_heads(heads, n, column, num_heads, shape.head_dim, norm, positions, layer.rotary)

    def _reserve(self, rows: int) -> None:
        """Room for the keys and values of `rows` kept tokens in every layer."""
        if rows > self._kept_rows:
            width = 2 * self.architecture.kv_width
            self._kept = [self.kernels.heads(rows, width) for _ in self.layers]
            self._kept_rows = rows

    def _pack(self, weights: WeightsFile, number: int, others: AbstractSet[str]) -> Layer:
        shape = self.architecture
        found, kind = layer_weights(weights, shape, number), shape.layers[number]
        if "int8" in (self.kernels.precision, None if self._other is None else self._other.precision):
            found = flip_signs(found, shape, number)  # changes no bit of the linears in another precision
        last = number == len(shape.layers) - 1
        qkv, output, gated, down = (self._kernels_of(f"{number}.{linear}", others) for linear in LINEARS)
        layer = Layer(
            attention=_attention_shape(shape, kind),
            rotary=None if kind.rotary is None else self._rotary[kind.rotary],
            qkv=None
            if last
            else qkv.pack([found.q, found.k, found.v], _joined(found.q_bias, found.k_bias, found.v_bias)),
            query=qkv.pack([found.q], found.q_bias) if last else None,
            key_value=qkv.pack([found.k, found.v], _joined(found.k_bias, found.v_bias)) if last else None,
            output=output.pack([found.o], found.o_bias),
            gated=gated.pack_gated(found.gate, found.up, _gate_bias(found), shape.activation),
            down=down.pack([found.down], found.down_bias),
            attention_norm=self._norm(found.attention_norm),
            mlp_norm=self._norm(found.mlp_norm),
            post_attention_norm=self._norm(found.post_attention_norm),
            post_mlp_norm=self._norm(found.post_mlp_norm),
            query_norm=self._heads_norm(found.q_norm),
            key_norm=self._heads_norm(found.k_norm),
        )
        for name in layer_tensors(shape, number):
            weights.drop(name)
        return layer

    def _kernels_of(self, linear: str, others: AbstractSet[str]) -> Kernels:
        if linear not in others:
            return self.kernels
        assert self._other is not None
        return self._other

    def _norm(self, weight: Float32 | None) -> Norm | None:
        return None if weight is None else Norm(weight, self.architecture.norm_eps)

    def _heads_norm(self, weight: Float32 | None) -> HeadsNorm | None:
        norm = self._norm(weight)
        return None if norm is None else HeadsNorm(norm, self.architecture.head_norm == "projection")


class _Shared(Iterator[MicroBatch]):
    """An iterator that several threads take from."""

    def __init__(self, items: Iterator[MicroBatch]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __next__(self) -> MicroBatch:
        with self._lock:
            return next(self._items)


def _operands(kernels: Kernels, other: Kernels | None, rows: int, width: int) -> dict[Precision, Operand]:
    found = (kernels,) if other is None else (kernels, other)
    return {one.precision: one.operand(rows, width) for one in found}


def rotary_table(inv_freq: tuple[float, ...], scaling: float, positions: int) -> RotaryTable:
    """Cosines and sines of `positions` positions, computed in float32 as transformers does."""
    angles = np.outer(np.arange(positions, dtype=np.float32), np.array(inv_freq, np.float32))
    cos, sin = np.cos(angles) * np.float32(scaling), np.sin(angles) * np.float32(scaling)
    return RotaryTable(np.ascontiguousarray(cos, np.float32), np.ascontiguousarray(sin, np.float32))


def _attention_shape(shape: Architecture, kind: LayerKind) -> AttentionShape:
    return AttentionShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.attention_scale,
        softcap=shape.softcap,
        window=kind.window,
    )


def _joined(*biases: Float32 | None) -> Float32 | None:
    found = [bias for bias in biases if bias is not None]
    return np.concatenate(found) if found else None


def _gate_bias(found: LayerWeights) -> tuple[Float32, Float32] | None:
    return None if found.gate_bias is None or found.up_bias is None else (found.gate_bias, found.up_bias)
