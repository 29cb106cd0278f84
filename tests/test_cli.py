"""Commands say what they do, print one result on stdout and all else on stderr, and import only what they need."""

import contextlib
import inspect
import io
import itertools
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import termios
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import extract, spawn, write_rows

from extract.cli import COMMANDS, cli
from extract.errors import ExtractError
from extract.sample import Passage, passages

EXTRACT = click.Context(cli, info_name="extract", **cli.context_settings)
"""What commands are called from, so that they know its settings."""

HEAVY = ("torch", "transformers", "datasets", "gguf")


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def paragraphs(name: str) -> list[str]:
    """A command's help: summary, when to use it, examples."""
    text = inspect.cleandoc(command(name).help or "")
    return [part.strip() for part in text.split("\n\n")]


def example_lines(name: str) -> list[str]:
    text = paragraphs(name)[-1]
    assert text.startswith("\b\nExample:\n")
    return [line.strip() for line in text.splitlines()[2:]]


class TestHelp:
    @pytest.mark.parametrize("name", COMMANDS)
    def test_a_command_opens_with_one_sentence_that_fits_the_list(self, name):
        summary = paragraphs(name)[0]
        assert re.fullmatch(r"[A-Z][^.]*\.", summary)
        assert len(summary) <= 66

    def test_the_list_of_commands_shows_every_summary_whole(self, capsys):
        shown = extract(capsys, "--help").out
        for name in COMMANDS:
            assert f"  {name:<9}  {paragraphs(name)[0]}\n" in shown
        assert "..." not in shown.partition("\n")[2]

    @pytest.mark.parametrize("name", COMMANDS)
    def test_a_command_says_when_to_use_it(self, name):
        assert len(paragraphs(name)) >= 3
        assert max(len(paragraph.split()) for paragraph in paragraphs(name)[1:-1]) >= 20

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_example_parses(self, name):
        lines = example_lines(name)
        assert lines
        for line in lines:
            words = shlex.split(line)
            assert words[:2] == ["extract", name]
            command(name).make_context(name, words[2:], parent=EXTRACT)

    def test_the_example_of_extract_itself_parses(self):
        lines = [
            line.split() for line in inspect.cleandoc(cli.help or "").splitlines() if line.startswith("    extract ")
        ]
        assert [words[1] for words in lines] == ["build", "run", "verify"]
        for words in lines:
            command(words[1]).make_context(words[1], words[2:], parent=EXTRACT)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_option_has_help_that_is_a_sentence(self, name):
        for option in command(name).params:
            if isinstance(option, click.Option):
                sentence = re.sub(r"  \[(default: |required ).*\]$", "", option.help or "")
                assert re.fullmatch(r"([a-z][\w, -]*: \w|[A-Z]).*\.", sentence), option.opts

    @pytest.mark.parametrize("name", COMMANDS)
    def test_an_option_that_takes_a_value_shows_its_default_and_unit(self, name):
        for option in command(name).params:
            if not isinstance(option, click.Option) or option.is_flag or option.name == "job_source_path":
                continue
            record = option.get_help_record(click.Context(command(name)))
            assert record is not None
            assert "default: " in record[1] or "[required" in record[1], option.opts
            assert not re.search(r"INTEGER|FLOAT|TEXT RANGE", record[0]), option.opts

    def test_h_is_help(self, capsys):
        assert extract(capsys, "run", "-h").out == extract(capsys, "run", "--help").out

    def test_a_terminal_of_forty_columns_shows_the_same_words(self, capsys, monkeypatch):
        wide = extract(capsys, "run", "--help").out
        monkeypatch.setenv("COLUMNS", "40")
        narrow = extract(capsys, "run", "--help").out
        assert max(map(len, narrow.splitlines())) < 70  # long names of choices do not break
        assert re.sub(r"[\s-]", "", narrow) == re.sub(r"[\s-]", "", wide)

    def test_extract_alone_shows_help_and_counts_as_a_mistake(self, capsys):
        ended = extract(capsys)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith("Usage: extract [OPTIONS] COMMAND [ARGS]...\n")

    def test_the_version_is_the_packages(self, capsys):
        from importlib.metadata import version

        assert extract(capsys, "--version").out == f"extract, version {version('extract-hidden-states')}\n"


@dataclass(frozen=True)
class Places:
    """What the commands below work on."""

    checkpoint: Path
    engine: Path
    rows: Path
    out: Path
    new: Path

    def fill(self, words: str) -> list[str]:
        return [word.format_map(vars(self)) for word in words.split()]


@pytest.fixture(scope="module")
def finished(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished output of three shards over `rows.parquet` beside it."""
    from extract import run
    from extract.spec import JobSpec, SourceSpec, StatesSpec

    root = tmp_path_factory.mktemp("finished")
    source = SourceSpec(path=str(write_rows(root / "rows.parquet")), id_column="key")
    states = StatesSpec(rows_per_shard=8, reserve_bytes=0)
    run(JobSpec(source=source, states=states, engine=str(tiny_engine), output=str(root / "out")))
    return root / "out"


@pytest.fixture(scope="module")
def few_passages() -> list[Passage]:
    return list(itertools.islice(passages(), 40))


@pytest.fixture
def places(
    llama_checkpoint: Path,
    tiny_engine: Path,
    finished: Path,
    few_passages: list[Passage],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Places:
    """With only the standard library's first passages, which are found quickly."""
    monkeypatch.setattr("extract.sample.passages", lambda: iter(few_passages))
    return Places(llama_checkpoint, tiny_engine, finished.parent / "rows.parquet", finished, tmp_path / "new")


ELSEWHERE = {"quantize"}
"""Commands that need a vendor's package: tests/vendor tries them."""

RESULTS: dict[str, tuple[str, Any]] = {
    "doctor": ("doctor", lambda found: [found["python"]["version"]] if "python" in found else []),
    "embed": (
        "embed {checkpoint} {rows} -o {new} --engine {engine} --quiet",
        lambda found: [str(found["num_shards_total"])] if "num_shards_total" in found else [],
    ),
    "export": ("export {out} --to npy -o {new} --quiet", lambda found: [found["path"]] if "path" in found else []),
    "fidelity": (
        "fidelity {engine} --reference {checkpoint} --rows 2 --quiet",
        lambda found: [found["checkpoint"]],
    ),
    "patch": ("patch list", lambda found: []),
    "report": ("report {out} -o {new}", lambda found: []),
    "build": (
        "build {checkpoint} -o {new} --dtype float32 --max-input-tokens 16 --max-tokens 256 --quiet",
        lambda found: [found["checkpoint"]["sha256"][:12], "16 tokens a row", found["precision"]["activations"]],
    ),
    "tune": (
        "tune {checkpoint} -o {new} --precisions float32 --threads 1 --max-input-tokens 16 --seconds 0 --quiet",
        lambda found: [
            found["architecture"],
            found["budget_is"],
            f"chosen     {found['chosen']['precision']}, 1 thread",
        ],
    ),
    "inspect an engine": (
        "inspect {engine}",
        lambda found: [found["checkpoint"]["sha256"][:12], f"width {found['output']['width']}"],
    ),
    "inspect an output": (
        "inspect {out}",
        lambda found: [found["job"], "20 source rows", *found["columns"], *found["columns"].values()],
    ),
    "inspect a row": (
        "inspect {out} --row 7",
        lambda found: [found["row"]["outcome"], str(found["row"]["first_values"][0])],
    ),
    "plan": (
        "plan --engine {engine} --data {rows} --kind last --reserve-bytes 0 -o {new}",
        lambda found: [found["job"], found["engine"]["layout"], f"of {found['estimate']['num_tokens_original']:,}"],
    ),
    "run": (
        "run --engine {engine} --data {rows} --kind last --reserve-bytes 0 -o {new} --quiet",
        lambda found: [found["job"], f"{found['totals']['num_rows']} rows in 1 shards"],
    ),
    "run again": (
        "run --engine {engine} --data {rows} --id-column key --rows-per-shard 8 --reserve-bytes 0 -o {out} --quiet",
        lambda found: [found["job"], "nothing to do"] if found["num_shards_made"] == 0 else ["shards were made again"],
    ),
    "finalize": ("finalize {out}", lambda found: [found["job"], "20 rows in 3 shards"]),
    "status": ("status {out}", lambda found: [found["job"], "complete", "shards     3 of 3"]),
    "verify": ("verify {out}", lambda found: [f"{found['num_rows']} source rows", f"{found['num_shards']} shards"]),
    "verify with recompute": (
        "verify {out} --recompute 3",
        lambda found: [f"recomputed {found['recomputed']} rows", f"{found['worst']:.1e}"],
    ),
    "reprocess without the model": (
        "reprocess {out} --cast float32 --pool last -o {new} --quiet",
        lambda found: [found["job"], found["made_from"]],
    ),
    "reprocess with the engine": (
        "reprocess {out} --rows 3-5 -o {new} --quiet",
        lambda found: [found["job"], f"{found['totals']['num_rows']} rows in 1 shards"],
    ),
    "families": ("families", lambda found: [*found, *(family["why"] for family in found.values())]),
    "sample": ("sample -o {new} --rows 5", lambda found: [found["path"], f"{found['rows']} rows"]),
}
"""Each command's words, and what of its JSON document must also be in its text."""


class TestResults:
    @pytest.mark.parametrize("case", RESULTS)
    def test_json_is_one_document_and_text_says_the_same(self, case, places, tmp_path, capsys):
        words, facts = RESULTS[case]
        ended = extract(capsys, *places.fill(words), "--json")
        document = json.loads(ended.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert (ended.code, ended.err) == (0, "")
        assert ended.out == json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        if places.new.exists():
            places.new.rename(tmp_path / "first")
        ended = extract(capsys, *places.fill(words))
        assert (ended.code, ended.err) == (0, "")
        assert re.match(rf"({places.new}: \S|[a-z_]+ +\S)", ended.out)
        for fact in facts(document):
            assert fact in ended.out

    def test_every_command_is_tried(self):
        assert {words.split()[0] for words, _ in RESULTS.values()} == set(COMMANDS) - ELSEWHERE

    def test_a_result_can_be_read_by_the_next_program(self, places):
        first = spawn("plan", "--engine", places.engine, "--data", places.rows, "--json")
        assert json.loads(first.out)["estimate"]["num_rows"] == 20


class TestStderr:
    def test_a_run_says_what_it_is_doing_and_how_far_it_came(self, places, capsys):
        ended = extract(capsys, *places.fill("run --engine {engine} --data {rows} --reserve-bytes 0 -o {new}"))
        reading, loading, last = ended.err.splitlines()
        assert reading == "reading the layout of the source"
        assert loading == f"loading {places.engine}"
        assert re.fullmatch(
            r"20 of 20 rows \(100 %\) \| [\d,]+ tokens/s \| 0\.\d MB written \| ETA 0 s \| "
            r"read\+tokenise \d+ %, forward \d+ %, write \d+ %",
            last,
        )

    @pytest.mark.parametrize(("quiet", "expected"), [((), "a step\n"), (("--quiet",), "")])
    def test_the_steps_of_a_build_go_to_stderr(self, quiet, expected, capsys, monkeypatch):
        def build(*_: object, say: Any, **__: object) -> None:
            say("a step")
            raise ExtractError(message="and no further")

        monkeypatch.setattr("extract.engine.builder.build", build)
        ended = extract(capsys, "build", "checkpoint", "-o", "engine", *quiet)
        assert (ended.out, ended.err) == ("", f"{expected}extract: and no further\n")

    def test_the_first_sign_of_life_comes_before_anything_slow(self, places, monkeypatch):
        seen = []

        class Stream(io.StringIO):
            def write(self, text: str) -> int:
                seen.append("wrote")
                return super().write(text)

        monkeypatch.setattr("extract.runners.session.open_job", lambda spec: seen.append("opened") or _stop())
        monkeypatch.setattr(sys, "stderr", Stream())
        from extract.cli import main

        with pytest.raises(SystemExit):
            main(places.fill("run --engine {engine} --data {rows} -o {new}"))
        assert seen[:2] == ["wrote", "opened"]

    def test_a_reader_of_progress_that_goes_away_does_not_stop_the_run(self, places, capsys, monkeypatch):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "w") as nobody, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", nobody)
            ended = extract(capsys, *places.fill("run --engine {engine} --data {rows} --reserve-bytes 0 -o {new}"))
            with contextlib.suppress(BrokenPipeError):
                nobody.close()
        assert ended.code == 0
        assert ended.out.startswith(f"complete   {places.new}: 20 rows in 1 shards")


def _stop() -> None:
    raise KeyboardInterrupt


class Terminal:
    """A pseudo-terminal of so many columns; `screen()` closes it and gives what was written to it."""

    def __init__(self, columns: int) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, columns))
        self.file = os.fdopen(slave, "w")
        self._parts: list[bytes] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._master, 65_536)
            except OSError:  # the other end is closed
                return
            if not part:
                return
            self._parts.append(part)

    def screen(self) -> str:
        self.file.close()
        self._thread.join()
        os.close(self._master)
        return b"".join(self._parts).decode()


class TestTerminal:
    @pytest.mark.parametrize("columns", [40, 120])
    def test_a_run_on_a_terminal_shows_one_bar_on_one_line(self, columns, places, capsys, monkeypatch):
        terminal = Terminal(columns)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal.file)
            ended = extract(capsys, *places.fill("run --engine {engine} --data {rows} --reserve-bytes 0 -o {new}"))
        lines = terminal.screen().split("\r\n")
        assert ended.code == 0
        assert lines[0] == "reading the layout of the source"
        assert lines[-1] == ""
        bars = lines[2].split("\r")  # lines[1] names the engine, and may be as long as its path
        assert len(lines) == 4
        assert all(len(bar) <= columns for bar in bars)
        assert bars[-1].startswith("100%|")
        assert "20/20" in bars[-1]

    def test_the_result_is_not_mixed_into_the_bar(self, places, capsys, monkeypatch):
        terminal = Terminal(80)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal.file)
            ended = extract(
                capsys, *places.fill("run --engine {engine} --data {rows} --reserve-bytes 0 -o {new} --json")
            )
        assert json.loads(ended.out)["complete"] is True
        assert "complete" not in terminal.screen()


class TestPipesAndLocales:
    def test_a_closed_pipe_is_silent(self):
        with subprocess.Popen(
            [sys.executable, "-m", "extract", "families"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""

    def test_a_closed_stdout_is_silent(self):
        ended = subprocess.run(
            [sys.executable, "-m", "extract", "families"],
            preexec_fn=lambda: os.close(1),
            stderr=subprocess.PIPE,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, b"")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_behind_stdout_is_told(self):
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "extract", "families"], stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert ended.stderr == (
            "extract: the command is done, but its result cannot be written to stdout: No space left on device.\n"
        )
        assert ended.returncode == 8

    @pytest.mark.parametrize("renderer", [(), ("--json",)], ids=["text", "json"])
    def test_a_terminal_without_unicode_still_shows_any_text(self, renderer, places, tmp_path):
        rows = write_rows(tmp_path / "rows.parquet", ["Grüße 🙂 an alle"])
        environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
        ended = spawn("plan", "--engine", places.engine, "--data", rows, *renderer, environment=environment)
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.isascii()
        if renderer:
            assert json.loads(ended.out)["estimate"]["example"]["text"] == "Grüße 🙂 an alle"
        else:
            assert r"Gr\xfc\xdfe \U0001f642 an alle" in ended.out

    def test_a_path_that_is_no_text_can_be_named_in_a_message(self, tmp_path):
        path = os.fsencode(tmp_path / "rows") + b"\xff"
        ended = subprocess.run([sys.executable, "-m", "extract", "status", path], capture_output=True, check=False)
        assert ended.returncode == 2
        assert ended.stderr.startswith(b"extract: ")
        assert b"Traceback" not in ended.stderr


WITHOUT_A_MODEL = """
import sys
import extract.sample
from extract.cli import main
extract.sample.spread = lambda count: [extract.sample.Passage("id", "module", "text")] * count
rows, engine, out, new = sys.argv[1:]
for words in (
    ["--help"], ["run", "--help"], ["build", "--help"],
    ["families"], ["inspect", engine], ["inspect", out, "--row", "3"],
    ["plan", "--data", rows, "--engine", engine, "-o", new], ["status", out], ["verify", out],
    ["reprocess", out, "--cast", "float32", "-o", new, "--quiet"], ["sample", "-o", new + ".parquet", "--rows", "1"],
):
    try:
        main(words)
    except SystemExit as end:
        heavy = [name for name in HEAVY if name in sys.modules]
        print(words[0], end.code or 0, *heavy, file=sys.stderr)
"""


class TestImports:
    def test_nothing_but_computing_imports_torch_transformers_or_datasets(self, places):
        python = WITHOUT_A_MODEL.replace("HEAVY", repr(HEAVY))
        ended = spawn(places.rows, places.engine, places.out, places.new, python=python)
        names = [
            "--help",
            "run",
            "build",
            "families",
            "inspect",
            "inspect",
            "plan",
            "status",
            "verify",
            "reprocess",
            "sample",
        ]
        assert ended.err.splitlines() == [f"{name} 0" for name in names]

    def test_help_imports_no_arrow(self):
        python = "import sys; import extract.cli as c; c.cli.main(['--help'], standalone_mode=False)"
        assert spawn(python=f"{python}; print('pyarrow' in sys.modules)").out.splitlines()[-1] == "False"

    def test_help_comes_quickly(self, capsys):
        start = time.perf_counter()
        assert spawn("--help").code == 0
        seconds = time.perf_counter() - start
        with capsys.disabled():
            sys.stderr.write(f"\nextract --help: {seconds:.2f} s\n")
        assert seconds < 60  # a quiet machine takes 0.2; importing torch and transformers takes 5 and more

    def test_the_package_gives_the_functions_behind_the_commands_on_first_use(self):
        ended = spawn(python="import sys, extract; print(*extract.__all__); print('numpy' in sys.modules, extract.run)")
        names, use = ended.out.splitlines()
        assert names == (
            "JobSpec Recipe RunSpec SourceSpec StatesSpec TextSpec build embed export fidelity load_job load_runtime "
            "open_output plan quantize rank_layers run stream tune verify write_report"
        )
        assert use.startswith("False <function run")

    def test_an_unknown_name_of_the_package_is_an_attribute_error(self):
        import extract as package

        with pytest.raises(AttributeError, match="module 'extract' has no attribute 'ruN'"):
            package.ruN  # noqa: B018
