"""Which tensors of a checkpoint are not the decoder's, by their names.

A weight that is in the file but not in the decoder must be explained, or the decoder is not the model that was saved.
These are the explanations that are accepted; everything else is refused by whoever loads. Names are matched as the file
has them, or with a wrapper's prefix taken off, so nothing here depends on a family.
"""

import re
from typing import Literal

Part = Literal["head", "tower", "prediction", "buffer"]

WRAPPER_PREFIX = r"^(model\.)?(language_model|text_model)\.(model\.)?"
"""What a vision-language wrapper puts before the names of its text decoder."""

_HEAD = re.compile(
    r"^((model|transformer|language_model|backbone)\.)*"
    r"(lm_head|embed_out|score|v_head|classifier|output|head|lm_loss|reward_head|value_head|output_projection)\."
    r"|^decoder\.(weight|bias)$"  # ModernBERT's decoder
)
_TOWER = re.compile(
    r"^(model\.)?[a-z_0-9]*"
    r"(vision|visual|vit|image|img|audio|speech|video|multi_modal|multimodal|mm_|projector|connector|resampler|aligner)"
)
_PREDICTION = re.compile(r"(^|\.)(mtp|nextn|mtp_block|eagle)(_[a-z_]+)?\.")
_BUFFER = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|rotary_pos_emb\.inv_freq|masked_bias|position_ids"
    r"|(attn|attention|self_attention)\.bias|embed_positions\.weights|causal_mask)$"
)
_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.(\d+)\.")
_QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_scale|weight_scale_inv|weight_zero_point|SCB|absmax"
    r"|quant_map|nested_absmax|W_q|weight_format|w_q|[a-z_]+_scales|[a-z_]+_blocks)$|\.quant_state\."
)


def outside_decoder(name: str, *, num_layers: int, num_prediction_layers: int = 0) -> Part | None:
    """Say why a tensor does not belong to the decoder, or `None` if nothing explains it.

    Args:
        name: as in the file.
        num_layers: of the decoder.
        num_prediction_layers: multi-token prediction layers that the config announces; they follow the decoder's.
    """
    if _HEAD.search(name):
        return "head"
    if _BUFFER.search(name):
        return "buffer"
    if _PREDICTION.search(name):
        return "prediction"
    layer = _LAYER.search(name)
    if layer and num_layers <= int(layer[3]) < num_layers + num_prediction_layers:
        return "prediction"
    if _TOWER.search(name):
        return "tower"
    return None


def is_quantised(name: str) -> bool:
    """Whether the name is one that only packed, quantised weights have."""
    return bool(_QUANTISED.search(name))
