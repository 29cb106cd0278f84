"""Stored value types: exact where they claim to be, honest about what they cannot hold."""

import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import extract.shards.values
from extract.shards.rotation import block_size, rotate
from extract.shards.values import VALUE_TYPES, Fault, as_float32, bfloat16_bits, unit_length, value_type

ANY_FLOAT32 = hnp.arrays(np.uint32, st.tuples(st.integers(1, 8), st.sampled_from([1, 16, 48])))
MODERATE = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 8), st.sampled_from([5, 16, 48, 128])),
    elements=st.floats(-1e4, 1e4, width=32),
)


def outlier_states(count, width, seed=0):
    """Rows with a few dimensions thirty times larger than the rest, as decoders make them."""
    states = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    states[:, :: max(1, width // 4)] *= 30
    return states


@given(ANY_FLOAT32)
def test_float32_states_round_trip_bit_for_bit(bits):
    states = bits.view(np.float32)
    encoded = value_type("float32").encode(states)
    assert value_type("float32").decode(encoded.values).tobytes() == states.tobytes()
    assert (encoded.bad == ~np.isfinite(states).all(axis=1)).all()


@given(hnp.arrays(np.uint16, st.tuples(st.integers(1, 8), st.sampled_from([1, 16, 48]))))
def test_bfloat16_and_float16_states_round_trip_bit_for_bit(bits):
    assert value_type("bfloat16").encode(bits).values.tobytes() == bits.tobytes()
    assert value_type("float16").encode(bits.view(np.float16)).values.tobytes() == bits.tobytes()


def test_every_bfloat16_survives_float32_and_back():
    import torch

    bits = np.arange(2**16, dtype=np.uint16).reshape(1, -1)
    wide = as_float32(bits)
    by_torch = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert wide.tobytes() == by_torch.tobytes()
    again = bfloat16_bits(wide)
    nan = np.isnan(wide)
    assert (again[~nan] == bits[~nan]).all()
    assert np.isnan(as_float32(again)[nan]).all()


@given(ANY_FLOAT32)
def test_bfloat16_rounds_as_torch_does(bits):
    import torch

    states = bits.view(np.float32)
    by_torch = torch.from_numpy(states.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(states)
    assert (bfloat16_bits(states)[~nan] == by_torch[~nan]).all()
    assert np.isnan(as_float32(bfloat16_bits(states))[nan]).all()


@given(MODERATE)
def test_float16_is_the_nearest_half_float(states):
    encoded = value_type("float16").encode(states)
    assert not encoded.bad.any()
    assert (encoded.values == states.astype(np.float16)).all()


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("float16", 65504.0, Fault.NONE),
        ("float16", 65519.0, Fault.NONE),
        ("float16", 65520.0, Fault.OVERFLOW),
        ("float16", -1e30, Fault.OVERFLOW),
        ("bfloat16", 3.3895e38, Fault.NONE),
        ("bfloat16", 3.4e38, Fault.OVERFLOW),
        ("float32", 3.4e38, Fault.NONE),
        ("int8", 1e37, Fault.NONE),
        *((name, value, Fault.NON_FINITE) for name in VALUE_TYPES for value in (math.nan, math.inf, -math.inf)),
    ],
)
def test_a_state_that_does_not_fit_is_named_and_its_neighbours_are_kept(name, value, fault):
    states = np.ones((3, 32), np.float32)
    states[1, 7] = value
    encoded = value_type(name).encode(states)
    assert encoded.faults.tolist() == [Fault.NONE, fault, Fault.NONE]


def test_int8_reports_a_rotation_that_leaves_float32():
    states = np.full((1, 64), 3e38, np.float32)
    assert value_type("int8").encode(states).faults.tolist() == [Fault.OVERFLOW]


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_non_finite_states_of_a_narrow_engine_are_not_called_overflow(dtype):
    infinity = {np.float16: 0x7C00, np.uint16: 0x7F80}[dtype]
    states = np.zeros((2, 16), np.uint16)
    states[1, 3] = infinity
    for name in VALUE_TYPES:
        assert value_type(name).encode(states.view(dtype)).faults.tolist() == [Fault.NONE, Fault.NON_FINITE]


HELD = {
    ("float32", "float32"),
    ("float16", "float32"), ("float16", "bfloat16"), ("float16", "float16"),
    ("bfloat16", "float32"), ("bfloat16", "bfloat16"),
}  # fmt: skip
"""Computed and stored types of which the second holds every finite value of the first."""


@pytest.mark.parametrize("stored", list(VALUE_TYPES))
@pytest.mark.parametrize("computed", ["float32", "float16", "bfloat16"])
def test_nobody_looks_at_states_that_are_known_to_be_finite_and_cannot_be_too_large(computed, stored, monkeypatch):
    largest = {"float32": np.finfo(np.float32).max, "float16": 65504, "bfloat16": float.fromhex("0x1.fep127")}[computed]
    states = np.ones((3, 64), np.float32)
    states[1, 7], states[2, 0] = largest, -largest
    states = bfloat16_bits(states) if computed == "bfloat16" else states.astype(computed)
    looked = []
    look = extract.shards.values._all_finite
    monkeypatch.setattr(extract.shards.values, "_all_finite", lambda values: looked.append(1) or look(values))
    expected = value_type(stored).encode(states)
    looked.clear()
    found = value_type(stored).encode(states, finite=True)
    assert (not looked) == ((computed, stored) in HELD)
    assert found.faults.tolist() == expected.faults.tolist()
    assert found.values.tobytes() == expected.values.tobytes()
    assert ((computed, stored) in HELD) <= (not expected.bad.any())


@given(MODERATE)
def test_the_rotation_is_its_own_inverse_and_keeps_lengths(states):
    rotated = rotate(states)
    size = np.abs(states).max() + 1e-30
    assert np.abs(rotate(rotated) - states).max() <= 1e-5 * size
    assert np.allclose(np.linalg.norm(rotated, axis=1), np.linalg.norm(states, axis=1), rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize(("width", "block"), [(576, 64), (640, 64), (96, 32), (48, 16), (32, 32), (40, 1), (7, 1)])
def test_the_block_is_the_largest_power_of_two_from_16_to_64_that_divides_the_width(width, block):
    assert block_size(width) == block


@given(MODERATE)
def test_int8_errors_are_at_most_half_a_step_in_the_rotated_state(states):
    stored = value_type("int8")
    encoded = stored.encode(states)
    decoded = stored.decode(encoded.values, encoded.scales)
    error = np.abs(rotate(decoded) - rotate(states))
    assert (error <= 0.501 * encoded.scales[:, None] + 1e-5 * np.abs(states).max()).all()


def test_rotated_int8_beats_plain_int8_on_states_with_outliers():
    states = outlier_states(200, 576)
    stored = value_type("int8")
    encoded = stored.encode(states)
    scale = np.abs(states).max(axis=1, keepdims=True) / 127
    plain = np.rint(states / scale) * scale
    error = np.linalg.norm(stored.decode(encoded.values, encoded.scales) - states)
    assert error * 2 < np.linalg.norm(plain - states)


def test_an_int8_state_of_zeros_has_scale_zero_and_decodes_to_zeros():
    encoded = value_type("int8").encode(np.zeros((2, 64), np.float32))
    assert encoded.scales.tolist() == [0, 0]
    assert not encoded.bad.any()
    assert not value_type("int8").decode(encoded.values, encoded.scales).any()


@pytest.mark.parametrize("units", [1, 100, 190, 1000])
def test_int8_takes_states_whose_scale_is_a_denormal_number(units):
    smallest = np.float32(1e-45)
    states = np.full((1, 40), units * smallest, np.float32)
    encoded = value_type("int8").encode(states)
    decoded = value_type("int8").decode(encoded.values, encoded.scales)
    assert not encoded.bad.any()
    assert (decoded >= 0).all()
    assert (decoded <= states).all()


@pytest.mark.parametrize("name", list(VALUE_TYPES))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_state_is_stored_the_same_whatever_stands_beside_it(name, dtype):
    states = outlier_states(500, 576)
    states = bfloat16_bits(states) if dtype == "bfloat16" else states.astype(dtype)
    whole = value_type(name).encode(states)
    for row in range(0, 500, 23):
        alone = value_type(name).encode(states[row : row + 1])
        assert alone.values[0].tobytes() == whole.values[row].tobytes()
        if whole.scales is not None:
            assert alone.scales[0] == whole.scales[row]


@pytest.mark.parametrize("name", list(VALUE_TYPES))
@pytest.mark.parametrize("width", [576, 48, 40])
def test_the_recipe_in_words_decodes_as_the_library_does(name, width):
    stored = value_type(name)
    encoded = stored.encode(outlier_states(20, width))
    variables = {"numpy": np, "values": encoded.values, "scale": encoded.scales}
    exec(stored.recipe(width), variables)
    decoded = stored.decode(encoded.values, encoded.scales)
    assert np.abs(variables["states"] - decoded).max() <= 1e-5 * np.abs(decoded).max()


def test_the_recipe_is_at_most_three_lines():
    assert all(len(stored.recipe(576).splitlines()) <= 3 for stored in VALUE_TYPES.values())


@given(MODERATE)
def test_unit_length_gives_length_one_and_points_out_zeros(states):
    scaled, zero = unit_length(states)
    assert (zero == ~states.any(axis=1)).all()
    assert np.allclose(np.linalg.norm(scaled[~zero], axis=1), 1, atol=1e-5)
    assert not scaled[zero].any()


@pytest.mark.parametrize("size", [1e-42, 1e-20, 1e38])
def test_unit_length_neither_overflows_nor_vanishes(size):
    scaled, zero = unit_length(np.full((1, 16), size, np.float32))
    assert not zero.any()
    assert np.allclose(scaled, 0.25)


@settings(max_examples=20)
@given(st.sampled_from(sorted(VALUE_TYPES)), st.integers(0, 3))
def test_no_states_at_all_are_fine(name, _):
    encoded = value_type(name).encode(np.zeros((0, 64), np.float32))
    assert encoded.values.shape == (0, 64)
    assert value_type(name).decode(encoded.values, encoded.scales).shape == (0, 64)


@pytest.fixture(scope="module")
def smollm2_states(request):
    """float32 final-norm states of ten docstrings, [T, H], and the head [V, H] of SmolLM2."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    checkpoint = request.getfixturevalue("smollm2")
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = [text for text in (os.__doc__, *(getattr(math, name).__doc__ for name in dir(math))) if text][:10]
    states = []
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer(text, truncation=True, max_length=128, return_tensors="pt").input_ids
            states.append(model(input_ids=ids, use_cache=False).last_hidden_state[0])
    return torch.cat(states).numpy(), model.get_input_embeddings().weight.detach()


def kl_of(head, exact, stored):
    """Mean KL divergence of the next-token distribution when `stored` takes the place of `exact`."""
    import torch

    with torch.inference_mode():
        want = torch.log_softmax(torch.from_numpy(exact) @ head.T, dim=-1)
        have = torch.log_softmax(torch.from_numpy(np.ascontiguousarray(stored)) @ head.T, dim=-1)
        return float((want.exp() * (want - have)).sum(dim=-1).mean())


@pytest.mark.model
def test_rotated_int8_keeps_a_real_models_distribution_five_times_better_than_plain(smollm2_states):
    states, head = smollm2_states
    encoded = value_type("int8").encode(states)
    rotated = kl_of(head, states, value_type("int8").decode(encoded.values, encoded.scales))
    scale = np.abs(states).max(axis=1, keepdims=True) / 127
    plain = kl_of(head, states, np.rint(states / scale) * scale)
    assert rotated < 1e-3
    assert rotated * 5 < plain


@pytest.mark.model
def test_float16_keeps_a_real_models_distribution(smollm2_states):
    states, head = smollm2_states
    assert kl_of(head, states, as_float32(value_type("float16").encode(states).values)) < 1e-5
