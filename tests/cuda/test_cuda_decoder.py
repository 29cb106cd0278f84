"""The card's decoder against transformers, family by family; what shares a batch changes nothing.

The same modules that run on a card run here on plain attention and emulated FP8. What only a card can show is whether
its own kernels agree with these twins.
"""

from typing import Any

import cuda_rig
import numpy as np
import plain_decoder
import pytest
import torch
from cuda_rig import batch, loaded, positions_of, runtime, states
from plain_decoder import plain_states
from rig import relative_error
from test_own_architecture import CASES, case_name
from test_packed_decoder import (
    MIXED,
    RICH,
    ROWS,
    Tiny,
    bfloat16,
    by_row,
    distance,
    ids,
    joined,
    model_states,
    write_tiny,
    written,
)

from extract.cuda.fp8 import quantized
from extract.cuda.regions import AddAndRead, Norm, fuse

any_case = pytest.fixture(scope="module", params=CASES, ids=case_name, name="any_case")(written)
rich = pytest.fixture(scope="module", params=RICH, ids=case_name, name="rich")(written)
softcapped = pytest.fixture(scope="module", params=RICH[1:2], ids=case_name, name="softcapped")(written)

PRECISIONS = ("float32", "bfloat16", "fp8")


def test_float32_states_are_transformers_states_with_every_option(any_case: Tiny) -> None:
    error = relative_error(by_row(states(runtime(any_case, share=True))), any_case.expected)
    assert error <= 1e-5 or error <= any_case.bound


def test_float32_states_are_transformers_states_without_sharing(rich: Tiny) -> None:
    assert relative_error(by_row(states(runtime(rich))), rich.expected) <= 1e-5


def fp8(values: Any) -> Any:
    """Rounded as products read them, one scale a row."""
    rounded, scales = quantized(torch.from_numpy(np.ascontiguousarray(values, np.float32)))
    return (rounded.double() * scales.double()).numpy()


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_rounded_states_are_as_near_to_float64_as_their_rounding_allows(
    rich: Tiny, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside products, branches and queries, keys and values are bfloat16 too, which the plain decoder is not."""
    rounding = {"bfloat16": bfloat16, "fp8": fp8}[precision]

    def linear(x: Any, weight: Any, bias: Any) -> Any:
        return bfloat16(rounding(x) @ rounding(weight.astype(np.float64)).T + (0 if bias is None else bias))

    exact = np.concatenate(plain_states(rich.path, rich.architecture, ROWS))
    with monkeypatch.context() as patch:
        patch.setattr(plain_decoder, "_linear", linear)
        rounded = np.concatenate(plain_states(rich.path, rich.architecture, ROWS))
    for share in (True, False):
        found = states(runtime(rich, precision, share=share))
        assert distance(found, exact) <= 1.5 * distance(rounded, exact)


@pytest.mark.parametrize("share", [True, False], ids=["sharing", "plain"])
@pytest.mark.parametrize("kind", ["last", "first", "mean"])
def test_one_state_a_row_is_made_of_transformers_states(rich: Tiny, kind: str, share: bool) -> None:
    pick = {"last": lambda one: one[-1:], "first": lambda one: one[:1], "mean": lambda one: one.mean(0, keepdims=True)}
    expected = [pick[kind](one) for one in rich.expected]
    found = states(runtime(rich, share=share), kind=kind)
    assert relative_error(np.split(found, len(ROWS)), expected) <= 1e-5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_states_do_not_depend_on_the_batch_the_order_or_the_cut_into_passes(rich: Tiny, precision: Any) -> None:
    bound = {"float32": 1e-6, "bfloat16": 5e-3, "fp8": 2e-2}[precision]
    found, expected = runtime(rich, precision), states(runtime(rich, precision, pass_tokens=1))  # each row alone
    assert distance(states(found), expected) <= bound
    order = np.random.default_rng(0).permutation(len(ROWS))
    moved = by_row(states(found, [ROWS[i] for i in order]), [ROWS[i] for i in order])
    assert distance(np.concatenate([moved[i] for i in np.argsort(order)]), expected) <= bound
    for options in ({"pass_tokens": 10**6}, {"share": True, "pass_tokens": 90}):
        assert distance(states(runtime(rich, precision, **options)), expected) <= bound, options


def test_no_row_sees_its_neighbours(rich: Tiny) -> None:
    found = runtime(rich, pass_tokens=10**6)
    others = [[(token + 7) % 90 for token in row] if number % 2 else row for number, row in enumerate(ROWS)]
    for number, (one, other) in enumerate(zip(by_row(states(found)), by_row(states(found, others)), strict=True)):
        assert (number % 2 == 1) or distance(other, one) <= 1e-6


def test_states_of_layers_are_the_residual_stream_after_them(rich: Tiny) -> None:
    model = rich.model().double()
    seen: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.layers, start=1):
        layer.register_forward_hook(
            lambda module, given, output, number=number: seen.__setitem__(
                number, output[0] if isinstance(output, tuple) else output
            )
        )
    expected = []
    for row in ROWS:
        with torch.no_grad():
            model(input_ids=torch.tensor([row]), use_cache=False)
        expected.append({number: one.reshape(len(row), -1).numpy().copy() for number, one in seen.items()})
    for kind, pick in (("tokens", slice(None)), ("last", slice(-1, None))):
        for share in (True, False):
            found = runtime(rich, share=share).layer_states(batch(ROWS), kind, (4, 1))
            assert np.array_equal(found[0], runtime(rich, share=share).hidden_states(batch(ROWS), kind))
            for states_of, layer in zip(found[1:], (4, 1), strict=True):
                rows = np.concatenate([one[layer][pick] for one in expected])
                assert distance(states_of, rows) <= 1e-5, (kind, share, layer)


def test_long_rows_with_windows_may_share_their_prefix(tmp_path: Any) -> None:
    tiny = write_tiny(tmp_path, "ministral", {"sliding_window": 70, "layer_types": MIXED}, 400)
    common = ids(157, 1)
    rows = [common + ids(count, count) for count in (150, 31, 77, 100, 1)]
    shared = states(runtime(tiny, share=True, longest=400, pass_tokens=10**6), rows)
    assert relative_error(by_row(shared, rows), model_states(tiny.model().double(), rows)) <= 1e-5


@pytest.mark.parametrize("last", [False, True], ids=["tokens", "last"])
def test_one_traced_graph_takes_any_number_of_tokens_and_sequences(softcapped: Tiny, last: bool) -> None:
    decoder = loaded(softcapped)

    def inputs(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        input_ids, cu_seqlens = (torch.from_numpy(one) for one in joined(rows))
        return input_ids, positions_of(cu_seqlens), cu_seqlens

    tokens, ends = torch.export.Dim("tokens", min=2), torch.export.Dim("ends", min=3)
    shapes = ({0: tokens}, {0: tokens}, {0: ends}, None)
    with torch.no_grad():
        traced = torch.export.export(
            decoder,
            (*inputs(ROWS[:7]), cuda_rig.LONGEST),
            {"last": last},
            dynamic_shapes={
                "input_ids": shapes[0], "positions": shapes[1], "cu_seqlens": shapes[2], "max_seqlen": None,
                "last": None,
            },
            strict=False,
        ).module()  # fmt: skip
        for rows in (ROWS, ROWS[3:5]):
            given = inputs(rows)
            found, expected = (run(*given, cuda_rig.LONGEST, last=last) for run in (traced, decoder))
            assert distance(found.numpy(), expected.numpy()) <= 1e-6


def test_fused_regions_are_few_graphs_that_give_the_same_states(softcapped: Tiny) -> None:
    found = runtime(softcapped, "fp8", share=True)
    expected = {kind: states(found, kind=kind) for kind in ("tokens", "last")}
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    fuse(found.decoder.modules(), backend=backend)
    for kind in ("last", "tokens", "tokens"):
        assert distance(states(found, kind=kind), expected[kind]) <= 1e-6
    assert len(graphs) <= 12  # of four layers


@pytest.mark.parametrize("share", [True, False], ids=["sharing", "plain"])
@pytest.mark.parametrize("kind", ["tokens", "last", "mean"])
def test_a_row_that_is_not_finite_spoils_no_other(rich: Tiny, kind: Any, share: bool) -> None:
    """Not its neighbours in a pass, and not those that take a prefix from it: it comes first in the order of ids."""
    common = ids(20, 1001)
    bad = min(set(range(95)) - set(common))
    rows = [*ROWS, [*common, bad, 3], [*common, 94, 3]]
    found = runtime(rich, share=share, pass_tokens=10**6)
    expected = states(found, rows, kind)
    table: Any = found.decoder.embed.table
    table[bad] = float("nan")
    counts = [len(row) if kind == "tokens" else 1 for row in rows]
    broken = np.repeat([bad in row for row in rows], counts)
    assert 0 < broken.sum() < len(broken)
    seen = states(found, rows, kind)
    assert not np.isfinite(seen[broken][-1]).any()
    assert distance(seen[~broken], expected[~broken]) <= 1e-6


@pytest.mark.parametrize("share", [True, False], ids=["sharing", "plain"])
@pytest.mark.parametrize("kind", ["tokens", "last", "mean", "first"])
def test_batches_submitted_ahead_are_written_where_they_belong(softcapped: Tiny, kind: Any, share: bool) -> None:
    found = runtime(softcapped, "bfloat16", share=share, pass_tokens=90)
    parts = [ROWS[:9], ROWS[9:14], ROWS[14:]]
    given = [batch(part) for part in parts]
    expected = [found.layer_states(one, kind, (2,)) for one in given]
    counts = [len(one[0]) for one in expected]
    order = np.random.default_rng(1).permutation(sum(counts))
    into = [np.zeros((sum(counts), expected[0][0].shape[1]), one.dtype) for one in expected[0]]
    rows = np.split(order, np.cumsum(counts)[:-1])
    pending = [found.submit(one, kind, (2,), into, where) for one, where in zip(given, rows, strict=True)]
    for one in pending:
        one.wait()
    for where, one in zip(rows, expected, strict=True):
        assert all(np.array_equal(array[where], part) for array, part in zip(into, one, strict=True))


def test_many_engines_of_other_sizes_are_compiled_in_one_process() -> None:
    """Torch counts what it compiles for a class, and fails at the ninth unless told otherwise."""
    for number in range(1, 11):
        width = 8 * number
        region = AddAndRead(None, 1.0, Norm(torch.ones(width), 1e-6), torch.float32)
        plain = region(torch.ones(3, width), torch.ones(3, width))[0]
        fuse([region], backend="eager")
        with torch.inference_mode():
            assert torch.equal(region(torch.ones(3, width), torch.ones(3, width))[0], plain)
