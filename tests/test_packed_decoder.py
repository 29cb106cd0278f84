"""The packed decoder as a whole: plans over both sets of kernels against transformers and the plain float64 decoder.

Every family's model is tiny and telling (see `test_own_architecture`). The rows share prefixes, contain each other,
come twice, and make several micro-batches. What must hold most: sharing, threads, micro-batches and neighbours change
nothing - no bit with the native kernels, rounding with the portable ones.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import plain_decoder
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_rig import PRECISIONS, implementation, missing_native, rotation_matrix
from plain_decoder import plain_states
from rig import relative_error
from test_own_architecture import CASES, MIXED, VOCAB, case_name, small_model

from extract.cpu.architecture import Architecture
from extract.cpu.decoder import PackedDecoder
from extract.cpu.implementations import kernels_for
from extract.cpu.micro_batches import PassPlan
from extract.cpu.pass_plan import plan_pass
from extract.cpu.portable_products import CANDIDATES
from extract.cpu.rotation import gain
from extract.cpu.runtime import means
from extract.cpu.sign_flips import flip_signs
from extract.cpu.weights import layer_weights, open_weights
from extract.engine.own_architecture import architecture_of
from extract.packing import MIN_SHARED

LONGEST = 60
MICRO_BATCH = 48
"""Less than the longest row, and a ninth of all tokens."""
NO_ID = VOCAB - 1
"""A token that only the rows of a test about it have."""


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, NO_ID, count).tolist()


def some_rows() -> list[list[int]]:
    """Rows in no order: a common prefix, a deeper one, a short one, whole rows as prefixes, duplicates, strangers."""
    common, short = ids(20, 1), ids(MIN_SHARED, 2)
    deeper = common + ids(17, 3)
    rows = [common + ids(count, 10 + count) for count in (3, 5, 8, 12, 17, 23, 30, 40)]
    rows += [deeper + ids(count, 40 + count) for count in (1, 2, 9, 14)]
    rows += [short + ids(count, 70 + count) for count in (4, 5)]
    rows += [common, common[:17], deeper, rows[2], rows[2], rows[9], short]
    rows += [ids(count, 90 + count) for count in (1, 1, 2, 17, LONGEST)]
    order = np.random.default_rng(5).permutation(len(rows))
    return [rows[i] for i in order]


ROWS = some_rows()


def joined(rows: list[list[int]]) -> tuple[Any, Any]:
    return np.concatenate([np.array(row, np.int32) for row in rows]), np.cumsum([0, *map(len, rows)]).astype(np.int32)


@dataclass(eq=False)
class Tiny:
    """A model written to a file; `model` makes it anew, in float32."""

    path: Path
    architecture: Architecture
    model: Any

    @cached_property
    def expected(self) -> list[Any]:
        """Transformers' states of each row alone, in float64: [L, H]."""
        return model_states(self.model().double(), ROWS)

    @cached_property
    def bound(self) -> float:
        """1e-5, or more where transformers itself is further than that from its float64 in float32."""
        return max(1e-5, 2 * relative_error(model_states(self.model(), ROWS), self.expected))


def model_states(model: Any, rows: list[list[int]]) -> list[Any]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0].numpy() for row in rows]


def write_tiny(directory: Path, family: str, options: dict[str, Any], longest: int = LONGEST) -> Tiny:
    model = small_model(family, **options)
    model.save_pretrained(directory)
    architecture = architecture_of(model, longest)
    return Tiny(directory / "model.safetensors", architecture, lambda: small_model(family, **options))


def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family, options = request.param
    return write_tiny(tmp_path_factory.mktemp(family), family, options)


any_case = pytest.fixture(scope="module", params=CASES, ids=case_name, name="any_case")(written)
last_cases = list({family: (family, options) for family, options in CASES}.values())
any_family = pytest.fixture(scope="module", params=last_cases, ids=case_name, name="any_family")(written)

RICH = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("gemma2", {"layer_types": MIXED, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8}),
    ("gemma3_text", {"layer_types": MIXED, "attention_bias": True, "sliding_window": 15}),
    ("olmo2", {"head_dim": None, "num_key_value_heads": 1}),
    ("smollm3", {"head_dim": None, "no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 5}),
]
"""Norms before, after and around the branches; over a head and over all; biases, softcap, windows, no positions."""


rich = pytest.fixture(scope="module", params=RICH, ids=case_name, name="rich")(written)

IMPLEMENTATIONS = {
    precision: [implementation("portable", precision), implementation("native", precision, missing_native(precision))]
    for precision in PRECISIONS
}
EVERY = [one for ones in IMPLEMENTATIONS.values() for one in ones]
NATIVE = [ones[1] for ones in IMPLEMENTATIONS.values()]


@cache
def kernels_of(name: Any, precision: Any) -> Any:
    return kernels_for(precision, micro_batch=MICRO_BATCH, choice=name)


@contextmanager
def decoder(
    tiny: Tiny, which: tuple[str, str], *, threads: int = 2, longest: int = LONGEST, max_kept: int = 1024
) -> Iterator[PackedDecoder]:
    found = PackedDecoder(
        tiny.architecture,
        open_weights(tiny.path),
        kernels_of(*which),
        max_positions=longest,
        micro_batch=MICRO_BATCH,
        threads=threads,
        max_kept=max_kept,
    )
    try:
        yield found
    finally:
        found.close()


def plan_of(rows: list[list[int]], kind: Any, share: bool, **options: Any) -> PassPlan:
    return plan_pass(*joined(rows), kind, **{"budget": MICRO_BATCH, "threads": 2, "share": share, **options})


def states_of(
    found: PackedDecoder, rows: list[list[int]] = ROWS, kind: Any = "tokens", *, share: bool, **options: Any
) -> Any:
    """What a pass gives: float32 [T, H], or [B, H]."""
    plan = plan_of(rows, kind, share, **options)
    states = found.states(plan)
    states = states if plan.output_index is None else states[plan.output_index]
    return means(states, joined(rows)[1]) if kind == "mean" else states


def by_row(states: Any, rows: list[list[int]] = ROWS) -> list[Any]:
    return np.split(states, joined(rows)[1][1:-1])


def alone(found: PackedDecoder, rows: list[list[int]] = ROWS) -> Any:
    """Each row in a pass of its own."""
    return np.concatenate([states_of(found, [row], share=False) for row in rows])


def distance(found: Any, expected: Any) -> float:
    """Root of the mean square of the differences, beside that of the expected states."""
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected))


def least_cosine(found: Any, expected: Any) -> float:
    found = found.astype(np.float64)
    sizes = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(axis=1) / sizes).min())


# --- the rows themselves --------------------------------------------------------------------------------------------


def test_the_rows_share_over_several_micro_batches() -> None:
    plan, plain = plan_of(ROWS, "tokens", True), plan_of(ROWS, "tokens", False)
    assert plan.kept is not None
    assert sum(batch.sequences.num_kept > 0 for batch in plan.micro_batches) >= 4
    assert plan.num_computed < 0.7 * plain.num_computed
    assert max(len(batch.input_ids) for batch in plain.micro_batches) > MICRO_BATCH


# --- float32 against transformers -----------------------------------------------------------------------------------


def assert_near_transformers(tiny: Tiny, which: tuple[str, str]) -> None:
    with decoder(tiny, which) as found:
        for share in (True, False):
            error = relative_error(by_row(states_of(found, share=share)), tiny.expected)
            assert error <= 1e-5 or error <= tiny.bound


def test_float32_states_are_transformers_states_with_every_option(any_case: Tiny) -> None:
    assert_near_transformers(any_case, ("portable" if missing_native("float32") else "native", "float32"))


def test_portable_float32_states_are_transformers_states_in_every_family(any_family: Tiny) -> None:
    assert_near_transformers(any_family, ("portable", "float32"))


@pytest.mark.parametrize("share", [True, False], ids=["sharing", "plain"])
@pytest.mark.parametrize("kind", ["last", "first", "mean"])
@pytest.mark.parametrize("which", IMPLEMENTATIONS["float32"])
def test_one_state_a_row_is_made_of_transformers_states(rich: Tiny, which: Any, kind: str, share: bool) -> None:
    pick = {"last": lambda one: one[-1:], "first": lambda one: one[:1], "mean": lambda one: one.mean(0, keepdims=True)}
    expected = [pick[kind](one) for one in rich.expected]
    with decoder(rich, which) as found:
        assert relative_error(np.split(states_of(found, kind=kind, share=share), len(ROWS)), expected) <= 1e-5


# --- rounded precisions against float64 -----------------------------------------------------------------------------


def bfloat16(values: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().double().numpy()


def int8(values: Any) -> Any:
    """Rotated, one scale a row."""
    filled = np.pad(values, ((0, 0), (0, -values.shape[1] % 64)))
    matrix = rotation_matrix(filled.shape[1])
    rotated = filled @ matrix.T
    scale = np.maximum(np.abs(rotated).max(axis=1, keepdims=True), 1e-30) / 127
    return (np.rint(rotated / scale) * scale @ matrix / gain(filled.shape[1]))[:, : values.shape[1]]


def rounded_plain_states(tiny: Tiny, precision: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plain decoder with both sides of each linear rounded as the precision asks."""
    rounded = {"bfloat16": bfloat16, "int8": int8}[precision]

    def linear(x: Any, weight: Any, bias: Any) -> Any:
        return rounded(x) @ rounded(weight.astype(np.float64)).T + (0 if bias is None else bias)

    with monkeypatch.context() as patch:
        patch.setattr(plain_decoder, "_linear", linear)
        return np.concatenate(plain_states(tiny.path, tiny.architecture, ROWS))


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_rounded_states_are_as_near_as_their_rounding_allows(
    rich: Tiny, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = np.concatenate(plain_states(rich.path, rich.architecture, ROWS))
    rounded = rounded_plain_states(rich, precision, monkeypatch)
    for name in ("portable",) if missing_native(precision) else ("portable", "native"):
        with decoder(rich, (name, precision)) as found:
            for share in (True, False):
                states = states_of(found, share=share)
                assert distance(states, exact) <= 1.5 * distance(rounded, exact)
                assert 1 - least_cosine(states, exact) <= 3 * (1 - least_cosine(rounded, exact))


@pytest.mark.parametrize("which", IMPLEMENTATIONS["float32"])
def test_flipped_signs_change_no_bit_of_float32(any_family: Tiny, which: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What int8 folds into its weights, folded into those of float32."""
    with decoder(any_family, which) as found:
        expected = states_of(found, share=False)
    seen = []

    def flipped(weights: Any, architecture: Any, layer: int) -> Any:
        seen.append(layer)
        return flip_signs(layer_weights(weights, architecture, layer), architecture, layer)

    monkeypatch.setattr("extract.cpu.decoder.layer_weights", flipped)
    with decoder(any_family, which) as found:
        assert np.array_equal(states_of(found, share=False), expected)
    assert len(seen) == len(any_family.architecture.layers)


def test_flipped_signs_leave_int8_more_of_a_row_that_is_nearly_constant() -> None:
    draw = np.random.Generator(np.random.PCG64(3))
    rows = 10 + draw.standard_normal((4, 576))
    signs = np.where(draw.integers(0, 2, 576), -1, 1)
    assert distance(int8(rows * signs) * signs - 10, rows - 10) < 0.25 * distance(int8(rows) - 10, rows - 10)


needs_native = pytest.mark.skipif(missing_native("int8") is not None, reason=str(missing_native("int8")))


@needs_native
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_both_sets_of_kernels_round_alike(rich: Tiny, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one token, whose attention is its value: native kernels round its weights too. Products in float32.

    Where a number lies between two others the last bits before it, or an activation to 1e-5, decide which it becomes.
    """
    rows = [[token] for token in range(VOCAB)]
    monkeypatch.setitem(CANDIDATES, precision, CANDIDATES[precision][-1:])
    kernels_of.cache_clear()
    with decoder(rich, ("portable", precision)) as portable, decoder(rich, ("native", precision)) as native:
        differences = np.abs(states_of(portable, rows, share=False) - states_of(native, rows, share=False)).max(axis=1)
    kernels_of.cache_clear()
    assert (differences < 1e-5).mean() > 0.6
    assert differences.max() < 0.5


@needs_native
def test_both_sets_of_kernels_give_near_int8_states(rich: Tiny) -> None:
    exact = np.concatenate(plain_states(rich.path, rich.architecture, ROWS))
    with decoder(rich, ("portable", "int8")) as portable, decoder(rich, ("native", "int8")) as native:
        states = states_of(native, share=False)
        assert distance(states_of(portable, share=False), states) <= distance(states, exact)


# --- sharing, micro-batches, threads and neighbours -----------------------------------------------------------------

WAYS: list[dict[str, Any]] = [
    {"share": False},
    {"share": False, "budget": 16},
    {"share": True},
    {"share": True, "max_kept": 10},
    {"share": True, "max_kept": 0, "budget": 30},
    {"share": True, "threads": 3, "budget": 20},
    {"share": True, "threads": 1, "budget": 400},
]


@pytest.mark.parametrize("which", NATIVE)
def test_native_states_are_the_same_bits_however_they_are_computed(any_family: Tiny, which: Any) -> None:
    with decoder(any_family, which, longest=400) as found:
        expected = alone(found)
        for way in WAYS:
            assert np.array_equal(states_of(found, **way), expected), way
        last = states_of(found, kind="last", share=False)
        assert np.array_equal(last, [one[-1] for one in by_row(expected)])
        assert np.array_equal(states_of(found, kind="last", share=True), last)
        assert np.array_equal(states_of(found, kind="first", share=True), [one[0] for one in by_row(expected)])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_portable_states_are_the_same_but_for_rounding(rich: Tiny, precision: str) -> None:
    bound = {"float32": 1e-6, "bfloat16": 1e-3, "int8": 1e-3}[precision]
    with decoder(rich, ("portable", precision), longest=400) as found:
        expected = alone(found)
        for way in WAYS:
            assert distance(states_of(found, **way), expected) <= bound, way


@pytest.mark.parametrize("which", EVERY)
def test_the_number_of_threads_changes_nothing(rich: Tiny, which: Any) -> None:
    states = []
    for threads in (1, 2, 3):
        with decoder(rich, which, threads=threads) as found:
            states.append([states_of(found, share=share, threads=2) for share in (True, False)])
    assert np.array_equal(states[0], states[1])
    assert np.array_equal(states[0], states[2])


@pytest.mark.parametrize("which", EVERY)
def test_a_pass_leaves_nothing_for_the_next_one(rich: Tiny, which: Any) -> None:
    others = [[(token + 7) % NO_ID for token in row] for row in ROWS[::-1]]
    with decoder(rich, which, threads=1) as found:
        before = [states_of(found, share=share) for share in (True, False)]
        states_of(found, others, share=True)
        states_of(found, others[:3], "last", share=False)
        assert np.array_equal([states_of(found, share=share) for share in (True, False)], before)


@pytest.mark.parametrize("window", [3, 70, 130, 200])
@pytest.mark.parametrize("which", EVERY)
def test_long_rows_with_windows_may_share_their_prefix(which: Any, window: int, tmp_path: Path) -> None:
    options = {"sliding_window": window, "layer_types": MIXED, "max_position_embeddings": 512, "num_attention_heads": 6}
    tiny = write_tiny(tmp_path, "ministral", options, 400)
    common = ids(157, 1)
    rows = [common + ids(count, count) for count in (150, 31, 77, 100, 1)]
    with decoder(tiny, which, longest=400) as found:
        plain = states_of(found, rows, share=False)
        shared = states_of(found, rows, share=True)
    if which[0] == "native":
        assert np.array_equal(shared, plain)
    else:
        assert distance(shared, plain) <= {"float32": 1e-6, "bfloat16": 2e-3, "int8": 5e-3}[which[1]]
    if which[1] == "float32":
        assert relative_error(by_row(plain, rows), model_states(tiny.model().double(), rows)) <= 1e-5


@st.composite
def related_rows(draw: st.DrawFn) -> list[list[int]]:
    """Rows cut from and grown on each other."""
    rows = [ids(draw(st.integers(1, LONGEST)), draw(st.integers(0, 3)))]
    for number in range(draw(st.integers(0, 14))):
        trunk = draw(st.sampled_from(rows))
        kept = draw(st.integers(0, len(trunk)))
        grown = ids(draw(st.integers(0, min(20, LONGEST - kept))), number + 9)
        rows.append(trunk[:kept] + grown or [draw(st.integers(0, NO_ID))])
    return rows


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("gemma"), *RICH[2])


@needs_native
def test_any_related_rows_in_any_micro_batches_give_the_bits_of_each_row_alone(gemma: Tiny) -> None:
    with decoder(gemma, ("native", "float32")) as found:

        @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
        @given(rows=related_rows(), budget=st.integers(1, MICRO_BATCH), max_kept=st.integers(0, 60))
        def check(rows: list[list[int]], budget: int, max_kept: int) -> None:
            shared = states_of(found, rows, share=True, budget=budget, max_kept=max_kept)
            assert np.array_equal(shared, alone(found, rows))

        check()


# --- NaN ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 21, 22])
@pytest.mark.parametrize("which", EVERY)
def test_an_embedding_that_is_not_finite_reaches_no_other_row(which: Any, place: int, tmp_path: Path) -> None:
    """Token `place` of a row, after or in the prefix that it shares, or the first one of it."""
    tiny = write_tiny(tmp_path, *RICH[2])
    common = ids(22, 1)
    rows = [common + ids(count, count) for count in range(3, 30, 3)]
    spoilt = [*common, *ids(9, 9)]
    spoilt[place] = NO_ID
    rows = [rows[0], spoilt, *rows[1:], spoilt[:-1], common]
    bad = [1, len(rows) - 2]
    with decoder(tiny, which) as found:
        healthy = {share: by_row(states_of(found, rows, share=share), rows) for share in (True, False)}
        found._embedding = found._embedding.copy()
        found._embedding[NO_ID] = np.nan
        for share in (True, False):
            states = by_row(states_of(found, rows, share=share), rows)
            for number, (one, before) in enumerate(zip(states, healthy[share], strict=True)):
                kept = place if number in bad else len(one)
                assert np.array_equal(one[:kept], before[:kept])
                assert not np.isfinite(one[kept : kept + 1]).any()


# --- what an engine imports -----------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from extract.engine.runtimes import load_runtime
from extract.records import TokenBatch
runtime = load_runtime(Path(sys.argv[1]))
ids, bounds = np.array([5, 6, 7, 5, 6], np.int32), np.array([0, 3, 5], np.int32)
runtime.hidden_states(TokenBatch(input_ids=ids, cu_seqlens=bounds, members=np.arange(2)), "tokens")
runtime.close()
print(runtime.arithmetic, *(name for name in ("transformers", "torch", "numba") if name in sys.modules))
"""


def test_an_engine_runs_without_transformers_and_on_native_kernels_without_torch(tiny_engine: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(tiny_engine)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["portable", "torch", "numba"] if missing_native("float32") else ["native"])
