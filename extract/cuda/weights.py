"""An engine's weights file -> the packed decoder on a device, layer by layer.

Reads the file that every decoder of ours reads, in the type that is stored there; rounding to the computing type, and
to FP8, happens on the device. FP8 weights are not stored: every load hashes the whole file anyway, so a second, smaller
copy would make it read more, not less, and rounding 7 billion weights takes a card a hundredth of a second. The next
layer is read while one is put together, so that two layers at most are on the device twice.
"""

from typing import Literal

import numpy as np
import torch

from extract.cpu.architecture import Architecture
from extract.cpu.decoder import rotary_table
from extract.cpu.kernels import Float32, Weights
from extract.cpu.mapped_weights import WeightsFile
from extract.cpu.weights import embedding, final_norm, layer_tensors, layer_weights
from extract.cuda.attention import Backend
from extract.cuda.decoder import Layer, PackedDecoder
from extract.cuda.fp8 import FP8
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


def load_decoder(
    architecture: Architecture,
    weights: WeightsFile,
    precision: Precision,
    *,
    device: str | torch.device,
    max_positions: int,
    backend: Backend,
) -> PackedDecoder:
    """The decoder of an engine, on `device`, in eval mode and without gradients.

    Args:
        architecture: what to compute.
        weights: its weights, by name.
        precision: of the products; FP8 wants sizes that are multiples of 16.
        device: where it runs.
        max_positions: longest sequence that will come.
        backend: of attention; see `choose_backend`.

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
        backend: Backend,
    ) -> None:
        self.architecture, self.weights, self.loader, self.precision = architecture, weights, loader, precision
        self.stored = [layer_weights(weights, architecture, number) for number in range(len(architecture.layers))]
        self.device, self.max_positions, self.backend = device, max_positions, backend
        self.computed = COMPUTED[precision]
        self.read_type = FP8 if precision == "fp8" else self.computed
        self.rotary = [
            tuple(self._float32(part) for part in (table.cos, table.sin))
            for table in (rotary_table(one.inv_freq, one.scaling, max_positions) for one in architecture.rotary)
        ]

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

    def _layer(self, number: int, after: Norm | None) -> Layer:
        """One layer; `after` is the norm through which the next one, or the states, read the residual stream."""
        a, kind = self.architecture, self.architecture.layers[number]
        for soon in self.stored[number : number + 2]:
            self.loader.begin((soon.q, soon.k, soon.v, soon.o, soon.gate, soon.up, soon.down))
        found = self.stored[number]
        last = number == len(a.layers) - 1
        cos, sin = (None, None) if kind.rotary is None else self.rotary[kind.rotary]
        over_projection = a.head_norm == "projection"
        layer = Layer(
            a,
            kind,
            self.backend,
            qkv=self._linear([found.q, found.k, found.v], [found.q_bias, found.k_bias, found.v_bias]),
            query=Heads(a.num_heads, a.head_dim, self._norm(found.q_norm), over_projection, cos, sin),
            key=Heads(a.num_kv_heads, a.head_dim, self._norm(found.k_norm), over_projection, cos, sin),
            attended=Round(self.read_type),
            output=self._linear([found.o], [found.o_bias]),
            after_attention=AddAndRead(
                self._norm(found.post_attention_norm), a.residual_scale, self._norm(found.mlp_norm), self.read_type
            ),
            gate_up=self._linear([found.gate, found.up], [found.gate_bias, found.up_bias]),
            gated=Gated(a.activation, self.read_type),
            down=self._linear([found.down], [found.down_bias]),
            after_mlp=AddAndRead(
                self._norm(found.post_mlp_norm), a.residual_scale, after, self.computed if last else self.read_type
            ),
        )
        self.weights.drop(*layer_tensors(a, number))  # copied, so the file's pages may go
        return layer

    def _linear(self, blocks: list[Weights], biases: list[Float32 | None]) -> Linear | ScaledLinear:
        """Blocks [N_i, K] one under the other, and their biases."""
        weight = torch.cat([self.loader.take(block).to(self.computed) for block in blocks])
        present = [self._float32(bias) for bias in biases if bias is not None]
        bias = torch.cat(present).to(self.computed) if present else None
        return (ScaledLinear if self.precision == "fp8" else Linear)(weight, bias)

    def _norm(self, weight: Float32 | None) -> Norm | None:
        return None if weight is None else Norm(self._float32(weight), self.architecture.norm_eps)

    def _float32(self, values: Float32) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.float32)).to(self.device)
