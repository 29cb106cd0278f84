"""The arithmetic of the packed decoder: every method of every implementation against itself written out in float64."""

import threading
from typing import Any

import numba
import numpy as np
import pytest
import torch
from kernel_rig import (
    CAPACITY,
    IMPLEMENTATIONS,
    activated,
    attended,
    bfloat16_bits,
    error,
    linear,
    make_kernels,
    matrix_of,
    missing_native,
    normal,
    normed,
    numbers,
    operand_of,
    prepared,
    read,
    rotary_table,
    rotation_matrix,
    sequences_of,
)

from extract.cpu import portable_numbers, portable_products
from extract.cpu.kernels import AttentionShape, HeadsNorm, Kernels, Norm
from extract.cpu.portable_glue import rotate_rows
from extract.cpu.portable_packing import packed_channels
from extract.cpu.portable_products import CANDIDATES, Channels, is_right, packer
from extract.cpu.rotation import gain, power_of_two

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "int8": 3e-2}
OPERAND_TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3, "int8": 1.5e-2}
"""Of one rounding to the operand's type."""
HEADS_TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "int8": 4e-3}
"""Of one rounding to the type of queries, keys and values."""

ODD_NAN = float(np.uint32(0x7FFFFFFF).view(np.float32))
"""Its bits overflow where a float32 is rounded to bfloat16 without a look at them."""

ROWS = (1, 7, 300)
SENTINEL = 7.0


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    return make_kernels(*request.param)


def some_norm(width: int, eps: float = 1e-5) -> Norm:
    return Norm(weight=1 + normal(width, seed=9) / 4, eps=eps)


# --- linears --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 96), (100, 33), (576, 65)])
def test_a_linear_is_rows_times_weights_plus_bias(kernels: Kernels, n: int, num_inputs: int, num_outputs: int) -> None:
    x, weights, bias = normal(n, num_inputs), normal(num_outputs, num_inputs, seed=1), normal(num_outputs, seed=2)
    out = kernels.matrix(CAPACITY, num_outputs + 3)
    packed = kernels.pack([weights[:20], weights[20:]], bias)
    kernels.project(operand_of(kernels, x), n, packed, out)
    assert (packed.num_outputs, packed.num_inputs) == (num_outputs, num_inputs)
    assert error(out.array[:n, :num_outputs], linear(x, weights, bias)) < TOLERANCE[kernels.precision]
    assert not out.array[:, num_outputs:].any()


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_weights_may_be_of_any_stored_type(kernels: Kernels, kind: str) -> None:
    x, weights = normal(5, 100), normal(40, 100, seed=1)
    stored = bfloat16_bits(weights) if kind == "bfloat16" else weights.astype(np.float16)
    stored.setflags(write=False)  # as a mapped file is
    out = kernels.heads(CAPACITY, 40)
    kernels.project(operand_of(kernels, x), 5, kernels.pack([stored], None), out)
    assert error(numbers(out.array[:5]), linear(x, numbers(stored))) < TOLERANCE[kernels.precision]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("n", ROWS)
def test_a_linear_is_added_to_the_residual_stream(kernels: Kernels, n: int, with_bias: bool) -> None:
    rows, weights = normal(n, 100), normal(48, 100, seed=1)
    bias = normal(48, seed=2) * 9 if with_bias else None
    x = normal(CAPACITY, 48, seed=3) * 10
    before = x.copy()
    kernels.project_add(operand_of(kernels, rows), n, kernels.pack([weights], bias), 0.25, x)
    expected = 0.25 * linear(rows, weights, bias)
    assert error(x[:n] - before[:n].astype(np.float64), expected) < TOLERANCE[kernels.precision]
    assert np.array_equal(x[n:], before[n:])


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_a_gated_linear_is_the_activated_gate_times_up(kernels: Kernels, activation: Any, with_bias: bool) -> None:
    n, width = 37, 90
    x, gate, up = normal(n, 100), normal(width, 100, seed=1) / 4, normal(width, 100, seed=2) / 10
    bias = (normal(width, seed=3), normal(width, seed=4)) if with_bias else None
    out = kernels.operand(CAPACITY, width)
    kernels.project_gated(operand_of(kernels, x), n, kernels.pack_gated(gate, up, bias, activation), out)
    gate_bias, up_bias = bias or (None, None)
    expected = activated(linear(x, gate, gate_bias), activation) * linear(x, up, up_bias)
    assert error(read(kernels, out, n), expected) < TOLERANCE[kernels.precision]


def test_one_huge_channel_does_not_spoil_the_others(kernels: Kernels) -> None:
    x, weights = normal(30, 128), normal(64, 128, seed=1)
    x[:, 5] *= 60
    weights[:, 5] = 0
    out = kernels.matrix(CAPACITY, 64)
    kernels.project(operand_of(kernels, x), 30, kernels.pack([weights], None), out)
    assert error(out.array[:30], linear(x, weights)) < {"int8": 0.1}.get(
        kernels.precision, TOLERANCE[kernels.precision]
    )


# --- operands and norms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 100, 576])
def test_an_operand_holds_the_rows_it_was_given(kernels: Kernels, width: int) -> None:
    x = normal(7, width)
    x[3] *= 1e-5
    x[4] = 0
    found = read(kernels, operand_of(kernels, x), 7)
    assert not found[4].any()
    for t in (0, 1, 2, 3, 5, 6):
        assert error(found[t], x[t]) < OPERAND_TOLERANCE[kernels.precision]


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("width", [64, 100, 576])
def test_norms_divide_by_the_root_mean_square(kernels: Kernels, n: int, width: int) -> None:
    x, norm = normal(CAPACITY, width) * np.float32(3), some_norm(width, eps=0.5)
    out, final = kernels.operand(CAPACITY, width), np.full((CAPACITY, width), np.float32(SENTINEL))
    kernels.norm(x, n, norm, out)
    kernels.final_norm(x, n, norm, final)
    assert error(read(kernels, out, n), normed(x[:n], norm)) < OPERAND_TOLERANCE[kernels.precision]
    assert error(final[:n], normed(x[:n], norm)) < 2e-6
    assert (final[n:] == SENTINEL).all()


@pytest.mark.parametrize("n", ROWS)
def test_a_normed_branch_is_added_to_the_residual_stream(kernels: Kernels, n: int) -> None:
    branch = matrix_of(kernels.matrix(CAPACITY, 100), normal(CAPACITY, 100) * 5)
    x, norm = normal(CAPACITY, 100, seed=1), some_norm(100)
    before = x.copy()
    kernels.add_norm(branch, n, norm, 0.5, x)
    assert error(x[:n], before[:n] + 0.5 * normed(branch.array[:n], norm)) < 2e-6
    assert np.array_equal(x[n:], before[n:])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_an_embedding_is_a_scaled_row_of_the_table(kernels: Kernels, kind: str) -> None:
    table = normal(11, 100)
    stored = {"float32": table, "bfloat16": bfloat16_bits(table), "float16": table.astype(np.float16)}[kind]
    ids = np.array([3, 0, 10, 3], np.int32)
    x = np.full((CAPACITY, 100), np.float32(SENTINEL))
    kernels.embed(stored, ids, 24.0, x)
    assert error(x[:4], numbers(stored)[ids] * 24) < 1e-7
    assert (x[4:] == SENTINEL).all()


# --- queries and keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary_share", [0, 0.5, 1], ids=["no_rotary", "partial_rotary", "rotary"])
@pytest.mark.parametrize("norm_over", ["nothing", "head", "projection"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_heads_are_normed_then_rotated_in_place(
    kernels: Kernels, head_dim: int, norm_over: str, rotary_share: float
) -> None:
    n, num_heads, column = 7, 3, 2 * head_dim
    end = column + num_heads * head_dim
    heads = matrix_of(kernels.heads(12, end + head_dim), normal(12, end + head_dim) * 2)
    before = heads.array.copy()
    norm = {
        "nothing": None,
        "head": HeadsNorm(some_norm(head_dim), over_projection=False),
        "projection": HeadsNorm(some_norm(num_heads * head_dim), over_projection=True),
    }[norm_over]
    rotary = rotary_table(40, int(head_dim * rotary_share) // 2) if rotary_share else None
    positions = np.array([0, 1, 2, 39, 5, 0, 17], np.int32)
    kernels.prepare_heads(heads, n, column, num_heads, head_dim, norm, positions, rotary)
    expected = prepared(numbers(before[:n, column:end]), num_heads, head_dim, norm, positions, rotary)
    assert error(numbers(heads.array[:n, column:end]), expected) < HEADS_TOLERANCE[kernels.precision]
    heads.array[:n, column:end] = before[:n, column:end]
    assert np.array_equal(heads.array, before)


# --- attention ------------------------------------------------------------------------------------------------------

SHAPES = {
    "one_head_each": AttentionShape(num_heads=4, num_kv_heads=4, head_dim=16, scale=0.25),
    "grouped": AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125),
    "one_key_head": AttentionShape(num_heads=5, num_kv_heads=1, head_dim=80, scale=0.2),
    "odd_pairs": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=18, scale=0.25),
    "window": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=80, scale=0.1, window=5),
    "window_of_one": AttentionShape(num_heads=2, num_kv_heads=2, head_dim=16, scale=0.1, window=1),
    "softcap": AttentionShape(num_heads=2, num_kv_heads=1, head_dim=256, scale=0.0625, softcap=3.0),
    "window_and_softcap": AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.5, softcap=30.0, window=33),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths", [[1], [7], [1, 64, 3, 130, 50, 2, 50]], ids=["1", "7", "300"])
def test_a_query_sees_the_keys_of_its_own_sequence_up_to_itself(
    kernels: Kernels, lengths: list[int], shape: AttentionShape
) -> None:
    n = sum(lengths)
    query_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    heads = matrix_of(kernels.heads(CAPACITY, query_width + 2 * kv_width), normal(n, query_width + 2 * kv_width))
    out = kernels.operand(CAPACITY, query_width)
    sequences = sequences_of(lengths)
    kernels.attend(heads, heads, query_width, None, sequences, shape, out)
    queries, keys, values = np.split(numbers(heads.array[:n]), [query_width, query_width + kv_width], axis=1)
    expected = attended(queries, keys, values, sequences, shape)
    assert error(read(kernels, out, n), expected) < TOLERANCE[kernels.precision]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("counts", [None, [1, 5, 1, 9], [1, 1, 1, 1]], ids=["all", "some", "last"])
@pytest.mark.parametrize("num_kept", [0, 1, 37])
def test_kept_rows_come_before_a_sequence_and_any_last_positions_may_ask(
    kernels: Kernels, num_kept: int, counts: list[int] | None, shape: AttentionShape
) -> None:
    lengths = [1, 20, 3, 9]
    query_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sequences = sequences_of(lengths, num_kept, counts)
    num_queries = int(sequences.query_count.sum())
    queries = matrix_of(kernels.heads(CAPACITY, query_width), normal(num_queries, query_width))
    own = matrix_of(kernels.heads(CAPACITY, 5 + 2 * kv_width), normal(sum(lengths), 5 + 2 * kv_width, seed=1))
    kept = matrix_of(kernels.heads(40, 2 * kv_width), normal(num_kept, 2 * kv_width, seed=2)) if num_kept else None
    out = operand_of(kernels, np.full((CAPACITY, query_width), SENTINEL))
    kernels.attend(queries, own, 5, kept, sequences, shape, out)
    rows = numbers(own.array[: sum(lengths), 5:])
    if kept is not None:
        rows = np.concatenate([numbers(kept.array[:num_kept]), rows])
    expected = attended(numbers(queries.array[:num_queries]), rows[:, :kv_width], rows[:, kv_width:], sequences, shape)
    found = read(kernels, out, CAPACITY)
    assert error(found[:num_queries], expected) < TOLERANCE[kernels.precision]
    assert np.allclose(found[num_queries:], SENTINEL, rtol=4e-2)  # int8 rounds a row of equal values by that much


def finite_after_a_nan(kernels: Kernels, place: str) -> list[bool]:
    """Which results are finite where token 17 of sequences 0-9, 10-19, 20-29 has a NaN in its key or value."""
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25)
    column = 34 if place == "key" else 50
    heads = matrix_of(kernels.heads(CAPACITY, 64), normal(30, 64))
    heads.array[17, column] = 0xFFC0 if heads.array.dtype == np.uint16 else -np.nan
    out = kernels.operand(CAPACITY, 32)
    kernels.attend(heads, heads, 32, None, sequences_of([10, 10, 10]), shape, out)
    return np.isfinite(read(kernels, out, 30)).all(axis=1).tolist()


@pytest.mark.parametrize("place", ["key", "value"])
def test_what_is_not_finite_shows_in_its_sequence_and_in_no_other(kernels: Kernels, place: str) -> None:
    finite = finite_after_a_nan(kernels, place)
    assert all(finite[:10]) and all(finite[20:])
    assert not any(finite[17:20])


@pytest.mark.parametrize("place", ["key", "value"])
def test_what_is_not_finite_does_not_travel_back_in_time(kernels: Kernels, place: str) -> None:
    assert all(finite_after_a_nan(kernels, place)[:17])


# --- every method ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_shows_in_its_channel(kernels: Kernels, number: float) -> None:
    weights = normal(40, 100)
    weights[7, 50] = number
    out = kernels.matrix(CAPACITY, 40)
    kernels.project(operand_of(kernels, normal(9, 100, seed=1)), 9, kernels.pack([weights], None), out)
    assert np.isfinite(out.array[:9]).tolist() == [[channel != 7 for channel in range(40)]] * 9
    gated = kernels.operand(CAPACITY, 20)
    packed = kernels.pack_gated(weights[:20], weights[20:], None, "silu")
    kernels.project_gated(operand_of(kernels, normal(9, 100, seed=1)), 9, packed, gated)
    assert not np.isfinite(read(kernels, gated, 9)).all(axis=1).any()


@pytest.mark.parametrize("width", [16, 80, 144])
def test_a_row_of_any_width_that_is_not_finite_stays_alone_in_a_product(kernels: Kernels, width: int) -> None:
    rows = normal(40, width)
    rows[17] = np.nan
    out = kernels.matrix(CAPACITY, 64)
    kernels.project(operand_of(kernels, rows), 40, kernels.pack([normal(64, width, seed=1)], None), out)
    assert np.isfinite(out.array[:40]).all(axis=1).tolist() == [t != 17 for t in range(40)]


@pytest.mark.parametrize("number", [np.nan, -np.nan, ODD_NAN, np.inf, -np.inf])
@pytest.mark.parametrize("method", ["quantize", "norm", "final_norm", "add_norm", "project_add", "project_gated"])
def test_a_row_that_is_not_finite_stays_alone(kernels: Kernels, method: str, number: float) -> None:
    n, width = 9, 100
    rows, weights = normal(n, width), normal(width, width, seed=1) / 10
    rows[4, 33] = number
    x, norm, out = normal(n, width, seed=2), some_norm(width), kernels.operand(CAPACITY, width)
    match method:
        case "quantize":
            found = read(kernels, operand_of(kernels, rows), n)
        case "norm":
            kernels.norm(rows, n, norm, out)
            found = read(kernels, out, n)
        case "final_norm":
            found = np.empty((n, width), np.float32)
            kernels.final_norm(rows, n, norm, found)
        case "add_norm":
            found = x
            kernels.add_norm(matrix_of(kernels.matrix(n, width), rows), n, norm, 1.0, x)
        case "project_add":
            found = x
            kernels.project_add(operand_of(kernels, rows), n, kernels.pack([weights], None), 1.0, x)
        case _:
            gated = kernels.pack_gated(weights, weights, None, "gelu")
            kernels.project_gated(operand_of(kernels, rows), n, gated, out)
            found = read(kernels, out, n)
    assert np.isfinite(found).all(axis=1).tolist() == [t != 4 for t in range(n)]


def test_no_method_writes_an_operand_row_it_was_not_asked_for(kernels: Kernels) -> None:
    n, width = 5, 100
    x, square = normal(CAPACITY, width), kernels.pack([normal(width, width) / 10], None)
    gated = kernels.pack_gated(normal(width, width) / 10, normal(width, width) / 10, None, "silu")
    source, matrix = operand_of(kernels, x), kernels.matrix(CAPACITY, width)
    before = read(kernels, source, CAPACITY)
    for write in (
        lambda out: kernels.norm(x, n, some_norm(width), out),
        lambda out: kernels.quantize(x * 3, n, out),
        lambda out: kernels.project_gated(source, n, gated, out),
    ):
        out = operand_of(kernels, x)
        write(out)
        after = read(kernels, out, CAPACITY)
        assert np.array_equal(after[n:], before[n:])
        assert (after[:n] != before[:n]).any(axis=1).all()
    matrix.array[:] = SENTINEL
    kernels.project(source, n, square, matrix)
    assert (matrix.array[n:] == SENTINEL).all()


def test_an_operand_used_before_is_as_good_as_a_new_one(kernels: Kernels) -> None:
    small, large = normal(7, 100, seed=1), normal(300, 100) * 1000
    large[20:] = np.nan
    weights = kernels.pack([normal(30, 100, seed=2)], None)
    used, new = operand_of(kernels, large), operand_of(kernels, small)
    kernels.quantize(small, 7, used)
    results = []
    for operand in (used, new):
        out = kernels.matrix(CAPACITY, 30)
        kernels.project(operand, 7, weights, out)
        results.append(out.array.copy())
    assert np.array_equal(*results)


def test_a_row_gives_the_same_alone_and_among_others(kernels: Kernels) -> None:
    x, weights = normal(300, 100), normal(60, 100, seed=1) / 10
    packed = kernels.pack([weights], None)
    together = kernels.matrix(CAPACITY, 60)
    kernels.project(operand_of(kernels, x), 300, packed, together)
    for t in (0, 13, 299):
        alone = kernels.matrix(CAPACITY, 60)
        kernels.project(operand_of(kernels, x[t : t + 1]), 1, packed, alone)
        # Sums may be taken in another order, which moves a float32 in its last bit, and a bfloat16 in its own.
        assert error(alone.array[0], together.array[t]) < (2e-7 if kernels.precision == "float32" else 4e-3)


def test_two_threads_with_buffers_of_their_own_do_not_meet(kernels: Kernels) -> None:
    x, weights = normal(64, 100), normal(60, 100, seed=1)
    packed, results = kernels.pack([weights], None), {}

    def work(number: int) -> None:
        torch.set_num_threads(1)
        operand, out = kernels.operand(CAPACITY, 100), kernels.matrix(CAPACITY, 60)
        rows = x * np.float32(1 + number)
        for _ in range(20):
            kernels.quantize(rows, 64, operand)
            kernels.project(operand, 64, packed, out)
        results[number] = error(out.array[:64], linear(rows, weights))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(results[0], results[1]) < TOLERANCE[kernels.precision]


# --- both kinds of kernels ------------------------------------------------------------------------------------------

needs_native = pytest.mark.skipif(missing_native("int8") is not None, reason=str(missing_native("int8")))

UNEVEN = normal(70, 200) * np.float32(10) ** normal(70, 1, seed=1)
UNEVEN[3] = 0
UNEVEN[4] *= np.float32(1e-35)
UNEVEN[5] *= np.float32(1e33)
"""Rows of all sizes, one of zeros, one below the least peak, one of huge numbers."""


@needs_native
def test_native_and_portable_int8_weights_are_the_same_bytes() -> None:
    weights = UNEVEN.copy()
    weights[6, 7] = np.nan
    weights[8, 9] = -np.inf
    channels = packed_channels([weights[:30], weights[30:]], "int8", 16)
    native: Any = make_kernels("native", "int8").pack([weights[:30], weights[30:]], None)
    # Panels of 64 columns, steps of 16 groups, squares of 16 columns, groups of 4 bytes.
    panels = native.panels.reshape(2, native.groups // 16, 4, 16, 16, 4)
    values = panels.transpose(0, 2, 4, 1, 3, 5).reshape(128, -1)[:70].view(np.int8)
    finite = np.isfinite(weights).all(axis=1)
    assert np.array_equal(values[finite], channels.weights.numpy()[finite])
    assert np.array_equal(native.scale[:70], channels.scales.numpy(), equal_nan=True)
    assert np.isnan(native.scale[[6, 8]]).all()


@needs_native
def test_native_and_portable_int8_operands_are_the_same_bytes() -> None:
    native, portable = (make_kernels(name, "int8") for name in ("native", "portable"))
    left: Any = operand_of(native, UNEVEN)
    right: Any = operand_of(portable, UNEVEN)
    rows = left.data.reshape(-1, left.stride)[:70, : left.padded]
    assert np.array_equal(rows, right.array[:70])
    assert np.allclose(left.scale[:70], right.scales[:70], rtol=1.2e-7, atol=0)  # the last bit, of a division by 127


# --- the portable kernels' parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 128, 192, 576, 1536, 64 * 15, 64 * 17, 64 * 34])
def test_rotation_is_hadamard_in_blocks_and_a_mix_of_the_blocks(width: int) -> None:
    """Orthogonal but for its gain; an outlier in one place reaches every place that the mix connects."""
    rows = normal(3, width)
    rotated = rows.copy()
    rotate_rows(rotated)
    matrix = rotation_matrix(width)
    assert error(rotated, rows.astype(np.float64) @ matrix.T) < 1e-6
    assert np.allclose(matrix @ matrix.T, np.eye(width) * gain(width), atol=1e-4)
    connected = (
        64 * power_of_two(width // 64) * (1 if width // 64 % 17 == 0 else width // 64 // power_of_two(width // 64))
    )
    assert np.count_nonzero(np.abs(matrix[:, 5]) > 1e-9) >= 0.6 * connected


def test_rotation_adds_in_stages_of_stride_1_2_to_32() -> None:
    expected = normal(1, 64) * np.float32(1e3) ** normal(1, 64, seed=1)
    rotated = expected.copy()
    rotate_rows(rotated)
    for stride in (1, 2, 4, 8, 16, 32):
        pairs = expected.reshape(-1, 2, stride)
        expected = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(1, 64)
    assert np.array_equal(rotated, expected)


@numba.njit
def _table(x: Any, exps: Any, tanhs: Any, erfcs: Any) -> None:
    for i in range(x.shape[0]):
        exps[i] = portable_numbers.exp(x[i])
        tanhs[i] = portable_numbers.tanh(x[i])
        erfcs[i] = portable_numbers.erfc_of_positive(abs(x[i]))


def test_exp_and_tanh_are_near_the_last_bit() -> None:
    x = np.concatenate([np.linspace(-87, 88, 200_001), np.geomspace(1e-7, 5, 50_001)]).astype(np.float32)
    exps, tanhs, erfcs = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    _table(x, exps, tanhs, erfcs)
    exact = x.astype(np.float64)
    assert np.abs(exps / np.exp(exact) - 1).max() < 2e-7
    assert np.abs(tanhs - np.tanh(exact)).max() < 1.5e-7
    nonzero = x != 0
    assert np.abs(tanhs[nonzero] / np.tanh(exact[nonzero]) - 1).max() < 2e-7
    exact_erfc = 1 - activated(np.abs(exact) * np.sqrt(2), "gelu") * np.sqrt(2) / np.maximum(np.abs(exact), 1e-30) + 1
    assert np.abs(erfcs - exact_erfc)[nonzero].max() < 4e-7
    for number in (np.nan, -np.nan):
        _table(np.array([number], np.float32), exps[:1], tanhs[:1], erfcs[:1])
        assert np.isnan([exps[0], tanhs[0], erfcs[0]]).all()


@pytest.mark.parametrize("precision", CANDIDATES)
def test_every_candidate_product_is_the_same(precision: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-100, 101, (24, 128), generator=generator)
    rows = torch.randint(0, 256, (16, 128), generator=generator)
    scales = torch.rand(24, generator=generator) if precision == "int8" else torch.ones(24)
    types = {"float32": (torch.float32,) * 2, "bfloat16": (torch.bfloat16,) * 2, "int8": (torch.int8, torch.uint8)}
    channels = Channels(weights.to(types[precision][0]), scales, 16)
    first, *others = (candidate(channels)(rows.to(types[precision][1])).double() for candidate in CANDIDATES[precision])
    assert all(error(other.numpy(), first.numpy()) < 2**-8 for other in others)


@pytest.mark.parametrize("precision", CANDIDATES)
def test_without_onednn_the_plain_product_is_taken(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packer(precision) is CANDIDATES[precision][-1]


@pytest.mark.parametrize("precision", CANDIDATES)
def test_a_product_that_fails_or_errs_is_not_taken(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(channels: Channels) -> Any:
        raise RuntimeError("could not create a primitive descriptor")

    def saturating(channels: Channels) -> Any:
        right = portable_products.CANDIDATES[precision][-1](channels)
        return lambda rows: right(rows).clamp(-10, 10)

    for wrong in (failing, saturating):
        assert not is_right(wrong, precision)
    plain = CANDIDATES[precision][-1]
    monkeypatch.setitem(portable_products.CANDIDATES, precision, (failing, saturating, plain))
    assert packer(precision) is plain


def test_kernels_compile_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def without_a_place(function: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError(f"cannot cache function {function.__name__!r}: no locator available for file")
        return njit(function, **options)

    monkeypatch.setattr(numba, "njit", without_a_place)

    @portable_numbers.kernel
    def twice(x: Any) -> Any:
        return x + x

    assert twice(2) == 4
