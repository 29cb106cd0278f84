"""The torch engine on small models: packed attention, final norm, head position, and what the proof notices.

The reference of every number is the family's own base model on each row alone, or attention written out per sequence.
"""

import math
import re
from dataclasses import replace

import pytest
import torch
from family_zoo import VOCAB, scramble, small_config, small_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel

from extract.engine import torch_attention
from extract.engine.torch_attention import PACKED_ATTENTION, MaskPattern, packed_attention
from extract.engine.torch_decoder import PackedRefused, TorchDecoder, UnequalLengths
from extract.engine.torch_final_norm import NoFinalNorm, find_final_norm
from extract.engine.torch_head import head_input
from extract.engine.torch_packed_pass import Group, PackedAttentionRefused, groups_of, packed_pass
from extract.engine.torch_proof import NotCausal, NotExact, PlainModelFails, packed_limits, prove
from extract.engine.torch_trial import plain_rows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


def rows_of(*lengths: int, seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def bounds_of(rows: list[torch.Tensor]) -> list[int]:
    return [0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()]


def packed_states(model: nn.Module, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    decoder = TorchDecoder(model, layout="packed")
    states = decoder.states(torch.cat(rows), bounds_of(rows))
    decoder.close()
    return list(states.split([len(row) for row in rows]))


@torch.inference_mode()
def alone(model: nn.Module, row: torch.Tensor) -> torch.Tensor:
    return model(input_ids=row[None], use_cache=False)[0][0].clone()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def built(model_type: str, **changes: object) -> nn.Module:
    config = small_config(model_type)
    for name, value in changes.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    scramble(model)
    return model


# --- attention by itself --------------------------------------------------------------------------------------------


def written_out(query, key, value, lengths, *, scaling=None, softcap=None, s_aux=None, window=None):
    """Attention per sequence and head, one query at a time: [1, T, heads, Dv]."""
    heads, repeats = query.shape[1], query.shape[1] // key.shape[1]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    output = torch.zeros(1, query.shape[2], heads, value.shape[3])
    start = 0
    for length in lengths:
        for head in range(heads):
            for place in range(length):
                first = 0 if window is None else max(0, place - window + 1)
                keys = slice(start + first, start + place + 1)
                scores = key[0, head // repeats, keys] @ query[0, head, start + place] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if s_aux is not None:
                    scores = torch.cat([scores, s_aux[head : head + 1]])
                weights = scores.softmax(0)[: place + 1 - first]
                output[0, start + place, head] = weights @ value[0, head // repeats, keys]
        start += length
    return output


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"scaling": 0.7},
        {"softcap": 1.5},
        {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"softcap": 2.0, "scaling": 0.9, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window": 3},
        {"window": 4},
    ],
    ids=lambda asked: "+".join(asked) or "plain",
)
@pytest.mark.parametrize(("kv_heads", "value_size"), [(4, 8), (2, 8), (1, 8), (2, 5)])
@pytest.mark.parametrize("lengths", [(5, 5, 5), (1, 7, 7, 2, 9)], ids=["one group", "mixed"])
def test_packed_attention_equals_attention_written_out_per_sequence(asked, kv_heads, value_size, lengths, monkeypatch):
    monkeypatch.setattr(torch_attention, "MAX_SCORES", 200)  # so that written-out attention works in parts
    torch.manual_seed(0)
    tokens = sum(lengths)
    query, key = torch.randn(1, 4, tokens, 8), torch.randn(1, kv_heads, tokens, 8)
    value = torch.randn(1, kv_heads, tokens, value_size)
    expected = written_out(query, key, value, lengths, **asked)
    arguments = {"sliding_window" if name == "window" else name: given for name, given in asked.items()}
    bounds = torch.tensor([0, *lengths]).cumsum(0).numpy()
    with packed_pass(groups_of(bounds), tokens) as this_pass:
        found, weights = packed_attention(nn.Identity(), query, key, value, None, **arguments)
    assert weights is None
    assert this_pass.calls == 1
    assert found.is_contiguous()
    assert error(found, expected) < 1e-6


def test_equal_lengths_in_a_row_are_one_group():
    assert groups_of(torch.tensor([0, 2, 4, 5, 7]).numpy()) == (Group(0, 2, 2), Group(4, 1, 1), Group(5, 1, 2))


def test_an_unknown_argument_of_attention_is_refused():
    states = torch.zeros(1, 2, 3, 4)
    with packed_pass((Group(0, 1, 3),), 3), pytest.raises(PackedAttentionRefused) as refused:
        packed_attention(nn.Identity(), states, states, states, None, position_bias=states)
    assert str(refused.value) == (
        "packed attention: Identity passes the argument 'position_bias', which is not known. "
        "Build this checkpoint with layout dense."
    )


def test_an_unknown_argument_that_is_none_is_accepted():
    states = torch.ones(1, 2, 3, 4)
    with packed_pass((Group(0, 1, 3),), 3):
        found, _ = packed_attention(nn.Identity(), states, states, states, None, position_bias=None)
    assert torch.equal(found, torch.ones(1, 3, 2, 4))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dropout": 0.1}, "dropout 0.1, 0 was expected"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "a mask of type Tensor, the pattern given to it was expected"),
        ({"key": torch.zeros(1, 2, 5, 4)}, "1 x 3 queries and 5 keys, 1 x 3 of each were expected"),
    ],
)
def test_what_packed_attention_cannot_do_is_refused(given, words):
    states = torch.zeros(1, 2, 3, 4)
    arguments = {"query": states, "key": states, "value": states, "attention_mask": None, **given}
    with packed_pass((Group(0, 1, 3),), 3), pytest.raises(PackedAttentionRefused) as refused:
        packed_attention(nn.Identity(), **arguments)
    assert words in str(refused.value)


def test_a_mask_pattern_survives_slices_that_keep_everything_and_refuses_others():
    pattern = MaskPattern(torch.ones(3, 3, dtype=torch.bool).tril(), 7)
    assert pattern[:, :, 0:, :7] is pattern
    with pytest.raises(PackedAttentionRefused, match="a part slice\\(None, -1, None\\) of its mask"):
        pattern[:, :, :-1]


def test_a_window_only_costs_a_mask_for_rows_longer_than_it():
    index = torch.arange(9)
    ahead = index[None] - index[:, None]
    pattern = MaskPattern((ahead <= 0) & (ahead > -4), 20)
    assert pattern.for_length(4) is None
    assert torch.equal(pattern.for_length(5), ((ahead <= 0) & (ahead > -4))[:5, :5])


def test_a_packed_model_does_not_run_without_boundaries():
    model = small_model("llama")
    decoder = TorchDecoder(model, layout="packed")
    with pytest.raises(PackedAttentionRefused, match="only TorchDecoder may run a packed model"):
        alone(model, rows_of(4)[0])
    decoder.close()


# --- rows of a pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "gemma3_text", "opt", "phi3"])
def test_packed_equals_sdpa_and_eager_of_the_family(model_type, own):
    model = small_model(model_type)
    model.set_attn_implementation(own)
    rows = rows_of(3, 64, 1, 17, 17, 40)
    expected = [alone(model, row) for row in rows]
    found = packed_states(model, rows)
    assert max(error(*pair) for pair in zip(found, expected, strict=True)) < 3e-6
    assert model.config._attn_implementation == own


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "vaultgemma", "mistral", "cohere2", "llama4_text"])
def test_windows_chunks_softcaps_and_sinks_are_honoured(model_type):
    model = small_model(model_type)
    rows = rows_of(64, 7, 8, 9, 9, 33)  # the windows of the zoo are 8 tokens, its chunks 16
    expected = [alone(model, row) for row in rows]
    assert max(error(*pair) for pair in zip(packed_states(model, rows), expected, strict=True)) < 3e-6


@pytest.mark.parametrize("kind", ["last", "first", "mean"])
@pytest.mark.parametrize("layout", ["packed", "dense"])
def test_pooled_states_are_each_rows_own(kind, layout):
    model = small_model("llama")
    rows = rows_of(1, 5, 17, 17, 64)
    expected = [alone(model, row) for row in rows]
    pool = {"last": lambda state: state[-1], "first": lambda state: state[0], "mean": lambda state: state.mean(0)}[kind]
    decoder = TorchDecoder(model, layout=layout)
    if layout == "packed":
        found = decoder.layer_states(torch.cat(rows), bounds_of(rows), kind, ())[0]
    else:
        found = torch.cat([decoder.layer_states(row, [0, len(row)], kind, ())[0] for row in rows])
    decoder.close()
    assert found.shape == (5, 64)
    assert max(error(one, pool(other)) for one, other in zip(found, expected, strict=True)) < 3e-6


def test_means_are_accumulated_in_float32():
    model = small_model("llama").bfloat16()
    decoder = TorchDecoder(model, layout="packed")
    rows = rows_of(64, 64, 9)
    found = decoder.layer_states(torch.cat(rows), bounds_of(rows), "mean", ())[0]
    states = decoder.states(torch.cat(rows), bounds_of(rows)).split([64, 64, 9])
    decoder.close()
    assert found.dtype == torch.float32
    assert max(error(one, state.float().mean(0)) for one, state in zip(found, states, strict=True)) < 1e-6


def test_rows_of_one_token_are_not_mixed_up():
    model = small_model("gpt2")
    rows = [torch.tensor([token]) for token in torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:64]]
    expected = torch.stack([alone(model, row)[0] for row in rows])
    for _ in range(2):
        found = torch.cat(packed_states(model, rows))
        assert torch.equal(torch.cdist(found, expected).argmin(1), torch.arange(64))
        assert error(found, expected) < 1e-5


def test_rows_that_share_a_prefix_each_have_all_their_states():
    model = small_model("gpt2")
    prefix = rows_of(48)[0]
    rows = [torch.cat([prefix, tail]) for tail in rows_of(*range(1, 15))] + [prefix, prefix]
    expected = [alone(model, row) for row in rows]
    found = packed_states(model, rows)
    assert [len(state) for state in found] == [len(row) for row in rows]
    assert max(error(*pair) for pair in zip(found, expected, strict=True)) < 3e-6


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom"])
def test_a_row_has_the_same_states_in_batches_of_1_2_and_9(model_type):
    model = small_model(model_type)
    rows = rows_of(*[21] * 9)
    decoder = TorchDecoder(model, layout="dense" if model_type == "bloom" else "packed")
    by_size = [
        torch.cat(
            [decoder.states(torch.cat(part), bounds_of(part)) for part in (rows[i : i + n] for i in range(0, 9, n))]
        )
        for n in (1, 2, 9)
    ]
    decoder.close()
    assert error(by_size[1], by_size[0]) < 1e-6
    assert error(by_size[2], by_size[0]) < 1e-6


def test_positions_restart_so_a_pass_may_be_longer_than_the_model():
    model = small_model("gpt2")  # 256 learned positions
    rows = rows_of(*[100] * 6)
    expected = [alone(model, row) for row in rows]
    assert max(error(*pair) for pair in zip(packed_states(model, rows), expected, strict=True)) < 3e-6


def test_a_dense_pass_refuses_rows_of_different_lengths():
    decoder = TorchDecoder(small_model("bloom"), layout="dense")
    with pytest.raises(UnequalLengths) as refused:
        decoder.states(torch.zeros(9, dtype=torch.long), [0, 4, 9])
    assert str(refused.value) == "a pass of layout dense takes sequences of one length; this one has 4 to 5 tokens."


def test_a_family_with_attention_of_its_own_is_not_packed():
    model = small_model("bloom")
    with pytest.raises(PackedRefused) as refused:
        TorchDecoder(model, layout="packed")
    assert str(refused.value) == (
        "bloom: layout packed is not possible: it has attention code of its own. "
        "Build this checkpoint with layout dense."
    )


# --- which output is the state --------------------------------------------------------------------------------------


OPT_KINDS = {
    "pre-norm": ({}, "decoder.final_layer_norm", 64),
    "post-norm": ({"do_layer_norm_before": False}, "decoder.layers.3.final_layer_norm (the last block's own norm)", 64),
    "projected": (
        {"word_embed_proj_dim": 32},
        "decoder.project_out (projects decoder.final_layer_norm, 64 -> 32)",
        32,
    ),
}


@pytest.mark.parametrize("kind", OPT_KINDS)
def test_the_final_norm_is_found_by_what_it_does(kind):
    changes, described, width = OPT_KINDS[kind]
    model = built("opt", **{"word_embed_proj_dim": 64, **changes})
    norm = find_final_norm(model, rows_of(6)[0])
    assert (norm.described, norm.width) == (described, width)
    decoder = TorchDecoder(model, layout="packed", final_norm=norm)
    row = rows_of(9)[0]
    assert head_input(decoder, row) == "identical"
    states = decoder.states(row, [0, 9])
    decoder.close()
    assert error(states, alone(model, row)) < 3e-6


def test_a_model_without_a_final_norm_needs_consent():
    model = built("opt", word_embed_proj_dim=64, _remove_final_layer_norm=True)
    with pytest.raises(NoFinalNorm) as refused:
        prove(model, max_input_tokens=16, max_tokens=64)
    assert str(refused.value) == (
        "opt: no final norm found. The last modules that ran: decoder.layers.3.activation_fn (ReLU), "
        "decoder.layers.3.fc2 (Linear), decoder.layers.3 (OPTDecoderLayer). Its states would be the model's output as "
        "it is. If that is what you want, say so: --allow-no-final-norm"
    )
    proven = prove(model, max_input_tokens=16, max_tokens=64, allow_no_final_norm=True)
    assert proven.final_norm.described == "none (the model's output, no norm)"
    assert (proven.layout, proven.head_input) == ("packed", "identical")


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor with memory of its own that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.elements = max(self.elements, result.numel())
        return result


def test_the_head_is_never_allocated():
    decoder = TorchDecoder(small_model("llama"), layout="dense")
    with LargestTensor() as largest:
        assert head_input(decoder, rows_of(6)[0]) == "identical"
    assert 6 * 64 <= largest.elements < VOCAB * 64


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("cohere", {"logit_scale": 0.3}, "identical"),
        ("granite", {"logits_scaling": 8.0}, "identical"),
        ("gemma2", {"final_logit_softcapping": 5.0}, "identical"),
        ("minicpm3", {}, "scaled by 4"),
        ("modernbert-decoder", {}, "transformed by lm_head.dense"),
    ],
)
def test_what_a_head_does_to_the_state_before_it_reads_it_is_seen(model_type, changes, expected):
    decoder = TorchDecoder(built(model_type, **changes), layout="dense")
    assert head_input(decoder, rows_of(6)[0]) == expected


def test_a_class_without_a_head_is_not_checked_and_says_so():
    config = small_config("llama")
    model = AutoModel.from_config(config)
    model.config = type("StrangeConfig", (type(config),), {})(**config.to_dict())
    decoder = TorchDecoder(model, layout="dense")
    assert head_input(decoder, rows_of(6)[0]) == "not checked (no class with a head is known for StrangeConfig)"


# --- the proof ------------------------------------------------------------------------------------------------------


def test_the_proof_leaves_the_model_as_it_came():
    model = small_model("gemma2")
    row = rows_of(20)[0]
    before = alone(model, row)
    proven = prove(model, max_input_tokens=32, max_tokens=128)
    assert proven.attention == PACKED_ATTENTION
    assert model.config._attn_implementation == "eager"
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(alone(model, row), before)


def test_the_proof_holds_in_bfloat16_and_leaves_the_bits_as_they_were():
    model = small_model("llama").bfloat16()
    frequencies = torch.rand_like(model.rotary_emb.inv_freq.float())
    model.rotary_emb.inv_freq = frequencies.clone()  # a float32 buffer, as checkpoints load it
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    proven = prove(model, max_input_tokens=32, max_tokens=128)
    assert (proven.layout, proven.proof.neighbour) == ("packed", 0.0)
    assert 2e-2 <= proven.bound <= 2e-1
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize(("in_float32", "layout"), [(True, "dense"), (False, "packed")])
def test_a_fault_that_bfloat16_rounding_hides_is_noticed_in_float32(monkeypatch, in_float32, layout):
    right = torch_attention._written_out

    def without_softcap(query, key, value, visible, scaling, softcap, s_aux):
        return right(query, key, value, visible, scaling, 1e6, s_aux)

    monkeypatch.setattr(torch_attention, "_written_out", without_softcap)
    model = built("gemma2", attn_logit_softcapping=60.0).bfloat16()
    for layer in model.layers:
        layer.self_attn.attn_logit_softcapping = 60.0
    proven = prove(model, max_input_tokens=32, max_tokens=128, decide_in_float32=in_float32)
    assert proven.layout == layout


def test_rounding_noise_of_the_plain_model_widens_the_bound_at_most_tenfold(monkeypatch):
    monkeypatch.setattr("extract.engine.torch_proof.plain_rows", lambda *given: replace(plain_rows(*given), noise=1.0))
    assert prove(small_model("llama"), max_input_tokens=32, max_tokens=128).bound == pytest.approx(1e-4)


def test_layout_dense_can_be_asked_for():
    proven = prove(small_model("llama"), max_input_tokens=32, max_tokens=128, layout="dense")
    assert (proven.layout, proven.attention, proven.reasons) == ("dense", "sdpa", ())


def test_one_token_rows_can_be_proven():
    assert prove(small_model("llama"), max_input_tokens=1, max_tokens=4).layout == "packed"


@pytest.mark.parametrize("lost_at", [range(99), [17]], ids=["every length", "one length"])
def test_a_lost_window_is_noticed(monkeypatch, lost_at):
    right = MaskPattern.for_length
    monkeypatch.setattr(MaskPattern, "for_length", lambda self, n: None if n in lost_at else right(self, n))
    proven = prove(small_model("gemma3_text"), max_input_tokens=32, max_tokens=128)
    assert proven.layout == "dense"
    assert proven.reasons[0].startswith("packed: relative error ")


def test_a_lost_boundary_is_noticed(monkeypatch):
    def one_sequence(cu_seqlens):
        return (Group(0, 1, int(cu_seqlens[-1])),)

    monkeypatch.setattr("extract.engine.torch_decoder.groups_of", one_sequence)
    with pytest.raises(NotExact) as refused:  # OPT: its mask does not know the positions, so only the groups separate
        prove(small_model("opt"), max_input_tokens=32, max_tokens=128, layout="packed")
    assert "when a neighbour changes" in str(refused.value)


def test_positions_that_do_not_restart_are_noticed(monkeypatch):
    monkeypatch.setattr("extract.engine.torch_decoder.np.repeat", lambda starts, lengths: 0)
    proven = prove(small_model("gpt2"), max_input_tokens=16, max_tokens=128)
    assert proven.layout == "dense"


def test_a_hybrid_leaks_when_packed_and_is_refused_with_numbers():
    with pytest.raises(NotExact) as refused:
        prove(small_model("falcon_h1"), max_input_tokens=32, max_tokens=128, layout="packed")
    found = re.fullmatch(
        r"falcon_h1: no layout reproduces the plain model within 1e-05\. packed: relative error (\S+) against the "
        r"plain model, (\S+) when moved, (\S+) when a neighbour changes",
        str(refused.value),
    )
    assert found is not None
    assert min(float(number) for number in found.groups()) > 1e-3


@pytest.mark.parametrize(
    ("model_type", "changes"), [("bert", {}), ("gemma3_text", {"use_bidirectional_attention": True})]
)
def test_what_looks_at_later_tokens_is_refused_by_name(model_type, changes):
    with pytest.raises(NotCausal, match=f"^{model_type}: not a causal decoder: changing later tokens moved"):
        prove(built(model_type, **changes), max_input_tokens=32, max_tokens=128)


def test_rows_longer_than_the_model_can_run_are_refused_by_name():
    with pytest.raises(PlainModelFails) as refused:
        prove(small_model("gpt2"), max_input_tokens=300, max_tokens=600)  # 256 learned positions
    assert str(refused.value) == (
        "gpt2: the model itself fails on rows of up to 300 tokens: IndexError: index out of range in self. "
        "Choose a smaller --max-input-tokens, or check that config.json belongs to these weights."
    )


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize(("longest", "layout"), [(32, "packed"), (48, "dense")])
def test_rope_that_follows_the_longest_row_is_packed_only_below_its_switch(kind, longest, layout):
    config = small_config("phi3" if kind == "longrope" else "llama")
    config.sliding_window = None
    if kind == "dynamic":
        config.max_position_embeddings = 32
        config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    else:
        half = 8
        config.original_max_position_embeddings = 32
        config.rope_parameters = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * half,
            "long_factor": [3.0] * half,
            "original_max_position_embeddings": 32,
        }
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    scramble(model)
    proven = prove(model, max_input_tokens=longest, max_tokens=256)
    assert proven.layout == layout
    if layout == "dense":
        assert proven.reasons == (f"packed: {kind} rope changes at 32 tokens, rows may have 48",)


def test_dynamic_rope_does_not_remember_longer_rows():
    config = small_config("llama")
    config.max_position_embeddings = 32
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    scramble(model)
    decoder = TorchDecoder(model, layout="dense")
    short, long = rows_of(40, 64)
    before = decoder.states(short, [0, 40])
    decoder.states(long, [0, 64])
    assert torch.equal(decoder.states(short, [0, 40]), before)


@pytest.mark.parametrize("layout", ["packed", "dense"])
def test_the_proof_never_exceeds_the_token_budget_and_fills_it(layout):
    model = small_model("llama")
    tokens = []
    model.embed_tokens.register_forward_pre_hook(lambda module, given: tokens.append(given[0].numel()))
    prove(model, max_input_tokens=40, max_tokens=120, layout=layout)
    assert max(tokens) == 120


def test_llama4_limits_the_tokens_of_a_packed_pass():
    config = small_config("llama4_text")
    config.floor_scale = 100
    assert packed_limits(config, 64) == (None, 99)
    config.attn_temperature_tuning = False
    assert packed_limits(config, 64) == (None, None)


def test_llama4_is_proven_within_its_limit_and_fails_beyond(monkeypatch):
    model = built("llama4_text", floor_scale=400, attn_scale=2.0)
    proven = prove(model, max_input_tokens=64, max_tokens=2000)
    assert (proven.layout, proven.limit_max_tokens) == ("packed", 399)
    monkeypatch.setattr("extract.engine.torch_proof.packed_limits", lambda config, longest: (None, None))
    beyond = prove(model, max_input_tokens=64, max_tokens=2000)
    assert beyond.layout == "dense"
    assert math.isfinite(beyond.proof.plain)
