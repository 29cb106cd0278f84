"""What every export does: it is whole or has no name, goes on after a kill, and refuses what does not fit."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from exporting_rig import assert_same, output, stored
from job_rig import snapshot

from extract import export
from extract.derivation import Change, Unfinished, derive
from extract.errors import BadValue
from extract.exporting import TARGETS
from extract.exporting.export import ExportDiffers, ExportIntoOutput
from extract.exporting.hf_directory import ColumnNotForDatasets
from extract.exporting.request import Kind, OptionDoesNotApply
from extract.exporting.target import Target, TargetCannotHold
from extract.exporting.working_directory import ExportExists, ExportIsBusy, OtherExport, WorkingDirectory
from extract.output import open_output

PLAIN = ("parquet", "npy", "safetensors", "hf", "lance", "saelens")
ALL_ROWS = ("parquet", "hf", "lance")


def export_to(kind, out, path, **options):
    if kind == "lance":
        pytest.importorskip("lance", reason="pylance is not installed")
    if kind in ("speculators", "specforge"):
        options = {"layers": ("final",), "loss_mask": "all", **options}
    return export(out, path, kind=kind, **options)


def content(path):
    """Everything but what is different by its nature: names that Lance draws, and when it wrote."""
    found = snapshot(path)
    return {name: digest for name, digest in found.items() if ".lance/" not in name and name != "export.json"}


# --- whole or not at all --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "killed_in"), [*((kind, 1) for kind in TARGETS), ("npy", 0), ("npy", 2)])
def test_after_a_kill_there_is_nothing_under_the_name_and_the_same_call_goes_on(kind, killed_in, tmp_path, monkeypatch):
    """Killed after it wrote a part's files and before it recorded them: the worst moment."""
    out = output(tmp_path)
    export_to(kind, out, tmp_path / "whole")
    record, calls = WorkingDirectory.record, Counter()

    def die(self, part, shared):
        if calls["parts"] == killed_in:
            raise KeyboardInterrupt
        calls["parts"] += 1
        record(self, part, shared)

    monkeypatch.setattr(WorkingDirectory, "record", die)
    with pytest.raises(KeyboardInterrupt):
        export_to(kind, out, tmp_path / "to")
    assert not (tmp_path / "to").exists()
    monkeypatch.setattr(WorkingDirectory, "record", record)
    made = export_to(kind, out, tmp_path / "to")
    assert made.parts_made == 3 - killed_in
    assert content(tmp_path / "to") == content(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "to", "whole"]
    files = [len([*(tmp_path / name).rglob("*")]) for name in ("to", "whole")]
    assert files[0] == files[1]


def test_a_process_that_is_killed_leaves_what_the_next_one_goes_on_with(tmp_path):
    out = output(tmp_path, "tokens", "float32")
    code = (
        "import os, sys\n"
        "from extract import export\n"
        "from extract.exporting.working_directory import WorkingDirectory as W\n"
        "record = W.record\n"
        "def once(self, part, shared):\n"
        "    record(self, part, shared)\n"
        "    os.kill(os.getpid(), 9)\n"
        "W.record = once\n"
        "export(sys.argv[1], sys.argv[2], kind='npy')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, out, tmp_path / "to"], check=False, env=os.environ)
    assert ended.returncode == -9
    assert not (tmp_path / "to").exists()
    assert export(out, tmp_path / "to", kind="npy").parts_made == 2
    states = np.load(tmp_path / "to" / "states.npy")
    assert np.array_equal(states, np.concatenate(stored(out, with_states_only=True)))


def test_an_export_that_is_there_is_not_made_again(tmp_path):
    out = output(tmp_path)
    export(out, tmp_path / "to", kind="hf")
    before = snapshot(tmp_path / "to")
    assert export(out, tmp_path / "to", kind="hf").parts_made == 0
    assert snapshot(tmp_path / "to") == before


def test_another_export_in_its_place_is_refused(tmp_path):
    out = output(tmp_path)
    export(out, tmp_path / "to", kind="hf")
    with pytest.raises(ExportExists) as error:
        export(out, tmp_path / "to", kind="npy")
    assert str(error.value) == (
        f'{tmp_path}/to: an export is there whose kind is "hf"; you asked for "npy". '
        "Choose another directory with -o, or remove this one."
    )


def test_a_directory_with_something_else_is_refused_and_left_alone(tmp_path):
    out = output(tmp_path)
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine").write_text("mine")
    with pytest.raises(ExportExists, match="something is there that is no export"):
        export(out, tmp_path / "to", kind="npy")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["mine"]


def test_an_export_into_the_output_itself_is_refused(tmp_path):
    out = output(tmp_path)
    for place in (out, out / "to"):
        with pytest.raises(ExportIntoOutput) as error:
            export(out, place, kind="npy")
        assert str(error.value) == (
            f"{place}: lies within the output that it is made from. Choose another directory with -o."
        )


def test_an_unfinished_export_of_something_else_is_refused(tmp_path, monkeypatch):
    out = output(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(WorkingDirectory, "publish", _interrupted)
        export(out, tmp_path / "to", kind="npy")
    with pytest.raises(OtherExport) as error:
        export(out, tmp_path / "to", kind="npy", cast="float32")
    assert str(error.value) == (
        f'{tmp_path}/.to.exporting: an unfinished export whose cast is null; you asked for "float32". '
        "Ask for the same again to go on with it, or remove it."
    )
    assert export(out, tmp_path / "to", kind="npy").parts_made == 0


def _interrupted(*_):
    raise KeyboardInterrupt


def test_two_processes_do_not_write_the_same_export(tmp_path):
    out = output(tmp_path)
    hold = (
        "import sys, time\n"
        "from extract.claims import Claims\n"
        "claims = Claims(__import__('pathlib').Path(sys.argv[1]))\n"
        "assert claims.claim(0)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    (tmp_path / ".to.exporting").mkdir()
    command = [sys.executable, "-c", hold, tmp_path / ".to.exporting" / ".claims"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ExportIsBusy):
            export(out, tmp_path / "to", kind="npy")
        other.stdin.close()
    assert export(out, tmp_path / "to", kind="npy").parts_made == 3


@pytest.mark.parametrize("kind", PLAIN)
def test_numbers_that_read_back_differently_never_get_the_name(kind, tmp_path, monkeypatch):
    from extract.exporting import target_class

    out = output(tmp_path)
    if kind == "lance":
        pytest.importorskip("lance", reason="pylance is not installed")
    cls = target_class(kind)
    read_back = cls.read_back

    def wrong(self, parts, row):
        found = read_back(self, parts, row)
        return found if found is None else found + 1

    monkeypatch.setattr(cls, "read_back", wrong)
    with pytest.raises(ExportDiffers, match="row 0 of the export reads back as other numbers than are stored"):
        export(out, tmp_path / "to", kind=kind)
    assert not (tmp_path / "to").exists()


# --- which rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TARGETS)
def test_every_row_is_exported_or_counted(kind, tmp_path):
    out = output(tmp_path)
    made = export_to(kind, out, tmp_path / "to")
    assert made.rows == (21 if kind in ALL_ROWS else 15)
    assert made.left_out_without_states == ({} if kind in ALL_ROWS else {"empty": 6})
    assert made.rows + sum(made.left_out_without_states.values()) == open_output(out).num_rows_out


@pytest.mark.parametrize("kind", TARGETS)
def test_rows_and_outcomes_are_chosen(kind, tmp_path):
    out = output(tmp_path)
    made = export_to(kind, out, tmp_path / "to", rows="2-4,9,17-30", outcomes=("ok",))
    assert (made.rows, made.left_out_without_states) == (6, {})
    assert made.left_out_not_chosen == 15


@pytest.mark.parametrize("kind", TARGETS)
def test_an_export_of_no_rows_opens(kind, tmp_path):
    out = output(tmp_path)
    made = export_to(kind, out, tmp_path / "to", outcomes=("bad_text",))
    assert (made.rows, made.record["rows_read_back"]) == (0, 0)
    if kind != "safetensors" and kind not in ("speculators", "specforge"):
        exec(made.reading, {})


def test_chosen_rows_keep_their_own_states_and_columns(tmp_path):
    out = output(tmp_path, "last", "bfloat16")
    export(out, tmp_path / "to", kind="npy", rows="3,10-12")
    rows = pq.read_table(tmp_path / "to" / "rows")
    assert rows["row"].to_pylist() == [3, 10, 12]
    assert rows["id"].to_pylist() == [open_output(out).row(row).columns["id"] for row in (3, 10, 12)]
    assert_same(list(np.load(tmp_path / "to" / "states.npy")), [stored(out)[row] for row in (3, 10, 12)])


def test_an_output_that_is_not_complete_is_refused_unless_asked_for(tmp_path):
    out = output(tmp_path, missing=(2,))
    with pytest.raises(Unfinished, match=r"shard 2 is missing \(--unfinished exports what is there\)"):
        export(out, tmp_path / "to", kind="parquet")
    made = export(out, tmp_path / "to", kind="parquet", unfinished=True)
    assert (made.rows, made.record["made_from"]["complete"]) == (14, False)
    assert "unfinished" in (tmp_path / "to" / "README.md").read_text()


def test_chunks_come_with_their_numbers(tmp_path):
    out = output(tmp_path, chunked=True)
    export(out, tmp_path / "to", kind="parquet")
    assert pq.read_table(tmp_path / "to" / "data")["chunk"].to_pylist() == open_output(out).table()["chunk"].to_pylist()


# --- stored types ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TARGETS)
def test_int8_is_refused_without_a_cast_and_before_anything_is_written(kind, tmp_path):
    out = output(tmp_path, "tokens", "int8")
    with pytest.raises(TargetCannotHold) as error:
        export_to(kind, out, tmp_path / "to")
    assert str(error.value) == (
        f"{out}: holds int8: rotated numbers with a scale a state, which --to {kind} cannot hold. "
        "Choose what they become: --cast float16, float32 or bfloat16."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert export_to(kind, out, tmp_path / "to", cast="float16").rows


@pytest.mark.parametrize("states", ["tokens", "last", "mean", "first"])
@pytest.mark.parametrize("cast", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "int8"])
def test_a_cast_gives_what_reprocess_gives(states, dtype, cast, tmp_path):
    out = output(tmp_path, states, dtype)
    derive(out, tmp_path / "again", Change(dtype=cast))
    export(out, tmp_path / "to", kind="npy", cast=cast)
    expected = stored(tmp_path / "again", with_states_only=True)
    found = np.load(tmp_path / "to" / "states.npy")
    assert_same([found], [np.concatenate(expected) if states == "tokens" else np.stack(expected)])


def test_lance_refuses_bfloat16(tmp_path):
    pytest.importorskip("lance", reason="pylance is not installed")
    with pytest.raises(TargetCannotHold, match=r"Choose what Lance searches: --cast float16 or float32"):
        export(output(tmp_path, "last", "bfloat16"), tmp_path / "to", kind="lance")


@pytest.mark.parametrize("kind", ["speculators", "specforge", "saelens"])
def test_targets_of_every_token_refuse_one_state_a_row(kind, tmp_path):
    out = output(tmp_path, "mean")
    with pytest.raises(TargetCannotHold) as error:
        export_to(kind, out, tmp_path / "to")
    assert str(error.value) == (
        f'{out}: holds one state a row (mean), which --to {kind} cannot hold. Export an output of kind "tokens".'
    )


# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "option", "value", "kinds"),
    [
        ("parquet", "layers", ("2",), "speculators, specforge and saelens"),
        ("npy", "loss_mask", "all", "speculators and specforge"),
        ("hf", "engine", "engine", "speculators and specforge"),
        ("lance", "context", 4, "saelens"),
        ("specforge", "hook", "name", "saelens"),
        ("saelens", "rows_per_file", 4, "safetensors"),
    ],
)
def test_an_option_of_another_target_is_refused(kind, option, value, kinds, tmp_path):
    with pytest.raises(OptionDoesNotApply) as error:
        export(output(tmp_path), tmp_path / "to", kind=kind, **{option: value})
    assert str(error.value) == (
        f"--{option.replace('_', '-')} does not apply to --to {kind}, only to {kinds}. Leave it out."
    )


@pytest.mark.parametrize("wrong", [{"kind": "csv"}, {"cast": "fp8"}, {"outcomes": ("fine",)}, {"context": 0}])
def test_words_that_nobody_knows_are_refused(wrong, tmp_path):
    with pytest.raises(BadValue, match="export: "):
        export(output(tmp_path), tmp_path / "to", **{"kind": "saelens", **wrong})


def test_the_targets_are_those_of_the_request():
    from typing import get_args

    from extract.exporting import target_class

    assert tuple(TARGETS) == get_args(Kind)
    for kind in TARGETS:
        cls = target_class(kind)
        assert issubclass(cls, Target)
        assert cls.kind == kind


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    from extract.exporting.target import MissingPackage

    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(MissingPackage) as error:
        export(output(tmp_path), tmp_path / "to", kind="lance")
    assert str(error.value) == "--to lance needs the package pylance, which is not installed: pip install pylance"


def test_a_column_that_datasets_cannot_hold_is_named(tmp_path):
    import pyarrow as pa

    from extract.exporting.hf_directory import features_of

    schema = pa.schema([("n", pa.int64()), ("tags", pa.map_(pa.string(), pa.int32()))])
    with pytest.raises(ColumnNotForDatasets) as error:
        features_of(schema, tmp_path)
    assert str(error.value) == (
        f'{tmp_path}: column "tags" has type map<string, int32>, for which Hugging Face datasets have none. '
        "Export to parquet, or run the job without carrying it."
    )


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_made_and_how_it_is_read(tmp_path, capsys):
    from command_line import extract

    out = output(tmp_path)
    ended = extract(capsys, "export", out, "--to", "npy", "-o", tmp_path / "to", "--quiet")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0].startswith(f"complete   {tmp_path}/to: 15 rows of {out} as npy, ")
    assert lines[1] == "left out   6 rows without states (empty 6), 0 that were not asked for"
    assert lines[-1] == f'  states = numpy.load("{tmp_path}/to/states.npy", mmap_mode="r")'
    again = extract(capsys, "export", out, "--to", "npy", "-o", tmp_path / "to", "--quiet", "--json")
    assert json.loads(again.out)["parts_made"] == 0


def test_the_command_refuses_with_an_exit_code(tmp_path, capsys):
    from command_line import extract

    out = output(tmp_path, missing=(1,))
    assert extract(capsys, "export", out, "--to", "npy", "-o", tmp_path / "to").code == 5
    assert extract(capsys, "export", out, "--to", "npy", "-o", tmp_path / "to", "--hook", "h").code == 2
    shutil.rmtree(out)
    assert extract(capsys, "export", out, "--to", "npy", "-o", tmp_path / "to").code == 2
