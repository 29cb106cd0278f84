"""Which tensors may be left out of a decoder, and which names give away packed weights."""

import pytest

from extract.engine.tensor_names import is_quantised, outside_decoder


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("lm_head.weight", "head"),
        ("language_model.lm_head.weight", "head"),
        ("score.weight", "head"),
        ("embed_out.weight", "head"),
        ("decoder.bias", "head"),
        ("model.vision_tower.encoder.layers.0.weight", "tower"),
        ("visual.blocks.0.attn.qkv.weight", "tower"),
        ("multi_modal_projector.linear_1.weight", "tower"),
        ("mtp.layers.0.input_layernorm.weight", "prediction"),
        ("model.layers.4.self_attn.q_proj.weight", "prediction"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "buffer"),
        ("h.0.attn.bias", "buffer"),
        ("gpt_neox.layers.3.attention.masked_bias", "buffer"),
        ("model.layers.5.self_attn.q_proj.weight", None),
        ("model.layers.0.self_attn.q_proj.bias", None),
        ("model.layers.0.attention.output.dense.weight", None),
        ("model.layers.0.mlp.vision_gate.weight", None),
        ("model.norm.weight", None),
        ("model.embed_tokens.weight", None),
    ],
)
def test_only_what_a_name_explains_may_be_left_out(name, part):
    assert outside_decoder(name, num_layers=4, num_prediction_layers=1) == part


@pytest.mark.parametrize(
    "ending", ["qweight", "scales", "weight_packed", "weight_scale_inv", "SCB", "gate_up_proj_blocks"]
)
def test_names_of_packed_weights_are_seen(ending):
    assert is_quantised(f"model.layers.0.mlp.experts.{ending}")
    assert not is_quantised("model.layers.0.mlp.experts.gate_up_proj")
