"""A sweep stops where throughput does, survives what memory refuses, chooses nothing less exact, and can be built."""

import dataclasses
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import rig
from command_line import extract

from extract.cpu.runtime import CpuRuntime
from extract.engine.builder import build
from extract.engine.contract import PassOutOfMemory
from extract.engine.device import computes_in, this_device
from extract.engine.recipe import Recipe, load_recipe
from extract.tuning import growth, trials
from extract.tuning.growth import REPEATS, Curve, Run, grow, has_peaked
from extract.tuning.plot import NoPictureFormat, draw
from extract.tuning.recipe_file import TuningExists, check_replaceable, write_recipe
from extract.tuning.results import Difference, Point, Tuning, Unmeasured
from extract.tuning.search import (
    BadThreads,
    NoPassFits,
    NoSuchPrecision,
    NothingMeasured,
    NothingToChoose,
    own_precision,
    tune,
)
from extract.tuning.sweep import choose
from extract.tuning.table import tuning_text
from extract.tuning.workload import workload

BUDGETS = [64, 128, 256, 512, 1024, 2048, 4096]


# --- the stop rule, on injected measurements ------------------------------------------------------------------------


def measured(rates: dict[int, float | list[float]], calls: list[int] | None = None) -> Callable[[int], Run]:
    """Runs of one second; a list gives its values in turn, `inf` is a lack of memory."""
    left = {budget: list(rate) if isinstance(rate, list) else None for budget, rate in rates.items()}

    def run(budget: int) -> Run:
        if calls is not None:
            calls.append(budget)
        turn = left[budget]
        rate = rates[budget] if turn is None else turn.pop(0)
        assert isinstance(rate, (int, float))
        if rate == np.inf:
            raise PassOutOfMemory(tokens="1", sequences="1", device="cpu")
        return Run(int(rate), 1.0)

    return run


def grown(rates: dict[int, float | list[float]], affords: Callable[[float], bool] = lambda seconds: True) -> Curve:
    return grow(BUDGETS, measured(rates), affords)


def test_a_curve_ends_after_two_doublings_that_bring_less_than_two_percent():
    curve = grown({64: 1000, 128: 2000, 256: 3000, 512: 3050, 1024: 3055})
    assert (list(curve.runs), curve.ended) == ([64, 128, 256, 512, 1024], "peak")


def test_one_doubling_without_a_gain_is_not_the_end():
    curve = grown({64: 1000, 128: 1000, 256: 1500, 512: 1500, 1024: 1500})
    assert list(curve.runs) == [64, 128, 256, 512, 1024]


def test_gains_too_small_to_count_add_up():
    assert not has_peaked([1000, 1015, 1021])
    assert has_peaked([1000, 1015, 1019])


def test_a_curve_that_keeps_growing_ends_with_the_last_budget():
    curve = grown({budget: budget for budget in BUDGETS})
    assert (list(curve.runs), curve.ended) == (BUDGETS, "limit")


def test_every_budget_gets_its_repeats_round_by_round():
    calls: list[int] = []
    grow(BUDGETS, measured({64: 100, 128: 90, 256: 80}, calls), lambda seconds: True)
    assert calls == [64, 128, 256] * REPEATS


def test_a_slow_moment_at_first_does_not_hide_a_curve_that_still_grows():
    """The medians, not the first runs, say whether there is a peak."""
    curve = grown({64: 1000, 128: [500, 2000, 2000], 256: [500, 3000, 3000], 512: 3000, 1024: 3000})
    assert list(curve.runs) == [64, 128, 256, 512, 1024]
    assert curve.medians() == [1000, 2000, 3000, 3000, 3000]


@pytest.mark.parametrize("error", [PassOutOfMemory(tokens="1", sequences="1", device="cpu"), MemoryError()])
def test_a_budget_that_memory_refuses_ends_the_curve_and_is_remembered(error):
    def run(budget: int) -> Run:
        if budget == 512:
            raise error
        return Run(budget, 1.0)

    curve = grow(BUDGETS, run, lambda seconds: True)
    assert (list(curve.runs), curve.refused, curve.ended) == ([64, 128, 256], 512, "memory")
    assert all(len(runs) == REPEATS for runs in curve.runs.values())


def test_a_budget_that_memory_refuses_in_a_later_round_counts_as_refused():
    curve = grown({64: 1000, 128: [2000, np.inf], 256: 2000, 512: 2000})
    assert (list(curve.runs), curve.refused) == ([64], 128)
    assert len(curve.runs[64]) == REPEATS


def test_a_curve_that_time_ends_names_the_next_budget_and_finishes_the_runs_of_the_others():
    def affords(seconds: float) -> bool:
        return seconds < 12  # another budget costs (1 + 3) runs of at most 2 s, and what others lack

    curve = grown({budget: budget for budget in BUDGETS}, affords)
    assert (list(curve.runs), curve.next_budget, curve.ended) == ([64, 128], 256, "time")
    assert all(len(runs) == REPEATS for runs in curve.runs.values())


def test_the_first_budget_is_run_however_short_time_is():
    curve = grown({64: 1}, lambda seconds: False)
    assert (list(curve.runs), curve.next_budget) == ([64], 128)


# --- what is chosen -------------------------------------------------------------------------------------------------


def point(precision: str = "float32", budget: int = 64, rate: float | None = 1000.0, **changes: Any) -> Point:
    standard: dict[str, Any] = {
        "threads": 2,
        "slowest": rate,
        "fastest": rate,
        "spread": None if rate is None else 0.0,
        "runs": 0 if rate is None else 3,
        "memory_bytes": 123_000_000,
        "difference": Difference(rel_error=0.01, kl=None, top1=None),
    }
    return Point(precision=precision, budget=budget, tokens_per_s=rate, **{**standard, **changes})


def test_the_fastest_point_of_the_precisions_that_may_be_chosen_is():
    points = [point(rate=1000), point("bfloat16", rate=3000), point("int8", rate=9000)]
    assert choose(points, ["float32", "bfloat16"]) == points[1]
    assert choose(points, ["float32"]) == points[0]
    assert choose(points, ["float32", "int8"]) == points[2]


def test_a_smaller_budget_of_the_same_curve_is_taken_if_it_is_as_fast_but_for_noise():
    points = [point(budget=64, rate=900), point(budget=128, rate=990), point(budget=256, rate=1000)]
    other = point(budget=64, rate=995, threads=1)
    assert choose([other, *points], ["float32"]) == points[1]


def test_a_point_that_memory_refused_is_not_chosen():
    assert choose([point(rate=None), point("int8")], ["float32"]) is None


# --- real sweeps of tiny checkpoints --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "RUN_S", 0.005)
        patch.setattr(trials, "MAX_TOKENS", 1024)
        yield


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its head is its embedding."""
    return rig.tiny_checkpoint(tmp_path_factory.mktemp("tied"), "llama", tied=True)


@pytest.fixture(scope="module")
def found(tied: Path, short_runs: None) -> Tuning:
    steps: list[str] = []
    precisions = ("int8", "float32")
    tuning = tune(tied, precisions=precisions, threads=(1, 2), max_input_tokens=32, device="cpu", say=steps.append)
    assert sum(step.startswith("loading") for step in steps) == 1  # one build for all precisions
    assert sum(step.startswith("int8, 1 thread (tokens: tokens/s)  ") for step in steps) == 1
    return tuning


def quick(checkpoint: Path, **options: Any) -> Tuning:
    """One short curve."""
    return tune(
        checkpoint, **{"precisions": ("float32",), "threads": (1,), "max_input_tokens": 16, "device": "cpu", **options}
    )


def test_every_precision_and_number_of_threads_has_its_points(found):
    curves = {(point.precision, point.threads) for point in found.points}
    assert curves == {("float32", 1), ("float32", 2), ("int8", 1), ("int8", 2)}
    assert found.unmeasured == ()
    assert len({(point.precision, point.threads, point.budget) for point in found.points}) == len(found.points)
    for point in found.points:
        assert point.runs == REPEATS
        assert 0 < point.slowest <= point.tokens_per_s <= point.fastest
        assert point.spread == pytest.approx((point.fastest - point.slowest) / point.tokens_per_s, abs=1e-3)
        assert point.memory_bytes is None or 0 <= point.memory_bytes < 2**30
    assert (found.decoder, found.budget_is) == ("own", "tokens per micro-batch")
    assert 1 < found.mean_tokens <= 32


def test_differences_are_those_that_a_build_measures(found, tied, tmp_path):
    seen = {point.precision: point.difference for point in found.points}
    assert seen["float32"].rel_error < 1e-5
    assert seen["float32"].top1 == 1
    contract = build(tied, tmp_path / "engine", Recipe(dtype="int8", device="cpu", max_input_tokens=32))
    # The build compares with the plain model, the sweep with our own decoder in float32: they are alike to 1e-5.
    assert seen["int8"].rel_error == pytest.approx(contract.fidelity.rel_error_max, rel=0.01)
    assert seen["int8"].kl == pytest.approx(contract.fidelity.kl_mean, rel=0.01)
    assert seen["int8"].top1 == pytest.approx(contract.fidelity.top1, abs=0.01)


def test_the_recipe_builds_an_engine_that_runs_as_the_chosen_point_did(found, tied, tmp_path):
    write_recipe(tmp_path / "tuned.toml", found.recipe, tuning_text(found))
    recipe = load_recipe(tmp_path / "tuned.toml")
    assert recipe == found.recipe
    contract = build(tied, tmp_path / "engine", recipe)
    assert (contract.runtime.decoder, contract.precision.activations) == ("own", "float32")
    assert (contract.runtime.micro_batch, contract.runtime.threads) == (found.chosen.budget, found.chosen.threads)
    assert contract.limits.max_input_tokens == 32
    assert contract.limits.max_tokens >= found.chosen.budget * found.chosen.threads
    for fact in (found.date, found.device, f"{found.chosen.tokens_per_s:,.0f} tokens/s", tied.name):
        assert fact in recipe.description


def test_int8_is_chosen_only_where_it_is_allowed(found, tied, short_runs):
    assert found.chosen.precision == "float32"
    allowed = quick(tied, precisions=("int8",), allow_int8=True, seconds=0)
    assert (allowed.chosen.precision, allowed.recipe.dtype) == ("int8", "int8")
    with pytest.raises(NothingToChoose) as caught:
        quick(tied, precisions=("int8",))
    assert str(caught.value) == (
        "precisions: of int8, none may be chosen for a checkpoint in float32. "
        "Add float32, or allow int8 (--allow-int8)."
    )


def test_where_time_is_short_one_point_is_measured_and_the_others_are_named(tied, short_runs):
    tuning = quick(tied, precisions=("float32", "int8"), threads=(1, 2), seconds=0)
    assert [(one.precision, one.threads, one.budget) for one in tuning.points] == [("float32", 2, 64)]
    assert [(one.precision, one.threads, one.from_budget) for one in tuning.unmeasured] == [
        ("float32", 2, 128),
        ("int8", 2, None),
        ("float32", 1, None),
        ("int8", 1, None),
    ]
    assert "unmeasured int8, 1 thread: time did not suffice" in tuning_text(tuning)


def test_a_lack_of_memory_is_a_row_of_the_table(tied, short_runs, monkeypatch):
    refuse_from(monkeypatch, 512)
    monkeypatch.setattr(growth, "PATIENCE", 100)
    tuning = quick(tied)
    assert [one.budget for one in tuning.points] == [64, 128, 256, 512]
    assert [one.tokens_per_s is None for one in tuning.points] == [False, False, False, True]
    assert tuning.chosen.budget < 512
    line = next(line for line in tuning_text(tuning).splitlines() if " 512 " in line)
    assert line.split()[:3] == ["float32", "1", "512"]
    assert "out of memory" in line


def test_no_pass_that_fits_is_an_error(tied, short_runs, monkeypatch):
    def run(self: Any, budget: int) -> Run:
        raise MemoryError

    monkeypatch.setattr(trials.Trial, "run", run)
    with pytest.raises(
        NoPassFits, match=r"passes of 64 tokens do not fit in the memory of .*\. Use a larger machine\."
    ):
        quick(tied)


def refuse_from(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """Micro-batches from this size up do not fit in memory."""
    real = CpuRuntime.hidden_states

    def hidden_states(self: CpuRuntime, *arguments: Any) -> Any:
        if (self.contract.runtime.micro_batch or 0) >= budget:
            raise PassOutOfMemory(tokens="1", sequences="1", device="cpu")
        return real(self, *arguments)

    monkeypatch.setattr(CpuRuntime, "hidden_states", hidden_states)


def test_a_family_that_our_decoder_does_not_know_is_tuned_by_tokens_per_pass(gpt2_checkpoint, short_runs, tmp_path):
    tuning = quick(gpt2_checkpoint, precisions=("float32", "int8"), seconds=60)
    assert (tuning.decoder, tuning.budget_is) == ("transformers", "tokens per pass")
    assert tuning.points[0].budget == 256
    assert [one.precision for one in tuning.unmeasured if one.from_budget is None] == ["int8"]
    assert "our own decoder" in next(one.reason for one in tuning.unmeasured if one.precision == "int8")
    assert tuning.recipe.micro_batch is None
    assert tuning.recipe.max_tokens == tuning.chosen.budget
    contract = build(gpt2_checkpoint, tmp_path / "engine", tuning.recipe)
    assert (contract.runtime.decoder, contract.limits.max_tokens) == ("transformers", tuning.chosen.budget)


def test_what_cannot_be_built_in_any_precision_is_an_error_with_its_reason(gpt2_checkpoint, short_runs):
    with pytest.raises(NothingMeasured, match="nothing could be measured in int8: recipe: it asks for our own decoder"):
        quick(gpt2_checkpoint, precisions=("int8",), allow_int8=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_own_precision_is_the_one_that_a_build_takes_by_itself(dtype, tmp_path):
    checkpoint = rig.tiny_checkpoint(tmp_path / "checkpoint", dtype=dtype)
    contract = build(checkpoint, tmp_path / "engine", Recipe(device="cpu", max_input_tokens=8))
    assert own_precision(this_device("cpu"), dtype) == contract.precision.activations


def test_what_no_device_computes_in_is_refused_by_name(tied):
    with pytest.raises(NoSuchPrecision) as caught:
        quick(tied, precisions=("float32", "float8"))
    offered = [name for name in ("float32", "bfloat16", "float16", "int8") if computes_in(this_device("cpu"), name)]
    assert str(caught.value) == f"precisions: 'float8' is not what this cpu computes in ({', '.join(offered)})."


def test_no_threads_are_refused(tied):
    with pytest.raises(BadThreads, match="threads: 0 is no number of threads"):
        quick(tied, threads=(2, 0))


def test_rows_are_passages_in_any_number_of_tokens():
    work = workload(rig.tiny_tokenizer(), 32, rig.VOCAB_SIZE)
    whole = len(work.input_ids)
    for asked in (1, 100, whole, 3 * whole + 5):
        rows = work.rows(asked)
        assert asked - 32 < rows.offsets[-1] <= max(asked, 32)
        assert len(rows.input_ids) == rows.offsets[-1]
        assert rows.num_tokens.max() <= 32
    again = work.rows(2 * whole)
    assert np.array_equal(again.input_ids[:whole], again.input_ids[whole:])


# --- the files ------------------------------------------------------------------------------------------------------

DRAWN = Tuning(
    checkpoint="Model-1B",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    device="A CPU & more",
    decoder="own",
    arithmetic="native",
    budget_is="tokens per micro-batch",
    mean_tokens=40.5,
    date="2026-01-02",
    seconds=99.0,
    points=(
        point("bfloat16", 64, 2000.0, slowest=1500.0, fastest=2100.0, spread=0.3),
        point("bfloat16", 128, 3000.0, difference=Difference(rel_error=0.03, kl=0.001, top1=0.995)),
        point("bfloat16", 256, None, memory_bytes=None),
        point("float32", 64, 1000.0, threads=1, difference=None),
        point("int8", 64, 9000.0),
    ),
    unmeasured=(Unmeasured(precision="int8", threads=1, from_budget=128, reason="time did not suffice"),),
    chosen=point("bfloat16", 128, 3000.0, difference=Difference(rel_error=0.03, kl=0.001, top1=0.995)),
    recipe=Recipe(device="cpu", dtype="bfloat16", micro_batch=128, threads=2, description='a "quoted" name\x7f'),
)


def test_an_svg_holds_its_labels_as_text(tmp_path):
    draw(DRAWN, tmp_path / "curves.svg")
    root = ElementTree.parse(tmp_path / "curves.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {"".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {
        "Model-1B on A CPU & more",
        "token budget (tokens per micro-batch)",
        "throughput (tokens/s, median and range)",
        "bfloat16, 2 threads",
        "float32, 1 thread",
        "int8, 2 threads",
        "out of memory",
        "64",
        "128",
        "256",
    } <= texts
    assert any("ring: chosen, 128 tokens per micro-batch, bfloat16, 2 threads" in text for text in texts)


def test_a_png_is_one(tmp_path):
    draw(DRAWN, tmp_path / "curves.PNG")
    content = (tmp_path / "curves.PNG").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (1200, 720)


def test_other_pictures_are_refused(tmp_path):
    with pytest.raises(NoPictureFormat, match=r"curves\.pdf: pictures are \.svg or \.png\."):
        draw(DRAWN, tmp_path / "curves.pdf")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_on_a_card_is_drawn_without_threads(tmp_path):
    points = tuple(dataclasses.replace(one, threads=None) for one in DRAWN.points)
    card = dataclasses.replace(
        DRAWN, points=points, unmeasured=(), chosen=points[1], decoder="transformers", arithmetic="torch"
    )
    draw(card, tmp_path / "curves.svg")
    assert "thread" not in (tmp_path / "curves.svg").read_text()
    assert [line.split()[1] for line in tuning_text(card).splitlines()[6:11]] == ["-", "bfloat16", "-", "-", "-"]


@pytest.mark.parametrize("name", ["curves.svg", "curves.png", "tuned.toml"])
def test_what_a_sweep_wrote_may_be_replaced_and_nothing_else(name, tmp_path):
    path = tmp_path / name
    check_replaceable(path, "-o")
    if name == "tuned.toml":
        write_recipe(path, DRAWN.recipe, "a table")
    else:
        draw(DRAWN, path)
    check_replaceable(path, "-o")
    path.write_text('dtype = "float32"\n')
    with pytest.raises(TuningExists) as caught:
        check_replaceable(path, "-o")
    assert str(caught.value) == (
        f"{path}: exists already, and `extract tune` did not write it. Choose another file with -o."
    )


def test_a_recipe_keeps_any_description_and_the_table_as_a_comment(tmp_path):
    write_recipe(tmp_path / "new" / "tuned.toml", DRAWN.recipe, "a table\n\n* of rows")
    assert load_recipe(tmp_path / "new" / "tuned.toml") == DRAWN.recipe
    assert (tmp_path / "new" / "tuned.toml").read_text().endswith("\n\n# a table\n#\n# * of rows\n")


def test_the_table_marks_what_was_chosen_and_what_is_noise_and_shows_the_faster_but_less_exact():
    lines = tuning_text(DRAWN).splitlines()
    assert lines[5].split() == [
        "precision",
        "threads",
        "budget",
        "tokens/s",
        "range",
        "memory",
        "rel",
        "error",
        "KL",
        "top-1",
    ]
    assert lines[6].split() == ["bfloat16", "2", "64", "2,000", "1,500-2,100", "!", "123", "MB", "1.0e-02", "-", "-"]
    assert lines[7].split()[:5] == ["*", "bfloat16", "2", "128", "3,000"]
    assert lines[7].split()[-3:] == ["3.0e-02", "1.0e-03", "99.5%"]
    assert lines[9].split()[-3:] == ["-", "-", "-"]
    assert lines[12:] == [
        "!          runs differ by more than 15%: something else ran on this machine",
        "unmeasured int8, 1 thread, budgets from 128 up: time did not suffice",
        "chosen     bfloat16, 2 threads, 128 tokens per micro-batch: 3,000 tokens/s",
        "           int8, 2 threads gives 9,000 tokens/s and is less exact; choose it yourself (--allow-int8)",
    ]


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_recipe_and_picture_and_prints_the_table(tied, short_runs, tmp_path, capsys):
    recipe, words = tmp_path / "tuned.toml", ["--precisions", "float32", "--threads", "1,2", "--seconds", "0"]
    ended = extract(capsys, "tune", tied, "-o", recipe, "--max-input-tokens", "16", *words)
    assert ended.code == 0
    assert "float32, 2 threads (tokens: tokens/s)  64: " in ended.err
    assert load_recipe(recipe).micro_batch == 64
    assert "bfloat16" not in ended.out
    assert ended.out.splitlines()[-2:] == [
        f"written    {recipe}, {tmp_path / 'tuned.svg'}",
        f"next       extract build {tied} -o ENGINE --recipe {recipe}",
    ]
    assert "float32, 2 threads" in (tmp_path / "tuned.svg").read_text()
    ended = extract(capsys, "tune", tied, "-o", recipe, "--quiet", "--json", *words, "--plot", tmp_path / "a.png")
    document = json.loads(ended.out)
    assert ended.err == ""
    assert [one["budget"] for one in document["points"]] == [64]
    assert document["recipe"]["micro_batch"] == document["chosen"]["budget"] == 64
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--precisions", "float8"], "precisions: 'float8' is not what this"),
        (["--threads", "two"], "'two' is not a list of whole numbers such as 1,2."),
        (["--threads", "0"], "threads: 0 is no number of threads"),
        (["--plot", "curves.pdf"], "curves.pdf: pictures are .svg or .png."),
        (
            ["--plot", "{taken}"],
            "exists already, and `extract tune` did not write it. Choose another file with --plot.",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(words, message, tied, tmp_path, capsys):
    taken = tmp_path / "taken.svg"
    taken.write_text("mine")
    filled = [word.format(taken=taken) for word in words]
    ended = extract(capsys, "tune", tied, "-o", tmp_path / "tuned.toml", *filled)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
    assert list(tmp_path.iterdir()) == [taken]


def test_a_recipe_of_somebody_else_is_not_replaced(tied, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text('dtype = "float32"\n')
    ended = extract(capsys, "tune", tied, "-o", tmp_path / "mine.toml")
    assert ended.code == 2
    assert ended.err == (
        f"extract: {tmp_path / 'mine.toml'}: exists already, and `extract tune` did not write it. "
        "Choose another file with -o.\n"
    )


def test_a_checkpoint_that_a_build_refuses_is_refused(tmp_path, capsys):
    ended = extract(capsys, "tune", tmp_path / "nothing", "-o", tmp_path / "tuned.toml")
    assert ended.code == 4
    assert not (tmp_path / "tuned.toml").exists()
