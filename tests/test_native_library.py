"""Native kernels are compiled once, tried once, and refused precision by precision where they are wrong or slow."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from extract.cli import cli
from extract.cpu import native_library as library_module
from extract.cpu import native_trial
from extract.cpu.implementations import engine_kernels, kernels_for, kernels_here
from extract.cpu.native import NativeKernels, NoNativeKernels
from extract.cpu.native_library import NativeLibrary, cache_directory, library_if_compiled, native_library
from extract.cpu.native_trial import Verdict, known_verdicts, native_kernels, try_library, verdicts
from extract.engine.contract import read_contract
from extract.report import contract_text

PRECISIONS: Any = ("float32", "bfloat16", "int8")

here = native_library()
needs_compiler = pytest.mark.skipif(library_module.find_compiler() is None, reason="no C++ compiler")
needs_all = pytest.mark.skipif(
    any(here.missing(precision) for precision in PRECISIONS),
    reason=f"native kernels of some precision: {[here.missing(precision) for precision in PRECISIONS]}",
)

FAKE = 'extern "C" __attribute__((visibility("default"))) int extract_capabilities() { return 7; }\n'
"""Compiles in an instant."""


def forget() -> None:
    native_library.cache_clear()
    verdicts.cache_clear()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, a source that compiles in an instant, and nothing known in this process; the cache's place."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "kernels.cpp").write_text(FAKE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library_module, "SOURCE", source)
    forget()
    yield cache_directory()
    forget()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The compiler's command lines from here on."""
    seen: list[list[str]] = []
    run = subprocess.run

    def counted(command: list[str], **options: Any) -> Any:
        seen.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    return seen


def again() -> NativeLibrary:
    """As another process would find it."""
    forget()
    return native_library()


# --- compiled once --------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_library_is_compiled_once(fresh: Path, compilations: list[list[str]]) -> None:
    first = native_library()
    assert first.functions is not None
    assert first.path is not None and first.path.parent == fresh
    assert again().path == first.path
    assert len(compilations) == 1
    assert [path.name for path in fresh.iterdir()] == [first.path.name]


@needs_compiler
@pytest.mark.parametrize("change", ["source", "header", "flags", "cpu", "compiler"])
def test_another_source_compiler_or_cpu_has_a_library_of_its_own(
    fresh: Path, compilations: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    first = native_library()
    match change:
        case "source":
            (library_module.SOURCE / "kernels.cpp").write_text(FAKE + "// more\n")
        case "header":
            (library_module.SOURCE / "new.h").write_text("")
        case "flags":
            monkeypatch.setattr(library_module, "FLAGS", (*library_module.FLAGS, "-g0"))
        case "cpu":
            monkeypatch.setattr(library_module, "cpu_identity", lambda: "another CPU")
        case "compiler":
            compiler = tmp_path / "bin" / "c++"
            compiler.parent.mkdir()
            compiler.write_text(f'#!/bin/sh\nexec {library_module.find_compiler()} "$@"\n')
            compiler.chmod(0o755)
            monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    second = again()
    assert second.functions is not None
    assert second.path != first.path
    assert len(compilations) == 2


# --- or not at all --------------------------------------------------------------------------------------------------


def assert_portable(problem: str) -> None:
    """Nothing fails, and the reason is told."""
    assert native_library().functions is None
    assert problem in native_library().problem
    for precision in PRECISIONS:
        assert kernels_for(precision, micro_batch=16).name == "portable"
        with pytest.raises(NoNativeKernels) as refusal:
            kernels_for(precision, micro_batch=16, choice="native")
        assert str(refusal.value) == f"native kernels in {precision}: {native_library().problem}."


def test_without_a_compiler_the_portable_kernels_take_over(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert_portable("no C++ compiler (c++, g++ or clang++) on PATH")
    assert kernels_here("float32") == "portable (no C++ compiler (c++, g++ or clang++) on PATH)"
    assert not fresh.exists()


@needs_compiler
def test_a_source_that_does_not_compile_is_told(fresh: Path) -> None:
    (library_module.SOURCE / "kernels.cpp").write_text("int broken(\n")
    assert_portable("ended with 1:")
    assert list(fresh.iterdir()) == []


@needs_compiler
def test_a_compiler_that_hangs_is_told(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "COMPILE_S", 0.001)
    assert_portable("TimeoutExpired")


@needs_compiler
def test_a_library_without_our_functions_is_told(fresh: Path) -> None:
    (library_module.SOURCE / "kernels.cpp").write_text("int other;\n")
    assert_portable("undefined symbol: extract_capabilities")


@needs_compiler
def test_a_cache_that_cannot_be_written_is_told(fresh: Path) -> None:
    fresh.parent.parent.mkdir(exist_ok=True)
    fresh.parent.write_text("a file where the directory should be")
    assert_portable("NotADirectoryError")


@needs_compiler
def test_no_home_is_told(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert_portable("Could not determine home directory.")


# --- damaged, or by two at once -------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.999])
def test_a_cut_library_is_compiled_again(fresh: Path, compilations: list[list[str]], kept: float) -> None:
    path = native_library().path
    assert path is not None
    content = path.read_bytes()
    path.unlink()  # the loaded one keeps its file
    path.write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    assert library_if_compiled() is None
    assert again().functions is not None
    assert again().path == path
    assert len(compilations) == 2


SCRIPT = """
import sys
from pathlib import Path
from extract.cpu import native_library as module
module.SOURCE = Path(sys.argv[1])
library = module.native_library()
print(library.problem or library.path)
"""


@needs_compiler
def test_two_processes_may_compile_at_once(fresh: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(library_module.SOURCE)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {one.communicate(timeout=60)[0].strip() for one in running}
    assert found == {str(native_library().path)}
    assert [str(path) for path in fresh.iterdir()] == [*found]


# --- tried ----------------------------------------------------------------------------------------------------------

GOOD = Verdict(problem="", gflops=100.0, least_gflops=50.0)
SLOW = Verdict(problem="slow", final=False, gflops=10.0, least_gflops=50.0)
WRONG = Verdict(problem="wrong", gflops=100.0, least_gflops=50.0)


@pytest.fixture
def trials(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Verdict]]:
    """What the next trials will find, first to last; each takes its own."""
    planned: list[dict[str, Verdict]] = []
    monkeypatch.setattr(native_trial, "try_library", lambda library: planned.pop(0))
    return planned


def found_again() -> dict[str, str]:
    """Problems that another process sees."""
    return {precision: verdict.problem for precision, verdict in verdicts(again()).items()}


@needs_compiler
def test_a_library_is_tried_once(trials: list[dict[str, Verdict]]) -> None:
    trials.append({"float32": GOOD, "bfloat16": WRONG, "int8": GOOD})
    expected = {"float32": "", "bfloat16": "wrong", "int8": ""}
    assert found_again() == expected
    assert found_again() == expected
    assert kernels_here("float32").startswith("native (")
    assert kernels_here("bfloat16") == "portable (wrong)"
    with pytest.raises(NoNativeKernels) as refusal:
        native_kernels("bfloat16")
    assert str(refusal.value) == "native kernels in bfloat16: wrong."


@needs_compiler
@pytest.mark.parametrize(("second", "expected"), [(GOOD, ""), (SLOW, "slow"), (WRONG, "wrong")])
def test_what_was_slow_is_tried_once_more_by_the_next_process(
    trials: list[dict[str, Verdict]], second: Verdict, expected: str
) -> None:
    trials += [{"float32": GOOD, "bfloat16": WRONG, "int8": SLOW}, {"float32": SLOW, "bfloat16": GOOD, "int8": second}]
    assert found_again() == {"float32": "", "bfloat16": "wrong", "int8": "slow"}
    assert found_again() == {"float32": "", "bfloat16": "wrong", "int8": expected}
    assert not trials
    assert found_again() == {"float32": "", "bfloat16": "wrong", "int8": expected}


@needs_compiler
@pytest.mark.parametrize("damage", ["", "{", "[]", "older", '{"version": 1, "float32": {"problem": ""}}'])
def test_a_verdict_that_does_not_parse_or_is_of_another_version_is_made_again(
    trials: list[dict[str, Verdict]], damage: str
) -> None:
    trials += [{"float32": WRONG, "bfloat16": WRONG, "int8": WRONG}, {"float32": GOOD, "bfloat16": GOOD, "int8": GOOD}]
    found_again()
    path = native_library().path
    assert path is not None
    verdict = path.with_suffix(".json")
    verdict.write_text(verdict.read_text().replace('"version": 1', '"version": 0') if damage == "older" else damage)
    assert known_verdicts(native_library()) is None
    assert kernels_here("int8") == "native, not tried yet"
    assert found_again() == {"float32": "", "bfloat16": "", "int8": ""}
    assert known_verdicts(native_library()) == {"float32": GOOD, "bfloat16": GOOD, "int8": GOOD}


@needs_compiler
def test_a_verdict_that_cannot_be_written_holds_for_its_process(
    trials: list[dict[str, Verdict]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    trials += [{"float32": GOOD, "bfloat16": GOOD, "int8": GOOD}] * 2
    library = native_library()
    monkeypatch.setattr(native_trial.tempfile, "mkstemp", full)
    assert verdicts(library) == verdicts(library)
    assert len(trials) == 1


@needs_compiler
def test_looking_neither_compiles_nor_tries(fresh: Path, compilations: list[list[str]]) -> None:
    assert kernels_here("float32") == "native, not compiled yet"
    assert not fresh.exists()
    native_library()
    assert kernels_here("float32") == "native, not tried yet"
    assert len(compilations) == 1


@needs_compiler
def test_inspect_tells_which_kernels_would_compute(tiny_engine: Path, fresh: Path) -> None:
    shown = CliRunner().invoke(cli, ["inspect", str(tiny_engine)])
    assert "kernels    native, not compiled yet" in shown.stdout.splitlines()
    assert not fresh.exists()


def test_an_engine_of_transformers_own_decoder_names_no_kernels(tiny_engine: Path) -> None:
    contract = read_contract(tiny_engine)
    contract = replace(contract, runtime=replace(contract.runtime, decoder="transformers"))
    assert engine_kernels(contract) is None
    assert "\nkernels " not in contract_text(contract, tiny_engine, engine_kernels(contract))


@needs_all
def test_the_kernels_of_this_machine_prove_right_and_fast() -> None:
    found = try_library(here)
    assert {precision: verdict.problem for precision, verdict in found.items()} == dict.fromkeys(PRECISIONS, "")
    assert all(verdict.gflops > verdict.least_gflops > 1 for verdict in found.values())


@needs_all
def test_broken_kernels_are_refused_precision_by_precision(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled copy of the real source: float32 multiplies ten times, int8 forgets a part of a zero point."""
    shutil.copytree(Path(library_module.__file__).parent / "native_source", tmp_path / "broken")
    tiles, kernels = (tmp_path / "broken" / name for name in ("tiles.h", "kernels.cpp"))
    edit(tiles, "        for (int step = 0; step < groups; step += SUM_GROUPS) {", SLOW_TILE)
    edit(kernels, "offset[column + r] = -128 * sum;", "offset[column + r] = -100 * sum;")
    monkeypatch.setattr(library_module, "SOURCE", tmp_path / "broken")
    problems = {precision: verdict.problem for precision, verdict in verdicts(native_library()).items()}
    assert "GFLOP/s, at least" in problems["float32"]
    assert problems["bfloat16"] == ""
    assert problems["int8"].startswith("a product differs from numpy by")
    assert kernels_for("float32", micro_batch=16).name == "portable"
    assert kernels_for("bfloat16", micro_batch=16).name == "native"
    assert kernels_for("int8", micro_batch=16).name == "portable"
    assert kernels_here("float32") == f"portable ({problems['float32']})"
    stored = json.loads(next(fresh.glob("*.json")).read_text())
    assert {precision: stored[precision]["final"] for precision in PRECISIONS} == {
        "float32": False,
        "bfloat16": True,
        "int8": True,
    }


SLOW_TILE = """        for (int turn = 0; turn < 9; turn++) {
            const char *from = a, *with = b;
            for (int step = 0; step < groups; step += SUM_GROUPS) {
                part(from, lda, with, groups - step < SUM_GROUPS ? groups - step : SUM_GROUPS, c, ldc, step > 0);
                from += (size_t)SUM_GROUPS * GROUP_BYTES;
                with += (size_t)SUM_GROUPS / STEP_GROUPS * PANEL_STEP_BYTES;
            }
            asm volatile("" ::: "memory");
        }
        for (int step = 0; step < groups; step += SUM_GROUPS) {"""


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


class Broken:
    """Kernels of which one method does nothing."""

    def __init__(self, kernels: NativeKernels, method: str) -> None:
        self._kernels, self._method = kernels, method

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name == self._method else getattr(self._kernels, name)


@needs_all
@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("project", "a product"),
        ("quantize", "a product"),
        ("norm", "a norm"),
        ("final_norm", "the final norm"),
        ("project_gated", "an MLP with silu"),
        ("project_add", "an MLP with silu"),
        ("prepare_heads", "rotary positions"),
        ("attend", "attention"),
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_kernel_that_does_nothing_is_seen(precision: Any, method: str, named: str) -> None:
    broken: Any = Broken(NativeKernels(precision, here), method)
    assert native_trial.wrong_numbers(broken).startswith(named)
    assert native_trial.wrong_numbers(NativeKernels(precision, here)) == ""


@needs_all
def test_a_nan_is_wrong() -> None:
    kernels: Any = NativeKernels("float32", here)
    final_norm = kernels.final_norm

    def spoilt(x: Any, n: int, norm: Any, out: Any) -> None:
        final_norm(x, n, norm, out)
        out[3, 5] = np.nan

    kernels.final_norm = spoilt
    expected = "the final norm differs from numpy by nan (relative), at most 1e-05 expected"
    assert native_trial.wrong_numbers(kernels) == expected
