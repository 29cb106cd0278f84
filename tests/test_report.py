"""Results on stdout, as JSON that any parser reads and as text that fits the eye; rare results have their text too."""

import io
import json
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from extract import report
from extract.derivation import Derived
from extract.estimate import Estimate
from extract.inspection import Inspection
from extract.jobs import PlannedJob
from extract.record_sums import Totals
from extract.records import Outcome
from extract.report import NotPrinted, emit
from extract.runners.local import Summary
from extract.spec import JobSpec, RunSpec, SourceSpec, StatesSpec, TextSpec
from extract.status import Status
from extract.text.tokens import Example
from extract.verification import Verification


@dataclass(frozen=True)
class Point:
    x: float
    parts: tuple[Any, ...] = ()


def printed(result: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    emit(result, str, as_json=True)
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


class TestJson:
    @pytest.mark.parametrize(
        ("result", "expected"),
        [
            (Point(1.5, (1, "a", None, True)), {"x": 1.5, "parts": [1, "a", None, True]}),
            (Point(float("nan"), (float("inf"), [-float("inf")])), {"x": None, "parts": [None, [None]]}),
            (MappingProxyType({"p": Point(2.0)}), {"p": {"x": 2.0, "parts": []}}),
            ({1: {"when": datetime(2026, 1, 2, tzinfo=UTC)}}, {"1": {"when": "2026-01-02 00:00:00+00:00"}}),
            ({"price": Decimal("1.10"), "path": Path("a/b")}, {"price": "1.10", "path": "a/b"}),
            ({"outcome": Outcome.OK, "text": "Grüße 🙂 \n"}, {"outcome": "ok", "text": "Grüße 🙂 \n"}),
        ],
    )
    def test_any_result_is_one_document(self, result, expected, capsys):
        assert printed(result, capsys) == expected

    def test_a_result_may_say_itself_what_of_it_is_printed(self, capsys):
        class Own:
            def as_json(self) -> dict[str, Any]:
                return {"point": Point(float("nan"))}

        assert printed(Own(), capsys) == {"point": {"x": None, "parts": []}}

    def test_text_that_no_encoding_holds_is_still_json(self, monkeypatch):
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        monkeypatch.setattr(sys, "stdout", out)
        emit({"path": "rows\udcff"}, str, as_json=True)
        assert json.loads(out.buffer.getvalue()) == {"path": "rows\udcff"}

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "UTF-8"])
    def test_json_is_read_back_whatever_the_encoding_of_stdout(self, encoding, monkeypatch):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", out)
        emit({"text": "Grüße 🙂"}, str, as_json=True)
        assert json.loads(out.buffer.getvalue().decode(encoding)) == {"text": "Grüße 🙂"}


class TestStdout:
    def test_a_process_without_a_stdout_prints_nothing(self, monkeypatch):
        monkeypatch.setattr(sys, "stdout", None)
        emit("result", str, as_json=False)

    def test_a_full_disk_is_told_and_stdout_is_given_up(self, monkeypatch):
        class Full(io.StringIO):
            def flush(self) -> None:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(sys, "stdout", Full())
        with pytest.raises(NotPrinted) as caught:
            emit("result", str, as_json=False)
        assert caught.value.exit_code == 8
        assert sys.stdout is None

    def test_a_closed_pipe_is_left_to_the_command_line(self, monkeypatch):
        class Closed(io.StringIO):
            def flush(self) -> None:
                raise BrokenPipeError

        monkeypatch.setattr(sys, "stdout", Closed())
        with pytest.raises(BrokenPipeError):
            emit("result", str, as_json=False)


TOTALS = Totals(
    num_shards=2,
    num_rows=1200,
    num_rows_out=1200,
    num_bytes=3_400_000,
    num_tokens=9000,
    num_tokens_original=12_000,
    outcomes={"ok": 1000, "truncated": 200},
    doubled_bos=0,
    overflowed=0,
)


def planned(**changes: Any) -> PlannedJob:
    values: dict[str, Any] = {
        "num_rows": 1_000_000,
        "num_shards": 123,
        "rows_per_shard": 8192,
        "sampled_rows": 2048,
        "exact": False,
        "outcomes": {"ok": 900_000, "truncated": 100_000},
        "num_rows_out": 1_000_000,
        "num_tokens": 70_000_000,
        "num_tokens_original": 90_000_000,
        "doubled_bos": 0,
        "num_bytes": 5_500_000_000,
        "seconds": 7200.0,
        "free_bytes": 2_500_000_000_000,
        "example": None,
    }
    spec = JobSpec(
        source=SourceSpec(path="x"),
        text=TextSpec(max_input_tokens=128),
        states=changes.pop("states", StatesSpec(kind="last")),
        run=RunSpec(max_tokens=4096, max_sequences=8192),
    )
    engine = {
        "checkpoint": "org/model",
        "architecture": "LlamaModel",
        "precision": "float32",
        "device": "cpu",
        "layout": "packed",
        "width": 2048,
        "limits": {"pass_tokens": None, "memory_bytes": None, "binding": "the recipe"},
        "tokens_per_s": 9722.2,
    }
    return PlannedJob(job="0123456789abcdef", spec=spec, engine=engine, estimate=Estimate(**{**values, **changes}))


class TestPlan:
    def test_an_engine_that_splits_batches_says_how_large_a_pass_is_and_why(self):
        found = planned()
        found.engine["limits"] = {"pass_tokens": 74_880, "memory_bytes": 19 * 2**30, "binding": "the card"}
        assert report.plan_text(found).splitlines()[4] == (
            "passes     of up to 74,880 tokens, bound by the card; 19.00 GiB on the card"
        )

    def test_a_sampled_plan(self):
        assert report.plan_text(planned()).splitlines() == [
            "job        0123456789abcdef",
            "engine     org/model (LlamaModel), float32 on cpu, packed",
            "output     one state a row (last), width 2,048, float16, zstd 1",
            "limits     128 tokens a row; 4,096 tokens, 8,192 sequences a pass",
            "rows       1,000,000 in 123 shards of 8,192",
            "outcomes   ok 900,000, truncated 100,000  (from 2,048 sampled rows)",
            "tokens     about 70,000,000 of 90,000,000",
            "bytes      about 5.5 GB; 2.5 TB free",
            "time       about 2:00:00 at the 9,722 tokens/s seen at build",
        ]

    def test_a_stream_of_unknown_length(self):
        lines = report.plan_text(planned(num_rows=None, num_shards=None, seconds=None)).splitlines()
        assert lines[4] == "rows       a stream of unknown length"
        assert not any(line.startswith("time") for line in lines)

    def test_every_tokens_state_without_zstd(self):
        states = StatesSpec(kind="tokens", dtype="int8", compression="lz4")
        lines = report.plan_text(planned(states=states, exact=True)).splitlines()
        assert lines[2] == "output     every token's state, width 2,048, int8, compression lz4"
        assert lines[5].endswith("(all rows read)")
        assert lines[6] == "tokens     70,000,000 of 90,000,000"

    def test_two_beginnings_are_a_warning(self):
        assert "warning    17 rows begin with two beginning-of-sequence tokens" in report.plan_text(
            planned(doubled_bos=17)
        )

    def test_an_example_is_shown_with_both_ends(self):
        example = Example(
            row=3,
            outcome=Outcome.TRUNCATED,
            text="word " * 90,
            num_tokens_original=90,
            input_ids=tuple(range(40)),
            pieces=tuple("abcdefghij" * 4),
        )
        lines = report.plan_text(planned(example=example)).splitlines()[-4:]
        assert lines[0] == "example    row 3, truncated, 40 tokens"
        assert lines[1].startswith("  text     'word word ")
        assert lines[1].endswith("...")
        assert len(lines[1]) == 211
        assert lines[2] == "  ids      0 1 2 3 4 5 6 7 ... 32 33 34 35 36 37 38 39"
        assert lines[3] == "  pieces   'a' 'b' 'c' 'd' 'e' 'f' 'g' 'h' ... 'c' 'd' 'e' 'f' 'g' 'h' 'i' 'j'"

    def test_an_example_of_ids_has_no_text_and_no_pieces(self):
        example = Example(row=0, outcome=Outcome.OK, text=None, num_tokens_original=2, input_ids=(1, 2), pieces=())
        assert report.plan_text(planned(example=example)).splitlines()[-2:] == [
            "  text     (ids given)",
            "  ids      1 2",
        ]


def summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {
        "path": "out",
        "job": "0123456789abcdef",
        "complete": True,
        "num_shards_total": 2,
        "num_shards_made": 2,
        "num_shards_before": 0,
        "totals": TOTALS,
        "tokens_computed": 9000,
        "seconds": 75.0,
        "tokens_per_s": 120.0,
        "stage_shares": {"read+tokenise": 0.1, "forward": 0.95, "write": 0.0},
    }
    return Summary(**{**values, **changes})


class TestRun:
    def test_a_finished_run(self):
        assert report.summary_text(summary()).splitlines() == [
            "complete   out: 1,200 rows in 2 shards (job 0123456789abcdef)",
            "outcomes   ok 1,000, truncated 200",
            "tokens     9,000 of 12,000",
            "bytes      3.4 MB in 2 files",
            "this run   2 shards, 9,000 tokens in 1:15: 120 tokens/s (read+tokenise 10 %, forward 95 %, write 0 %)",
            "next       extract verify out    |    python: extract.open_output('out')",
        ]

    def test_a_run_with_nothing_left_to_do(self):
        assert "this run   nothing to do, every shard was committed before" in report.summary_text(
            summary(num_shards_made=0, num_shards_before=2)
        )

    def test_states_that_did_not_fit_their_type_and_two_beginnings_are_warnings(self):
        text = report.summary_text(summary(totals=replace(TOTALS, overflowed=3, doubled_bos=1200)))
        assert (
            "warning    3 rows have states too large for the stored type: they are non_finite. Store float32 or "
            "bfloat16 instead\n"
            "warning    1,200 rows begin with two beginning-of-sequence tokens\n"
        ) in text


class TestStatus:
    def status(self, **changes: Any) -> list[str]:
        values: dict[str, Any] = {
            "path": "out",
            "job": "0123456789abcdef",
            "complete": False,
            "problem": "shard 2 is missing",
            "num_rows": 3000,
            "num_shards": 3,
            "done": TOTALS,
            "num_temporary": 1,
            "busy_seconds": {"forward": 61.0, "write": 2.0},
            "free_bytes": 900,
        }
        return report.status_text(Status(**{**values, **changes})).splitlines()

    def test_an_unfinished_job(self):
        assert self.status() == [
            "job        0123456789abcdef in out: incomplete: shard 2 is missing",
            "shards     2 of 3, rows 1,200 of 3,000",
            "outcomes   ok 1,000, truncated 200",
            "tokens     9,000 of 12,000",
            "bytes      3.4 MB in 2 files",
            "busy       forward 1:01, write 2 s",
            "disk       900 bytes free; 1 temporary files",
            "next       the same `extract run` command again goes on",
        ]

    def test_a_stream_that_has_not_ended(self):
        assert self.status(num_rows=None, num_shards=None)[1] == "shards     2 of ?, rows 1,200 of ?"

    def test_a_job_that_did_nothing_yet(self):
        assert self.status(busy_seconds={})[5] == "busy       0 s"
        assert self.status(busy_seconds=None)[5] == (
            "busy       not in what was read (commit records say it, a manifest does not)"
        )


class TestOthers:
    def verification(self, **changes: Any) -> list[str]:
        values: dict[str, Any] = {
            "path": "out",
            "job": "0123456789abcdef",
            "complete": True,
            "num_shards": 2,
            "num_rows": 1200,
            "num_rows_out": 1300,
            "num_bytes": 3400,
        }
        return report.verification_text(Verification(**{**values, **changes})).splitlines()

    def test_a_verified_output(self):
        assert self.verification(recomputed=16, worst=0.00012, recompute_bound=0.0005, notes=("a stray file",)) == [
            "verified   out: complete; 1,200 source rows, 1,300 rows in 2 shards, 3.4 kB",
            "checked    hashes, sizes, schema, row order and count, outcomes, states per row, finite values, tiling, "
            "manifest",
            "recomputed 16 rows with the plain model: largest relative error 1.2e-04, bound 5.0e-04",
            "note       a stray file",
        ]

    def test_an_output_that_is_right_so_far(self):
        first, second = self.verification(complete=False)
        assert first.startswith("verified   out: correct so far, not complete; ")
        assert second.endswith("finite values")

    def test_a_derived_output(self):
        derived = Derived(
            path="b", job="0123456789abcdef", made_from="a", num_shards_made=2, totals=TOTALS, seconds=3.2
        )
        assert report.derived_text(derived).splitlines() == [
            "complete   b: made from a without the model (job 0123456789abcdef)",
            "this run   2 shards in 3 s",
            "outcomes   ok 1,000, truncated 200",
            "tokens     9,000 of 12,000",
            "bytes      3.4 MB in 2 files",
            "next       extract verify b",
        ]

    def test_an_inspected_output_shows_long_metadata_on_one_line_each(self):
        found = Inspection(
            path="out",
            job="j",
            columns={"row": "int64"},
            metadata={"extract.read": "first\nsecond", "extract.tokens": "x" * 300},
            num_shards=1,
            num_rows=2,
            num_rows_out=2,
            num_bytes=10,
            row={"row": 1, "input_ids": list(range(40)), "url": "u" * 300},
        )
        lines = report.output_text(found).splitlines()
        assert lines[3:6] == [
            "metadata",
            "  extract.read           first | second",
            f"  extract.tokens         {'x' * 157}...",
        ]
        assert lines[6:9] == ["row", "  row                    1", lines[8]]
        assert lines[8] == "  input_ids              0 1 2 3 4 5 6 7 ... 32 33 34 35 36 37 38 39"
        assert len(lines[9]) == 185

    @pytest.mark.parametrize(
        ("num_bytes", "shown"),
        [
            (0, "0 bytes"),
            (999, "999 bytes"),
            (1000, "1.0 kB"),
            (2.5e6, "2.5 MB"),
            (1e9, "1.0 GB"),
            (1234e12, "1,234.0 TB"),
        ],
    )
    def test_sizes_have_units(self, num_bytes, shown):
        assert report._size(num_bytes) == shown
