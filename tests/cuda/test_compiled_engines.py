"""An engine with compiled regions: what its contract says, what its id counts, and what loading it refuses.

Compiling itself is made up here (tests/cuda/test_ahead_of_time.py does it): the file says nothing, and its code is the
plain lines. Everything around it is what a card would run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rig
from job_rig import edit_contract
from test_cuda_engine import LIMIT, ROWS, on_this_machine, recipe

from extract.cuda import opening, packaged_regions
from extract.cuda.packaged_regions import Compiled, CompiledForAnother
from extract.cuda.region_variants import regions_of
from extract.cuda.trusted_code import CodeNotTrusted
from extract.engine.builder import NoOwnDecoder, RecipeDoesNotFit, build
from extract.engine.contract import COMPILED_FILE, Contract, EngineChanged, read_contract
from extract.engine.recipe import Recipe, load_recipe
from extract.engine.replay import states_of
from extract.engine.runtimes import load_runtime
from extract.settings import BadValue


class AnyCode(dict[str, dict[Any, Any]]):
    """Code for every region that fits none of its inputs: the plain lines run."""

    def get(self, key: str, default: Any = None) -> dict[Any, Any]:
        return {}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.tiny_checkpoint(tmp_path_factory.mktemp("compiled") / "llama", "llama")


@pytest.fixture(autouse=True)
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often regions were compiled, and in how many variants; the user's cache is a folder of the test."""
    found: list[int] = []

    def compile_regions(variants: Any, path: Path, *, max_rows: int) -> None:
        found.append(len(variants))
        path.write_bytes(f"code {len(found)} for {max_rows} rows".encode())

    monkeypatch.setattr(opening, "compile_regions", compile_regions)
    monkeypatch.setattr(packaged_regions, "load_codes", lambda path, device: AnyCode())
    monkeypatch.setenv("EXTRACT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EXTRACT_TRUST_CODE", raising=False)
    yield found


def built(checkpoint: Path, output: Path, **settings: Any) -> Contract:
    with on_this_machine():
        return build(checkpoint, output, recipe("float32", **settings))


def loaded(engine: Path) -> Any:
    with on_this_machine():
        return load_runtime(engine)


def test_a_build_compiles_once_and_a_load_binds_every_region(
    checkpoint: Path, tmp_path: Path, compiled: list[int]
) -> None:
    contract = built(checkpoint, tmp_path / "engine", compile="ahead")
    assert contract.runtime.compile == "ahead"
    assert COMPILED_FILE in [file.name for file in contract.files]
    assert len(compiled) == 1 and compiled[0] > 5
    assert (tmp_path / "engine" / COMPILED_FILE).read_text() == f"code 1 for {contract.limits.pass_tokens} rows"
    runtime = loaded(tmp_path / "engine")
    assert all(isinstance(region.forward, Compiled) for region in regions_of(runtime.decoder))
    built(checkpoint, tmp_path / "plain")
    plain = loaded(tmp_path / "plain")
    assert not any(isinstance(region.forward, Compiled) for region in regions_of(plain.decoder))
    assert np.array_equal(np.concatenate(states_of(runtime, ROWS)), np.concatenate(states_of(plain, ROWS)))


def test_an_engine_that_is_built_again_has_the_same_id_though_its_code_differs(
    checkpoint: Path, tmp_path: Path, compiled: list[int]
) -> None:
    first = built(checkpoint, tmp_path / "first", compile="ahead")
    second = built(checkpoint, tmp_path / "second", compile="ahead")
    code = [next(file for file in one.files if file.name == COMPILED_FILE) for one in (first, second)]
    assert code[0].sha256 != code[1].sha256
    assert first.engine_id == second.engine_id
    assert built(checkpoint, tmp_path / "jit", compile="jit").engine_id != first.engine_id


def test_an_engine_that_does_not_say_how_it_is_compiled_says_nothing(checkpoint: Path, tmp_path: Path) -> None:
    assert built(checkpoint, tmp_path / "engine").runtime.compile is None


def test_code_that_was_changed_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    built(checkpoint, tmp_path / "engine", compile="ahead")
    code = tmp_path / "engine" / COMPILED_FILE
    code.write_bytes(code.read_bytes()[:-1] + b"!")
    with pytest.raises(EngineChanged, match=r"engine file regions\.pt2 has sha256 "):
        loaded(tmp_path / "engine")


def test_code_that_is_not_listed_is_not_opened(checkpoint: Path, tmp_path: Path) -> None:
    contract = built(checkpoint, tmp_path / "engine", compile="ahead")
    (tmp_path / "engine" / COMPILED_FILE).unlink()
    files = [file for file in contract.files if file.name != COMPILED_FILE]
    edit_contract(tmp_path / "engine", files=[{"name": f.name, "size": f.size, "sha256": f.sha256} for f in files])
    with pytest.raises(EngineChanged) as refused:
        loaded(tmp_path / "engine")
    assert "engine file regions.pt2 has state missing, the contract says present" in str(refused.value)


def test_code_of_another_machine_is_run_only_when_the_user_names_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = built(checkpoint, tmp_path / "engine", compile="ahead")
    digest = next(file.sha256 for file in contract.files if file.name == COMPILED_FILE)
    monkeypatch.setenv("EXTRACT_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(CodeNotTrusted) as refused:
        loaded(tmp_path / "engine")
    assert f"EXTRACT_TRUST_CODE={digest[:12]};" in str(refused.value)
    monkeypatch.setenv("EXTRACT_TRUST_CODE", digest[:12])
    loaded(tmp_path / "engine").close()


def test_code_for_another_torch_is_refused_with_found_and_expected(checkpoint: Path, tmp_path: Path) -> None:
    built(checkpoint, tmp_path / "engine", compile="ahead")
    edit_contract(tmp_path / "engine", runtime={"version": "1.13.1"})
    with pytest.raises(CompiledForAnother, match=r"its compiled code is for torch 1\.13\.1, here is 2\."):
        loaded(tmp_path / "engine")
    assert read_contract(tmp_path / "engine").runtime.version == "1.13.1"


def test_the_passes_of_a_recipe_are_kept_or_refused(checkpoint: Path, tmp_path: Path) -> None:
    assert built(checkpoint, tmp_path / "engine", pass_tokens=640).limits.pass_tokens == 640
    with pytest.raises(Exception, match=r"this engine needs passes of [0-9,]+ tokens, this machine has kernels that"):
        built(checkpoint, tmp_path / "other", pass_tokens=2**27)


@pytest.mark.parametrize("settings", [{"compile": "ahead"}, {"compile": "none"}, {"pass_tokens": 4096}])
def test_what_only_our_decoder_on_a_card_does_is_refused_elsewhere(tmp_path: Path, settings: dict[str, Any]) -> None:
    (key,) = settings
    gpt2 = rig.tiny_checkpoint(tmp_path / "gpt2", "gpt2")
    with pytest.raises(NoOwnDecoder, match="passes or a way to compile, which only that has"):
        built(gpt2, tmp_path / "engine", **settings)
    with pytest.raises(RecipeDoesNotFit) as refused:
        build(gpt2, tmp_path / "engine", Recipe(max_input_tokens=LIMIT, **settings))
    assert str(refused.value) == f"recipe: {key} is {settings[key]}, for a card alone; leave it out here."
    text = "\n".join(f"{name} = {value!r}".replace("'", '"') for name, value in settings.items())
    (tmp_path / "bad.toml").write_text(f'device = "cpu"\n{text}\n')
    with pytest.raises(BadValue, match=f"{key} is .*, expected left out, or our own decoder on a card"):
        load_recipe(tmp_path / "bad.toml")
