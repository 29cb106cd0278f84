"""Loading an engine refuses whatever is not what was built, in words; a loaded one gives the plain model's states."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import rig
import torch
from job_rig import CHECKPOINTS, LIMIT, Engines, edit_contract, reference, runtime
from safetensors.torch import load_file, save_file

from extract.canonical import file_digest
from extract.engine import device
from extract.engine.contract import (
    EngineChanged,
    EngineDoesNotFit,
    NotAnEngine,
    OutputDiffers,
    PassOutOfMemory,
    SequenceTooLong,
    read_contract,
)
from extract.engine.device import CPU_LEVELS, computes_in, this_device
from extract.engine.replay import ProbeFailed, states_of
from extract.engine.runtimes import load_runtime
from extract.engine.torch_runtime import PlainModel, load_engine_model
from extract.records import TokenBatch


@pytest.fixture(params=["own", "transformers"])
def engine(engines: Engines, tmp_path, request) -> Path:
    """An engine of each decoder, which a test may spoil."""
    shutil.copytree(engines.engine("llama", request.param), tmp_path / "engine")
    return tmp_path / "engine"


def batch_of(sequences: list[list[int]]) -> TokenBatch:
    return TokenBatch(
        input_ids=np.array([token for sequence in sequences for token in sequence], np.int32),
        cu_seqlens=np.cumsum([0, *map(len, sequences)]).astype(np.int32),
        members=np.arange(len(sequences)),
    )


def believe(engine: Path, name: str) -> None:
    """Write the size and hash that a file has now into the contract."""
    files = json.loads((engine / "contract.json").read_bytes())["files"]
    for file in files:
        if file["name"] == name:
            file.update(size=(engine / name).stat().st_size, sha256=file_digest(engine / name))
    edit_contract(engine, files=files)


def edit_weights(engine: Path, change) -> None:
    """Change the tensors (a dict, in place) and make the contract believe it."""
    weights = load_file(engine / "model.safetensors")
    change(weights)
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, engine / "model.safetensors")
    believe(engine, "model.safetensors")


# --- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_pass_gives_every_kind_in_the_shape_and_type_of_the_contract(engines: Engines, name):
    same = [9, 9, 9, 9] if runtime(str(engines.engine(name))).contract.runtime.layout == "dense" else [1, 5, LIMIT, 3]
    sequences = rig.random_sequences(same, seed=2)
    loaded = runtime(str(engines.engine(name)))
    for kind, count in {"tokens": sum(same), "last": 4, "first": 4, "mean": 4}.items():
        states = loaded.hidden_states(batch_of(sequences), kind)
        assert (states.shape, states.dtype) == ((count, 64), np.float32)
        expected = reference(engines.checkpoint(name), sequences, kind)
        found = np.split(states, np.cumsum(same)[:-1]) if kind == "tokens" else list(states)
        assert rig.relative_error(found, expected) <= 1e-5


def test_the_plain_model_of_an_engine_is_the_checkpoints_own(engines: Engines):
    sequences = rig.random_sequences([1, 7, LIMIT], seed=3)
    for name in ("llama", "gemma2"):
        plain = PlainModel(load_engine_model(engines.engine(name), "float32"))
        found = [plain.states(sequence) for sequence in sequences]
        assert rig.relative_error(found, reference(engines.checkpoint(name), sequences)) <= 1e-6


def test_states_of_many_sequences_come_back_in_their_order(engines: Engines):
    sequences = rig.random_sequences([5, 1, 9, 1, 32, 5], seed=4)
    found = states_of(runtime(str(engines.engine("bloom"))), sequences)
    assert rig.relative_error(found, reference(engines.checkpoint("bloom"), sequences)) <= 1e-5


def test_the_same_pass_gives_the_same_bytes_again(engines: Engines):
    batch = batch_of(rig.random_sequences([5, 1, 9, 1, 32, 5], seed=4))
    loaded = runtime(str(engines.engine("llama")))
    assert loaded.hidden_states(batch, "tokens").tobytes() == loaded.hidden_states(batch, "tokens").tobytes()


def test_the_head_is_not_in_memory(engines: Engines):
    model = load_engine_model(engines.engine("llama"), "float32")
    names = [name for name, _ in model.named_parameters()]
    assert not any("head" in name for name in names)
    assert type(model).__name__ == "LlamaModel"


def test_a_sequence_longer_than_the_tables_of_our_own_decoder_is_refused(engines: Engines):
    loaded = runtime(str(engines.engine("llama")))
    longest = loaded.contract.limits.max_input_tokens
    assert len(loaded.hidden_states(batch_of([[5] * longest]), "last")) == 1
    with pytest.raises(SequenceTooLong, match=rf"^a sequence of {longest + 1} tokens was given to an engine for"):
        loaded.hidden_states(batch_of([[5] * 3, [5] * (longest + 1)]), "last")


@pytest.mark.parametrize(
    ("decoder", "error"),
    [
        ("own", MemoryError()),
        ("transformers", MemoryError()),
        ("transformers", torch.OutOfMemoryError("CUDA out of memory")),
        ("transformers", RuntimeError("[enforce fail at alloc_cpu.cpp:124] can't allocate memory: 9 bytes")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_pass_that_does_not_fit_says_how_large_it_was(engines: Engines, monkeypatch, decoder, error):
    loaded = runtime(str(engines.engine("llama", decoder)))

    def full(*arguments):
        raise error

    monkeypatch.setattr(loaded._decoder, "layer_states", full)
    with pytest.raises(PassOutOfMemory) as refused:
        loaded.hidden_states(batch_of([[5] * 24, [6] * 10] * 36 + [[5] * 10]), "tokens")
    assert str(refused.value) == (
        f"a forward pass of 1,234 tokens in 73 sequences ran out of memory on {loaded.contract.device.name}. "
        "Run again with a smaller --max-tokens."
    )
    assert refused.value.exit_code == 8


def test_another_error_of_a_pass_is_not_taken_for_a_lack_of_memory(engines: Engines, monkeypatch):
    loaded = runtime(str(engines.engine("llama", "transformers")))

    def broken(*arguments):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(loaded._decoder, "layer_states", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        loaded.hidden_states(batch_of([[5]]), "last")


# --- refusals -------------------------------------------------------------------------------------------------------


def test_an_engine_as_it_was_built_loads(engine):
    assert load_runtime(engine).contract == read_contract(engine)


def test_a_directory_that_is_no_engine_is_refused(tmp_path):
    with pytest.raises(NotAnEngine):
        load_runtime(tmp_path)


def test_an_engine_for_a_card_is_refused_without_one(engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    edit_contract(engine, device={"type": "cuda", "name": "H200", "compute_capability": "9.0"})
    with pytest.raises(EngineDoesNotFit) as error:
        load_runtime(engine)
    assert str(error.value) == (
        f"{engine}: this engine needs device cuda (H200), this machine has no CUDA device that torch can use. "
        "extract doctor says why. Or build one for this machine: extract build CHECKPOINT -o ENGINE"
    )
    assert error.value.exit_code == 4


def test_an_engine_for_another_card_is_refused(engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    facts = SimpleNamespace(name="A100", major=8, minor=0, multi_processor_count=108, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    edit_contract(engine, device={"type": "cuda", "name": "H200", "compute_capability": "9.0"})
    with pytest.raises(EngineDoesNotFit) as error:
        load_runtime(engine)
    said = str(error.value)
    assert said.startswith(f"{engine}: this engine needs compute capability 9.0, this machine has 8.0. Build an engine")
    assert said.endswith(": extract build CHECKPOINT -o ENGINE")


@pytest.mark.parametrize("needed", ["avx512_bf16", "aarch64"])
def test_an_engine_that_needs_missing_instructions_is_refused(engine, monkeypatch, needed):
    monkeypatch.setattr(device, "cpu_level", lambda: "avx2")
    edit_contract(engine, device={"instruction_set": needed})
    with pytest.raises(EngineDoesNotFit) as error:
        load_runtime(engine)
    assert str(error.value) == (
        f"{engine}: this engine needs instruction set {needed}, this machine has avx2. "
        "Build an engine for this machine: extract build CHECKPOINT -o ENGINE"
    )


def test_a_float32_engine_runs_on_every_cpu_of_its_architecture(engine, monkeypatch):
    for level in CPU_LEVELS:
        monkeypatch.setattr(device, "cpu_level", lambda level=level: level)
        load_runtime(engine)


def test_a_changed_file_is_refused_before_it_is_loaded(engine, monkeypatch):
    monkeypatch.setattr("extract.engine.torch_runtime.load_engine_model", None)
    monkeypatch.setattr("extract.cpu.runtime.open_weights", None)
    content = bytearray((engine / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (engine / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineChanged, match=f"^{engine}: engine file model.safetensors has sha256 "):
        load_runtime(engine)


def test_a_missing_file_is_refused(engine):
    (engine / "tokenizer.json").unlink()
    with pytest.raises(EngineChanged, match=f"^{engine}: engine file tokenizer.json has state missing"):
        load_runtime(engine)


def test_a_tensor_that_the_model_has_no_place_for_is_refused(engine):
    edit_weights(engine, lambda weights: weights.update({"layers.0.secret": torch.zeros(3)}))
    with pytest.raises(EngineChanged) as error:
        load_runtime(engine)
    assert str(error.value) == (
        f"{engine}: engine file model.safetensors has unexpected keys ['layers.0.secret'], the contract says none. "
        "Copy the engine again or rebuild it."
    )


def test_a_tensor_that_is_missing_is_refused_and_never_made_up(engine):
    edit_weights(engine, lambda weights: weights.pop("layers.1.mlp.up_proj.weight"))
    with pytest.raises(EngineChanged) as error:
        load_runtime(engine)
    assert str(error.value) == (
        f"{engine}: engine file model.safetensors has missing keys ['layers.1.mlp.up_proj.weight'], "
        "the contract says none. Copy the engine again or rebuild it."
    )


@pytest.mark.parametrize(
    ("change", "field", "found", "expected"),
    [
        ({"width": 128}, "width", "64", "128"),
        ({"dtype": "bfloat16"}, "dtype", "float32", "bfloat16"),
        ({"module": "ln_f"}, "module", None, "ln_f"),
    ],
)
def test_states_of_another_width_type_or_place_than_promised_are_refused(engine, change, field, found, expected):
    found = found or read_contract(engine).output.module
    edit_contract(engine, output=change)
    with pytest.raises(OutputDiffers) as error:
        load_runtime(engine)
    assert str(error.value) == (
        f"{engine}: the states have {field} {found}, the contract says {expected}. Build the engine again."
    )
    assert error.value.exit_code == 4


def test_a_weight_that_was_changed_together_with_its_hash_is_found_by_the_probe(engine):
    built = read_contract(engine)

    def turn(weights):
        weights["layers.1.mlp.down_proj.weight"] *= 1.5

    edit_weights(engine, turn)
    with pytest.raises(ProbeFailed) as error:
        load_runtime(engine)
    found = error.value.facts["found"]
    assert found > 10 * built.probe.tolerance
    assert str(error.value) == (
        f"{engine}: probe sequence 0 differs from the contract by {found:.1e} (relative), at most "
        f"{built.probe.tolerance:.1e} expected. This machine or its libraries (torch {torch.__version__}, built with "
        f"{built.runtime.version}) give other numbers: build the engine again here."
    )
    assert error.value.exit_code == 4


@pytest.mark.parametrize("name", ["norm.weight", "layers.2.self_attn.q_proj.weight", "embed_tokens.weight"])
def test_every_part_of_the_model_is_in_the_probe(engine, name):
    def turn(weights):
        weights[name] *= 1.5

    edit_weights(engine, turn)
    with pytest.raises(ProbeFailed):
        load_runtime(engine)


def test_weights_that_are_not_finite_fail_the_probe(engine):
    def spoil(weights):
        weights["norm.weight"][3] = float("nan")

    edit_weights(engine, spoil)
    with pytest.raises(ProbeFailed, match="differs from the contract by inf"):
        load_runtime(engine)


def test_a_probe_of_another_engine_is_found(engines: Engines, engine):
    other = json.loads((engines.engine("gemma2") / "contract.json").read_bytes())["probe"]
    edit_contract(engine, probe=other)
    with pytest.raises(ProbeFailed):
        load_runtime(engine)


# --- devices --------------------------------------------------------------------------------------------------------


def test_a_recipe_for_a_card_is_refused_without_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineDoesNotFit) as error:
        this_device("cuda")
    assert str(error.value) == (
        "recipe: this engine needs device cuda, this machine has no CUDA device that torch can use. "
        "Build for the CPU: --device cpu"
    )


def test_auto_is_the_card_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert this_device("auto").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    found = this_device("auto")
    assert (found.type, found.name, found.compute_capability) == ("cuda", "H200", "9.0")


@pytest.mark.parametrize(
    ("kind", "capability", "instructions", "expected"),
    [
        ("cpu", None, "avx2", {"float32"}),
        ("cpu", None, "avx512", {"float32"}),
        ("cpu", None, "avx512_bf16", {"float32", "bfloat16"}),
        ("cpu", None, "aarch64", {"float32", "bfloat16"}),
        ("cuda", "7.5", None, {"float32", "float16"}),
        ("cuda", "9.0", None, {"float32", "float16", "bfloat16"}),
    ],
)
def test_a_type_is_offered_where_the_device_computes_in_it(kind, capability, instructions, expected):
    from extract.engine.contract import Device

    found = Device(type=kind, name="any", compute_capability=capability, instruction_set=instructions)
    assert {dtype for dtype in ("float32", "bfloat16", "float16") if computes_in(found, dtype)} == expected
