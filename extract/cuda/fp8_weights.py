"""The weights file of an FP8 engine: linears as E4M3 with their scales, made from a plain model, and read as one again.

Linears are rounded by `quantized_weight`, as a load would round them. What is no product keeps the bits that it would
be loaded with: embedding and biases as bfloat16, norms (which compute in float32) in the checkpoint's own type.
"""

from collections.abc import Iterator, Mapping

import torch

from extract.cpu.architecture import Architecture
from extract.cpu.mapped_weights import FP8 as E4M3
from extract.cpu.mapped_weights import WeightsFile, to_float32
from extract.cpu.weights import layer_weights, scales_of, tensor_shapes
from extract.cuda.fp8 import FP8, quantized_weight
from extract.cuda.weights_writing import TensorKind


def fp8_kinds(architecture: Architecture, norms: torch.dtype) -> dict[str, TensorKind]:
    """Types and shapes of the file's tensors in its order, which is that of loading.

    Args:
        architecture: of the decoder.
        norms: type of the norms' weights.
    """
    linears = scales_of(architecture)
    scales = set(linears.values())

    def type_of(name: str) -> torch.dtype:
        if name in linears:
            return FP8
        if name in scales:
            return torch.float32
        return torch.bfloat16 if name == "embed_tokens.weight" or name.endswith(".bias") else norms

    return {name: TensorKind(type_of(name), shape) for name, shape in tensor_shapes(architecture, scaled=True).items()}


def fp8_tensors(
    model: Mapping[str, torch.Tensor], architecture: Architecture, norms: torch.dtype, device: torch.device
) -> Iterator[torch.Tensor]:
    """The tensors of `fp8_kinds`, one after the other.

    Args:
        model: plain weights by name, of any type.
        architecture: of the decoder.
        norms: type of the norms' weights.
        device: where linears are rounded, one at a time.
    """
    linears = scales_of(architecture)
    scales: dict[str, torch.Tensor] = {}
    for name, kind in fp8_kinds(architecture, norms).items():
        if name in linears:
            values, scales[linears[name]] = quantized_weight(model[name].to(device))
            yield values
        elif name in scales:
            yield scales.pop(name)
        else:
            yield model[name].to(kind.dtype)


def plain_weights(weights: WeightsFile, architecture: Architecture) -> dict[str, torch.Tensor]:
    """The file as a plain model's weights, float32: E4M3 times scale, which is what the engine multiplies with.

    Raises:
        UnfitWeights: a tensor is missing, of another shape or type; or a scale is not a number above 0.
    """
    for number in range(len(architecture.layers)):
        layer_weights(weights, architecture, number, scaled=True)  # every check that a load makes
    linears = scales_of(architecture)
    found = {}
    for name, shape in tensor_shapes(architecture).items():
        if name in linears:
            values = torch.from_numpy(weights.tensor(name, shape, E4M3).copy()).view(FP8).float()
            found[name] = values.mul_(torch.from_numpy(weights.tensor(linears[name]).copy()))
        else:
            found[name] = torch.from_numpy(to_float32(weights.tensor(name, shape)).copy())
        weights.drop(name)
    return found
