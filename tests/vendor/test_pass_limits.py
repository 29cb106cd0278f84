"""What one pass may hold is arithmetic: exact for TensorRT, monotone for memory, and the reason that binds is named."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract.engine.build_plan import plan_build
from extract.engine.recipe import Recipe, load_recipe
from extract.tensorrt.model_shape import ModelShape, NoShape, read_shape
from extract.tensorrt.pass_limits import GIB, TILE, USABLE, DoesNotFit, RowTooLong, pass_limits
from extract.tensorrt.tensor_widths import MAX_ELEMENTS, largest_batch, largest_pass, tensor_widths, widest

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
MODELS = {"llama": LLAMA, "qwen": QWEN}
CARDS = (16, 24, 32, 80, 141)
RECIPES = sorted(
    path
    for path in (Path(__file__).parents[2] / "engines" / "llama-8b").glob("*.toml")
    if load_recipe(path).runtime == "tensorrt-llm"
)


def shape_of(model, weights="bfloat16", **changes):
    table = {**MODELS[model], **changes}
    return ModelShape(
        source="huggingface",
        architecture=table["architectures"][0],
        dtype="bfloat16",
        weights=weights,
        cache="bfloat16",
        hidden_size=table["hidden_size"],
        num_layers=table["num_hidden_layers"],
        num_heads=table["num_attention_heads"],
        num_kv_heads=table["num_key_value_heads"],
        head_size=128,
        intermediate_size=table["intermediate_size"],
        vocab_size=table["vocab_size"],
        max_positions=table["max_position_embeddings"],
        num_experts=table.get("num_experts", 0),
    )


def asked(**changes):
    return Recipe(runtime="tensorrt-llm", **changes)


def limits_of(model, card, weights="bfloat16", **changes):
    return pass_limits(shape_of(model, weights), asked(**changes), card * GIB, name=model)


def checkpoint(directory, table):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(table))
    return directory


@pytest.mark.parametrize(
    ("width", "tokens"),
    [
        (2048, 1_048_575),
        (4096, 524_287),
        (6144, 349_525),
        (14336, 149_796),
        (28672, 74_898),
        (37888, 56_679),
    ],
)
def test_the_widest_tensor_decides_the_largest_pass(width, tokens):
    assert largest_pass(width) == tokens
    assert tokens * width < 2**31 <= (tokens + 1) * width


@pytest.mark.parametrize(
    ("model", "mlp", "expected"),
    [
        ("llama", "fused", ("gate and up (fused)", 28672)),
        ("llama", "separate", ("MLP", 14336)),
        ("llama", "swiglu-plugin", ("MLP", 14336)),
        ("qwen", "fused", ("gate and up (fused)", 37888)),
        ("qwen", "separate", ("MLP", 18944)),
    ],
)
def test_separate_products_halve_the_widest_tensor(model, mlp, expected):
    assert widest(tensor_widths(shape_of(model), mlp)) == expected


def test_experts_lie_inside_the_vendors_plugin():
    shape = dataclasses.replace(shape_of("llama"), num_experts=8)
    assert widest(tensor_widths(shape, "fused")) == ("query, key and value", 6144)


@pytest.mark.parametrize("architecture", ["GPTForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "FalconForCausalLM"])
def test_an_ungated_mlp_is_as_wide_as_its_intermediate_size(architecture):
    shape = dataclasses.replace(shape_of("llama"), architecture=architecture)
    assert widest(tensor_widths(shape, "fused")) == ("MLP", 14336)


def test_a_pass_of_8192_full_rows_is_split():
    limits = limits_of("llama", 1000)
    assert (limits.max_sequences, limits.max_tokens) == (8192, 1_048_576)
    assert limits.pass_tokens == 74_898 // TILE * TILE


@pytest.mark.parametrize(
    ("changes", "card", "binding", "tokens"),
    [
        ({}, 1000, "TensorRT's limit of 2^31 elements (gate and up (fused), 28,672 a token)", 74_880),
        ({"mlp": "separate"}, 1000, "TensorRT's limit of 2^31 elements (MLP, 14,336 a token)", 149_760),
        ({"max_sequences": 100}, 1000, "100 sequences of 128 tokens", 12_800),
        ({"max_tokens": 4096}, 1000, "the token budget of a batch", 4096),
        ({"pass_tokens": 8192}, 1000, "the recipe's pass_tokens", 8192),
        ({}, 24, "24 GiB of the card", None),
    ],
)
def test_the_reason_that_binds_is_named(changes, card, binding, tokens):
    limits = limits_of("llama", card, **changes)
    assert limits.binding == binding
    assert tokens is None or limits.pass_tokens == tokens


@pytest.mark.parametrize(
    ("model", "weights", "card"),
    [of for of in itertools.product(MODELS, ("bfloat16", "fp8"), CARDS) if of != ("llama", "bfloat16", 16)],
)
def test_a_pass_fits_its_card_and_the_next_larger_one_does_not(model, weights, card):
    limits = limits_of(model, card, weights)
    usable = card * GIB * USABLE
    assert limits.memory.total <= usable
    assert limits.pass_tokens % TILE == 0
    larger = limits_of(model, 1000, weights, pass_tokens=limits.pass_tokens + TILE)
    if limits.binding.endswith("of the card"):
        assert larger.memory.total > usable
    else:
        assert larger.pass_tokens == limits.pass_tokens


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_memory_grows_with_the_pass_and_a_larger_card_never_holds_less(model, weights):
    totals = [limits_of(model, 1000, weights, pass_tokens=2**power).memory.total for power in range(7, 17)]
    assert totals == sorted(set(totals))
    passes = [limits_of(model, card, weights).pass_tokens for card in (24, 32, 80, 141)]
    assert passes == sorted(passes)


def test_weights_are_those_of_llama_8b_without_its_head():
    gib = {weights: limits_of("llama", 141, weights).memory.weights / GIB for weights in ("bfloat16", "fp8")}
    parameters = 8_030_261_248 - 128256 * 4096 - 4096  # without the head, and the final norm
    assert gib["bfloat16"] * GIB == 2 * parameters
    assert gib["fp8"] == pytest.approx(7.48, abs=0.01)


@pytest.mark.parametrize("changes", [{"keep_head": True}, {"cache": "paged"}])
def test_the_logits_of_a_head_limit_the_sequences(changes):
    shape = shape_of("llama", vocab_size=300_000)
    limits = pass_limits(shape, asked(**changes), 1000 * GIB)
    assert limits.max_sequences == largest_batch(300_000) == MAX_ELEMENTS // 300_000 < 8192
    assert pass_limits(shape, asked(), 1000 * GIB).max_sequences == 8192


def test_a_head_and_a_cache_cost_memory():
    plain = limits_of("llama", 141).memory
    head = limits_of("llama", 141, keep_head=True).memory
    paged = limits_of("llama", 141, cache="paged").memory
    assert head.weights - plain.weights == 128256 * 4096 * 2
    assert head.outputs - plain.outputs == 8192 * (128256 - 4096) * 4
    assert (plain.cache, head.cache) == (0, 0)
    assert paged.cache == 2 * 32 * 8 * 128 * 2 * (74_880 + 8192)


def test_states_of_last_tokens_need_less_memory():
    assert limits_of("llama", 141, states="last").host_bytes < limits_of("llama", 141).host_bytes
    assert limits_of("llama", 24, states="last").pass_tokens > limits_of("llama", 24).pass_tokens


def test_tiers_double_until_the_largest_pass():
    assert limits_of("llama", 141).tiers == (8192, 16384, 32768, 65536, 74_880)
    assert limits_of("llama", 141, pass_tokens=16384).tiers == (8192, 16384)
    assert limits_of("llama", 141, pass_tokens=1024).tiers == (1024,)


def test_a_card_that_is_too_small_is_refused_with_figures():
    with pytest.raises(DoesNotFit) as caught:
        limits_of("llama", 16)
    assert str(caught.value) == (
        "llama: weights of 14.0 GiB and a pass of 1,024 tokens need 15.7 GiB, a card of 16.0 GiB gives 15.5 GiB. "
        "Use a larger card, or quantise the checkpoint first: extract quantize."
    )
    with pytest.raises(DoesNotFit) as caught:
        limits_of("llama", 8, "fp8")
    assert str(caught.value).endswith("Use a larger card.")


def test_a_row_that_no_pass_holds_is_refused():
    with pytest.raises(RowTooLong) as caught:
        limits_of("llama", 1000, max_input_tokens=100_000)
    assert str(caught.value) == (
        "llama: a row of 100,000 tokens is more than the 74,898 of a pass, bound by TensorRT's limit of 2^31 elements "
        "(gate and up (fused), 28,672 a token). Use a smaller --max-input-tokens."
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_figures_in_a_recipes_comment_are_what_a_plan_says(recipe, tmp_path):
    comment = "".join(line[1:] for line in recipe.read_text().splitlines(keepends=True) if line.startswith("#"))
    plan = plan_build(checkpoint(tmp_path / "llama", LLAMA), load_recipe(recipe))
    weights = re.search(r"weights ([\d.]+) GiB", comment)
    tokens = re.search(r"passes of up to ([\d,]+) tokens", comment)
    total = re.search(r"([\d.]+) GiB in all", comment)
    assert weights.group(1) == f"{plan.memory['weights'] / GIB:.1f}"
    assert tokens.group(1) == f"{plan.pass_tokens:,}"
    if total is None:
        assert "bound by the card" in comment
        assert plan.binding.endswith("of the card")
    else:
        places = len(total.group(1).partition(".")[2])
        assert total.group(1) == f"{plan.memory['total'] / GIB:.{places}f}"
        assert "2^31" in plan.binding
    assert f"{plan.card_bytes / GIB:g} GB" in comment


def test_a_plan_needs_neither_weights_nor_card(tmp_path):
    plan = plan_build(checkpoint(tmp_path / "qwen", QWEN), asked(dtype="fp8", card_memory_gib=24))
    assert (plan.dtype, plan.weights, plan.device) == ("bfloat16", "fp8", "a card of 24 GiB")
    assert (plan.widest, plan.width, plan.element_limit) == ("gate and up (fused)", 37888, 56_679)
    assert plan.memory["total"] == sum(size for name, size in plan.memory.items() if name != "total")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": None}, "it gives no whole number for hidden_size or n_embd or d_model"),
        ({"vocab_size": "many"}, "it gives no whole number for vocab_size"),
        ({"torch_dtype": "int4"}, "dtype is 'int4', expected float32, float16 or bfloat16"),
    ],
)
def test_a_config_that_does_not_say_how_large_the_model_is_is_refused(change, problem, tmp_path):
    path = checkpoint(tmp_path / "model", {**LLAMA, **change})
    with pytest.raises(NoShape) as caught:
        read_shape(path)
    advice = "A build for tensorrt-llm needs a checkpoint directory with a full config.json."
    assert str(caught.value) == f"{path / 'config.json'}: {problem}. {advice}"


SHAPES = st.builds(
    ModelShape,
    source=st.just("huggingface"),
    architecture=st.sampled_from(["LlamaForCausalLM", "GPTForCausalLM", "DbrxForCausalLM"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    weights=st.sampled_from(["bfloat16", "fp8", "float32"]),
    cache=st.sampled_from(["bfloat16", "fp8"]),
    hidden_size=st.integers(1, 65536),
    num_layers=st.integers(1, 200),
    num_heads=st.integers(1, 256),
    num_kv_heads=st.integers(1, 256),
    head_size=st.integers(1, 512),
    intermediate_size=st.integers(1, 300_000),
    vocab_size=st.integers(1, 1_000_000),
    max_positions=st.none() | st.integers(1, 200_000),
    num_experts=st.sampled_from([0, 0, 8]),
)
ASKED = st.fixed_dictionaries(
    {
        "max_input_tokens": st.integers(1, 4096),
        "max_sequences": st.integers(1, 8192),
        "mlp": st.sampled_from(["fused", "separate", "swiglu-plugin"]),
        "output": st.sampled_from([("tokens", "none"), ("last", "none"), ("tokens", "paged")]),
        "pass_tokens": st.none() | st.integers(4096, 1_048_576),
    }
)


@settings(max_examples=200, deadline=None)
@given(SHAPES, ASKED, st.integers(1, 2000))
def test_no_limit_ever_allows_a_tensor_of_2_31_elements_or_more_than_the_card(shape, changes, card):
    states, cache = changes["output"]
    others = {name: value for name, value in changes.items() if name != "output"}
    recipe = asked(**others, states=states, cache=cache)
    try:
        limits = pass_limits(shape, recipe, card * GIB)
    except (DoesNotFit, RowTooLong):
        return
    for width in (*tensor_widths(shape, recipe.mlp).values(), shape.hidden_size):
        assert limits.pass_tokens * width < 2**31
    if recipe.cache == "paged":
        assert limits.max_sequences * shape.vocab_size < 2**31
    assert limits.memory.total <= card * GIB
    longest = min(recipe.max_input_tokens, shape.max_positions or recipe.max_input_tokens)
    assert longest <= limits.pass_tokens <= limits.max_tokens <= 1_048_576
    assert 1 <= limits.max_sequences <= min(recipe.max_sequences, limits.pass_tokens)
    assert limits.tiers[-1] == limits.pass_tokens
