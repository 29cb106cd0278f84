"""An engine's weights file -> the packed decoder on a device, layer by layer.

Reads the file that every decoder of ours reads, in the type that is stored there. An FP8 engine stores what its
products take: each linear's blocks are read to their places in one weight, and nothing is rounded or joined. Plain
weights can be rounded to FP8 here too, to the same bits: a sweep tries FP8 so without a build of its own, and engines
of older builds hold no other. Where what is read is what stays, all of it is begun at once; else the next layer is read
while one is put together, so that two layers at most are on the device twice.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from extract.cpu.architecture import Architecture
from extract.cpu.decoder import rotary_table
from extract.cpu.kernels import Float32
from extract.cpu.mapped_weights import UnfitWeights, WeightsFile
from extract.cpu.weights import LayerWeights, embedding, final_norm, holds_scales, layer_tensors, layer_weights
from extract.cuda.attention import Backend
from extract.cuda.decoder import Layer, PackedDecoder
from extract.cuda.fp8 import FP8, quantized_weight
from extract.cuda.linears import Linear, ScaledLinear
from extract.cuda.loading import WeightsLoader
from extract.cuda.regions import AddAndRead, Embed, Gated, Heads, Norm, Read, Round

Precision = Literal["float32", "bfloat16", "fp8"]

COMPUTED: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
"""The type of what is not a product: queries, keys, values, branches, and the states that come out."""


AHEAD = 2
"""Layers that are being read at a time, where what is read is not what stays."""


def load_decoder(
    architecture: Architecture,
    weights: WeightsFile,
    precision: Precision,
    *,
    device: str | torch.device,
    max_positions: int,
    backend: Backend | Callable[[], Backend],
) -> PackedDecoder:
    """The decoder of an engine, on `device`, in eval mode and without gradients.

    Args:
        architecture: what to compute.
        weights: its weights, by name.
        precision: of the products; FP8 wants sizes that are multiples of 16.
        device: where it runs.
        max_positions: longest sequence that will come.
        backend: of attention; see `choose_backend`. Or what names it, which is asked when reading has begun.

    Raises:
        UnfitWeights: a tensor is missing, or of another shape or type.
    """
    device = torch.device(device)
    with WeightsLoader(weights, device) as loader:
        assembly = _Assembly(architecture, weights, loader, precision, device, max_positions, backend)
        return assembly.decoder().requires_grad_(False).eval()


class _Assembly:
    def __init__(
        self,
        architecture: Architecture,
        weights: WeightsFile,
        loader: WeightsLoader,
        precision: Precision,
        device: torch.device,
        max_positions: int,
        backend: Backend | Callable[[], Backend],
    ) -> None:
        self.architecture, self.weights, self.loader, self.precision = architecture, weights, loader, precision
        self.scaled = precision == "fp8" and holds_scales(weights)
        self.stored = [self._found(number) for number in range(len(architecture.layers))]
        self.device, self.max_positions = device, max_positions
        self.computed = COMPUTED[precision]
        self.read_type = FP8 if precision == "fp8" else self.computed
        self.rotary = [
            tuple(self._float32(part) for part in (table.cos, table.sin))
            for table in (rotary_table(one.inv_freq, one.scaling, max_positions) for one in architecture.rotary)
        ]
        loader.begin(embedding(weights, architecture))
        self._begin(0, len(self.stored) if self.scaled else AHEAD)
        self.backend: Backend = backend() if callable(backend) else backend

    def decoder(self) -> PackedDecoder:
        a = self.architecture
        table = self.loader.take(embedding(self.weights, a))
        reads = [*(found.attention_norm for found in self.stored), final_norm(self.weights, a)]
        layers = [self._layer(number, self._norm(reads[number + 1])) for number in range(len(a.layers))]
        return PackedDecoder(
            a,
            self.precision,
            embed=Embed(table.to(self.computed), a.embedding_scale),
            read=Read(self._norm(reads[0]), self.read_type),
            layers=layers,
            output_dtype=self.computed,
            max_positions=self.max_positions,
        )

    def _begin(self, start: int, stop: int) -> None:
        """Begin to read the linears of these layers."""
        for one in self.stored[start:stop]:
            for blocks in ((one.q, one.k, one.v), (one.o,), (one.gate, one.up), (one.down,)):
                self.loader.begin(*blocks)

    def _found(self, number: int) -> LayerWeights:
        found = layer_weights(self.weights, self.architecture, number, scaled=self.scaled)
        for blocks in ((found.q, found.k, found.v), (found.gate, found.up)):
            if len({block.dtype for block in blocks}) > 1:
                problem = "of several types in blocks of one product"
                raise UnfitWeights(path=self.weights.path, tensor=f"layers.{number}", problem=problem)
        return found

    def _layer(self, number: int, after: Norm | None) -> Layer:
        """One layer; `after` is the norm through which the next one, or the states, read the residual stream."""
        a, kind = self.architecture, self.architecture.layers[number]
        if number and not self.scaled:
            self._begin(number, number + AHEAD)
        found = self.stored[number]
        last = number == len(a.layers) - 1
        cos, sin = (None, None) if kind.rotary is None else self.rotary[kind.rotary]
        over_projection = a.head_norm == "projection"
        layer = Layer(
            a,
            kind,
            self.backend,
            qkv=self._linear(found, "q", "k", "v"),
            query=Heads(a.num_heads, a.head_dim, self._norm(found.q_norm), over_projection, cos, sin),
            key=Heads(a.num_kv_heads, a.head_dim, self._norm(found.k_norm), over_projection, cos, sin),
            attended=Round(self.read_type),
            output=self._linear(found, "o"),
            after_attention=AddAndRead(
                self._norm(found.post_attention_norm), a.residual_scale, self._norm(found.mlp_norm), self.read_type
            ),
            gate_up=self._linear(found, "gate", "up"),
            gated=Gated(a.activation, self.read_type),
            down=self._linear(found, "down"),
            after_mlp=AddAndRead(
                self._norm(found.post_mlp_norm), a.residual_scale, after, self.computed if last else self.read_type
            ),
        )
        self.weights.drop(*layer_tensors(a, number))  # copied, so the file's pages may go
        return layer

    def _linear(self, found: LayerWeights, *names: str) -> Linear | ScaledLinear:
        """The blocks [N_i, K] of these names one under the other, with their biases and scales."""
        weight = self.loader.take(*(getattr(found, name) for name in names))
        bias = self._joined([getattr(found, f"{name}_bias") for name in names])
        bias = None if bias is None else bias.to(self.computed)
        if self.precision != "fp8":
            return Linear(weight.to(self.computed), bias)
        scales = self._joined([getattr(found, f"{name}_scale") for name in names])
        if scales is None:
            weight, scales = quantized_weight(weight)
        return ScaledLinear(weight, scales, bias)

    def _joined(self, blocks: list[Float32 | None]) -> torch.Tensor | None:
        present = [self._float32(block) for block in blocks if block is not None]
        return torch.cat(present) if present else None

    def _norm(self, weight: Float32 | None) -> Norm | None:
        return None if weight is None else Norm(self._float32(weight), self.architecture.norm_eps)

    def _float32(self, values: Float32) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.float32)).to(self.device)
