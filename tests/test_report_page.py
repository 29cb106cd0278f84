"""The facts of a report page against numpy on small outputs: of every kind and type, unfinished, damaged, empty."""

import dataclasses
import json
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

import job_rig
import numpy as np
import pyarrow.parquet as pq
import pytest
from command_line import extract
from shard_rig import LENGTHS, WIDTH, random_states, replace_shard, token_rows, write_output

from extract.derivation import Change, derive
from extract.job import read_job
from extract.manifest import finalize
from extract.output import open_output
from extract.report_page.facts import Report
from extract.report_page.gathering import gather
from extract.report_page.neighbours import PAIR_COSINE, directions, find_neighbours
from extract.report_page.page import NotOurPage, PageUnwritable, html, script_json, write_report
from extract.report_page.projection import pca, umap
from extract.report_page.state_figures import OUTLIER_FACTOR, StateTally
from extract.spec import StatesSpec

KINDS = ("tokens", "last", "mean", "first")
TYPES = ("float16", "float32", "bfloat16", "int8")


def output(root: Path, *, complete: bool = True, **options: Any) -> Path:
    """An output of three shards of seven rows, two of each seven without tokens."""
    spec = StatesSpec(**{key: options.pop(key) for key in ("kind", "dtype", "record_batch_bytes") if key in options})
    write_output(root, spec, **options)
    if complete and not options.get("missing"):
        finalize(read_job(root))
    return root


def edit_job(root: Path, **changes: Any) -> None:
    table = json.loads((root / "job.json").read_text())
    (root / "job.json").write_text(json.dumps({**table, **changes}))


def files(*rows: int) -> dict[str, Any]:
    entries = [{"name": f"part-{n}.parquet", "rows": count, "size": 1} for n, count in enumerate(rows)]
    return {"format": "parquet", "files": entries}


class TestStates:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_norms_means_and_variances_are_those_of_the_stored_states(self, kind, dtype, tmp_path):
        root = output(tmp_path / "out", kind=kind, dtype=dtype)
        rows = [row.states for row in open_output(root) if row.states is not None]
        states = np.concatenate([np.atleast_2d(row) for row in rows]).astype(np.float64)
        found = gather(root).states
        assert found is not None
        assert found.num_states == len(states)
        np.testing.assert_allclose(found.mean, states.mean(axis=0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.variance, states.var(axis=0), rtol=1e-4, atol=1e-9)
        norms = np.linalg.norm(states, axis=1)
        np.testing.assert_allclose(found.norm_quantiles, np.quantile(norms, [0, 0.05, 0.5, 0.95, 1]), rtol=1e-5)
        assert sum(found.norm_counts) == len(states)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_row_is_its_last_token_or_its_only_state(self, kind, tmp_path):
        root = output(tmp_path / "out", kind=kind)
        expected = [row for row in open_output(root) if row.states is not None]
        sample = gather(root).sample
        assert sample is not None
        assert sample.represented_by == ("last" if kind == "tokens" else kind)
        assert [row.row for row in sample.rows] == [row.row for row in expected]
        assert [row.num_tokens for row in sample.rows] == [row.num_tokens for row in expected]
        assert [row.id for row in sample.rows] == [row.columns["id"] for row in expected]
        last = np.stack([np.atleast_2d(row.states)[-1] for row in expected])
        np.testing.assert_allclose([row.norm for row in sample.rows], np.linalg.norm(last, axis=1), atol=6e-4)

    def test_figures_do_not_depend_on_how_states_come_in(self):
        states = 1000 + np.random.default_rng(0).standard_normal((500, 6)).astype(np.float32)
        tally = StateTally(6)
        for part in np.array_split(states, [0, 1, 30, 499]):
            tally.add(part)
        found = tally.figures()
        np.testing.assert_allclose(found.variance, states.astype(np.float64).var(axis=0), rtol=1e-5)

    def test_dead_and_outlier_dimensions_are_named(self):
        states = np.random.default_rng(0).standard_normal((300, 40)).astype(np.float32)
        states[:, 7] = 0.25
        states[:, 11] = 90
        states[:, 30] *= 60
        tally = StateTally(40)
        tally.add(states)
        found = tally.figures()
        assert [one.index for one in found.outliers] == [11, 30]
        assert [(one.index, one.mean, one.std) for one in found.dead] == [(7, 0.25, 0), (11, 90, 0)]
        size = np.sqrt((states.astype(np.float64) ** 2).mean(axis=0))
        assert set(np.flatnonzero(size > OUTLIER_FACTOR * np.median(size))) == {11, 30}

    def test_one_state_has_no_dead_dimension(self):
        tally = StateTally(4)
        tally.add(np.ones((1, 4), np.float32))
        found = tally.figures()
        assert (found.dead, found.outliers, found.num_states) == ((), (), 1)


class TestMap:
    @pytest.mark.parametrize("shape", [(60, 12), (12, 60), (2, 5), (1, 5)])
    def test_pca_is_that_of_the_singular_values(self, shape):
        states = np.random.default_rng(1).standard_normal(shape).astype(np.float32) * np.linspace(3, 1, shape[1])
        places, explained = pca(states.astype(np.float32))
        centred = states - states.mean(axis=0)
        left, values, _ = np.linalg.svd(centred, full_matrices=False)
        kept = min(2, shape[0] - 1)
        np.testing.assert_allclose(np.abs(places[:, :kept]), np.abs(left * values)[:, :kept], atol=1e-4)
        assert not places[:, kept:].any()
        if kept:
            np.testing.assert_allclose(explained[:kept], (values**2 / (values**2).sum())[:kept], rtol=1e-5)

    def test_equal_states_lie_on_one_point(self):
        places, explained = pca(np.full((5, 8), 0.3, np.float32))
        assert not places.any()
        assert explained == (0, 0)

    def test_neighbours_and_pairs_are_those_of_all_cosines(self):
        states = np.random.default_rng(2).standard_normal((700, 16)).astype(np.float32)
        states[600] = 3 * states[3]
        states[650] = states[560] + 0.001  # both in the second block of rows
        unit = directions(states)
        cosines = unit.astype(np.float64) @ unit.T.astype(np.float64)
        np.fill_diagonal(cosines, -2)
        found = find_neighbours(unit)
        np.testing.assert_allclose(found.cosines, -np.sort(-cosines, axis=1)[:, :5], atol=1e-6)
        np.testing.assert_array_equal(found.nearest[:, 0], cosines.argmax(axis=1))
        assert [(pair.first, pair.second) for pair in found.pairs] == [(3, 600), (560, 650)]
        assert found.num_pairs == int((np.triu(cosines, 1) >= PAIR_COSINE).sum()) == 2
        others = cosines[~np.eye(len(unit), dtype=bool)]
        assert found.typical == pytest.approx(others.mean(), abs=1e-6)

    def test_many_equal_rows_are_one_pair_and_all_are_counted(self):
        found = find_neighbours(directions(np.ones((30, 4), np.float32)))
        assert found.num_pairs == 30 * 29 // 2
        assert len({place for pair in found.pairs for place in (pair.first, pair.second)}) == 2 * len(found.pairs)

    def test_umap_says_why_it_is_not_there(self):
        few = np.ones((3, 4), np.float32)
        assert umap(few) == (None, "needs at least 20 rows")

    def test_umap_gives_a_place_to_every_row(self):
        pytest.importorskip("umap", reason="needs umap-learn: pip install 'extract-hidden-states[umap]'")
        unit = directions(np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32))
        places, why = umap(unit)
        assert why == ""
        assert places is not None
        assert places.shape == (40, 2)


class TestRows:
    def test_outcomes_are_counted_by_source_file_the_most_troubled_first(self, tmp_path):
        root = output(tmp_path / "out")
        edit_job(root, source=files(8, 0, 13))
        found = gather(root).counts
        expected = [
            ("part-2.parquet", 13, {"ok": 9, "empty": 4}),
            ("part-0.parquet", 8, {"ok": 6, "empty": 2}),
        ]
        assert [(file.name, file.num_rows, file.outcomes) for file in found.files] == expected
        assert found.num_files == 3

    def test_a_source_that_is_not_made_of_files_is_one(self, tmp_path):
        found = gather(output(tmp_path / "out")).counts
        assert [(file.name, file.num_rows) for file in found.files] == [("rows.parquet", 21)]

    def test_lengths_are_counted_once_for_each_row(self, tmp_path):
        found = gather(output(tmp_path / "out")).counts.lengths
        assert found is not None
        assert found.width == 3
        expected = np.bincount(np.array(LENGTHS * 3) // 3, minlength=len(found.starts))
        assert list(found.stored) == list(found.original) == expected.tolist()
        assert (found.median_stored, found.longest_original) == (2, 128)

    def test_a_giant_row_does_not_squeeze_the_others(self, tmp_path):
        spec = StatesSpec(kind="last")
        root = output(tmp_path / "out", kind="last", num_shards=1, rows_per_shard=100)
        rows = token_rows([9] * 100)
        original = rows.num_tokens_original.copy()
        original[50] = 5_000_000
        replace_shard(
            root, 0, spec, dataclasses.replace(rows, num_tokens_original=original), random_states(rows, "last")
        )
        found = gather(root).counts.lengths
        assert found is not None
        assert (found.starts, found.width) == (tuple(range(10)), 1)
        assert (found.original[9], found.longest_original) == (100, 5_000_000)

    def test_chunks_of_a_row_count_its_length_once(self, tmp_path):
        spec = StatesSpec(kind="last")
        root = output(tmp_path / "out", kind="last", chunked=True, num_shards=1, rows_per_shard=2)
        rows = token_rows([4, 4, 2], source_index=[0, 0, 1], chunk=[0, 1, 0])
        rows = dataclasses.replace(rows, num_tokens_original=np.array([8, 8, 2], np.int32))
        replace_shard(root, 0, spec, rows, random_states(rows, "last"), chunked=True)
        report = gather(root)
        lengths, sample = report.counts.lengths, report.sample
        assert lengths is not None
        assert sample is not None
        assert (sum(lengths.stored), sum(lengths.original), lengths.original[8]) == (3, 2, 1)
        assert [(row.row, row.chunk) for row in sample.rows] == [(0, 0), (0, 1), (1, 0)]

    def test_a_sample_is_spread_over_all_shards_and_no_larger_than_asked(self, tmp_path):
        root = output(tmp_path / "out", kind="last", num_shards=6, rows_per_shard=70)
        sample = gather(root, rows=60).sample
        assert sample is not None
        assert len(sample.rows) == 60
        np.testing.assert_array_equal(np.bincount([row.row // 70 for row in sample.rows]), [10] * 6)
        assert len({row.row for row in sample.rows}) == 60

    def test_a_sample_reads_a_bounded_number_of_record_batches(self, tmp_path, monkeypatch):
        root = output(tmp_path / "out", num_shards=9, rows_per_shard=70, record_batch_bytes=2**16)
        monkeypatch.setattr("extract.report_page.sampling.MAX_BATCHES", 4)
        sample = gather(root, rows=40).sample
        assert sample is not None
        assert sample.num_batches == 4
        assert len({row.row // 70 for row in sample.rows}) == 4


class TestUnusualOutputs:
    def test_an_unfinished_output_shows_what_is_there(self, tmp_path):
        report = gather(output(tmp_path / "out", missing=(1,)))
        assert (report.complete, report.problem) == (False, "shard 1 is missing")
        assert (report.num_rows, report.num_rows_expected) == (14, 21)
        assert report.integrity.state == "verified"

    @pytest.mark.parametrize("kind", ["tokens", "last"])
    def test_an_output_that_has_just_begun_is_a_page(self, kind, tmp_path):
        root = output(tmp_path / "out", kind=kind, missing=(0, 1, 2))
        report = gather(root)
        assert (report.states, report.sample, report.counts.lengths, report.throughput) == (None,) * 4
        page = html(report)
        assert "There are no rows in the output yet." in page
        assert "There are no output files yet." in page
        assert "Files intact" not in page

    @pytest.mark.parametrize("kind", ["tokens", "last"])
    def test_one_row_is_a_page(self, kind, tmp_path):
        root = output(tmp_path / "out", kind=kind, num_shards=1, rows_per_shard=1)
        report = gather(root)
        assert report.sample is not None
        assert [row.neighbours for row in report.sample.rows] == [()]
        assert report.sample.typical_cosine is None
        assert "It takes two rows with states to compare." in html(report)

    def test_rows_without_any_state_are_a_page(self, tmp_path):
        root = output(tmp_path / "out", kind="last", num_shards=1, rows_per_shard=4)
        rows = token_rows([0, 0, 0, 0])
        replace_shard(root, 0, StatesSpec(kind="last"), rows, np.zeros((0, WIDTH), np.float32))
        report = gather(root)
        assert (report.sample, report.outcomes) == (None, {"empty": 4})
        assert "No row that was looked at has a state." in html(report)

    def test_a_derived_output_says_what_it_was_made_from(self, tmp_path):
        root = output(tmp_path / "out", dtype="float32")
        derive(root, tmp_path / "derived", Change(pool="mean", dtype="int8"))
        report = gather(tmp_path / "derived")
        settings = {line.name: line.value for line in report.settings}
        assert settings["Made from job"] == read_job(root).job_id
        assert report.throughput is not None
        assert [worker.name for worker in report.throughput.workers] == ["rewritten from another output"]

    def test_a_directory_without_a_job_is_an_error(self, tmp_path, capsys):
        ended = extract(capsys, "report", tmp_path, "-o", tmp_path / "page.html")
        assert (ended.code, ended.out) == (2, "")
        assert ended.err == f"extract: {tmp_path}: not an output directory (it holds no job.json).\n"


class TestIntegrity:
    def test_files_of_the_right_hash_are_verified(self, tmp_path):
        found = gather(output(tmp_path / "out")).integrity
        assert (found.state, found.num_files, found.num_hashed, found.problems) == ("verified", 3, 3, ())

    def test_more_bytes_than_a_person_waits_for_are_not_hashed(self, tmp_path, monkeypatch):
        monkeypatch.setattr("extract.report_page.integrity.MAX_HASHED_BYTES", 10)
        report = gather(output(tmp_path / "out"))
        assert (report.integrity.state, report.integrity.num_hashed) == ("unhashed", 0)
        page = html(report)
        assert "<strong>Not verified.</strong>" in page
        assert f"<code>extract verify {tmp_path / 'out'}</code>" in page

    def test_a_flipped_bit_is_named_and_its_shard_is_not_read(self, tmp_path):
        root = output(tmp_path / "out")
        path = sorted((root / "data").iterdir())[1]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        report = gather(root)
        assert report.integrity.state == "problems"
        assert report.integrity.problems == (f"shard 1: data/{path.name} has another sha256 than was written",)
        assert not report.complete
        assert report.sample is not None
        assert {row.row // 7 for row in report.sample.rows} == {0, 2}

    def test_missing_files_and_broken_records_are_shown_not_raised(self, tmp_path):
        root = output(tmp_path / "out")
        (root / "commits" / "shard-00000.json").write_text("{")
        sorted((root / "data").iterdir())[2].unlink()
        found = gather(root).integrity
        assert (found.state, found.num_problems) == ("problems", 2)
        assert "shard-00000.json: cannot be read" in found.problems[0]
        assert found.problems[1].startswith("shard 2: data/shard-00002-")


class TestThroughput:
    def times(self, root: Path, stops: list[float]) -> None:
        for number, stop in enumerate(stops):
            os.utime(root / "commits" / f"shard-{number:05d}.json", (stop, stop))

    def with_seconds(self, root: Path, seconds: list[float], workers: list[dict[str, Any]]) -> None:
        for number, (spent, worker) in enumerate(zip(seconds, workers, strict=True)):
            path = root / "commits" / f"shard-{number:05d}.json"
            table = json.loads(path.read_bytes())
            del table["check"]
            stages = {"read+tokenise": spent / 10, "forward": spent, "write": spent / 5}
            path.write_text(json.dumps({**table, "seconds": stages, "worker": worker}))

    def test_tokens_are_spread_over_the_time_in_which_they_were_made(self, tmp_path):
        root = output(tmp_path / "out", complete=False)
        self.with_seconds(root, [10, 10, 20], [{"device": "a"}, {"device": "a"}, {"device": "b"}])
        self.times(root, [1010, 1030, 1040])  # a gap of ten seconds, then two workers at once
        found = gather(root).throughput
        assert found is not None
        assert (found.axis, found.started, found.edges[-1]) == ("time", "1970-01-01T00:16:40+00:00", 40)
        assert [(worker.name, worker.num_shards, worker.tokens_per_s) for worker in found.workers] == [
            ("a", 2, 13.9),
            ("b", 1, 7.0),
        ]
        assert found.workers[0].seconds == {"read+tokenise": 2, "forward": 20, "write": 4}
        widths = np.diff(found.edges)
        assert (np.array(found.tokens_per_s) * widths).sum(axis=1) == pytest.approx([278, 139], rel=1e-2)
        between = (np.array(found.edges[:-1]) >= 10) & (np.array(found.edges[1:]) <= 20)
        assert not np.array(found.tokens_per_s)[:, between].any()

    def test_a_copy_without_its_times_is_shown_by_shard(self, tmp_path):
        root = output(tmp_path / "out", complete=False)
        self.with_seconds(root, [10, 10, 20], [{"device": "a"}] * 3)
        self.times(root, [1000, 1000, 1000])
        found = gather(root).throughput
        assert found is not None
        assert (found.axis, found.started, found.edges) == ("shard", None, (0, 1, 2, 3))
        assert found.tokens_per_s == ((13.9, 13.9, 6.95),)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for number, count in enumerate((6, 5)):
        texts = job_rig.texts(count, seed=number)
        job_rig.parquet(folder / f"part-{number}.parquet", {"text": texts, "key": list(range(count))})
    return folder


class TestTexts:
    def job(self, engines: Any, source: Path, target: Path, **settings: Any) -> Path:
        job_rig.run(job_rig.job(engines.engine("llama"), source, target, kind="last", **settings))
        return target

    def texts(self, root: Path) -> tuple[str, list[str], str]:
        sample = gather(root).sample
        assert sample is not None
        return sample.text_from, [row.text for row in sample.rows], sample.text_note

    def test_they_are_the_sources_own_where_it_is_there(self, engines, sources, tmp_path):
        expected = pq.read_table(sources).column("text").to_pylist()
        assert self.texts(self.job(engines, sources, tmp_path / "out")) == ("source", expected, "")

    def test_of_a_selection_they_are_those_of_the_selected_rows(self, engines, sources, tmp_path):
        expected = pq.read_table(sources).column("text").to_pylist()
        root = self.job(engines, sources, tmp_path / "out", rows="1,4-7")
        assert self.texts(root)[1] == [expected[row] for row in (1, 4, 5, 6, 7)]

    def test_a_carried_input_column_is_read_from_the_output(self, engines, sources, tmp_path):
        root = self.job(engines, sources, tmp_path / "out", carry=("text",))
        assert self.texts(root)[0] == "column"

    @pytest.mark.parametrize("change", ["gone", "other", "remote"])
    def test_ids_are_decoded_where_the_source_is_gone_or_another(self, change, engines, sources, tmp_path):
        copy = tmp_path / "rows.parquet"
        copy.write_bytes((sources / "part-0.parquet").read_bytes())
        root = self.job(engines, copy, tmp_path / "out")
        if change == "gone":
            copy.unlink()
        elif change == "other":
            job_rig.parquet(copy, {"text": ["another"] * 6})
        else:
            spec = json.loads((root / "job.json").read_text())["spec"]
            spec["source"]["path"] = ["hf://datasets/nobody/nothing"]
            edit_job(root, spec=spec)
        origin, texts, note = self.texts(root)
        assert origin == "ids"
        ids = [ids for ids in job_rig.stored_ids(root) if ids]
        from tokenizers import Tokenizer

        decoder = Tokenizer.from_file(str(engines.engine("llama") / "tokenizer.json"))
        assert texts == [decoder.decode(one, skip_special_tokens=False) for one in ids]
        assert note

    def test_without_an_engine_rows_are_their_ids(self, engines, sources, tmp_path):
        root = self.job(engines, sources, tmp_path / "out")
        spec = json.loads((root / "job.json").read_text())["spec"]
        spec["source"]["path"] = [str(tmp_path / "gone")]
        edit_job(root, spec={**spec, "engine": str(tmp_path / "no-engine")})
        origin, texts, _ = self.texts(root)
        assert origin == "raw ids"
        first = job_rig.stored_ids(root)[0]
        assert texts[0] == "ids " + " ".join(map(str, first or []))

    def test_without_ids_either_there_is_no_text(self, engines, sources, tmp_path):
        root = self.job(engines, sources, tmp_path / "out", input_ids=False)
        spec = json.loads((root / "job.json").read_text())["spec"]
        spec["source"]["path"] = [str(tmp_path / "gone")]
        edit_job(root, spec=spec)
        assert self.texts(root)[:2] == ("nothing", [""] * 11)


class TestPage:
    def test_the_command_writes_a_page_and_prints_its_facts(self, tmp_path, capsys):
        root, page = output(tmp_path / "out"), tmp_path / "page.html"
        ended = extract(capsys, "report", root, "-o", page, "--rows", "5", "--json")
        assert ended.code == 0
        printed = json.loads(ended.out)
        assert {field.name for field in dataclasses.fields(Report)} == set(printed)
        assert len(printed["sample"]["rows"]) == 5
        embedded = re.search(r'<script type="application/json" id="facts">(.*?)</script>', page.read_text(), re.DOTALL)
        assert embedded is not None
        assert json.loads(embedded[1]) == printed

    def test_the_command_says_what_it_wrote(self, tmp_path, capsys):
        page = tmp_path / "page.html"
        ended = extract(capsys, "report", output(tmp_path / "out"), "-o", page)
        assert re.fullmatch(rf"{re.escape(str(page))}: 15 of 21 rows shown, \d\.\d MB\n", ended.out)

    def test_an_earlier_page_is_replaced_and_any_other_file_is_kept(self, tmp_path):
        root, page = output(tmp_path / "out"), tmp_path / "page.html"
        write_report(root, page)
        write_report(root, page)
        page.write_text("<!doctype html>mine")
        with pytest.raises(NotOurPage) as caught:
            write_report(root, page)
        assert str(caught.value) == (
            f"{page}: exists and is not a page of `extract report`. Choose another file with -o."
        )
        assert page.read_text() == "<!doctype html>mine"

    @pytest.mark.parametrize(
        ("name", "problem"), [("", "a directory, not a file"), ("no/page.html", "there is no directory {}/no")]
    )
    def test_a_page_with_no_place_is_refused_before_anything_is_read(self, name, problem, tmp_path):
        page = tmp_path / name
        with pytest.raises(PageUnwritable) as caught:
            write_report(tmp_path / "nothing", page)
        assert str(caught.value) == f"{page}: {problem.format(tmp_path)}. Choose another file with -o."

    def test_the_same_output_gives_the_same_page(self, tmp_path):
        root = output(tmp_path / "out")
        assert html(gather(root)) == html(gather(root))

    def test_json_in_a_page_holds_nothing_that_html_knows(self):
        value = {"text": "</script><script>alert(1)</script><!-- & \u2028 \udcff"}
        text = script_json(value)
        assert not set("<>&") & set(text)
        assert text.isascii()
        assert json.loads(text) == value

    def test_a_page_stays_small(self, tmp_path):
        root = output(tmp_path / "out", kind="last", num_shards=2, rows_per_shard=1500, dtype="float16")
        page = tmp_path / "page.html"
        write_report(root, page)
        assert page.stat().st_size < 6_000_000


def contrast(one: str, other: str) -> float:
    """How far two colours are apart in brightness, as accessibility rules measure it: 1 to 21."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[n : n + 2], 16) for n in (1, 3, 5)]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_and_charts_stand_out_from_what_they_are_on(theme):
    style = (resources.files("extract.report_page") / "page.css").read_text("utf-8")
    before, _, after = style.partition("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", before))
    if theme == "dark":
        colours |= dict(re.findall(r"--([\w-]+): (#\w{6})", after.partition("* {")[0]))
    texts = [(ink, under) for ink in ("ink", "muted", "accent") for under in ("card", "page")]
    texts += [(mood, f"{mood}-soft") for mood in ("good", "warn", "bad")] + [("ink", "accent-soft")]
    assert min(contrast(colours[ink], colours[under]) for ink, under in texts) >= 4.5
    assert min(contrast(colours[f"c{n}"], colours["card"]) for n in range(1, 9)) >= 3
