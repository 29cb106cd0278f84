"""Each exit code by the mistakes and accidents that lead to it: one message after `extract: `, and no traceback."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from command_line import Ended, extract, spawn, write_rows
from rig import edit_json

from extract import assets
from extract.cpu.runtime import CpuRuntime
from extract.records import States, TokenBatch
from extract.sample import Passage
from extract.spec import OutputKind

NO_RECIPE = f"fast: no such file, and no recipe of that name comes with extract ({', '.join(assets.names('engines'))})."


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture
def job(tiny_engine: Path, rows: Path, tmp_path: Path) -> list[str]:
    """The options of a job of three shards into `out`."""
    words = ["--engine", tiny_engine, "--data", rows, "-o", tmp_path / "out"]
    return [*map(str, words), "--rows-per-shard", "8", "--reserve-bytes", "0", "--kind", "last"]


@pytest.fixture
def finished(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert extract(capsys, "run", *job, "--quiet").code == 0
    return tmp_path / "out"


def check(ended: Ended, code: int, message: str) -> None:
    """Nothing on stdout, the message alone on stderr (after the progress of a run)."""
    assert (ended.code, ended.out) == (code, "")
    assert ended.err[ended.err.index("extract: ") :] == f"extract: {message}\n"
    assert "Traceback" not in ended.err


def check_like(ended: Ended, code: int, pattern: str) -> None:
    """As `check`, for messages that hold measured numbers."""
    assert (ended.code, ended.out) == (code, "")
    assert re.fullmatch(f"extract: {pattern}\n", ended.err[ended.err.index("extract: ") :])
    assert "Traceback" not in ended.err


def test_0_is_a_command_that_did_what_was_asked(finished, capsys):
    assert extract(capsys, "verify", finished).code == 0


class TestInternal:
    def test_1_is_a_bug_and_shows_its_traceback(self):
        python = (
            "import extract.status, extract.cli; extract.status.status = lambda *_, **__: 1 / 0; extract.cli.main()"
        )
        ended = spawn("status", "out", python=python)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith("Traceback (most recent call last):\n")
        assert ended.err.endswith("ZeroDivisionError: division by zero\n")


class TestUsage:
    """Exit code 2."""

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("rum", "No such command 'rum'. Did you mean 'run'? See extract --help"),
            (
                "run --dat x",
                "No such option '--dat'. (Did you mean one of: '--data', '--dtype', '--format'?) "
                "See extract run --help",
            ),
            ("run", "No data given. Name a job spec, or give --data PATH. See extract run --help"),
            ("status", "Missing argument 'OUT'. See extract status --help"),
            ("sample", "Missing option '-o' / '--output'. See extract sample --help"),
            (
                "run --data x --kind all",
                "Invalid value for '--kind': 'all' is not one of 'tokens', 'last', 'mean', 'first'. "
                "See extract run --help",
            ),
            (
                "run --data x --limit ten",
                "Invalid value for '--limit': 'ten' is not a valid integer. See extract run --help",
            ),
            ("reprocess out -o new", "Nothing to do: choose rows, or what to change. See extract reprocess --help"),
            ("run --data x --limit -1", "options [source]: limit is -1, expected a whole number, 0 or more."),
            (
                "run --data x --normalize",
                'options [states]: normalize is true, expected false unless kind is "last", "mean" or "first".',
            ),
            (
                "run --data x -o out",
                'the job names no engine. Put engine = "DIRECTORY" into the job spec, or give --engine DIRECTORY.',
            ),
            (
                "run --data x",
                'the job names no output directory. Put output = "DIRECTORY" into the job spec, or give -o DIRECTORY.',
            ),
            (
                "run nojob",
                "nojob: no such file, and no job spec of that name comes with extract "
                "(demo, examples/chats, examples/embeddings).",
            ),
            ("run nojob.toml", "nojob.toml: no such file."),
            (
                "build x -o new --max-input-tokens 0",
                "options: max_input_tokens is 0, expected a whole number, 1 or more.",
            ),
            ("inspect nothing", "nothing: neither an engine (no contract.json) nor an output directory (no job.json)."),
            ("build x -o new --recipe fast", NO_RECIPE),
            ("status nothing", "nothing: not an output directory (no such directory)."),
            ("verify nothing", "nothing: not an output directory (no such directory)."),
            ("status .", ".: not an output directory (it holds no job.json)."),
        ],
    )
    def test_2_is_a_command_line_that_asks_for_nothing_possible(self, words, message, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        check(extract(capsys, *words.split()), 2, message)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                '[source]\npath = "x"\ncolum = "text"\n',
                "job.toml [source]: unknown key \"colum\". Did you mean 'column'?",
            ),
            (
                'zzz = 1\n[source]\npath = "x"\n',
                'job.toml: unknown key "zzz". Known keys: engine, other_engines, output, run, source, states, text.',
            ),
            (
                '[source]\npath = "x"\n[states]\nkind = "all"\n',
                'job.toml [states]: kind is "all", expected one of "tokens", "last", "mean", "first".',
            ),
            ('[source]\npath = "x"\nlimit = "3"\n', 'job.toml [source]: limit is "3", expected a whole number.'),
            ('engine = "x"\n', "job.toml: source is missing, expected a table."),
            (
                "[source\n",
                "job.toml: not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 8).",
            ),
        ],
    )
    def test_2_is_a_job_spec_with_a_mistake_and_the_message_says_which(
        self, text, message, capsys, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        Path("job.toml").write_text(text)
        check(extract(capsys, "plan", "job.toml"), 2, message)

    def test_2_is_an_option_that_is_wrong_over_a_job_spec_that_is_not(self, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("job.toml").write_text('[source]\npath = "x"\n')
        message = "job.toml, options over it [source]: limit is -1, expected a whole number, 0 or more."
        check(extract(capsys, "plan", "job.toml", "--limit", "-1"), 2, message)

    def test_2_is_more_than_the_engine_was_built_for(self, job, capsys):
        ended = extract(capsys, "plan", *job, "--max-input-tokens", "64")
        message = (
            "text.max_input_tokens is 64, more than the engine's 32 (the recipe). "
            "Ask for less, or build an engine with a higher limit: extract build ... --max-input-tokens 64"
        )
        check(ended, 2, message)

    def test_2_is_a_place_that_cannot_be_written(self, tmp_path, capsys, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setattr("extract.sample.passages", lambda: iter([Passage("id", "module", "text")]))
        ended = extract(capsys, "sample", "-o", tmp_path / "file" / "rows.parquet", "--rows", "1")
        where = f"{tmp_path}/file/rows.parquet"
        check(ended, 2, f"{where}: cannot be written: File exists. Choose another place with -o.")

    def test_2_is_a_row_that_is_not_there(self, finished, capsys):
        assert extract(capsys, "inspect", finished, "--row", "20").code == 2

    def test_2_is_asking_for_a_row_of_an_engine(self, tiny_engine, capsys):
        ended = extract(capsys, "inspect", tiny_engine, "--row", "2")
        check(ended, 2, "--row is for output directories; this is an engine. See extract inspect --help")


class TestSource:
    """Exit code 3."""

    def test_3_is_a_source_that_is_not_there(self, job, tmp_path, capsys):
        ended = extract(capsys, "plan", *job, "--data", tmp_path / "gone.parquet")
        check(ended, 3, f"{tmp_path}/gone.parquet: no such file or directory.")

    def test_3_is_a_file_that_is_not_what_its_name_says(self, job, tmp_path, capsys):
        (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing of the kind")
        job[job.index("--data") + 1] = str(tmp_path / "bad.parquet")
        ended = extract(capsys, "plan", *job)
        check_like(ended, 3, rf"{re.escape(str(tmp_path))}/bad\.parquet: cannot be read as parquet: .*")

    def test_3_is_a_column_that_is_not_there(self, job, rows, capsys):
        ended = extract(capsys, "plan", *job, "--column", "txt")
        check(ended, 3, f'{rows}: no column "txt". Did you mean "text"? Columns: text, key.')

    def test_3_is_a_row_that_an_error_policy_stops_at(self, job, tmp_path, capsys):
        job[job.index("--data") + 1] = str(write_rows(tmp_path / "null.parquet", ["a", None]))
        ended = extract(capsys, "run", *job, "--on-null", "error", "--quiet")
        assert (ended.code, ended.out) == (3, "")
        assert ended.err.startswith("extract: row 1: ")


class TestEngine:
    """Exit code 4."""

    @pytest.fixture
    def engine(self, tiny_engine: Path, tmp_path: Path, job: list[str]) -> Path:
        """A copy that may be damaged, and that the job names."""
        shutil.copytree(tiny_engine, tmp_path / "engine")
        job[job.index("--engine") + 1] = str(tmp_path / "engine")
        return tmp_path / "engine"

    def test_4_is_a_directory_that_is_no_engine(self, job, tmp_path, capsys):
        ended = extract(capsys, "plan", *job, "--engine", tmp_path)
        assert ended.code == 4
        assert ended.err.startswith(f"extract: {tmp_path}: not an engine directory (")
        assert ended.err.endswith(f"Build one: extract build CHECKPOINT -o {tmp_path}\n")

    def test_4_is_an_engine_file_that_changed(self, engine, job, capsys):
        path = next(engine.glob("*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        ended = extract(capsys, "run", *job, "--quiet")
        pattern = (
            rf"{re.escape(str(engine))}: engine file {path.name} has sha256 \w+, the contract says \w+\. "
            r"Copy the engine again or rebuild it\."
        )
        check_like(ended, 4, pattern)

    def test_4_is_an_engine_for_another_device(self, engine, job, capsys):
        contract = json.loads((engine / "contract.json").read_text())
        edit_json(engine / "contract.json", {"device": {**contract["device"], "type": "cuda", "name": "A card"}})
        ended = extract(capsys, "run", *job, "--quiet")
        message = (
            f"{engine}: this engine needs device cuda (A card), this machine has no CUDA device that torch can use. "
            "extract doctor says why. Or build one for this machine: extract build CHECKPOINT -o ENGINE"
        )
        check(ended, 4, message)

    def test_4_is_a_checkpoint_that_is_none(self, tmp_path, capsys):
        ended = extract(capsys, "build", tmp_path, "-o", tmp_path / "engine", "--quiet")
        assert (ended.code, ended.out) == (4, "")
        assert ended.err.startswith(f"extract: {tmp_path}: not a checkpoint: ")


class TestResume:
    def test_5_is_another_job_in_the_same_directory(self, finished, job, capsys):
        ended = extract(capsys, "run", *job, "--dtype", "float32", "--quiet")
        message = (
            f'{finished}: this directory holds a job whose states.dtype is "float16"; you asked for "float32". '
            "Ask for the same again to go on with it, or choose another output directory with -o."
        )
        check(ended, 5, message)

    def test_5_is_a_directory_that_holds_something_else(self, job, tmp_path, capsys):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").touch()
        ended = extract(capsys, "run", *job, "--quiet")
        problem = "the directory is not empty and holds no job.json"
        check(ended, 5, f"{tmp_path}/out: {problem}. Choose another output directory with -o.")


class TestRun:
    def test_6_is_shards_that_broke_twice_and_the_others_are_kept(self, job, tmp_path, capsys, monkeypatch):
        whole = CpuRuntime.hidden_states

        def broken(runtime: CpuRuntime, batch: TokenBatch, kind: OutputKind) -> States:
            if kind == "last" and len(batch.members) == 4:  # shards are of 8, 8 and 4 rows
                raise RuntimeError("the card fell off the bus")
            return whole(runtime, batch, kind)

        monkeypatch.setattr(CpuRuntime, "hidden_states", broken)
        message = (
            f"{tmp_path}/out: 1 of 3 shards failed twice and are missing: shard 2: RuntimeError: the card fell off "
            "the bus. Run again to try them again."
        )
        check(extract(capsys, "run", *job, "--quiet"), 6, message)
        monkeypatch.undo()
        ended = extract(capsys, "run", *job, "--quiet", "--json")
        assert json.loads(ended.out)["num_shards_made"] == 1

    def test_6_is_states_that_an_error_policy_stops_at(self, job, capsys, monkeypatch):
        whole = CpuRuntime.hidden_states

        def overflowing(runtime: CpuRuntime, batch: TokenBatch, kind: OutputKind) -> States:
            states = whole(runtime, batch, kind)
            if kind == "last":  # what the job asks for; the probe of a load asks for tokens
                states[:] = np.nan
            return states

        monkeypatch.setattr(CpuRuntime, "hidden_states", overflowing)
        ended = extract(capsys, "run", *job, "--on-non-finite", "error", "--quiet")
        assert (ended.code, ended.out) == (6, "")
        assert ended.err.startswith(
            "extract: shard 00000, row 0, state: 64 of 64 values cannot be stored as float16 (64 NaN, 0 inf, "
            "0 beyond 65504). Nothing was written for this shard. "
        )

    def test_8_is_a_disk_that_is_too_small(self, job, tmp_path, capsys):
        job[job.index("--reserve-bytes") + 1] = str(2**62)
        pattern = (
            rf"{re.escape(str(tmp_path))}/out: the job needs about [\d,]+ bytes more and leaves "
            r"4,611,686,018,427,387,904 free, but only [\d,]+ are free\. Choose another disk with -o, a smaller output "
            r"\(--dtype int8, --kind last\), or lower the reserve\."
        )
        check_like(extract(capsys, "plan", *job), 8, pattern)

    def test_8_is_running_out_of_memory(self, capsys, monkeypatch):
        def status(out: Path, **options: object) -> None:
            raise MemoryError

        monkeypatch.setattr("extract.status.status", status)
        message = "out of memory. Use a smaller --max-tokens, or a machine with more memory."
        check(extract(capsys, "status", "out"), 8, message)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_130_is_a_signal_and_what_is_committed_stays(self, number, job, tmp_path, capsys, monkeypatch):
        whole = CpuRuntime.hidden_states
        passes = []

        def interrupted(runtime: CpuRuntime, batch: TokenBatch, kind: OutputKind) -> States:
            passes.append(batch)
            if len(passes) == 2:
                os.kill(os.getpid(), number)
            return whole(runtime, batch, kind)

        job += ["--max-sequences", "8", "--sequential", "--quiet"]
        monkeypatch.setattr(CpuRuntime, "hidden_states", interrupted)
        ended = extract(capsys, "run", *job)
        assert (ended.code, ended.out) == (130, "")
        assert re.fullmatch(
            rf"extract: interrupted: [12]\D.* committed in {re.escape(str(tmp_path))}/out; .*"
            r"Run the same command again to go on\.\n",
            ended.err,
        )
        monkeypatch.undo()
        assert extract(capsys, "run", *job).code == 0

    def test_130_is_an_interrupt_of_any_other_command(self, capsys, monkeypatch):
        def status(out: Path, **options: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("extract.status.status", status)
        message = "interrupted. Nothing that was finished is lost; run the same command again to go on."
        ended = extract(capsys, "status", "out")
        assert ended.err.lstrip("\n") == f"extract: {message}\n"
        assert ended.code == 130


class TestVerification:
    def test_7_is_a_shard_with_a_flipped_byte(self, finished, capsys):
        path = sorted((finished / "data").iterdir())[1]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        ended = extract(capsys, "verify", finished)
        assert (ended.code, ended.out) == (7, "")
        assert ended.err.startswith(f"extract: {finished}: 1 problems:\n")
        assert "shard" in ended.err
        assert "Traceback" not in ended.err

    def test_7_is_a_commit_record_that_is_gone(self, finished, capsys):
        next((finished / "commits").iterdir()).unlink()
        assert extract(capsys, "verify", finished).code == 7

    def test_7_is_a_damaged_shard_that_is_read(self, finished, capsys):
        for path in (finished / "data").iterdir():
            path.write_bytes(b"ARROW1")
        ended = extract(capsys, "inspect", finished, "--row", "3")
        assert ended.code == 7
        assert f"extract verify {finished}" in ended.err


def test_rows_that_are_only_unusual_are_no_failure(job, tmp_path, capsys):
    job[job.index("--data") + 1] = str(write_rows(tmp_path / "odd.parquet", ["", None, "a", "b " * 90]))
    ended = extract(capsys, "run", *job, "--quiet", "--json")
    assert ended.code == 0
    outcomes = json.loads(ended.out)["totals"]["outcomes"]
    assert outcomes == {"ok": 1, "truncated": 1, "null": 1, "empty": 1}
