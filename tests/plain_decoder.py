"""The decoder that an `Architecture` describes, in float64 and in the plainest words: one row, no packing, no tricks.

The yardstick for everything that computes the same faster. It is driven by `Architecture` and `LayerWeights` alone, so
where it agrees with transformers, both say the right thing.
"""

import math
from pathlib import Path

import numpy as np

from extract.cpu.architecture import Architecture, LayerKind
from extract.cpu.mapped_weights import WeightsFile, to_float32
from extract.cpu.weights import LayerWeights, embedding, final_norm, layer_weights, open_weights


def plain_states(path: Path, architecture: Architecture, rows: list[list[int]]) -> list[np.ndarray]:
    """Post-final-norm states of rows of token ids by the weights in `path`: float64 [L, H] each."""
    with open_weights(path) as weights:
        return [_states(weights, architecture, np.asarray(row)) for row in rows]


def _states(weights: WeightsFile, a: Architecture, ids: np.ndarray) -> np.ndarray:
    x = _wide(embedding(weights, a)[ids]) * a.embedding_scale
    for index, kind in enumerate(a.layers):
        layer = layer_weights(weights, a, index)
        branch = _attention(a, kind, layer, _norm(x, layer.attention_norm, a.norm_eps))
        x = x + a.residual_scale * _norm(branch, layer.post_attention_norm, a.norm_eps)
        branch = _mlp(a, layer, _norm(x, layer.mlp_norm, a.norm_eps))
        x = x + a.residual_scale * _norm(branch, layer.post_mlp_norm, a.norm_eps)
    return _norm(x, final_norm(weights, a), a.norm_eps)


def _attention(a: Architecture, kind: LayerKind, layer: LayerWeights, x: np.ndarray) -> np.ndarray:
    q = _linear(x, layer.q, layer.q_bias)
    k = _linear(x, layer.k, layer.k_bias)
    v = _linear(x, layer.v, layer.v_bias).reshape(len(x), a.num_kv_heads, a.head_dim)
    if a.head_norm == "projection":
        q, k = _norm(q, layer.q_norm, a.norm_eps), _norm(k, layer.k_norm, a.norm_eps)
    q, k = q.reshape(len(x), a.num_heads, a.head_dim), k.reshape(len(x), a.num_kv_heads, a.head_dim)
    if a.head_norm == "head":
        q, k = _norm(q, layer.q_norm, a.norm_eps), _norm(k, layer.k_norm, a.norm_eps)
    if kind.rotary is not None:
        q, k = _rotated(a, kind.rotary, q), _rotated(a, kind.rotary, k)

    distance = np.arange(len(x))[:, None] - np.arange(len(x))  # query - key
    seen = (distance >= 0) & (distance < (len(x) if kind.window is None else kind.window))
    out = np.empty((len(x), a.num_heads, a.head_dim))
    for head in range(a.num_heads):
        shared = head // (a.num_heads // a.num_kv_heads)
        scores = q[:, head] @ k[:, shared].T * a.attention_scale
        if a.softcap is not None:
            scores = a.softcap * np.tanh(scores / a.softcap)
        weights = np.where(seen, np.exp(scores - np.where(seen, scores, -np.inf).max(axis=1, keepdims=True)), 0)
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, shared]
    return _linear(out.reshape(len(x), -1), layer.o, layer.o_bias)


def _rotated(a: Architecture, table: int, heads: np.ndarray) -> np.ndarray:
    """Channels i and i + n turn together by position * inv_freq[i]; heads are [L, heads, head_dim]."""
    rotary = a.rotary[table]
    n = len(rotary.inv_freq)
    # Angles are float32 in transformers whatever the model's type, so they are part of what is defined.
    angles = (np.arange(len(heads), dtype=np.float32)[:, None] * np.float32(rotary.inv_freq)).astype(np.float64)
    cos, sin = (np.expand_dims(f(angles) * rotary.scaling, 1) for f in (np.cos, np.sin))
    first, second, rest = heads[..., :n], heads[..., n : 2 * n], heads[..., 2 * n :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _mlp(a: Architecture, layer: LayerWeights, x: np.ndarray) -> np.ndarray:
    gate = _linear(x, layer.gate, layer.gate_bias)
    if a.activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    elif a.activation == "gelu":
        gate = 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
    else:
        gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return _linear(gate * _linear(x, layer.up, layer.up_bias), layer.down, layer.down_bias)


def _norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """RMSNorm over the last axis; without a weight there is no norm here."""
    if weight is None:
        return x
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * _wide(weight)


def _linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return x @ _wide(weight).T + (0 if bias is None else _wide(bias))


def _wide(array: np.ndarray) -> np.ndarray:
    return to_float32(array).astype(np.float64)
