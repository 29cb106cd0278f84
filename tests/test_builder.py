"""A build proves, writes what it proved, and leaves nothing behind when it does not get to the end."""

import json
import os
import shutil
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import rig
import torch
from job_rig import CHECKPOINTS, LIMIT, Engines, errors, ids_of, job, parquet, reference, run, runtime, stored, texts
from safetensors.torch import load_file, save_file

from extract.engine import builder, plain
from extract.engine.builder import NoOwnDecoder, OutputExists, RecipeDoesNotFit, build
from extract.engine.comparison import NotFaithful
from extract.engine.contract import CONTRACT_FILE, check_files, read_contract
from extract.engine.device import computes_in, this_device
from extract.engine.plain import NoRoomForEngine
from extract.engine.recipe import Recipe, load_recipe, override
from extract.engine.runtimes import load_runtime
from extract.engine.torch_proof import NotCausal
from extract.errors import BadValue, CheckpointRefused, UnknownKey, UnreadableSpec

SMALL = Recipe(dtype="float32", device="cpu", max_input_tokens=8, max_tokens=64)


@pytest.fixture(scope="module")
def checkpoint(engines: Engines) -> Path:
    return engines.checkpoint("llama")


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def nothing_left(directory: Path) -> bool:
    return list(directory.iterdir()) == []


# --- what is built --------------------------------------------------------------------------------------------------


def test_two_builds_of_one_checkpoint_have_one_id_and_the_same_files(checkpoint, tmp_path):
    first, second = (build(checkpoint, tmp_path / name, SMALL) for name in ("first", "second"))
    assert first.engine_id == second.engine_id
    assert first.files == second.files
    shutil.copytree(checkpoint, tmp_path / "elsewhere" / checkpoint.name)
    third = build(tmp_path / "elsewhere" / checkpoint.name, tmp_path / "third", SMALL)
    assert third.engine_id == first.engine_id


def test_another_seed_is_another_engine(checkpoint, tmp_path):
    other = rig.tiny_checkpoint(tmp_path / "llama", "llama", seed=1)
    assert build(other, tmp_path / "engine", SMALL).engine_id != build(checkpoint, tmp_path / "one", SMALL).engine_id


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_directory_holds_every_weight_of_the_decoder_and_nothing_of_the_head(engines: Engines, name):
    engine = tensors(engines.engine(name))
    assert not [key for key in engine if "head" in key]
    assert len(list(engines.engine(name).glob("*.safetensors"))) == 1
    for key, tensor in tensors(engines.checkpoint(name)).items():
        if key == "lm_head.weight":
            continue
        assert torch.equal(engine.pop(key.removeprefix("model.").removeprefix("transformer.")), tensor)
    assert not engine


def test_the_bytes_of_the_head_are_not_looked_at(checkpoint, tmp_path):
    """They are not even finite here, which would be refused in any weight that is loaded."""
    shutil.copytree(checkpoint, tmp_path / "llama")
    weights = load_file(checkpoint / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], float("nan"))
    save_file(weights, tmp_path / "llama" / "model.safetensors", metadata={"format": "pt"})
    spoilt, whole = build(tmp_path / "llama", tmp_path / "one", SMALL), build(checkpoint, tmp_path / "other", SMALL)
    weights_of = [next(file for file in one.files if file.name == "model.safetensors") for one in (spoilt, whole)]
    assert weights_of[0] == weights_of[1]
    assert "language model head not loaded (1 tensors)" in whole.checkpoint.notes


def test_the_contract_tells_the_checkpoint_the_runtime_and_the_limits(engines: Engines):
    import transformers

    contract = read_contract(engines.engine("llama"))
    checkpoint, limits = contract.checkpoint, contract.limits
    assert (checkpoint.architecture, checkpoint.model_type, checkpoint.kind) == ("LlamaModel", "llama", "directory")
    assert (checkpoint.num_layers, checkpoint.hidden_size, checkpoint.dtype) == (3, 64, "float32")
    assert (checkpoint.vocab_size, checkpoint.max_positions) == (400, 256)
    assert (contract.runtime.version, contract.runtime.transformers) == (torch.__version__, transformers.__version__)
    assert (limits.max_input_tokens, limits.max_sequences, limits.max_tokens) == (LIMIT, 8192, 16_384)
    assert limits.binding == "the recipe"
    assert (contract.output.module, contract.output.width) == ("norm", 64)
    assert contract.output.head_input == "identical"
    assert contract.device.type == "cpu"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_measured_fidelity_is_that_of_rounding(engines: Engines, name):
    contract = read_contract(engines.engine(name))
    fidelity, proof = contract.fidelity, contract.proof
    assert fidelity.reference == "float32"
    assert fidelity.num_tokens > 100
    assert 0 <= fidelity.rel_error_max <= fidelity.bound == 1e-5
    assert 1 - 1e-6 <= fidelity.cosine_min <= fidelity.cosine_mean <= 1 + 1e-6
    assert max(proof.neighbour, proof.moved, proof.plain) <= 1e-5
    assert len(contract.probe.sequences) == 4
    assert all(len(one.input_ids) == len(one.projection) for one in contract.probe.sequences)
    assert contract.measured.tokens_per_s > 0
    assert all(0.1 < ratio <= 1.1 for ratio in contract.measured.stored_ratio.values())


def test_layouts_are_chosen_by_trial_or_as_asked(engines: Engines, checkpoint, tmp_path):
    found = {name: read_contract(engines.engine(name)).runtime.layout for name in CHECKPOINTS}
    assert found == {"llama": "packed", "gpt2": "packed", "gemma2": "packed", "bloom": "dense"}
    assert build(checkpoint, tmp_path / "dense", override(SMALL, layout="dense")).runtime.layout == "dense"
    with pytest.raises(CheckpointRefused) as error:
        build(engines.checkpoint("bloom"), tmp_path / "packed", override(SMALL, layout="packed"))
    assert str(error.value).startswith("bloom: no layout reproduces the plain model within 1e-05. packed: ")


def test_a_checkpoint_without_a_tokenizer_takes_ids_only(tmp_path):
    bare = rig.tiny_checkpoint(tmp_path / "bare", "llama", tokenizer=None)
    assert build(bare, tmp_path / "engine", SMALL).tokenizer.kind == "none"
    ids = rig.random_sequences([3, 8, 1])
    source = parquet(tmp_path / "in.parquet", {"ids": ids})
    run(job(tmp_path / "engine", source, tmp_path / "out", column="ids", input="input_ids"))
    assert errors(stored(tmp_path / "out"), reference(bare, ids)).max() <= 1e-5


def test_every_step_is_said(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("extract.cpu.implementations.compiles_first", lambda: False)
    said: list[str] = []
    build(checkpoint, tmp_path / "engine", SMALL, say=said.append)
    assert said == [
        f"loading {checkpoint.name} (LlamaForCausalLM, float32) in float32, without its head",
        "proving our own packed decoder in float32: rows must not touch each other, and must equal the plain model",
        "comparing it (packed, float32) with the plain model in float32, row by row",
    ]


def test_a_build_that_compiles_kernels_first_says_so(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("extract.cpu.implementations.compiles_first", lambda: True)
    said: list[str] = []
    build(checkpoint, tmp_path / "engine", SMALL, say=said.append)
    assert said[1] == "compiling kernels for this CPU, once (about ten seconds)"


def test_a_recipe_for_our_own_decoder_is_refused_for_a_family_it_does_not_know(gpt2_checkpoint, tmp_path):
    for recipe in (override(SMALL, decoder="own"), override(SMALL, dtype="int8")):
        with pytest.raises(NoOwnDecoder) as error:
            build(gpt2_checkpoint, tmp_path / "engine", recipe)
        assert str(error.value) == (
            "recipe: it asks for our own decoder (or for int8, fp8, passes or a way to compile, which only that has), "
            'but gpt2: our packed decoder does not know model_type = "gpt2"; transformers\' own model runs it. Leave '
            "out --decoder own, or choose --dtype float32 or bfloat16."
        )
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    "contradiction",
    [
        {"decoder": "transformers", "dtype": "int8"},
        {"decoder": "transformers", "dtype": "fp8"},
        {"decoder": "own", "layout": "dense"},
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused_before_anything_loads(contradiction):
    with pytest.raises(BadValue):
        override(SMALL, **contradiction)


# --- limits ---------------------------------------------------------------------------------------------------------


def test_positions_that_the_model_lacks_bind_the_limit(tmp_path):
    short = rig.tiny_checkpoint(tmp_path / "gpt2", "gpt2", n_positions=16, max_position_embeddings=16)
    contract = build(short, tmp_path / "engine", Recipe(dtype="float32", device="cpu", max_tokens=512))
    assert (contract.limits.max_input_tokens, contract.limits.binding) == (16, "the positions that the model knows")
    rows = parquet(tmp_path / "in.parquet", {"text": ["all of it, " * 30, "short"]})
    run(job(tmp_path / "engine", rows, tmp_path / "out"))
    ids = ids_of(short, ["all of it, " * 30, "short"], limit=16)
    assert len(ids[0]) == 16
    assert errors(stored(tmp_path / "out"), reference(short, ids)).max() <= 1e-5


def test_a_budget_smaller_than_a_row_runs_that_row_alone(checkpoint, tmp_path):
    build(checkpoint, tmp_path / "engine", override(SMALL, max_input_tokens=LIMIT, max_tokens=4))
    rows = texts(40)
    run(job(tmp_path / "engine", parquet(tmp_path / "in.parquet", {"text": rows}), tmp_path / "out"))
    found = stored(tmp_path / "out")
    assert max(map(len, found)) == LIMIT
    assert errors(found, reference(checkpoint, ids_of(checkpoint, rows))).max() <= 1e-5


def test_the_default_recipe_takes_the_checkpoints_own_type_and_a_hundred_and_twenty_eight_tokens(checkpoint, tmp_path):
    contract = build(checkpoint, tmp_path / "engine")
    assert (contract.precision.weights, contract.precision.activations, contract.precision.output) == ("float32",) * 3
    assert (contract.limits.max_input_tokens, contract.limits.max_sequences) == (128, 8192)
    assert contract.runtime.decoder == "own"
    assert (contract.limits.max_tokens, contract.runtime.micro_batch, contract.runtime.threads) == (16_384, 256, None)


def test_the_default_budget_of_transformers_own_model_is_smaller(checkpoint, tmp_path):
    contract = build(checkpoint, tmp_path / "engine", Recipe(device="cpu", decoder="transformers"))
    assert contract.runtime.decoder == "transformers"
    assert (contract.limits.max_tokens, contract.runtime.micro_batch) == (4096, None)


# --- bfloat16 -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not computes_in(this_device("cpu"), "bfloat16"), reason="this CPU has no bfloat16 arithmetic")
@pytest.mark.parametrize(("decoder", "output"), [("own", "float32"), ("transformers", "bfloat16")])
def test_the_bound_of_a_bfloat16_engine_holds_for_rows_that_the_build_never_saw(tmp_path, decoder, output):
    half = rig.tiny_checkpoint(tmp_path / "llama", "llama", dtype="bfloat16")
    recipe = Recipe(device="cpu", max_input_tokens=LIMIT, max_tokens=512, decoder=decoder)
    contract = build(half, tmp_path / "engine", recipe)
    fidelity = contract.fidelity
    assert contract.precision.weights == contract.precision.activations == "bfloat16"
    assert contract.output.dtype == output
    assert contract.device.instruction_set == this_device("cpu").instruction_set
    assert fidelity.reference == "float32"
    assert 1e-4 < fidelity.rel_error_max < fidelity.bound < 0.5
    assert fidelity.cosine_min > 0.98
    rows = texts(100, seed=7)
    source = parquet(tmp_path / "in.parquet", {"text": rows})
    expected = ids_of(half, rows)
    for kind in ("tokens", "mean"):
        run(job(tmp_path / "engine", source, tmp_path / kind, kind=kind))
        assert errors(stored(tmp_path / kind), reference(half, expected, kind)).max() <= fidelity.bound
    if output == "bfloat16":
        run(job(tmp_path / "engine", source, tmp_path / "as-is", dtype="bfloat16"))
        assert all(
            np.array_equal(one, other)
            for one, other in zip(stored(tmp_path / "as-is"), stored(tmp_path / "tokens"), strict=True)
        )


def test_float16_is_refused_on_a_cpu(checkpoint, tmp_path):
    with pytest.raises(RecipeDoesNotFit) as error:
        build(checkpoint, tmp_path / "engine", Recipe(dtype="float16", device="cpu"))
    assert str(error.value) == (
        "recipe: dtype is float16, which is ten times slower than float32 on a CPU; use float32 or bfloat16."
    )
    assert error.value.exit_code == 2
    assert nothing_left(tmp_path)


def test_bfloat16_is_refused_on_a_cpu_without_its_arithmetic(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("extract.engine.device.cpu_level", lambda: "avx2")
    with pytest.raises(RecipeDoesNotFit) as error:
        build(checkpoint, tmp_path / "engine", Recipe(dtype="bfloat16", device="cpu"))
    assert str(error.value) == ("recipe: dtype is bfloat16, which this cpu has no fast arithmetic for; use float32.")
    half = rig.tiny_checkpoint(tmp_path / "half", "llama", dtype="bfloat16")
    assert build(half, tmp_path / "engine", override(SMALL, dtype="auto")).precision.weights == "float32"


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_model_that_looks_ahead_is_refused_by_name(tmp_path):
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=400, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    BertModel(config).save_pretrained(tmp_path / "bert")
    rig.tiny_tokenizer().save_pretrained(tmp_path / "bert")
    with pytest.raises(CheckpointRefused, match=r"(?i)bert") as error:
        build(tmp_path / "bert", tmp_path / "engine", SMALL)
    assert error.value.exit_code == 4
    assert {path.name for path in tmp_path.iterdir()} == {"bert"}


def test_a_decoder_family_whose_attention_is_told_to_look_ahead_is_refused_by_name(tmp_path):
    """The family is a decoder's; the config of this one is not."""
    gemma = rig.tiny_checkpoint(tmp_path / "gemma", "gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(NotCausal, match=r"^gemma3_text: not a causal decoder: changing later tokens moved the states"):
        build(gemma, tmp_path / "engine", SMALL)
    assert not (tmp_path / "engine").exists()


def test_an_unknown_model_type_is_refused_by_name(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "new")
    rig.edit_json(tmp_path / "new" / "config.json", {"model_type": "llama99", "architectures": ["Llama99ForCausalLM"]})
    with pytest.raises(CheckpointRefused, match="llama99"):
        build(tmp_path / "new", tmp_path / "engine", SMALL)


def test_a_recipe_for_other_architectures_is_refused(checkpoint, tmp_path):
    with pytest.raises(RecipeDoesNotFit) as error:
        build(checkpoint, tmp_path / "engine", override(SMALL, architectures=("GemmaForCausalLM", "Gemma2ForCausalLM")))
    assert str(error.value) == (
        "recipe: architecture is LlamaForCausalLM, it is for GemmaForCausalLM, Gemma2ForCausalLM."
    )
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("what", ["a file", "a directory", "an engine"])
def test_an_output_that_exists_is_refused_and_left_alone(engines: Engines, checkpoint, tmp_path, what):
    output = tmp_path / "engine"
    if what == "a file":
        output.write_text("mine")
    elif what == "a directory":
        output.mkdir()
        (output / "mine").write_text("mine")
    else:
        shutil.copytree(engines.engine("llama"), output)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(OutputExists) as error:
        build(checkpoint, output, SMALL)
    assert str(error.value) == f"{output}: exists already. Choose another directory with -o, or remove this one first."
    assert error.value.exit_code == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_an_empty_directory_is_as_good_as_none(checkpoint, tmp_path):
    (tmp_path / "engine").mkdir()
    check_files(tmp_path / "engine", build(checkpoint, tmp_path / "engine", SMALL))


def test_a_full_disk_is_told_before_weights_are_written(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(plain, "free_bytes", lambda path: 1000)
    with pytest.raises(NoRoomForEngine) as error:
        build(checkpoint, tmp_path / "engine", SMALL)
    size = sum(tensor.numel() * 4 for name, tensor in tensors(checkpoint).items() if name != "lm_head.weight")
    assert str(error.value) == f"{tmp_path}: the engine needs {size:,} bytes, 1,000 are free."
    assert error.value.exit_code == 8
    assert nothing_left(tmp_path)


def test_an_engine_that_does_not_give_the_plain_models_numbers_is_not_kept(checkpoint, tmp_path, monkeypatch):
    """The weights on disk are spoilt between writing and reading them back; only the comparison can know."""
    save = plain._save

    def spoilt(model, dtype, draft):
        save(model, dtype, draft)
        weights = load_file(draft / "model.safetensors")
        weights["norm.weight"] *= 1.01
        save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(plain, "_save", spoilt)
    with pytest.raises(NotFaithful) as error:
        build(checkpoint, tmp_path / "engine", SMALL)
    found = error.value.facts["found"]
    assert 0.005 < found < 0.02
    assert str(error.value) == (
        f"{checkpoint.name}: the engine differs from the plain model by {found:.1e} (relative), 1.0e-05 expected at "
        "most. Nothing was written."
    )
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    "step",
    [
        "builder.read_plain",
        "plain._save",
        "proven.prove_own",
        "builder._files",
        "builder.compare",
        "builder.write_contract",
    ],
)
def test_a_build_that_fails_at_any_step_leaves_nothing(checkpoint, tmp_path, monkeypatch, step):
    def fails(*arguments, **options):
        raise RuntimeError("as it happens")

    monkeypatch.setattr(f"extract.engine.{step}", fails)
    with pytest.raises(RuntimeError, match="as it happens"):
        build(checkpoint, tmp_path / "engine", SMALL)
    assert nothing_left(tmp_path)


def test_a_build_that_is_killed_leaves_no_engine_and_the_next_one_works(checkpoint, tmp_path, monkeypatch):
    """Killed at its last step, with everything but the name in place."""
    sync = builder._sync

    def killed(path):
        sync(path)
        if path.name == CONTRACT_FILE:
            os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child of a process with threads only ever dies
        child = os.fork()
    if child == 0:
        monkeypatch.setattr(builder, "_sync", killed)
        try:
            build(checkpoint, tmp_path / "engine", SMALL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    left = list(tmp_path.iterdir())
    assert [path.name.startswith(".engine.") for path in left] == [True]
    assert (left[0] / CONTRACT_FILE).is_file()
    build(checkpoint, tmp_path / "engine", SMALL)
    load_runtime(tmp_path / "engine")


# --- recipes --------------------------------------------------------------------------------------------------------


def test_a_recipe_is_read_from_toml(tmp_path):
    path = tmp_path / "fast.toml"
    path.write_text('dtype = "bfloat16"\nmax_input_tokens = 64\narchitectures = ["LlamaForCausalLM"]\n')
    assert load_recipe(path) == Recipe(dtype="bfloat16", max_input_tokens=64, architectures=("LlamaForCausalLM",))
    assert override(load_recipe(path), dtype=None, max_input_tokens=32).max_input_tokens == 32


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("max_tokns = 5", UnknownKey, '{path}: unknown key "max_tokns". Did you mean '),
        (
            'dtype = "fp4"',
            BadValue,
            '{path}: dtype is "fp4", expected one of "auto", "float32", "bfloat16", "float16", "int8", "fp8".',
        ),
        ('runtime = "trt"', BadValue, '{path}: runtime is "trt", expected one of "torch", "tensorrt-llm".'),
        (
            'device = "cpu"\ndtype = "fp8"',
            BadValue,
            '{path}: dtype is "fp8", expected any but fp8 with device "cpu".',
        ),
        ('mlp = "separate"', BadValue, '{path}: mlp is "separate", expected left out, or runtime "tensorrt-llm".'),
        (
            'runtime = "tensorrt-llm"\nthreads = 2',
            BadValue,
            '{path}: threads is 2, expected left out with runtime "tensorrt-llm".',
        ),
        (
            'runtime = "tensorrt-llm"\npass_tokens = 64',
            BadValue,
            "{path}: pass_tokens is 64, expected at least max_input_tokens (128).",
        ),
        (
            'runtime = "tensorrt-llm"\ncard_memory_gib = 0.0',
            BadValue,
            "{path}: card_memory_gib is 0.0, expected a number above 0.",
        ),
        ("max_input_tokens = 0", BadValue, "{path}: max_input_tokens is 0, expected a whole number, 1 or more."),
        ("max_sequences = 8193", BadValue, "{path}: max_sequences is 8193, expected 1 to 8192."),
        ("max_tokens = 1048577", BadValue, "{path}: max_tokens is 1048577, expected 1 to 1048576."),
        ("max_tokens = true", BadValue, "{path}: max_tokens is true, expected a whole number."),
        ("dtype = ", UnreadableSpec, "{path}: not valid TOML: "),
    ],
)
def test_a_recipe_with_a_mistake_is_refused_with_its_file(tmp_path, text, kind, message):
    path = tmp_path / "bad.toml"
    path.write_text(text + "\n")
    with pytest.raises(kind) as error:
        load_recipe(path)
    assert str(error.value).startswith(message.format(path=path))
    assert error.value.exit_code == 2


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(UnreadableSpec) as error:
        load_recipe(tmp_path / "none.toml")
    assert str(error.value) == f"{tmp_path / 'none.toml'}: no such file."


def test_the_engine_can_be_opened_by_transformers_alone(engines: Engines):
    """Nothing of the engine is in a form that only `extract` reads."""
    sequences = rig.random_sequences([5, 17], seed=5)
    found = rig.reference_states(engines.engine("llama"), sequences)
    assert rig.relative_error(found, reference(engines.checkpoint("llama"), sequences)) <= 1e-6
    assert json.loads((engines.engine("llama") / "config.json").read_bytes())["model_type"] == "llama"
    assert runtime(str(engines.engine("llama"))).contract.runtime.name == "torch"
