"""The models that are measured: shapes of well-known checkpoints, with weights drawn on the device.

Speed does not depend on what weights say, so nothing is downloaded. Norm weights are spread and projections keep the
size of their input, because the usual initialisation makes attention nearly uniform and norms the identity, which would
hide a lost mask or norm from the check of the numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder in numbers."""

    name: str
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def linears(self) -> tuple[tuple[str, int, int], ...]:
        """(name, outputs, inputs) of one layer's products, as fused as a packed decoder runs them."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            ("qkv", query + 2 * kv, self.hidden),
            ("o", self.hidden, query),
            ("gate_up", 2 * self.intermediate, self.hidden),
            ("down", self.hidden, self.intermediate),
        )

    @property
    def flops_per_token(self) -> int:
        """Of the linears of all layers; attention at 128 tokens adds 1 to 3 %."""
        return 2 * self.layers * sum(outputs * inputs for _, outputs, inputs in self.linears)

    @property
    def num_weights(self) -> int:
        """Elements of linears and token embedding."""
        return self.flops_per_token // 2 + self.vocabulary * self.hidden


def _shape(name: str, family: str, *numbers: int) -> Shape:
    keys = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocabulary")
    return Shape(name=name, family=family, **dict(zip(keys, numbers, strict=True)))


SHAPES = {
    shape.name: shape
    for shape in (
        _shape("llama-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128_256),
        _shape("llama-8b", "llama", 4096, 14_336, 32, 32, 8, 128, 128_256),
        _shape("qwen3-1.7b", "qwen3", 2048, 6144, 28, 16, 8, 128, 151_936),
        _shape("qwen3-8b", "qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936),
    )
}
CHECKED = {
    shape.name: shape
    for shape in (
        _shape("llama-check", "llama", 512, 1408, 4, 8, 2, 64, 4096),
        _shape("qwen3-check", "qwen3", 512, 1536, 4, 4, 2, 128, 4096),
    )
}
TINY = {
    shape.name: shape
    for shape in (
        _shape("llama-1b", "llama", 64, 128, 2, 4, 2, 16, 256),
        _shape("llama-8b", "llama", 96, 160, 2, 4, 2, 32, 256),
        _shape("qwen3-1.7b", "qwen3", 64, 96, 2, 4, 2, 16, 256),
        _shape("qwen3-8b", "qwen3", 96, 128, 2, 4, 2, 32, 256),
    )
}
"""The same names with numbers that a CPU runs in a moment: for trying the benchmark itself."""

TINY_CHECKED = {
    shape.name: shape
    for shape in (
        _shape("llama-check", "llama", 64, 128, 2, 4, 2, 16, 256),
        _shape("qwen3-check", "qwen3", 64, 96, 2, 4, 2, 16, 256),
    )
}

FAMILIES = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}


def random_model(shape: Shape, device: Any, dtype: Any, *, attention: str = "sdpa", seed: int = 0) -> Any:
    """A base model of transformers of this shape, drawn on `device`; the same weights for the same seed and device."""
    import torch
    import transformers

    config = getattr(transformers, FAMILIES[shape.family])(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config._attn_implementation = attention
    kind = getattr(transformers, FAMILIES[shape.family].replace("Config", "Model"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), _uninitialised():
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    # Frequencies as a checkpoint's model has them: computed on the CPU, in float32; a card rounds powers otherwise.
    model.rotary_emb = type(model.rotary_emb)(config).to(device)
    draw = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.3, 2.0, generator=draw)
            elif "embed" in name:
                weight.normal_(0.0, 1.0, generator=draw)
            else:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=draw)
    return model.requires_grad_(False).eval()


def weights_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Names and tensors of a base model, as an engine directory names them."""
    yield from model.state_dict().items()


class _uninitialised:
    """Keep transformers from drawing weights that are drawn again: seconds for a large model."""

    def __enter__(self) -> None:
        import torch.nn as nn

        self._kept = {kind: kind.reset_parameters for kind in (nn.Linear, nn.Embedding)}
        for kind in self._kept:
            kind.reset_parameters = lambda module: None  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        for kind, reset in self._kept.items():
            kind.reset_parameters = reset  # type: ignore[method-assign]
