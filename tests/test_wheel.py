"""The wheel, alone in a virtual environment, is the whole tool: every module, recipe, patch and job, and a job runs."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parent.parent
SHIPPED = ("engines", "patches", "jobs")


def call(*arguments: object, cwd: Path) -> str:
    """Run a program in `cwd`; nothing of this checkout is on its path."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    ended = subprocess.run(
        list(map(str, arguments)), capture_output=True, text=True, cwd=cwd, env=environment, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="needs the package `build`")
    pytest.importorskip("hatchling", reason="needs the package `hatchling`")
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, CHECKOUT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel, and borrows its dependencies from the one that runs this test.

    The path file is read after the environment's own packages, and the borrowed directory's path files, among them that
    of an editable install, are not read at all.
    """
    root = tmp_path_factory.mktemp("venv")
    call(sys.executable, "-m", "venv", "--without-pip", root, cwd=root)
    python = root / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=root)
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=root).strip())
    borrowed = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    return root


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_its_record_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"extract", f"{wheel.name.split('-py3')[0]}.dist-info"}
    code = {name.removeprefix("extract/") for name in names if re.match("extract/(?!_data/)", name)}
    assert code == files_below(CHECKOUT / "extract")


@pytest.mark.parametrize("kind", SHIPPED)
def test_the_wheel_holds_every_recipe_patch_and_job(kind, wheel):
    prefix = f"extract/_data/{kind}/"
    names = {name.removeprefix(prefix) for name in zipfile.ZipFile(wheel).namelist() if name.startswith(prefix)}
    assert names == files_below(CHECKOUT / kind)
    assert names


def test_the_wheel_asks_for_what_the_project_declares(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    asked = {Requirement(line) for line in metadata.get_all("Requires-Dist") or []}
    extras = project["optional-dependencies"].items()
    optional = {Requirement(f'{line}; extra == "{extra}"') for extra, lines in extras for line in lines}
    assert asked == {Requirement(line) for line in project["dependencies"]} | optional
    assert metadata["Requires-Python"] == project["requires-python"]


def test_the_installed_package_finds_what_was_shipped(venv, tmp_path):
    python = """
import json, extract
from extract import assets
print(json.dumps({"file": extract.__file__, **{kind: assets.names(kind) for kind in assets.KINDS}}))
"""
    found = json.loads(call(venv / "bin" / "python", "-c", python, cwd=tmp_path))
    assert Path(found.pop("file")).is_relative_to(venv)
    assert found == {
        kind: sorted(name.removesuffix(".toml") for name in files_below(CHECKOUT / kind) if name.endswith(".toml"))
        for kind in SHIPPED
    }


def test_a_shipped_job_runs_with_a_shipped_recipe_from_an_empty_directory(venv, llama_checkpoint, tmp_path):
    extract = venv / "bin" / "extract"
    call(extract, "sample", "-o", "demo/passages.parquet", "--rows", "20", cwd=tmp_path)
    build = ["build", llama_checkpoint, "--recipe", "any/float32-cpu", "--max-tokens", "512", "-o", "demo/engine"]
    call(extract, *build, cwd=tmp_path)
    ran = json.loads(call(extract, "run", "demo", "--reserve-bytes", "0", "--json", cwd=tmp_path))
    assert ran["path"] == "demo/out"
    assert ran["totals"]["num_rows"] == 20
    assert call(extract, "verify", "demo/out", cwd=tmp_path).startswith("verified   demo/out: complete; 20 source rows")
    python = "import extract; print(extract.__file__, extract.open_output('demo/out').row(19).states.shape[1])"
    file, width = call(venv / "bin" / "python", "-c", python, cwd=tmp_path).split()
    assert Path(file).is_relative_to(venv)
    assert width == "64"
    assert {path.name for path in tmp_path.iterdir()} == {"demo"}
