"""The weights of an engine by what they are to the decoder: q, k, v, gate, up, the norms of a layer.

Knows how each family names and fuses its tensors, not what is computed with them; needs neither transformers nor torch.
Matrices are views of the mapped file in the type that is stored there, because packing reads each of them once and
copies it anyway; norms and biases are small and come as float32. FP8 engines of a card hold their matrices as E4M3 with
a scale for each row, named as compressed-tensors and vLLM name them; who asks for plain ones is never given these.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from extract.cpu.architecture import Architecture
from extract.cpu.kernels import Float32, Weights
from extract.cpu.mapped_weights import FP8, PLAIN, UnfitWeights, WeightsFile, to_float32

WEIGHTS_FILE = "model.safetensors"

_SCALE = "weight_scale"
"""Beside a "weight" of E4M3 [N, K]: float32 [N, 1], and weight = E4M3 * scale."""

_FUSED = ("phi3",)
"""Families that store q, k, v (and gate, up) as the rows of one matrix, in this order."""

_NORMS = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"},
    "sandwich": {
        "attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
}
_OTHER_NORMS = {
    ("vaultgemma", "pre"): {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"},
    ("hyperclovax", "sandwich"): {
        "attention_norm": "input_layernorm",
        "post_attention_norm": "post_norm1",
        "mlp_norm": "post_attention_layernorm",
        "post_mlp_norm": "post_norm2",
    },
}
"""Where a family's names differ from the usual ones. The same name can mean another norm: llama's
`post_attention_layernorm` comes before the MLP, Gemma 2's after attention."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """Weights of one layer. H hidden size, Q channels of all queries, K of all keys, I of the MLP.

    Attributes:
        q: [Q, H]; k, v: [K, H]; o: [H, Q]; gate, up: [I, H]; down: [H, I].
        q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias: float32, or `None`.
        q_scale, k_scale, v_scale, o_scale, gate_scale, up_scale, down_scale: float32 [rows, 1] where matrices are
            E4M3 (uint8, its bits), else `None`.
        attention_norm, mlp_norm: float32 [H], before attention and MLP; 1 is added already where the family does so.
        post_attention_norm, post_mlp_norm: float32 [H], on what attention and MLP give.
        q_norm, k_norm: float32, [head_dim], or [Q] and [K] where the norm is over the projection.
    """

    q: Weights
    k: Weights
    v: Weights
    o: Weights
    gate: Weights
    up: Weights
    down: Weights
    q_bias: Float32 | None = None
    k_bias: Float32 | None = None
    v_bias: Float32 | None = None
    o_bias: Float32 | None = None
    gate_bias: Float32 | None = None
    up_bias: Float32 | None = None
    down_bias: Float32 | None = None
    q_scale: Float32 | None = None
    k_scale: Float32 | None = None
    v_scale: Float32 | None = None
    o_scale: Float32 | None = None
    gate_scale: Float32 | None = None
    up_scale: Float32 | None = None
    down_scale: Float32 | None = None
    attention_norm: Float32 | None = None
    mlp_norm: Float32 | None = None
    post_attention_norm: Float32 | None = None
    post_mlp_norm: Float32 | None = None
    q_norm: Float32 | None = None
    k_norm: Float32 | None = None


def open_weights(path: Path) -> WeightsFile:
    """Map a safetensors file; see `WeightsFile`."""
    return WeightsFile(path)


def holds_scales(weights: WeightsFile) -> bool:
    """Whether matrices are E4M3 with scales."""
    return any(name.endswith(f".{_SCALE}") for name in weights.names)


def scales_of(architecture: Architecture) -> dict[str, str]:
    """Name of each matrix that FP8 engines hold as E4M3 -> name of its scales."""
    stems = [f"layers.{layer}.{one.name}" for layer in range(len(architecture.layers)) for one in _stored(architecture)]
    return {f"{stem}.weight": f"{stem}.{_SCALE}" for stem in stems}


def tensor_shapes(architecture: Architecture, *, scaled: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor that a base model of this architecture has, no more and no less, as transformers names it.

    Args:
        architecture: of the model.
        scaled: matrices are E4M3, with their scales beside them.
    """
    a = architecture
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (a.vocab_size, a.hidden_size),
        "norm.weight": (a.hidden_size,),
    }
    for layer in range(len(a.layers)):
        for stored in _stored(a):
            shapes[f"layers.{layer}.{stored.name}.weight"] = stored.shape
            if scaled:
                shapes[f"layers.{layer}.{stored.name}.{_SCALE}"] = (stored.shape[0], 1)
            if stored.bias:
                shapes[f"layers.{layer}.{stored.name}.bias"] = stored.shape[:1]
        for name in _norm_names(a).values():
            shapes[f"layers.{layer}.{name}.weight"] = (a.hidden_size,)
        if a.head_norm != "none":
            over_projection = a.head_norm == "projection"
            shapes[f"layers.{layer}.self_attn.q_norm.weight"] = (a.query_width if over_projection else a.head_dim,)
            shapes[f"layers.{layer}.self_attn.k_norm.weight"] = (a.kv_width if over_projection else a.head_dim,)
    return shapes


def layer_tensors(architecture: Architecture, layer: int) -> list[str]:
    """Names of all tensors of one layer, for `WeightsFile.drop` once they are packed."""
    return [name for name in tensor_shapes(architecture) if name.startswith(f"layers.{layer}.")]


def layer_weights(
    weights: WeightsFile, architecture: Architecture, layer: int, *, scaled: bool = False
) -> LayerWeights:
    """The weights of one layer.

    Args:
        weights: the file.
        architecture: of its model.
        layer: from 0 on.
        scaled: matrices are E4M3 with scales, and nothing else will do; else they are plain.

    Raises:
        UnfitWeights: a tensor is missing, or of another shape or type; or a scale is not a number above 0.
    """
    a = architecture
    found: dict[str, Any] = {}
    for stored in _stored(a):
        full = f"layers.{layer}.{stored.name}"
        matrix = weights.tensor(f"{full}.weight", stored.shape, FP8 if scaled else PLAIN)
        scales = _scales(weights, f"{full}.{_SCALE}", stored.shape[0]) if scaled else None
        biases = _small(weights, f"{full}.bias", stored.shape[:1]) if stored.bias else None
        start = 0
        for part, rows in stored.parts:
            found[part] = matrix[start : start + rows]
            found[f"{part}_bias"] = None if biases is None else biases[start : start + rows]
            found[f"{part}_scale"] = None if scales is None else scales[start : start + rows]
            start += rows
    shapes = tensor_shapes(a)
    norms = {role: f"layers.{layer}.{name}.weight" for role, name in _norm_names(a).items()}
    if a.head_norm != "none":
        norms |= {role: f"layers.{layer}.self_attn.{role}.weight" for role in ("q_norm", "k_norm")}
    for role, full in norms.items():
        found[role] = _norm(weights, a, full, shapes[full])
    return LayerWeights(**found)


def embedding(weights: WeightsFile, architecture: Architecture) -> Weights:
    """The token embedding [vocabulary, H], not scaled."""
    return weights.tensor("embed_tokens.weight", (architecture.vocab_size, architecture.hidden_size))


def final_norm(weights: WeightsFile, architecture: Architecture) -> Float32:
    """Weight of the norm after the last layer, float32 [H]; 1 is added already where the family does so."""
    return _norm(weights, architecture, "norm.weight", (architecture.hidden_size,))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A matrix as it is stored: one linear, or the rows of several, each with its number of outputs."""

    name: str
    parts: tuple[tuple[str, int], ...]
    num_inputs: int
    bias: bool

    @property
    def shape(self) -> tuple[int, int]:
        return sum(rows for _, rows in self.parts), self.num_inputs


def _stored(a: Architecture) -> list[_Stored]:
    """The matrices of every layer."""
    qkv = (("q", a.query_width), ("k", a.kv_width), ("v", a.kv_width))
    gated = (("gate", a.intermediate_size), ("up", a.intermediate_size))
    if a.family in _FUSED:
        inputs = [
            _Stored("self_attn.qkv_proj", qkv, a.hidden_size, a.qkv_bias),
            _Stored("mlp.gate_up_proj", gated, a.hidden_size, a.mlp_bias),
        ]
    else:
        inputs = [
            *(_Stored(f"self_attn.{part[0]}_proj", (part,), a.hidden_size, a.qkv_bias) for part in qkv),
            *(_Stored(f"mlp.{part[0]}_proj", (part,), a.hidden_size, a.mlp_bias) for part in gated),
        ]
    return [
        *inputs,
        _Stored("self_attn.o_proj", (("o", a.hidden_size),), a.query_width, a.output_bias),
        _Stored("mlp.down_proj", (("down", a.hidden_size),), a.intermediate_size, a.mlp_bias),
    ]


def _norm_names(a: Architecture) -> dict[str, str]:
    return _OTHER_NORMS.get((a.family, a.norms), _NORMS[a.norms])


def _norm(weights: WeightsFile, a: Architecture, name: str, shape: tuple[int, ...]) -> Float32:
    values = _small(weights, name, shape)
    if a.norm_plus_one:
        values += 1
    return values


def _scales(weights: WeightsFile, name: str, rows: int) -> Float32:
    scales: Float32 = np.array(weights.tensor(name, (rows, 1), ("F32",)))
    wrong = rows - int(np.count_nonzero(np.isfinite(scales) & (scales > 0)))
    if wrong:
        problem = f"{wrong:,} of {rows:,} scales are no finite numbers above 0"
        raise UnfitWeights(path=weights.path, tensor=name, problem=problem)
    return scales


def _small(weights: WeightsFile, name: str, shape: tuple[int, ...]) -> Float32:
    """A copy in float32, which keeps no page of the file in use."""
    return np.array(to_float32(weights.tensor(name, shape)))
