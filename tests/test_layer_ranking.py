"""`extract fidelity --rank-layers`: damage of single linears, the search for a set, rows that chose nothing."""

import json
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

import job_rig
import numpy as np
import pytest
import rig
from command_line import extract
from job_rig import Engines

from extract.cpu.architecture import read_architecture
from extract.cpu.linear_names import linear_names, linears_of
from extract.cpu.movable_runtime import MovableRuntime
from extract.engine.builder import build
from extract.engine.contract import read_contract
from extract.engine.device import computes_in, this_device
from extract.engine.recipe import load_recipe
from extract.engine.replay import states_of
from extract.engine.runtimes import load_runtime
from extract.fidelity_check import dealt_rows
from extract.fidelity_check.layer_ranking import rank_layers
from extract.fidelity_check.measure import ReferenceNotFinite, fidelity
from extract.fidelity_check.ranking_results import LayerRanking
from extract.fidelity_check.ranking_table import ranking_text
from extract.fidelity_check.results import Interval
from extract.fidelity_check.set_search import SetSearch
from extract.fidelity_check.set_trials import costs
from extract.sample import Passage
from extract.spec import SourceSpec
from extract.tuning.recipe_file import TuningExists

pytestmark = pytest.mark.skipif(
    not computes_in(this_device("cpu"), "bfloat16"), reason="no fast arithmetic for bfloat16 on this CPU"
)

ROWS = 48
PASSAGES = [Passage("", "", text) for text in job_rig.texts(2 * ROWS)]


@pytest.fixture(scope="module", autouse=True)
def quick_passages() -> Iterator[None]:
    """Passages that are there in an instant: to parse the whole standard library takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("extract.fidelity_check.rows.spread", lambda count: PASSAGES[:count])
        yield


# --- the search, over divergences that are known --------------------------------------------------------------------


class Divergences:
    """What a set diverges by: its own harm and that of pairs, whose sum may be less or more than its parts."""

    def __init__(self, harm: dict[str, float], pairs: dict[frozenset[str], float] | None = None) -> None:
        self.harm, self.pairs = harm, pairs or {}
        self.measured: list[frozenset[str]] = []

    def __call__(self, chosen: AbstractSet[str]) -> Interval:
        self.measured.append(frozenset(chosen))
        left = self.harm.keys() - chosen
        mean = sum(self.harm[name] for name in left)
        mean += sum(size for pair, size in self.pairs.items() if pair <= left)
        return Interval(mean=mean, low=mean, high=mean)


HARM = {f"{layer}.{linear}": float(2**layer) for layer in range(6) for linear in ("o", "down")}
EVEN = dict.fromkeys(HARM, 1 / len(HARM))


class TestSearch:
    @pytest.mark.parametrize("target", [125, 60, 20, 3, 0])
    def test_it_ends_at_or_below_the_target_with_the_worst_linears(self, target):
        search = SetSearch(Divergences(HARM), HARM, EVEN)
        assert search.forward(target)
        search.prune(target)
        assert search.kl.mean <= target
        assert search.kl.mean == sum(HARM[name] for name in HARM.keys() - search.chosen)
        left = [HARM[name] for name in HARM.keys() - search.chosen]
        assert max(left, default=0) <= min((HARM[name] for name in search.chosen), default=np.inf)

    def test_a_target_that_int8_meets_needs_nothing(self):
        search = SetSearch(Divergences(HARM), HARM, EVEN)
        assert search.forward(126)
        search.prune(126)
        assert (search.chosen, [step.change for step in search.path]) == (frozenset(), ["start"])

    def test_a_target_below_all_of_them_is_not_reached(self):
        floor = Divergences({**HARM, "floor": 1.0})
        search = SetSearch(floor, HARM, EVEN)
        assert not search.forward(0.5)
        assert search.chosen == HARM.keys()

    def test_sets_are_measured_few_times_though_linears_are_many(self):
        harm = {f"{number}.down": 1 + number / 1000 for number in range(400)}
        measure = Divergences(harm)
        search = SetSearch(measure, harm, dict.fromkeys(harm, 1 / 400))
        assert search.forward(100)
        assert len(measure.measured) < 14
        worst = np.cumsum(sorted(harm.values(), reverse=True))
        assert len(search.chosen) <= np.searchsorted(worst, sum(harm.values()) - 100) + 2

    def test_a_linear_whose_error_another_cancels_is_put_in_only_where_the_set_gains(self):
        """Alone each of a pair does harm; together they do none. No sum of single ones knows that."""
        pair = frozenset({"5.o", "5.down"})
        measure = Divergences(HARM, {pair: -64.0})
        search = SetSearch(measure, HARM, EVEN)
        assert search.forward(30)
        search.prune(30)
        assert search.kl.mean <= 30
        assert search.kl.mean == measure(search.chosen).mean

    def test_what_costs_little_comes_first(self):
        harm, cost = {"0.gate_up": 2.0, "0.o": 1.5}, {"0.gate_up": 0.8, "0.o": 0.2}
        search = SetSearch(Divergences(harm), harm, cost)
        search.forward(2.1)
        assert search.chosen == {"0.o"}

    def test_what_turns_out_not_to_be_needed_is_taken_out(self):
        """Alone the first does most harm, beside the second hardly any: it is put in first, and out in the end."""
        search = SetSearch(Divergences({"0.o": 1.0, "1.o": 8.0}), {"0.o": 5.0, "1.o": 4.0}, {"0.o": 0.5, "1.o": 0.5})
        assert search.forward(2)
        assert search.chosen == {"0.o", "1.o"}
        search.prune(2)
        assert (search.chosen, search.kl.mean) == ({"1.o"}, 1)
        assert [step.kept for step in search.path] == [True, True, True, False, True]

    def test_the_path_holds_every_set_that_was_tried_and_none_is_measured_twice(self):
        measure, seen = Divergences(HARM), []
        search = SetSearch(measure, HARM, EVEN, seen.append)
        search.forward(20)
        search.prune(20)
        assert search.path == seen
        assert len(measure.measured) == len(set(measure.measured)) < len(seen)
        assert {step.num_linears for step in seen} == {len(chosen) for chosen in measure.measured}
        assert all(step.cost == pytest.approx(step.num_linears / len(HARM)) for step in seen)
        assert all(step.kept == (step.change != "drop" or step.kl.mean <= 20) for step in seen)


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranking(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> LayerRanking:
    """The tiny Llama, with a budget halfway between int8 and bfloat16."""
    engine, checkpoint = engines.engine("llama"), engines.checkpoint("llama")
    ends = rank_layers(engine, checkpoint, rows=ROWS, threads=1)
    assert ends.chosen is None and ends.path == () and [one.name for one in ends.confirmed] == ["int8", "bfloat16"]
    int8, bfloat16 = (one.kl.mean for one in ends.confirmed if one.kl is not None)
    assert int8 > 2 * bfloat16
    path = tmp_path_factory.mktemp("recipes") / "mixed.toml"
    return rank_layers(engine, checkpoint, rows=ROWS, threads=1, kl_budget=(int8 + bfloat16) / 2, recipe=path)


class Numbered:
    """A reference whose states are the row's number."""

    name, dtype, head = "numbered", "float32", None

    def states(self, input_ids: list[int]) -> np.ndarray:
        return np.full((len(input_ids), 4), input_ids[0], np.float32)


class TestDeal:
    def test_each_row_with_its_states_has_one_part_and_few_rank(self):
        ids = [[number] * 40 for number in range(800)]
        parts = dealt_rows.deal(Numbered(), ids, 0, 2**20, lambda message: None)
        numbers = []
        for part in (parts.rank, parts.search, parts.held):
            assert all((states == ids[0]).all() for ids, states in zip(part.ids, part.expected, strict=True))
            numbers.append([ids[0] for ids in part.ids])
        assert [len(part) for part in numbers] == [-(-dealt_rows.RANK_TOKENS // 40), 300, 400]
        assert len({*numbers[0], *numbers[1], *numbers[2]}) == sum(map(len, numbers))

    def test_a_reference_that_is_not_finite_is_refused_with_its_row(self):
        ids = [[0], [1], [np.inf], *([[3]] * 6)]
        with pytest.raises(ReferenceNotFinite, match="states of compared row 2 are not finite"):
            dealt_rows.deal(Numbered(), ids, 0, 2**20, lambda message: None)


class TestRanking:
    def test_the_damage_of_a_linear_is_that_of_a_decoder_with_that_one_in_int8(self, engines: Engines, ranking):
        engine = engines.engine("llama")
        runtime = MovableRuntime(engine, read_contract(engine), rest="float32", moved="int8", threads=1)
        own = read_contract(engine)
        names = {one.name for one in ranking.linears}
        assert names == set(linear_names(own.checkpoint.num_layers))
        assert {one.name for one in ranking.layers} == set(map(str, range(own.checkpoint.num_layers)))
        known = {one.name: one for one in (*ranking.linears, *ranking.layers)}
        rows = [PASSAGES[place].text for place in range(0, ROWS, sum(dealt_rows.DEAL))]
        ids = job_rig.ids_of(engines.checkpoint("llama"), rows)
        expected = job_rig.reference(engines.checkpoint("llama"), ids)
        for name in ("0.qkv", "1.down", "1"):
            runtime.move(linears_of([name], own.checkpoint.num_layers))
            errors = []
            for one, other in zip(states_of(runtime, ids), expected, strict=True):
                errors.append(np.linalg.norm(one - other, axis=1) / np.linalg.norm(other, axis=1))
            assert known[name].rel_error.mean == pytest.approx(np.concatenate(errors).mean(), rel=1e-3)
            assert known[name].kl.mean > 0
        runtime.close()

    def test_costs_are_parts_of_all_multiplications(self, engines: Engines, ranking):
        assert sum(one.cost for one in ranking.linears) == pytest.approx(1)
        assert sum(one.cost for one in ranking.layers) == pytest.approx(1)
        a = read_architecture(engines.engine("llama"))
        cost = costs(a)
        assert cost["0.gate_up"] / cost["1.o"] == 2 * a.intermediate_size / a.query_width

    def test_no_row_has_two_parts(self, ranking):
        assert (ranking.rank_rows, ranking.search_rows, ranking.held_rows) == (6, 18, 24)

    def test_the_rows_that_confirm_decide(self, ranking):
        int8, chosen, bfloat16 = ranking.confirmed
        assert (int8.name, chosen.name, bfloat16.name) == ("int8", "chosen", "bfloat16")
        assert bfloat16.kl.mean < chosen.kl.mean <= ranking.kl_budget < int8.kl.mean
        assert 0 < chosen.cost < 1
        assert int8.num_linears == 0
        assert ranking.chosen

    def test_the_recipe_builds_the_engine_that_was_measured(self, engines: Engines, ranking, tmp_path):
        """Bit for bit: its divergence on the rows that confirmed is what the ranking says."""
        checkpoint = engines.checkpoint("llama")
        recipe = load_recipe(Path(ranking.recipe))
        assert recipe.high_precision == ranking.chosen
        contract = build(checkpoint, tmp_path / "engine", recipe)
        assert contract.limits.max_input_tokens == job_rig.LIMIT
        held = [text for place, text in enumerate(p.text for p in PASSAGES[:ROWS]) if place % 8 >= 4]
        source = job_rig.parquet(tmp_path / "held.parquet", {"text": held})
        runtime = load_runtime(tmp_path / "engine", threads=1)
        report = fidelity(
            tmp_path / "engine", checkpoint, source=SourceSpec(path=str(source)), rows=len(held), runtime=runtime
        )
        runtime.close()
        assert report.kl is not None
        assert report.precision.startswith("int8 (")
        if ranking.arithmetic == "native":
            assert report.kl.mean == ranking.confirmed[1].kl
        else:
            assert report.kl.mean.mean == pytest.approx(ranking.confirmed[1].kl.mean, rel=0.05)

    def test_the_recipe_says_what_was_measured(self, ranking):
        text = Path(ranking.recipe).read_text()
        assert text.startswith("# Written by extract fidelity. Build with it: extract build CHECKPOINT -o ENGINE")
        assert f"{ranking.confirmed[1].kl.mean:.2e}" in load_recipe(Path(ranking.recipe)).description
        for step in ranking.path:
            assert f"# {step.num_linears:>4} linears" in text

    def test_it_reads_within_a_hundred_columns(self, ranking):
        lines = ranking_text(ranking).splitlines()
        assert max(len(line) for line in lines if not line.startswith(("engine", "recipe", "chosen"))) <= 100
        assert any(line.startswith("chosen, mixed") for line in lines)


class TestHeldRows:
    def test_where_they_do_not_confirm_the_search_goes_on(self, engines: Engines, ranking, monkeypatch):
        """Rows that search flatter: the first set that satisfies them is not enough."""
        from extract.fidelity_check import budget

        searched = budget.SetSearch

        def flattered(measure, damage, cost, note):
            def less(chosen):
                seen = measure(chosen)
                return Interval(mean=seen.mean / 3, low=seen.low / 3, high=seen.high / 3)

            return searched(less, damage, cost, note)

        monkeypatch.setattr(budget, "SetSearch", flattered)
        engine, checkpoint = engines.engine("llama"), engines.checkpoint("llama")
        found = rank_layers(engine, checkpoint, rows=ROWS, threads=1, kl_budget=ranking.kl_budget)
        assert found.looks > 1
        assert [step.change for step in found.path][:2] == ["start", "add"]
        assert found.chosen is None or found.confirmed[1].kl.mean <= ranking.kl_budget


class TestCommand:
    def test_a_table_or_json_and_the_steps_on_stderr(self, engines: Engines, ranking, capsys, tmp_path):
        arguments = ("fidelity", engines.engine("llama"), "--reference", engines.checkpoint("llama"), "--rows", ROWS)
        path = tmp_path / "mixed.toml"
        budget = ("--rank-layers", "--kl-budget", ranking.kl_budget, "--threads", 1, "-o", path)
        shown = extract(capsys, *arguments, *budget)
        assert shown.code == 0
        assert "rows that confirm" in shown.out
        assert "linears to keep in bfloat16" in shown.err
        assert load_recipe(path).high_precision == ranking.chosen
        again = json.loads(extract(capsys, *arguments, *budget, "--json", "--quiet").out)
        assert again["chosen"] == list(ranking.chosen)
        assert [step["kl"]["mean"] for step in again["path"]] == [step.kl.mean for step in ranking.path]

    def test_a_budget_below_bfloat16_ends_with_7_and_no_recipe(self, engines: Engines, capsys, tmp_path):
        path = tmp_path / "mixed.toml"
        ended = extract(
            capsys,
            *("fidelity", engines.engine("llama"), "--reference", engines.checkpoint("llama"), "--rows", 16),
            *("--rank-layers", "--kl-budget", 1e-9, "--threads", 1, "-o", path, "--quiet"),
        )
        assert ended.code == 7
        assert "with all linears in bfloat16 the mean KL of the next token is" in ended.err
        assert not path.exists()

    @pytest.mark.parametrize(
        "options",
        [
            ("--kl-budget", "0.1"),
            ("-o", "mixed.toml"),
            ("--rank-layers", "-o", "mixed.toml"),
            ("--rank-layers", "--max-kl", "1"),
            ("--rank-layers", "--write"),
        ],
    )
    def test_options_that_do_not_belong_together_are_a_mistake(self, capsys, options):
        ended = extract(capsys, "fidelity", "engine", "--reference", "checkpoint", *options)
        assert ended.code == 2
        assert "--rank-layers" in ended.err or "--kl-budget" in ended.err

    def test_a_recipe_that_somebody_made_is_not_replaced(self, engines: Engines, tmp_path):
        path = tmp_path / "mine.toml"
        path.write_text('dtype = "int8"\n')
        with pytest.raises(TuningExists, match="`extract fidelity` did not write it"):
            rank_layers(engines.engine("llama"), engines.checkpoint("llama"), rows=16, kl_budget=1.0, recipe=path)

    def test_an_engine_of_transformers_is_refused(self, engines: Engines, capsys):
        ended = extract(
            capsys,
            *("fidelity", engines.engine("llama", "transformers"), "--reference", engines.checkpoint("llama")),
            "--rank-layers",
        )
        assert ended.code == 4
        assert "it runs with transformers' own model; only our own decoder (on a CPU) has int8" in ended.err

    def test_too_few_rows_are_refused(self, engines: Engines, capsys):
        ended = extract(
            capsys,
            *("fidelity", engines.engine("llama"), "--reference", engines.checkpoint("llama"), "--rows", 5),
            "--rank-layers",
        )
        assert ended.code == 2
        assert "5 rows with tokens found, 8 or more expected" in ended.err

    def test_without_a_head_linears_are_ranked_by_states_and_a_budget_is_refused(
        self, engines: Engines, capsys, tmp_path
    ):
        from transformers import AutoModel

        base = tmp_path / "base"
        AutoModel.from_pretrained(engines.checkpoint("llama")).save_pretrained(base)
        rig.tiny_tokenizer().save_pretrained(base)
        arguments = ("fidelity", engines.engine("llama"), "--reference", base, "--rows", 16, "--rank-layers", "--quiet")
        shown = extract(capsys, *arguments, "--threads", 1)
        assert shown.code == 0
        assert "rel error" in shown.out
        assert "no head    only states are compared" in shown.out
        ended = extract(capsys, *arguments, "--kl-budget", "1")
        assert ended.code == 2
        assert "--kl-budget cannot be checked: the checkpoint holds no lm_head.weight" in ended.err
