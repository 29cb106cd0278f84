"""Engines that store FP8: the numbers of rounding at load, from half the bytes; what does not fit is named."""

import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rig
import torch
from cuda_rig import LLAMA_8B, runtime, states
from job_rig import job, parquet, rewrite_shard, run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_cuda_engine import ROWS, built, on_this_machine, recipe
from test_own_architecture import case_name, small_model
from test_packed_decoder import RICH, Tiny
from test_recomputation import swapped

from extract.cpu.mapped_weights import UnfitWeights
from extract.cpu.weights import WEIGHTS_FILE, open_weights
from extract.cuda import fp8_weights, opening
from extract.cuda.attention import Backend
from extract.cuda.fp8 import FP8, quantized_weight
from extract.cuda.fp8_weights import fp8_kinds, fp8_tensors, plain_weights
from extract.cuda.memory import weight_bytes
from extract.cuda.runtime import CudaRuntime
from extract.cuda.weights import load_decoder
from extract.cuda.weights_writing import file_bytes, write_tensors
from extract.engine import contract as contracts
from extract.engine import runtimes
from extract.engine.build_plan import plan_build
from extract.engine.contract import Contract, EngineChanged, describe_file, read_contract, write_contract
from extract.engine.own_architecture import architecture_of
from extract.engine.replay import states_of
from extract.engine.runtimes import load_runtime
from extract.recomputation import NoPlainModel
from extract.report import build_plan_text, contract_text
from extract.verification import BadShards, verify

LONGEST = 60
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def two_files(directory: Path, family: str, options: dict[str, Any], kept: str) -> tuple[Tiny, Tiny]:
    """A tiny model in a checkpoint's own type, as an engine stores it plainly and as FP8."""
    model = small_model(family, **options).to(TYPES[kept])
    architecture = architecture_of(model, LONGEST)
    plain, stored = directory / "plain.safetensors", directory / "stored.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, plain)
    kinds = fp8_kinds(architecture, TYPES[kept])
    write_tensors(
        stored, kinds, fp8_tensors(model.float().state_dict(), architecture, TYPES[kept], torch.device("cpu"))
    )
    assert stored.stat().st_size == file_bytes(kinds)
    return Tiny(plain, architecture, None), Tiny(stored, architecture, None)


@pytest.mark.parametrize("kept", TYPES)
@pytest.mark.parametrize("case", [*RICH, ("phi3", {"head_dim": None})], ids=case_name)
def test_states_are_bit_for_bit_those_of_rounding_at_load(
    case: tuple[str, dict[str, Any]], kept: str, tmp_path: Path
) -> None:
    found = [states(runtime(tiny, "fp8")) for tiny in two_files(tmp_path, *case, kept)]
    assert np.array_equal(*found)
    assert np.isfinite(found[0]).all()


def test_any_tool_reads_the_file_and_finds_the_fields_names(tmp_path: Path) -> None:
    plain, stored = two_files(tmp_path, *RICH[0], "bfloat16")
    whole, found = load_file(plain.path), load_file(stored.path)
    scales = {name for name in found if name.endswith(".weight_scale")}
    assert found.keys() - scales == whole.keys() and len(scales) == 7 * len(plain.architecture.layers)
    for name, tensor in whole.items():
        if f"{name}_scale" in scales:
            values, scale = quantized_weight(tensor)
            assert torch.equal(found[name].view(torch.uint8), values.view(torch.uint8))
            assert found[f"{name}_scale"].shape == (len(tensor), 1) and torch.equal(found[f"{name}_scale"], scale)
        else:
            assert torch.equal(found[name], tensor)
    with safe_open(stored.path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("stored", [True, False])
def test_weights_are_read_before_the_backend_of_attention_is_there(
    tmp_path: Path, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them where they stay as they are read; where they are rounded, no more than two layers at a time."""
    tiny = two_files(tmp_path, *RICH[0], "float32")[stored]
    read: list[int] = []
    preadv = os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        read.append(preadv(file, buffers, offset))
        return read[-1]

    tensors = load_file(tiny.path)
    sizes = {name: one.nbytes for name, one in tensors.items() if one.ndim == 2 and not name.endswith("scale")}
    expected = sum(size for name, size in sizes.items() if stored or not name.startswith(("layers.2.", "layers.3.")))

    def backend() -> Backend:
        ends = time.monotonic() + 30
        while sum(read) < expected and time.monotonic() < ends:
            time.sleep(0.001)
        assert sum(read) == expected
        return "plain"

    monkeypatch.setattr(os, "preadv", counted)
    with open_weights(tiny.path) as weights:
        load_decoder(tiny.architecture, weights, "fp8", device="cpu", max_positions=LONGEST, backend=backend)
    assert sum(read) == sum(sizes.values())


def test_linears_are_rounded_one_at_a_time_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a model is never in memory twice."""
    model = small_model(RICH[0][0], **RICH[0][1])
    architecture, rounded = architecture_of(model, LONGEST), [0]

    def counted(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded[0] += 1
        return quantized_weight(weight)

    monkeypatch.setattr(fp8_weights, "quantized_weight", counted)
    kinds, linears = fp8_kinds(architecture, torch.float32), 0
    tensors = fp8_tensors(model.state_dict(), architecture, torch.float32, torch.device("cpu"))
    for kind, tensor in zip(kinds.values(), tensors, strict=True):
        linears += kind.dtype == FP8
        assert rounded[0] == linears and tensor.dtype == kind.dtype
    assert linears == 7 * len(architecture.layers)


def test_weights_are_read_back_as_what_is_multiplied(tmp_path: Path) -> None:
    plain, stored = two_files(tmp_path, *RICH[1], "float32")
    with open_weights(stored.path) as weights:
        found = plain_weights(weights, stored.architecture)
    for name, tensor in load_file(plain.path).items():
        expected = tensor
        if name.startswith("layers.") and tensor.ndim == 2:
            values, scale = quantized_weight(tensor)
            expected = values.float() * scale
        elif name == "embed_tokens.weight":
            expected = tensor.bfloat16().float()
        assert found[name].dtype == torch.float32 and torch.equal(found[name], expected), name


def test_an_8b_engine_is_half_as_large_and_holds_what_the_card_holds() -> None:
    size = file_bytes(fp8_kinds(LLAMA_8B, torch.bfloat16))
    tables, wider_norms = 2 * 4 * 128 * 64, 2 * 4096 * (2 * 32 + 1)
    header = size - (weight_bytes(LLAMA_8B, "fp8", 128) - tables - wider_norms)
    assert 0 < header < 100_000
    assert round(size / 1e9, 1) == 8.0


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.tiny_checkpoint(tmp_path_factory.mktemp("llama") / "llama", "llama")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8") / "engine"
    built(checkpoint, path, "fp8")
    return path


def engine_states(path: Path) -> Any:
    with on_this_machine():
        loaded = load_runtime(path)
    try:
        return np.concatenate(states_of(loaded, ROWS))
    finally:
        loaded.close()


def changed(engine: Path, path: Path, change: Any) -> Path:
    """A copy whose weights were changed, and whose contract was written for that."""
    shutil.copytree(engine, path)
    weights = load_file(path / WEIGHTS_FILE)
    change(weights)
    save_file(weights, path / WEIGHTS_FILE)
    believe(path, read_contract(path))
    return path


def believe(path: Path, contract: Contract) -> None:
    write_contract(path, replace(contract, files=tuple(describe_file(path / file.name) for file in contract.files)))


def test_a_build_stores_fp8_and_its_contract_says_so(engine: Path) -> None:
    contract = read_contract(engine)
    assert (contract.precision.weights, contract.precision.activations, contract.precision.output) == (
        "fp8", "fp8", "bfloat16",
    )  # fmt: skip
    weights = load_file(engine / WEIGHTS_FILE)
    assert {one.dtype for name, one in weights.items() if name.endswith("proj.weight")} == {FP8}
    assert weights["embed_tokens.weight"].dtype == torch.bfloat16
    assert weights["norm.weight"].dtype == torch.float32  # as in this checkpoint
    assert not any("head" in name for name in weights)
    config = json.loads((engine / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaModel"], "bfloat16")


@pytest.fixture(scope="module")
def old(checkpoint: Path, engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain weights on disk, rounded when they are loaded: what builds made before FP8 was stored."""
    path = tmp_path_factory.mktemp("old") / "engine"
    shutil.copytree(engine, path)
    built(checkpoint, path.with_name("plain"), "float32")
    shutil.copyfile(path.with_name("plain") / WEIGHTS_FILE, path / WEIGHTS_FILE)
    contract = read_contract(path)
    believe(path, replace(contract, precision=replace(contract.precision, weights="float32")))
    return path


def test_an_engine_of_the_old_kind_keeps_loading_and_gives_the_same_states(old: Path, engine: Path) -> None:
    assert np.array_equal(engine_states(old), engine_states(engine))


def test_how_weights_are_stored_is_shown(old: Path, engine: Path) -> None:
    sizes = {path: (path / WEIGHTS_FILE).stat().st_size for path in (old, engine)}
    assert sizes[engine] < sizes[old] / 2
    shown = [contract_text(read_contract(path), path).splitlines()[0] for path in (engine, old)]
    assert shown[0].endswith(" as fp8, no head)") and shown[1].endswith(
        " in float32, rounded to fp8 by each load, no head)"
    )


@pytest.mark.parametrize("dtype", ["fp8", "bfloat16"])
def test_the_size_of_an_engine_is_said_before_it_is_built(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    built(checkpoint, tmp_path / "engine", dtype)
    with on_this_machine():
        plan = plan_build(checkpoint, recipe(dtype))
    size = (tmp_path / "engine" / WEIGHTS_FILE).stat().st_size
    assert plan.disk_bytes == pytest.approx(size, rel=0.15)  # a tiny model's header is a tenth of its file
    shown = build_plan_text(replace(plan, disk_bytes=2**33)).splitlines()
    assert shown[-1] == "disk       weights       8.00 GiB"


LINEAR = "layers.1.self_attn.q_proj"
SCALES = f"{LINEAR}.weight_scale"
MISFITS: dict[str, tuple[str, Any, str]] = {
    "plain weight": (f"{LINEAR}.weight", torch.Tensor.bfloat16, "type BF16 found, F8_E4M3 expected"),
    "scales of another type": (SCALES, torch.Tensor.bfloat16, "type BF16 found, F32 expected"),
    "scales in a row": (SCALES, lambda scales: scales.reshape(1, -1), "shape [1, 64] found, [64, 1] expected"),
    "one scale for all": (SCALES, lambda scales: scales[:1], "shape [1, 1] found, [64, 1] expected"),
    **{
        f"scales of {value}": (
            SCALES,
            lambda scales, value=value: scales.index_fill(0, torch.tensor([3, 5]), value),
            "2 of 64 scales are no finite numbers above 0",
        )
        for value in (float("nan"), float("inf"), -1.0, 0.0)
    },
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_weights_that_do_not_fit_are_named(engine: Path, tmp_path: Path, misfit: str) -> None:
    name, change, problem = MISFITS[misfit]
    path = changed(engine, tmp_path / "engine", lambda found: found.update({name: change(found[name])}))
    with on_this_machine(), pytest.raises(UnfitWeights) as refused:
        load_runtime(path)
    assert str(refused.value) == f"{path / WEIGHTS_FILE}: tensor {name}: {problem}. Build the engine again."


def test_missing_scales_are_named(engine: Path, tmp_path: Path) -> None:
    path = changed(engine, tmp_path / "engine", lambda found: found.pop(SCALES))
    with on_this_machine(), pytest.raises(EngineChanged) as refused:
        load_runtime(path)
    assert str(refused.value) == (
        f"{path}: engine file model.safetensors has missing keys ['{SCALES}'], the contract says none. "
        "Copy the engine again or rebuild it."
    )


def test_scales_that_nobody_promised_are_refused(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    table = json.loads((tmp_path / "engine" / "contract.json").read_text())
    table["precision"]["weights"] = "bfloat16"
    (tmp_path / "engine" / "contract.json").write_text(json.dumps(table))
    with on_this_machine(), pytest.raises(EngineChanged, match="has unexpected keys"):
        load_runtime(tmp_path / "engine")


# --- rows computed again --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def output(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    source = parquet(folder / "in.parquet", {"ids": rig.random_sequences([9] * 12)})
    with on_this_machine():
        run(job(engine, source, folder / "out", column="ids", input="input_ids", kind="last"))
    return folder / "out"


def test_rows_are_computed_again_with_the_weights_of_the_engine_and_that_is_said(
    output: Path, checkpoint: Path
) -> None:
    found = verify(output, recompute=12)
    assert found.recomputed == 12 and 0 < found.worst <= found.recompute_bound
    assert found.notes == (
        "rows were compared with the engine's own FP8 weights, computed in float32: what rounding the weights did is "
        "not seen. To compare with the checkpoint: --reference CHECKPOINT",
    )
    against = verify(output, recompute=12, reference=checkpoint)
    assert against.notes == () and against.worst <= against.recompute_bound
    assert found.worst < against.worst  # the weights' own rounding is not in it


def test_rows_in_each_others_place_are_found(output: Path, engine: Path, tmp_path: Path) -> None:
    """With the bound of a real model's engine: a tiny one multiplies rounding so that its own lets anything pass."""
    shutil.copytree(output, tmp_path / "out")
    shutil.copytree(engine, tmp_path / "engine")
    contract = read_contract(engine)
    write_contract(tmp_path / "engine", replace(contract, fidelity=replace(contract.fidelity, bound=0.05)))
    rewrite_shard(tmp_path / "out", 0, lambda table: swapped(table, "hidden_state", 3, 4))
    with on_this_machine(), pytest.raises(BadShards) as error:
        verify(tmp_path / "out", recompute=12, engine=tmp_path / "engine")
    problems = [line.strip() for line in str(error.value).splitlines()[1:-1]]
    assert [problem.split(" differs")[0] for problem in problems] == ["shard 0: row 3:", "shard 0: row 4:"]


def test_an_engine_that_stores_fp8_is_no_reference_for_another(output: Path, engine: Path) -> None:
    with pytest.raises(NoPlainModel) as refused:
        verify(output, recompute=2, reference=engine)
    assert str(refused.value) == (
        f"{engine}: an engine of torch with FP8 weights holds no plain model to compute rows again with. "
        "Say where the unquantised checkpoint, or a torch engine of it, lies: --reference CHECKPOINT"
    )


# --- hashed while they are read -------------------------------------------------------------------------------------


def test_weights_that_changed_are_never_handed_out(engine: Path, tmp_path: Path) -> None:
    """Though they load: the change is a bit of one weight, and hashing ends after loading."""
    shutil.copytree(engine, tmp_path / "engine")
    content = bytearray((tmp_path / "engine" / WEIGHTS_FILE).read_bytes())
    content[-5000] ^= 1
    (tmp_path / "engine" / WEIGHTS_FILE).write_bytes(content)
    order: list[str] = []
    loaded, check = threading.Event(), contracts.check_files

    def checked(directory: Path, contract: Contract) -> None:
        if contract.files[0].name == WEIGHTS_FILE:
            assert loaded.wait(30)
        check(directory, contract)

    def opened(*arguments: Any, **options: Any) -> CudaRuntime:
        runtime = load(*arguments, **options)
        runtime.close = lambda: order.append("closed")  # type: ignore[method-assign]
        loaded.set()
        return runtime

    with on_this_machine(), pytest.MonkeyPatch.context() as patch:
        load = opening.open_cuda_runtime
        patch.setattr(opening, "open_cuda_runtime", opened)
        patch.setattr(runtimes, "check_files", checked)
        patch.setattr(runtimes, "replay_probe", lambda *_: order.append("probed"))
        with pytest.raises(EngineChanged, match=r"engine file model\.safetensors has sha256"):
            load_runtime(tmp_path / "engine")
    assert order == ["closed"]


def test_a_damaged_file_is_named_by_its_hash_and_not_by_what_it_broke(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    content = bytearray((tmp_path / "engine" / WEIGHTS_FILE).read_bytes())
    content[20:30] = b"\xff" * 10  # of the header
    (tmp_path / "engine" / WEIGHTS_FILE).write_bytes(content)
    with on_this_machine(), pytest.raises(EngineChanged, match=r"engine file model\.safetensors has sha256"):
        load_runtime(tmp_path / "engine")


@pytest.mark.parametrize("name", ["decoder.json", "config.json"])
def test_every_other_file_is_checked_before_anything_is_opened(engine: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    (tmp_path / "engine" / name).write_text((tmp_path / "engine" / name).read_text() + "\n")
    with on_this_machine(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "open_cuda_runtime", None)
        with pytest.raises(EngineChanged, match=f"engine file {name} has size"):
            load_runtime(tmp_path / "engine")
