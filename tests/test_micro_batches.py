"""Plans of a pass: a decoder that runs through one gives the states of the plain decoder, and computes little twice.

The decoder is a small one in float64: two layers, two heads, positions added to the embedding, so that a token at a
wrong place, a missing key or one too many changes every state after it.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract.cpu.kernels import Sequences
from extract.cpu.micro_batches import MicroBatch, PassPlan
from extract.cpu.pass_plan import plan_pass

WIDTH, HEADS, LAYERS = 8, 2, 2
KINDS = ("tokens", "last", "mean", "first")


class Decoder:
    def __init__(self, vocab_size=64, positions=512):
        random = np.random.default_rng(0)
        self.embedding = random.standard_normal((vocab_size, WIDTH))
        self.position = random.standard_normal((positions, WIDTH))
        self.layers = [random.standard_normal((4, WIDTH, WIDTH)) / 3 for _ in range(LAYERS)]

    def plain(self, row):
        """States of one row, alone: float64 [L, WIDTH]."""
        x = self.embedding[row] + self.position[: len(row)]
        for q, k, v, o in self.layers:
            x = x + np.tanh(_attend(x @ q, x @ k, x @ v) @ o)
        return x

    def states(self, plan: PassPlan):
        """All outputs of a plan, as a decoder with one thread per micro-batch computes them."""
        outputs = np.full((plan.num_outputs, WIDTH), np.nan)
        kept = [(np.zeros((0, WIDTH)), np.zeros((0, WIDTH)))] * LAYERS
        if plan.kept is not None:
            kept = self.run(plan.kept, kept, outputs)
        for batch in plan.micro_batches:
            self.run(batch, kept, outputs)
        assert np.isfinite(outputs).all()
        return outputs

    def run(self, batch: MicroBatch, kept, outputs):
        x = self.embedding[batch.input_ids] + self.position[batch.positions]
        made = []
        for number, (q, k, v, o) in enumerate(self.layers):
            made.append((x @ k, x @ v))
            keys, values = (np.concatenate(pair) for pair in zip(kept[number], made[number], strict=True))
            sequences = batch.sequences
            if number == LAYERS - 1 and batch.wanted is not None:
                x, sequences = x[batch.wanted], batch.wanted_sequences
            assert sequences.num_kept == len(kept[number][0])
            x = x + np.tanh(_attend_through(sequences, x @ q, keys, values) @ o)
        assert len(x) == batch.num_outputs
        outputs[batch.first_output : batch.first_output + len(x)] = x
        return made


def _attend(queries, keys, values):
    """Causal attention of the last positions over all."""
    out = np.empty_like(queries)
    later = np.arange(len(keys)) > (np.arange(len(queries)) + len(keys) - len(queries))[:, None]
    for head in range(HEADS):
        part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
        scores = np.where(later, -np.inf, queries[:, part] @ keys[:, part].T)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out[:, part] = weights / weights.sum(1, keepdims=True) @ values[:, part]
    return out


def _attend_through(sequences: Sequences, queries, keys, values):
    out = np.full_like(queries, np.nan)
    for number, (start, count) in enumerate(zip(sequences.query_start, sequences.query_count, strict=True)):
        index = sequences.key_index[sequences.cu_keys[number] : sequences.cu_keys[number + 1]]
        out[start : start + count] = _attend(queries[start : start + count], keys[index], values[index])
    return out


DECODER = Decoder()

UNHURRIED = settings(deadline=None)

STEMS = [[(7 * a + 3 * i) % 5 for i in range(24)] for a in range(3)]
SHORT = st.lists(st.integers(0, 1), min_size=1, max_size=6)
BRANCHED = st.builds(
    lambda stem, length, tail: stem[:length] + tail,
    st.sampled_from(STEMS),
    st.sampled_from([0, 5, 12, 18, 23]),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
ROWS = st.lists(SHORT, min_size=1, max_size=20) | st.lists(BRANCHED | BRANCHED | SHORT, min_size=8, max_size=24)


@dataclass
class Given:
    rows: list
    budget: int
    threads: int
    share: bool
    min_shared: int
    max_kept: int

    def plan(self, kind):
        return plan(self.rows, kind, **{name: getattr(self, name) for name in list(vars(self))[1:]})


GIVEN = st.builds(
    Given,
    ROWS,
    budget=st.integers(1, 40),
    threads=st.sampled_from([1, 2, 4]),
    share=st.sampled_from([True, True, True, False]),
    min_shared=st.sampled_from([1, 4, 20]),
    max_kept=st.sampled_from([0, 7, 100]),
)


def plan(rows, kind="tokens", **options) -> PassPlan:
    options = {"budget": 256, "threads": 2, "share": True} | options
    cu_seqlens = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    return plan_pass(np.concatenate(rows).astype(np.int32), cu_seqlens, kind, **options)


def sizes(plan: PassPlan) -> list[int]:
    return [len(batch.input_ids) for batch in plan.micro_batches]


def random_rows(count, length, prefix=()):
    """Rows that share `prefix` and nothing more."""
    rows = np.random.default_rng(1).integers(0, 50_000, (count, length))
    rows[:, 0] = 1000 + np.arange(count)
    return [[*prefix, *row] for row in rows.tolist()]


@pytest.mark.parametrize("kind", KINDS)
@UNHURRIED
@given(case=GIVEN)
def test_a_decoder_that_runs_the_plan_gives_the_states_of_the_plain_decoder(kind, case):
    found = case.plan(kind)
    states = DECODER.states(found)
    states = states if found.output_index is None else states[found.output_index]
    plain = [DECODER.plain(row) for row in case.rows]
    place = {"last": -1, "first": 0}.get(kind)
    expected = np.concatenate(plain) if place is None else np.stack([row[place] for row in plain])
    assert states.shape == expected.shape
    assert np.abs(states - expected).max() < 1e-12


@UNHURRIED
@given(GIVEN, st.sampled_from(KINDS))
def test_no_token_is_computed_that_the_batch_does_not_hold(case, kind):
    found = case.plan(kind)
    kept = [] if found.kept is None else [found.kept]
    assert found.num_computed == sum(len(batch.input_ids) for batch in [*kept, *found.micro_batches])
    assert found.num_computed <= (len(case.rows) if kind == "first" else sum(map(len, case.rows)))


@UNHURRIED
@given(GIVEN, st.sampled_from(KINDS))
def test_outputs_of_the_micro_batches_lie_end_to_end_and_kept_ones_first(case, kind):
    found = case.plan(kind)
    kept = [] if found.kept is None else [found.kept]
    spans = [(b.first_output, b.first_output + b.num_outputs) for b in [*kept, *found.micro_batches]]
    ordered = sorted(spans)
    assert [start for start, _ in ordered] == [0, *(stop for _, stop in ordered[:-1])]
    assert ordered[-1][1] == found.num_outputs
    assert not kept or spans[0][0] == 0


@UNHURRIED
@given(GIVEN, st.sampled_from(KINDS))
def test_the_budget_is_kept_unless_a_sequence_alone_exceeds_it(case, kind):
    for batch in case.plan(kind).micro_batches:
        assert len(batch.input_ids) >= 1
        assert len(batch.input_ids) <= case.budget or len(batch.sequences.query_count) == 1


@UNHURRIED
@given(GIVEN, st.sampled_from(KINDS))
def test_no_more_tokens_are_kept_than_allowed(case, kind):
    found = case.plan(kind)
    assert found.kept is None or len(found.kept.input_ids) <= case.max_kept


@UNHURRIED
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 100), st.integers(1, 4))
def test_micro_batches_differ_by_a_sequence_at_most_and_the_largest_comes_first(lengths, budget, threads):
    found = sizes(plan([[0] * length for length in lengths], budget=budget, threads=threads, share=False))
    assert found == sorted(found, reverse=True)
    assert found[0] - found[-1] <= max(lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_without_sharing_states_come_out_in_the_order_of_the_batch(kind):
    rows = random_rows(50, 20)
    found = plan(rows, kind, share=False)
    assert found.kept is None and found.output_index is None
    assert found.num_outputs == (1000 if kind in ("tokens", "mean") else 50)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_share_nothing_keep_their_order_with_sharing_too(kind):
    rows = [[first, *row] for first, row in enumerate(random_rows(50, 20))][::-1]
    found = plan(rows, kind)
    assert found.kept is None and found.output_index is None
    starts = [int(batch.input_ids[0]) for batch in sorted(found.micro_batches, key=lambda batch: batch.first_output)]
    assert starts == sorted(starts, reverse=True)


@UNHURRIED
@given(GIVEN, st.sampled_from(KINDS))
def test_sharing_is_planned_only_where_it_saves_two_percent(case, kind):
    found = case.plan(kind)
    tokens = len(case.rows) if kind == "first" else sum(map(len, case.rows))
    if found.kept is not None or found.output_index is not None:
        assert case.share and found.num_computed <= 0.98 * tokens
    else:
        assert found.num_computed == tokens or kind == "last"


def test_one_duplicate_among_a_hundred_rows_is_not_worth_another_order():
    rows = random_rows(99, 20)
    assert plan([*rows, rows[0]]).num_computed == 2000
    assert plan([*rows[:96], *rows[:4]]).num_computed == 1920


@pytest.mark.parametrize("threads", [1, 2, 8, 60])
def test_a_prompt_of_all_rows_is_computed_once(threads):
    prompt = list(range(90))
    found = plan(random_rows(400, 38, prompt), threads=threads)
    assert found.kept.input_ids.tolist() == prompt
    assert found.num_computed == 90 + 400 * 38
    assert len(found.micro_batches) % threads == 0


def test_a_prompt_is_computed_by_each_of_a_few_threads_rather_than_awaited_by_many():
    found = plan(random_rows(60, 38, range(90)) + random_rows(60, 38, range(100, 190)), threads=8, budget=4096)
    assert found.kept is None
    assert len(found.micro_batches) == 8
    assert found.num_computed == 8 * 90 + 120 * 38


@pytest.mark.parametrize("kind", ["tokens", "last", "mean"])
def test_exact_duplicates_are_computed_once_however_short_they_are(kind):
    rows = random_rows(280, 5)
    found = plan([*rows, *rows[:120]], kind)
    assert found.num_computed == 280 * 5
    assert found.num_outputs == (280 if kind == "last" else 1400)


def test_rows_that_share_with_few_others_are_not_torn_apart():
    groups = [random_rows(4, 38, prompt) for prompt in random_rows(40, 90)]
    rows = [group[place] for place in range(4) for group in groups]
    found = plan(rows)
    assert found.kept is None
    assert sizes(found) == [90 + 4 * 38] * 40


def test_where_too_much_would_be_kept_the_prompts_of_fewest_rows_are_computed_again():
    many, few = [1] * 50, [2] * 50
    found = plan(random_rows(200, 20, many) + random_rows(100, 20, few), max_kept=60)
    assert found.kept.input_ids.tolist() == many + few[:10]


def test_only_first_tokens_are_computed_for_kind_first():
    rows = [[place % 3, *row] for place, row in enumerate(random_rows(50, 20))]
    assert plan(rows, "first", share=False).num_computed == 50
    found = plan(rows, "first")
    assert [batch.input_ids.tolist() for batch in found.micro_batches] == [[0, 1, 2]]
    assert found.output_index.tolist() == [place % 3 for place in range(50)]


def test_the_last_layer_runs_for_last_tokens_alone():
    found = plan(random_rows(50, 20), "last")
    assert sum(len(batch.wanted_sequences.query_count) for batch in found.micro_batches) == found.num_outputs == 50
    assert all(batch.positions[batch.wanted].tolist() == [19] * batch.num_outputs for batch in found.micro_batches)


def test_the_last_token_of_a_row_that_all_others_go_on_with_is_a_kept_output():
    prompt = list(range(90))
    found = plan([*random_rows(100, 38, prompt), prompt], "last")
    assert found.kept.wanted.tolist() == [89]
    assert found.output_index[100] == 0


def test_a_kept_prompt_that_is_no_row_gives_no_output():
    found = plan(random_rows(100, 38, range(90)), "last")
    assert found.kept.num_outputs == 0
    assert len(found.kept.wanted_sequences.query_count) == 0
    assert found.num_outputs == 100


def test_outputs_that_come_out_in_the_order_of_the_batch_need_no_index():
    rows = random_rows(100, 38, range(90))
    assert plan(rows, "last").output_index is None
    assert plan(rows[::-1], "last").output_index.tolist() == list(range(100))[::-1]


def test_too_few_tokens_are_not_spread_over_all_threads():
    assert sizes(plan(random_rows(20, 2), threads=8)) == [20, 20]
    assert sizes(plan(random_rows(3, 5), threads=8)) == [15]


def test_the_order_of_the_batch_does_not_change_what_is_computed():
    rows = random_rows(60, 10, range(30)) + random_rows(60, 12, range(20))
    first, second = plan(rows), plan(rows[::-1])
    assert [a.input_ids.tolist() for a in first.micro_batches] == [b.input_ids.tolist() for b in second.micro_batches]


def test_a_pass_without_sequences_has_no_micro_batches():
    none = np.zeros(0, np.int32)
    for share in (False, True):
        found = plan_pass(none, np.zeros(1, np.int32), "tokens", budget=8, threads=2, share=share)
        assert found.micro_batches == () and found.num_outputs == 0
