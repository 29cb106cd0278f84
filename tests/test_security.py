"""Nothing that is read runs code, leads out of its directory, or asks for memory that its file does not have."""

import ast
import os
from pathlib import Path

import crash_rig
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shard_rig

import extract
from extract.commits import BadRecord, commit_path, read_commit
from extract.cpu.architecture import ARCHITECTURE_FILE, DamagedArchitecture, read_architecture
from extract.engine.recipe import load_recipe
from extract.errors import UnreadableSpec, VerificationFailed
from extract.job import NotAJob, read_job
from extract.manifest import finalize
from extract.output import open_output
from extract.runners.local import run
from extract.spec import JobSpec, RunSpec, SourceSpec, StatesSpec
from extract.verification import BadShards, verify

PACKAGE = Path(extract.__file__).parent
ABSURD = 2**42


def trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE), ast.parse(path.read_text(encoding="utf-8"))


class TestNoCode:
    """Read from the source of every module."""

    def test_nothing_is_evaluated_or_executed(self):
        banned = {"eval", "exec", "compile", "__import__"}
        for path, tree in trees():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in banned, f"{path}:{node.lineno}"

    def test_no_serialiser_that_runs_code_is_used(self):
        banned = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
        for path, tree in trees():
            for node in ast.walk(tree):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                found = banned & {name.partition(".")[0] for name in names}
                if found == {"pickle"} and path.as_posix() == "engine/decoder.py":
                    continue  # for the name of the error that a refused pickle raises
                assert not found, f"{path}:{node.lineno}"
        (decoder,) = [tree for path, tree in trees() if path.as_posix() == "engine/decoder.py"]
        used = [node for node in ast.walk(decoder) if isinstance(node, ast.Attribute)]
        used = [node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "pickle"]
        assert set(used) <= {"UnpicklingError"}

    def test_torch_and_numpy_load_weights_only_and_checkpoints_bring_no_code(self):
        for path, tree in trees():
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call):
                    continue
                options = {word.arg: word.value for word in node.keywords}
                where = f"{path}:{node.lineno}"
                called = ast.unparse(node.func)
                if called == "torch.load":
                    assert ast.unparse(options["weights_only"]) == "True", where
                if called.rpartition(".")[2] == "load" and called.startswith("np."):
                    assert "allow_pickle" not in options, where
                if "trust_remote_code" in options:
                    assert ast.unparse(options["trust_remote_code"]) == "False", where

    def test_no_dictionary_of_options_trusts_remote_code(self):
        for path, tree in trees():
            for node in ast.walk(tree):
                if isinstance(node, ast.Dict):
                    for key, value in zip(node.keys, node.values, strict=True):
                        if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                            assert ast.unparse(value) == "False", f"{path}:{node.lineno}"

    def test_no_command_goes_through_a_shell(self):
        for path, tree in trees():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    assert ast.unparse(node.func) not in ("os.system", "os.popen"), f"{path}:{node.lineno}"
                    assert all(word.arg != "shell" for word in node.keywords), f"{path}:{node.lineno}"


@pytest.fixture
def out(tmp_path):
    """An output of three shards."""
    root = tmp_path / "out"
    shard_rig.write_output(root, StatesSpec())
    finalize(read_job(root))
    return root


class TestPaths:
    def test_no_name_on_the_disk_comes_from_the_rows(self, tiny_engine, tmp_path):
        hostile = ["../../gone", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "~", "$HOME", "con", "x" * 4000]
        column = "../../name/of/a column"
        table = {"text": hostile, "key": hostile, column: hostile}
        pq.write_table(pa.table(table), tmp_path / "rows.parquet")
        spec = JobSpec(
            engine=str(tiny_engine),
            output=str(tmp_path / "out"),
            source=SourceSpec(path=str(tmp_path / "rows.parquet"), id_column="key"),
            states=StatesSpec(kind="last", rows_per_shard=2, reserve_bytes=0),
            run=RunSpec(threads=1),
        )
        run(spec)
        assert crash_rig.names(tmp_path / "out") == crash_rig.expected_names(tmp_path / "out")
        assert {path.name for path in tmp_path.iterdir()} == {"out", "rows.parquet"}
        assert crash_rig.stored_keys(tmp_path / "out") == hostile

    def test_a_link_in_the_place_of_a_shard_is_not_followed(self, out, tmp_path):
        commit = read_commit(commit_path(out / "commits", 1))
        path = out / "data" / commit.data
        path.rename(tmp_path / "elsewhere.arrow")
        path.symlink_to(tmp_path / "elsewhere.arrow")
        with pytest.raises(VerificationFailed, match="a link, not the file that was written"):
            open_output(out).states(8)
        with pytest.raises(BadShards, match="is missing"):
            verify(out)

    @pytest.mark.parametrize(
        "name", ["shard-00001-x/../../../../etc/passwd", "shard-00001\0", "shard-00001\\..\\x", ".."]
    )
    def test_a_record_cannot_name_a_file_elsewhere(self, name, out):
        import job_rig

        job_rig.edit_record(out, 1, data=name)
        with pytest.raises(BadRecord, match="is not one of this shard"):
            read_commit(commit_path(out / "commits", 1))

    def test_names_that_only_look_like_records_are_left_alone(self, out):
        from extract.commits import committed_shards

        for name in ("shard-²²²²².json", "shard-٠٠٠٠٤.json", "shard-4.json", "shard-" + "9" * 200 + ".json"):
            (out / "commits" / name).write_text("{}")
        assert committed_shards(out / "commits") == {0, 1, 2}


class TestAbsurdSizes:
    """Files that say terabytes, which a sparse file does for nothing: refused by their size."""

    def grow(self, path):
        os.truncate(path, ABSURD)

    def test_a_record(self, out):
        self.grow(commit_path(out / "commits", 1))
        with pytest.raises(BadRecord, match="absurdly many for a record"):
            read_commit(commit_path(out / "commits", 1))

    def test_a_job(self, out):
        self.grow(out / "job.json")
        with pytest.raises(NotAJob, match="absurdly many"):
            read_job(out)

    def test_a_manifest(self, out):
        self.grow(out / "manifest.json")
        with pytest.raises(BadShards, match=r"manifest\.json does not agree"):
            verify(out)
        finalize(read_job(out))
        verify(out)

    def test_a_decoder(self, tmp_path):
        (tmp_path / ARCHITECTURE_FILE).touch()
        self.grow(tmp_path / ARCHITECTURE_FILE)
        with pytest.raises(DamagedArchitecture, match="absurdly many"):
            read_architecture(tmp_path)

    def test_a_recipe(self, tmp_path):
        (tmp_path / "recipe.toml").touch()
        self.grow(tmp_path / "recipe.toml")
        with pytest.raises(UnreadableSpec, match="absurdly many for such a file"):
            load_recipe(tmp_path / "recipe.toml")
