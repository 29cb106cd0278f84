"""How wide the tensors of an engine are per token, and so how many tokens one pass may hold.

TensorRT refuses a network tensor of 2^31 or more elements. A packed activation is [T, width], so the widest one decides
T, long before 1,048,576 tokens for any model in use. Larger batches are run as several passes.
"""

from typing import Literal

from extract.tensorrt.model_shape import ModelShape

MAX_ELEMENTS = 2**31 - 1

Mlp = Literal["fused", "separate", "swiglu-plugin"]


def tensor_widths(shape: ModelShape, mlp: Mlp) -> dict[str, int]:
    """Elements a token of each wide tensor, by what it is; experts' tensors lie inside the vendor's plugin."""
    widths = {"hidden state": shape.hidden_size, "query, key and value": shape.qkv_width}
    if not shape.num_experts:
        if shape.gated and mlp == "fused":
            widths["gate and up (fused)"] = 2 * shape.intermediate_size
        else:
            widths["MLP"] = shape.intermediate_size
    return widths


def widest(widths: dict[str, int]) -> tuple[str, int]:
    """Name and width of the tensor that binds."""
    name = max(widths, key=lambda name: widths[name])
    return name, widths[name]


def largest_pass(width: int) -> int:
    """Tokens of the largest pass whose [T, width] TensorRT accepts."""
    return MAX_ELEMENTS // width


def largest_batch(width: int) -> int:
    """Sequences of the largest pass whose [B, width] TensorRT accepts: logits of an engine that has its head."""
    return MAX_ELEMENTS // width
