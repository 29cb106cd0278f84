"""A build for TensorRT-LLM: what the engine file holds, what it is compared with, and every way in which it is refused.

A refusal is one line and leaves nothing behind, whatever the vendor's package had begun. Engines that mix rows up are
made by breaking the stand-in's arithmetic on purpose.
"""

import dataclasses
import json
import shutil
import tempfile

import numpy as np
import pytest
import rig
import torch
from vendor_rig import StandInCard, batch_of, left_behind, recipe, vendor

from extract.engine.builder import OutputExists, RecipeDoesNotFit, build
from extract.engine.contract import EngineDoesNotFit, Precision, read_contract
from extract.engine.row_trial import RowsTouch
from extract.engine.runtimes import load_runtime
from extract.engine.tensorrt_builder import CardTooSmall, QuantiseFirst, VendorPrecision
from extract.engine.tensorrt_reference import NotAReference, OtherReference
from extract.errors import ExtractError
from extract.tensorrt.marked_model import NotReached, marked_class
from extract.tensorrt.model_shape import NoShape
from extract.tensorrt.pass_limits import DoesNotFit
from extract.tensorrt.vendor_build import VendorBuildFailed
from extract.tensorrt.vendor_checkpoint import NoReference, SplitCheckpoint, VendorWeightsMissing

FILES = ["config.json", "contract.json", "rank0.engine"]


@pytest.fixture(scope="module")
def checkpoint(vendor_engines):
    return vendor_engines.checkpoint(tokenizer=None)


@pytest.fixture(scope="module")
def vendor_checkpoint(vendor_engines):
    return vendor_engines.vendor_checkpoint()


def program_of(engine):
    from stand_in.program import Program

    return Program.from_bytes((engine / "rank0.engine").read_bytes())


def refused(kind, checkpoint, tmp_path, asked=None, *, card=None, **options):
    """The message of a build that is refused; nothing may be left of it, in the output's folder or the system's."""
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(scratch))
        with pytest.raises(ExtractError) as caught:
            build(checkpoint, tmp_path / "out" / "engine", asked or recipe(), **options)
    assert type(caught.value) is kind, repr(caught.value)
    assert (left_behind(tmp_path / "out"), left_behind(scratch)) == ([], [])
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestEngines:
    def test_the_head_is_not_in_the_engine_file(self, vendor_engines):
        engine = vendor_engines.engine()
        program = program_of(engine)
        assert not [name for name in program.weights if "lm_head" in name]
        assert program.outputs.keys() == {"logits", "extract_hidden_states"}
        head = rig.VOCAB_SIZE * 64 * 4
        kept = vendor_engines.engine(keep_head=True)
        assert (kept / "rank0.engine").stat().st_size - (engine / "rank0.engine").stat().st_size > 0.99 * head
        assert left_behind(engine) == FILES

    def test_a_head_that_is_kept_gives_the_logits_of_an_engine_without_our_output(
        self, vendor_engines, checkpoint, tmp_path
    ):
        kept = vendor_engines.engine(keep_head=True)
        vendor_engines.vendor_checkpoint()
        asked = recipe(keep_head=True)
        with vendor(), pytest.MonkeyPatch.context() as patch:
            from tensorrt_llm.functional import Tensor

            patch.setattr(Tensor, "mark_output", _without_ours(Tensor.mark_output))
            with pytest.raises(ExtractError, match="the states have output logits"):
                build(checkpoint, tmp_path / "plain", asked)
            draft = tmp_path / "kept"
            draft.mkdir()
            bare = _bare_engine(vendor_engines, asked, draft)
        assert program_of(bare).outputs.keys() == {"logits"}
        rows = rig.random_sequences([4, 1, 9])
        with vendor():
            assert np.array_equal(_logits(kept, rows), _logits(bare, rows))

    @pytest.mark.parametrize("states", ["tokens", "last"])
    def test_the_contract_says_what_was_built(self, states, vendor_engines):
        contract = read_contract(vendor_engines.engine(**({"states": "last"} if states == "last" else {})))
        assert (contract.output.states, contract.output.tensor) == (states, "extract_hidden_states")
        assert (contract.cache, contract.generated_tokens) == ("none", 0)
        assert (contract.runtime.version, contract.runtime.tensorrt) == ("1.2.1", "10.14.1.48")
        assert (contract.device.name, contract.device.num_sms) == ("Stand-in card", 132)
        limits = contract.limits
        assert (limits.pass_tokens, limits.max_sequences, limits.max_tokens) == (256, 16, 1_048_576)
        assert limits.memory_bytes > 0
        assert contract.fidelity.rel_error_max < 1e-5
        assert contract.proof.neighbour == 0

    def test_a_vendor_checkpoint_gives_the_states_of_the_one_it_was_made_from(
        self, vendor_checkpoint, vendor_engines, tmp_path
    ):
        source = vendor_engines.checkpoint()
        with vendor():
            contract = build(vendor_checkpoint, tmp_path / "engine", recipe(), reference=source)
        assert contract.checkpoint.kind == "tensorrt-llm"
        assert contract.checkpoint.origin_sha256 is not None
        assert contract.checkpoint.notes[-1] == "weights from vendor-llama, a checkpoint that TensorRT-LLM wrote"
        assert contract.fidelity.rel_error_max < 1e-5
        assert contract.tokenizer.kind == "fast"

    def test_a_torch_engine_speaks_for_the_plain_model(self, tiny_engine, llama_checkpoint, tmp_path):
        with vendor():
            by_checkpoint = build(llama_checkpoint, tmp_path / "one", recipe())
            by_engine = build(llama_checkpoint, tmp_path / "two", recipe(), reference=tiny_engine)
        id_of = read_contract(tiny_engine).engine_id[:12]
        assert f"compared with a torch engine, {id_of}" in by_engine.checkpoint.notes
        assert left_behind(tmp_path / "one") == left_behind(tmp_path / "two")
        assert by_engine.files == by_checkpoint.files
        same = ("checkpoint", "measured", "fidelity", "proof", "probe")
        assert dataclasses.replace(by_engine, **{name: getattr(by_checkpoint, name) for name in same}) == by_checkpoint
        assert (
            dataclasses.replace(by_engine.checkpoint, notes=by_checkpoint.checkpoint.notes) == by_checkpoint.checkpoint
        )
        assert by_engine.fidelity.num_tokens == by_checkpoint.fidelity.num_tokens
        assert by_engine.fidelity.rel_error_max < 1e-5

    def test_every_family_of_the_stand_in_is_built(self, vendor_engines):
        for family in ("qwen2", "gpt2"):
            engine = vendor_engines.engine(family=family)
            rows = rig.random_sequences([5, 1, 32])
            with vendor():
                runtime = load_runtime(engine)
                found = runtime.hidden_states(batch_of(rows), "tokens")
                runtime.close()
            expected = np.concatenate(rig.reference_states(vendor_engines.checkpoint(family, tokenizer=None), rows))
            assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max(), family

    def test_precision_is_the_recipes(self, vendor_engines):
        contract = read_contract(vendor_engines.engine(dtype="bfloat16"))
        assert contract.precision == Precision(weights="bfloat16", activations="bfloat16", output="bfloat16")
        assert 1e-4 < contract.fidelity.rel_error_max < 0.1


def _without_ours(mark):
    def without(self, name=None, dtype=None):
        if name != "extract_hidden_states":
            mark(self, name, dtype)

    return without


def _bare_engine(vendor_engines, asked, draft):
    """The vendor's own engine of the same checkpoint and settings."""
    from extract.tensorrt.model_shape import read_shape
    from extract.tensorrt.pass_limits import pass_limits
    from extract.tensorrt.vendor_build import build_engine

    source = vendor_engines.vendor_checkpoint()
    shape = read_shape(source)
    build_engine(source, asked, shape, pass_limits(shape, asked, 4 * 2**30), draft, draft, "1.2.1")
    return draft


def _logits(engine, rows):
    from stand_in.execution import Execution

    program, batch = program_of(engine), batch_of(rows)
    from extract.tensorrt.engine_inputs import fixed_inputs, pass_values

    values = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in pass_values(batch).items()}
    fixed = fixed_inputs(tuple(program.inputs), num_layers=3, max_input_tokens=32)
    with torch.no_grad():
        return Execution(program)({**values, **fixed})["logits"].numpy()


class TestRefused:
    def test_a_gguf_file(self, tmp_path):
        file = tmp_path / "model.gguf"
        file.write_bytes(b"GGUF" + bytes(64))
        with vendor():
            found = refused(NoShape, file, tmp_path)
        assert found == (
            f"{file}: a file, where a directory is expected. A build for tensorrt-llm needs a checkpoint directory "
            "with a full config.json."
        )

    def test_a_vendor_checkpoint_in_ranks(self, vendor_checkpoint, tmp_path):
        split = _changed(vendor_checkpoint, tmp_path, mapping={"world_size": 2, "tp_size": 2, "pp_size": 1})
        with vendor():
            found = refused(SplitCheckpoint, split, tmp_path)
        assert found.startswith(f"{split}: split into 2 ranks, 1 expected: an engine runs on one card")

    def test_a_vendor_checkpoint_without_weights(self, vendor_checkpoint, tmp_path):
        bare = _changed(vendor_checkpoint, tmp_path)
        (bare / "rank0.safetensors").unlink()
        with vendor():
            found = refused(VendorWeightsMissing, bare, tmp_path)
        assert found == f"{bare}: it holds no rank0.safetensors. Copy or convert the checkpoint again."

    def test_a_vendor_checkpoint_of_another_quantisation(self, vendor_checkpoint, tmp_path):
        awq = _changed(vendor_checkpoint, tmp_path, quantization={"quant_algo": "W4A16_AWQ"})
        with vendor():
            found = refused(NoShape, awq, tmp_path)
        assert "quantised with 'W4A16_AWQ', only FP8 or no quantisation is supported" in found

    def test_fp8_of_a_checkpoint_that_is_not_quantised(self, checkpoint, tmp_path):
        with vendor():
            found = refused(QuantiseFirst, checkpoint, tmp_path, recipe(dtype="fp8"))
        assert found.endswith(f"extract quantize {checkpoint} --to fp8 -o {checkpoint}-fp8")

    def test_another_precision_of_a_vendor_checkpoint(self, vendor_checkpoint, tmp_path):
        with vendor():
            found = refused(VendorPrecision, vendor_checkpoint, tmp_path, recipe(dtype="bfloat16"))
        assert found == f"recipe: dtype is bfloat16, but {vendor_checkpoint} holds float32. Leave out --dtype."

    def test_a_vendor_checkpoint_that_nobody_speaks_for(self, vendor_checkpoint, tmp_path):
        with vendor():
            found = refused(NoReference, vendor_checkpoint, tmp_path)
        assert found == (
            f"{vendor_checkpoint}: nothing says which checkpoint it was made from. "
            "Say where the unquantised checkpoint lies: --reference CHECKPOINT"
        )

    def test_a_reference_of_another_checkpoint(self, checkpoint, tmp_path):
        other = rig.tiny_checkpoint(tmp_path / "other", seed=1, tokenizer=None)
        with vendor():
            found = refused(OtherReference, checkpoint, tmp_path, reference=other)
        assert found.startswith(f"{other}: its checkpoint has sha256 ")

    def test_a_reference_of_another_size(self, vendor_checkpoint, tmp_path):
        other = rig.tiny_checkpoint(tmp_path / "other", num_hidden_layers=2, tokenizer=None)
        with vendor():
            found = refused(OtherReference, vendor_checkpoint, tmp_path, reference=other)
        assert found.startswith(f"{other}: its checkpoint has num_layers 2, the one to build from has 3.")

    def test_an_engine_that_rounds_is_no_reference(self, checkpoint, vendor_engines, tmp_path):
        engine = vendor_engines.engine(dtype="bfloat16")
        with vendor():
            found = refused(NotAReference, checkpoint, tmp_path, reference=engine)
        assert found == (
            f"{engine}: a tensorrt-llm engine in bfloat16, whose own rounding would count as the engine's. "
            "Give a checkpoint, or a float32 torch engine of it: --reference"
        )

    def test_a_machine_whose_transformers_does_not_read_checkpoints(self, checkpoint, tmp_path, monkeypatch):
        from extract.engine import tensorrt_builder

        monkeypatch.setattr(tensorrt_builder.metadata, "version", lambda name: "4.57.3")
        with vendor():
            found = refused(NotAReference, checkpoint, tmp_path)
        assert "transformers 4.57.3 is installed, which this package does not read checkpoints with" in found

    def test_a_recipe_for_a_larger_card(self, checkpoint, tmp_path):
        with vendor():
            found = refused(CardTooSmall, checkpoint, tmp_path, recipe(card_memory_gib=80))
        assert found == (
            "recipe: card_memory_gib is 80, this card (Stand-in card) has 4.0. Use a recipe for this card."
        )

    def test_a_card_that_holds_no_pass(self, checkpoint, tmp_path):
        with vendor(card=StandInCard(total_bytes=2**30)):
            found = refused(DoesNotFit, checkpoint, tmp_path)
        assert "a card of 1.0 GiB gives 1.0 GiB. Use a larger card" in found

    def test_a_recipe_for_other_models(self, checkpoint, tmp_path):
        with vendor():
            refused(RecipeDoesNotFit, checkpoint, tmp_path, recipe(architectures=("Qwen2ForCausalLM",)))

    def test_a_machine_without_a_card(self, checkpoint, tmp_path):
        from stand_in.rig import stand_in

        with stand_in(with_card=False):
            found = refused(EngineDoesNotFit, checkpoint, tmp_path)
        assert found == (
            "recipe: this engine needs device cuda, this machine has no CUDA device that torch can use. "
            "extract doctor says why."
        )

    def test_an_output_that_exists(self, checkpoint, tmp_path):
        (tmp_path / "engine").mkdir()
        (tmp_path / "engine" / "mine").touch()
        with vendor(), pytest.raises(OutputExists):
            build(checkpoint, tmp_path / "engine", recipe())
        assert left_behind(tmp_path / "engine") == ["mine"]

    def test_an_architecture_that_the_vendor_does_not_know(self, tmp_path):
        source = rig.tiny_checkpoint(tmp_path / "gemma", "gemma2", tokenizer=None)
        with vendor():
            found = refused(VendorBuildFailed, source, tmp_path)
        assert found.startswith("tensorrt-llm 1.2.1 could not convert the checkpoint: NotImplementedError: The given ")

    @pytest.mark.parametrize(
        ("broken", "said"),
        [
            ("raises", "could not build the engine: MemoryError: the card is full"),
            ("says nothing", "could not build the engine: RuntimeError: without a word"),
            ("returns nothing", "could not build the engine: ValueError: it returned no engine"),
            ("writes nothing", "could not build the engine: it wrote no rank0.engine, config.json"),
        ],
    )
    def test_a_vendor_that_gives_up(self, broken, said, checkpoint, tmp_path, monkeypatch):
        with vendor():
            from tensorrt_llm import builder

            def build_nothing(model, build_config):
                if broken == "raises":
                    raise MemoryError("[TensorRT] long story\n\n  the card is full.\n")
                if broken == "says nothing":
                    raise RuntimeError
                if broken == "returns nothing":
                    return None
                return builder.Engine(None, b"")

            monkeypatch.setattr(builder, "build", build_nothing)
            monkeypatch.setattr(builder.Engine, "save", lambda self, engine_dir: None)
            found = refused(VendorBuildFailed, checkpoint, tmp_path)
        advice = "What it wrote above says more. Try a smaller --pass-tokens, or --runtime torch."
        assert found == f"tensorrt-llm 1.2.1 {said}. {advice}"


def _changed(vendor_checkpoint, tmp_path, **changes):
    """A copy whose config says something else."""
    copy = shutil.copytree(vendor_checkpoint, tmp_path / "changed")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


class TestModelsThatAreNotReached:
    @pytest.mark.parametrize(
        ("architecture", "cache", "problem"),
        [
            ("DeciLMForCausalLM", "none", "by DeciLMForCausalLM, which has a forward of its own"),
            ("MambaForCausalLM", "none", "by MambaForCausalLM, which is no DecoderModelForCausalLM"),
            ("FutureForCausalLM", "none", "by no class, it does not know it"),
        ],
    )
    def test_they_are_refused_by_name(self, architecture, cache, problem):
        with vendor(), pytest.raises(NotReached) as caught:
            marked_class(architecture, states="tokens", cache=cache, keep_head=False, release="1.2.1")
        assert str(caught.value) == (
            f"{architecture}: TensorRT-LLM 1.2.1 runs it {problem}, so its states cannot be put out. "
            "Build with --runtime torch."
        )

    def test_latent_attention_needs_a_cache(self, monkeypatch):
        with vendor():
            from tensorrt_llm.models import MODEL_MAP, stand_in_decoders

            monkeypatch.setitem(MODEL_MAP, "DeepseekV2ForCausalLM", stand_in_decoders.QWenForCausalLM)
            with pytest.raises(NotReached, match=r"whose attention cannot be without a cache \(--cache paged\)"):
                marked_class("DeepseekV2ForCausalLM", states="tokens", cache="none", keep_head=False, release="1.2.1")
            marked_class("DeepseekV2ForCausalLM", states="tokens", cache="paged", keep_head=False, release="1.2.1")

    def test_a_forward_that_returns_something_else(self, checkpoint, tmp_path, monkeypatch):
        with vendor():
            from tensorrt_llm.models.modeling_utils import DecoderModelForCausalLM

            forward = DecoderModelForCausalLM.forward
            two = lambda self, *args, **kwargs: forward(self, *args, **kwargs)[:2]  # noqa: E731
            from tensorrt_llm.models import stand_in_decoders

            monkeypatch.setattr(DecoderModelForCausalLM, "forward", two)
            assert stand_in_decoders.LLaMAForCausalLM.forward is two
            found = refused(NotReached, checkpoint, tmp_path)
        assert "whose forward returned 2 values, three tensors expected" in found


def _swapped_rows(execution, output, named, inputs, decode):
    """The rows of a pass come out in the other order."""
    found = decode(execution, output, named, inputs)
    lengths = named["context_lengths"].tolist()
    return torch.cat(list(found.split(lengths))[::-1]) if len(lengths) > 1 else found


def _leaking(execution, output, named, inputs, decode):
    """Each token sees a little of the one before it in the pass, whichever row that belongs to."""
    found = decode(execution, output, named, inputs)
    return found + 0.05 * torch.roll(found, 1, 0) if len(found) > 1 else found


def _pre_norm(execution, output, named, inputs, decode):
    """States before the final norm's weights."""
    found = decode(execution, output, named, inputs)
    return found * torch.linspace(0.3, 3, found.shape[1])


def _wrong_for_many(execution, output, named, inputs, decode):
    """Right for one sequence, wrong for several: each gets the first one's state."""
    found = decode(execution, output, named, inputs)
    return found[:1].expand_as(found).clone() if len(named["context_lengths"]) > 1 else found


def _not_finite(execution, output, named, inputs, decode):
    found = decode(execution, output, named, inputs)
    found[-1, 0] = float("nan")
    return found


class TestEnginesThatMixRows:
    @pytest.mark.parametrize(
        ("broken", "precision"),
        [
            (_swapped_rows, "bfloat16"),
            (_leaking, "float32"),
            (_leaking, "bfloat16"),
            (_pre_norm, "bfloat16"),
            (_wrong_for_many, "bfloat16"),
            (_not_finite, "float32"),
        ],
    )
    def test_they_are_refused_by_the_trial(self, broken, precision, checkpoint, tmp_path, monkeypatch):
        from stand_in.execution import Execution

        decode = Execution._decode
        monkeypatch.setattr(
            Execution,
            "_decode",
            lambda self, output, named, inputs: broken(self, output, named, inputs, decode),
        )
        with vendor():
            found = refused(RowsTouch, checkpoint, tmp_path, recipe(dtype=precision))
        assert "the engine is not right: " in found

    def test_the_wrong_tensor_is_refused(self, checkpoint, tmp_path, monkeypatch):
        with vendor():
            from tensorrt_llm import functional
            from tensorrt_llm.models import modeling_utils

            def first_tokens(states, ids, packed):
                return functional._result("gather", [states, ids], states.dtype, ["B", *states.letters[1:]])

            from stand_in import execution

            monkeypatch.setattr(modeling_utils, "gather_last_token_logits", first_tokens)
            monkeypatch.setattr(execution, "_gather", lambda states, ids: states[ids.long() - ids.long()[0]])
            refused(RowsTouch, checkpoint, tmp_path, recipe(states="last"))
