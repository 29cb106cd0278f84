"""Quantising once: what the vendor's quantiser is given, what is checked of what it wrote, and that builds find it."""

import itertools
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rig
from safetensors.torch import load_file, save_file
from stand_in.rig import stand_in
from vendor_rig import RELEASES, left_behind, recipe, vendor

from extract import quantizing
from extract.engine.builder import build
from extract.engine.tensorrt_reference import OtherReference
from extract.quantizing import (
    BadQuantization,
    NoCalibrationRows,
    QuantizedExists,
    quantize,
)
from extract.sample import passages
from extract.spec import SourceSpec
from extract.tensorrt.gate import VendorMissing
from extract.tensorrt.vendor_checkpoint import NoReference, read_origin
from extract.tensorrt.vendor_quantizer import QuantiserFailed


@pytest.fixture(scope="module", autouse=True)
def few_docstrings():
    """The standard library is read from its beginning on, not spread over all of it, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizing, "spread", lambda count: list(itertools.islice(passages(), count)))
        yield


@pytest.fixture(scope="module")
def checkpoint(vendor_engines):
    return vendor_engines.checkpoint()


@pytest.fixture(scope="module")
def quantized(checkpoint, few_docstrings, tmp_path_factory):
    """The tiny Llama in FP8; do not change its files."""
    output = tmp_path_factory.mktemp("quantized") / "llama-fp8"
    with vendor():
        quantize(checkpoint, output, num_rows=4, max_input_tokens=16)
    return output


@pytest.fixture
def asked(monkeypatch):
    """What the vendor's quantiser is called with, with the texts of its calibration data; it writes nothing."""
    seen = {}

    def record(**given):
        seen.update(given, texts=pq.read_table(f"{given['calib_dataset']}/train.parquet")["text"].to_pylist())
        raise RuntimeError("stopped here")

    with vendor():
        from tensorrt_llm import quantization

        monkeypatch.setattr(quantization, "quantize_and_export", record)
        yield seen


def table(path, texts, column="text"):
    pq.write_table(pa.table({column: pa.array(texts, pa.string())}), path)
    return SourceSpec(path=str(path), column=column)


class TestWhatTheVendorIsGiven:
    @pytest.mark.parametrize(("cache", "expected"), [("none", None), ("fp8", "fp8")])
    def test_every_choice_is_made(self, cache, expected, asked, checkpoint, tmp_path):
        with pytest.raises(QuantiserFailed):
            quantize(checkpoint, tmp_path / "out", num_rows=3, max_input_tokens=64, cache=cache)
        given = {name: value for name, value in asked.items() if name not in ("texts", "calib_dataset", "output_dir")}
        assert given == {
            "model_dir": str(checkpoint),
            "device": "cuda",
            "dtype": "bfloat16",
            "qformat": "fp8",
            "kv_cache_dtype": expected,
            "calib_size": 3,
            "batch_size": 1,
            "calib_max_seq_length": 64,
            "awq_block_size": 128,
            "tp_size": 1,
            "pp_size": 1,
            "cp_size": 1,
            "seed": 1234,
            "tokenizer_max_seq_length": 2048,
        }
        assert asked["texts"] == [passage.text for passage in itertools.islice(passages(), 3)]

    def test_texts_arrive_as_they_are_without_null_and_empty_ones(self, asked, checkpoint, tmp_path):
        texts = ["first", None, "", "  \n", "zweite Zeile\nmit Umbruch", "終", "beyond"]
        source = table(tmp_path / "rows.parquet", texts, "body")
        with pytest.raises(QuantiserFailed):
            quantize(checkpoint, tmp_path / "out", calibration=source, num_rows=6)
        assert asked["texts"] == ["first", "zweite Zeile\nmit Umbruch", "終"]
        assert asked["calib_size"] == 3

    def test_half_precision_of_the_checkpoint_is_kept(self, asked, vendor_engines, tmp_path):
        with pytest.raises(QuantiserFailed):
            quantize(vendor_engines.checkpoint(dtype="float16"), tmp_path / "out", num_rows=1)
        assert asked["dtype"] == "float16"


class TestWhatIsWritten:
    @pytest.mark.parametrize("release", RELEASES)
    def test_every_release_writes_fp8_with_a_head_that_is_not(self, release, checkpoint, tmp_path):
        with vendor(release):
            found = quantize(checkpoint, tmp_path / "out", num_rows=2, max_input_tokens=8)
        assert (found.weights, found.dtype, found.cache, found.num_rows) == ("fp8", "bfloat16", "none", 2)
        assert left_behind(tmp_path / "out") == ["config.json", "extract-origin.json", "rank0.safetensors"]
        assert found.num_bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
        origin = read_origin(tmp_path / "out")
        assert (origin.name, origin.path) == (checkpoint.name, str(checkpoint))
        assert origin.made == (f"tensorrt-llm {release}, fp8, cache none, 2 rows of the standard library's docstrings")

    def test_scales_of_a_cache_only_where_asked(self, checkpoint, quantized, tmp_path):
        with vendor():
            quantize(checkpoint, tmp_path / "out", num_rows=1, max_input_tokens=8, cache="fp8")
        algorithms = [
            json.loads((path / "config.json").read_text())["quantization"]["kv_cache_quant_algo"]
            for path in (quantized, tmp_path / "out")
        ]
        assert algorithms == [None, "FP8"]

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            ("head", "a head that is quantised, excluded expected"),
            ("head tensor", "FP8 tensors in the head ['lm_head.weight'], [] expected"),
            ("nothing", "weights in bfloat16, fp8 expected"),
            ("no tensor", "FP8 tensors none, some expected"),
            ("dtype", "states in float16, bfloat16 expected"),
            ("ranks", "ranks 2, 1 expected"),
            ("cache", "a cache in fp8, bfloat16 expected"),
        ],
    )
    def test_what_is_not_as_asked_is_not_kept(self, spoil, said, checkpoint, quantized, tmp_path, monkeypatch):
        with vendor():
            from tensorrt_llm import quantization

            monkeypatch.setattr(quantization, "quantize_and_export", _spoiling(quantized, spoil))
            with pytest.raises(BadQuantization) as caught:
                quantize(checkpoint, tmp_path / "out" / "fp8", num_rows=1)
        assert str(caught.value) == (f"{checkpoint.name}: the quantised checkpoint has {said}. Nothing was kept.")
        assert left_behind(tmp_path / "out") == []


def _spoiling(good, how):
    """A quantiser that copies a good checkpoint with one thing wrong in it."""
    import torch

    def write(*, output_dir, **given):
        config = json.loads((good / "config.json").read_text())
        tensors = load_file(good / "rank0.safetensors")
        quantization = config["quantization"]
        if how == "head":
            quantization["exclude_modules"] = []
        elif how == "head tensor":
            tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
        elif how == "nothing":
            quantization["quant_algo"] = None
        elif how == "no tensor":
            tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        elif how == "dtype":
            config["dtype"] = "float16"
        elif how == "ranks":
            config["mapping"]["world_size"] = 2
        elif how == "cache":
            quantization["kv_cache_quant_algo"] = "FP8"
        (Path(output_dir) / "config.json").write_text(json.dumps(config))
        save_file(tensors, f"{output_dir}/rank0.safetensors")

    return write


class TestRefused:
    def refused(self, kind, checkpoint, tmp_path, **options):
        with pytest.raises(kind) as caught:
            quantize(checkpoint, tmp_path / "out" / "fp8", **{"num_rows": 2, **options})
        assert left_behind(tmp_path / "out") == []
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_without_a_card(self, checkpoint, tmp_path):
        with stand_in(with_card=False):
            found = self.refused(QuantiserFailed, checkpoint, tmp_path)
        assert found == (
            f"tensorrt-llm 1.2.1 could not quantise {checkpoint.name}: OSError: GPU is required for inference. What it "
            "wrote above says more; extract doctor says whether nvidia-modelopt and the card are there."
        )

    def test_without_the_package(self, checkpoint, tmp_path):
        self.refused(VendorMissing, checkpoint, tmp_path)

    def test_an_architecture_that_the_vendor_does_not_export(self, tmp_path):
        source = rig.tiny_checkpoint(tmp_path / "gemma", "gemma2")
        with vendor():
            found = self.refused(QuantiserFailed, source, tmp_path)
        assert "could not quantise gemma: NotImplementedError: Cannot export Gemma2ForCausalLM." in found

    def test_rows_without_a_text(self, checkpoint, tmp_path):
        source = table(tmp_path / "rows.parquet", [None, "", " ", "text"])
        with vendor():
            found = self.refused(NoCalibrationRows, checkpoint, tmp_path, calibration=source, num_rows=3)
        assert found == (
            f"{tmp_path / 'rows.parquet'}: none of the first 3 rows of column text is a text. Choose another --column."
        )

    def test_a_quantised_checkpoint(self, quantized, tmp_path):
        with vendor(), pytest.raises(Exception, match=r"config\.json|quantised|unquantised") as caught:
            quantize(quantized, tmp_path / "out" / "fp8", num_rows=1)
        assert hasattr(caught.value, "exit_code")
        assert left_behind(tmp_path / "out") == []

    def test_an_output_that_exists(self, checkpoint, quantized):
        before = left_behind(quantized)
        with vendor(), pytest.raises(QuantizedExists):
            quantize(checkpoint, quantized)
        assert left_behind(quantized) == before


class TestBuildsFromIt:
    def test_a_build_finds_its_reference_by_itself(self, checkpoint, quantized, tmp_path):
        with vendor():
            contract = build(quantized, tmp_path / "engine", recipe(dtype="fp8"))
        assert contract.precision.weights == "fp8"
        assert contract.precision.output == "bfloat16"
        assert contract.checkpoint.origin_sha256 == read_origin(quantized).sha256
        assert contract.checkpoint.name == checkpoint.name
        assert 1e-3 < contract.fidelity.rel_error_max < 0.5
        assert contract.tokenizer.kind == "fast"

    def test_a_reference_that_is_gone_is_asked_for(self, quantized, tmp_path):
        copy = _moved(quantized, tmp_path, path=str(tmp_path / "gone"))
        with vendor(), pytest.raises(NoReference) as caught:
            build(copy, tmp_path / "out" / "engine", recipe())
        assert str(caught.value) == (
            f"{copy}: it was made from {tmp_path / 'gone'}, which is gone. "
            "Say where the unquantised checkpoint lies: --reference CHECKPOINT"
        )
        assert left_behind(tmp_path / "out") == []

    def test_a_reference_that_moved_may_be_named(self, checkpoint, quantized, tmp_path):
        copy = _moved(quantized, tmp_path, path=str(tmp_path / "gone"))
        with vendor():
            build(copy, tmp_path / "out" / "engine", recipe(), reference=checkpoint)
        assert left_behind(tmp_path / "out") == ["engine"]

    def test_a_reference_that_changed_is_refused(self, quantized, tmp_path):
        other = rig.tiny_checkpoint(tmp_path / "other", seed=3)
        copy = _moved(quantized, tmp_path, path=str(other))
        for reference in (None, other):
            with vendor(), pytest.raises(OtherReference) as caught:
                build(copy, tmp_path / "out" / "engine", recipe(), reference=reference)
            assert f"the one to build from has {read_origin(quantized).sha256[:12]}." in str(caught.value)
        assert left_behind(tmp_path / "out") == []

    def test_a_record_that_cannot_be_read(self, quantized, tmp_path):
        copy = shutil.copytree(quantized, tmp_path / "copy")
        (copy / "extract-origin.json").write_text("{")
        with vendor(), pytest.raises(NoReference, match=r"extract-origin\.json cannot be read"):
            build(copy, tmp_path / "out" / "engine", recipe())


def _moved(quantized, tmp_path, **changes):
    copy = shutil.copytree(quantized, tmp_path / "copy")
    record = json.loads((copy / "extract-origin.json").read_bytes())
    (copy / "extract-origin.json").write_text(json.dumps({**record, **changes}))
    return copy
