"""Weights of an engine by their role, mapped from the safetensors file that transformers wrote."""

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rig import randomise, tiny_config
from safetensors.torch import save_file
from transformers import AutoModel

from extract.cpu.architecture import Architecture
from extract.cpu.mapped_weights import DamagedWeights, UnfitWeights, WeightsFile, to_float32
from extract.cpu.weights import embedding, final_norm, layer_tensors, layer_weights, open_weights
from extract.engine.own_architecture import architecture_of

VALUES = [0.0, -0.0, 1.0, -2.5, 3.0e-39, 1.0e-7, 6.0e4, float("inf"), float("-inf"), float("nan")]


def model_and_file(directory: Path, family: str, dtype: str = "float32", **options: Any) -> tuple[Any, Architecture]:
    """A random base model, saved as an engine saves it, and its architecture."""
    model = AutoModel.from_config(tiny_config(family, **options)).eval()
    randomise(model)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory)
    return model, architecture_of(model, 32)


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def torch_bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", np.float32), ("float16", np.float16), ("bfloat16", np.uint16)]
)
def test_tensors_come_in_the_bits_that_are_stored(dtype: str, stored: type, tmp_path: Path) -> None:
    model, _ = model_and_file(tmp_path, "llama", dtype)
    with open_weights(tmp_path / "model.safetensors") as weights:
        assert weights.names == set(model.state_dict())
        for name, tensor in model.state_dict().items():
            found = weights.tensor(name, tuple(tensor.shape))
            assert found.dtype == stored
            assert bits(found) == torch_bits(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_half_precision_value_becomes_the_same_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.tensor(VALUES).to(dtype)
    if dtype != torch.float32:
        tensor = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    save_file({"all": tensor}, tmp_path / "model.safetensors")
    with open_weights(tmp_path / "model.safetensors") as weights:
        assert np.array_equal(to_float32(weights.tensor("all")), tensor.float().numpy(), equal_nan=True)


def test_a_matrix_is_a_view_of_the_file_and_cannot_be_written(tmp_path: Path) -> None:
    _, architecture = model_and_file(tmp_path, "phi3", head_dim=16)
    with open_weights(tmp_path / "model.safetensors") as weights:
        layer = layer_weights(weights, architecture, 1)
        fused = weights.tensor("layers.1.self_attn.qkv_proj.weight")
        for matrix in (layer.q, layer.k, layer.v):
            assert np.shares_memory(matrix, fused)
            assert not matrix.flags.writeable
            assert matrix.flags.c_contiguous
        assert np.shares_memory(layer.down, weights.tensor("layers.1.mlp.down_proj.weight"))
        assert np.shares_memory(embedding(weights, architecture), weights.tensor("embed_tokens.weight"))


def test_fused_matrices_are_split_into_their_rows(tmp_path: Path) -> None:
    model, architecture = model_and_file(tmp_path, "phi3", head_dim=16)
    with open_weights(tmp_path / "model.safetensors") as weights:
        layer = layer_weights(weights, architecture, 2)
        attention, mlp = model.layers[2].self_attn, model.layers[2].mlp
        q, k, v = attention.qkv_proj.weight.detach().split([64, 32, 32])
        gate, up = mlp.gate_up_proj.weight.detach().split([128, 128])
        expected = {"q": q, "k": k, "v": v, "gate": gate, "up": up, "o": attention.o_proj.weight.detach()}
        for role, tensor in expected.items():
            assert np.array_equal(getattr(layer, role), tensor.numpy()), role


NORMS: dict[str, tuple[dict[str, Any], dict[str, str | None]]] = {
    "llama": (
        {},
        {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "post_attention_norm": None}
        | {"post_mlp_norm": None, "q_norm": None, "k_norm": None},
    ),
    "olmo2": (
        {},
        {"attention_norm": None, "mlp_norm": None, "post_attention_norm": "post_attention_layernorm"}
        | {"post_mlp_norm": "post_feedforward_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},
    ),
    "gemma3_text": (
        {},
        {"attention_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        | {"mlp_norm": "pre_feedforward_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
        | {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},
    ),
    "vaultgemma": (
        {},
        {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", "post_attention_norm": None},
    ),
    "hyperclovax": (
        {"use_post_norm": True},
        {"attention_norm": "input_layernorm", "post_attention_norm": "post_norm1"}
        | {"mlp_norm": "post_attention_layernorm", "post_mlp_norm": "post_norm2"},
    ),
}


@pytest.mark.parametrize("family", NORMS)
def test_norms_have_their_roles_and_the_one_that_a_family_adds(family: str, tmp_path: Path) -> None:
    options, roles = NORMS[family]
    model, architecture = model_and_file(tmp_path, family, "bfloat16", **options)
    one = 1.0 if "gemma" in family else 0.0
    with open_weights(tmp_path / "model.safetensors") as weights:
        layer = layer_weights(weights, architecture, 1)
        for role, name in roles.items():
            found = getattr(layer, role)
            if name is None:
                assert found is None, role
            else:
                weight = model.layers[1].get_submodule(name).weight
                assert found.dtype == np.float32
                assert np.array_equal(found, weight.detach().float().numpy() + np.float32(one)), role
        expected = model.norm.weight.detach().float().numpy() + np.float32(one)
        assert np.array_equal(final_norm(weights, architecture), expected)


def test_biases_are_float32_and_absent_ones_are_none(tmp_path: Path) -> None:
    options = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True}
    model, architecture = model_and_file(tmp_path, "seed_oss", "float16", **options)
    with open_weights(tmp_path / "model.safetensors") as weights:
        layer = layer_weights(weights, architecture, 0)
    assert layer.o_bias is None
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    for role in ("q", "k", "v", "gate", "up", "down"):
        linear = getattr(attention if role in "qkv" else mlp, f"{role}_proj")
        found = getattr(layer, f"{role}_bias")
        assert found.dtype == np.float32
        assert np.array_equal(found, linear.bias.detach().float().numpy()), role


def test_views_outlive_the_file(tmp_path: Path) -> None:
    model, architecture = model_and_file(tmp_path, "llama")
    with open_weights(tmp_path / "model.safetensors") as weights:
        down = layer_weights(weights, architecture, 0).down
    assert np.array_equal(down, model.layers[0].mlp.down_proj.weight.detach().numpy())


def resident_bytes(path: Path) -> int:
    """Memory that this process has of a mapped file."""
    maps = Path("/proc/self/smaps").read_text()
    found = re.search(re.escape(str(path)) + r"\n.*?Rss:\s+(\d+) kB", maps, flags=re.DOTALL)
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps")
def test_dropped_tensors_leave_memory_and_can_be_read_again(tmp_path: Path) -> None:
    size = 4 * 1024 * 1024
    path = tmp_path / "model.safetensors"
    save_file({name: torch.arange(size // 4, dtype=torch.float32) for name in ("a", "b")}, path)
    with open_weights(path) as weights:
        a, b = weights.tensor("a"), weights.tensor("b")
        before = float(a.sum()), float(b.sum())
        assert resident_bytes(path) >= 2 * size
        weights.drop("a")
        assert size <= resident_bytes(path) < 1.2 * size
        weights.drop("b")
        assert resident_bytes(path) < 0.2 * size
        assert (float(a.sum()), float(b.sum())) == before


def test_the_tensors_of_a_layer_are_those_of_its_number(tmp_path: Path) -> None:
    model, architecture = model_and_file(tmp_path, "qwen3", num_hidden_layers=12)
    for layer in (1, 10):
        expected = {name for name in model.state_dict() if name.startswith(f"layers.{layer}.")}
        assert set(layer_tensors(architecture, layer)) == expected


HEADER = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
DATA = bytes(24)
START = 8 + len(json.dumps(HEADER))


def span(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_a_whole_file_is_taken(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": span("F16", [0], 24, 24), **HEADER}
    with open_weights(write(tmp_path / "w", header, DATA)) as weights:
        assert weights.tensor("a").shape == (2, 3)


DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "cut": (HEADER, DATA[:-1], f"{START + 23} bytes found, {START + 24} expected"),
    "padded": (HEADER, DATA + b"x", f"{START + 25} bytes found, {START + 24} expected"),
    "not JSON": (b"rubbish!", b"", "the header does not parse (JSONDecodeError)"),
    "not text": (b"{\xff}    ", b"", "the header does not parse (UnicodeDecodeError)"),
    "a list": ([1], b"", "the header does not parse (AttributeError)"),
    "no type": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, DATA, "the header does not parse (KeyError)"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}, DATA,
                   "the header does not parse (IndexError)"),
    "too few bytes": ({"a": span("F32", [2, 4], 0, 24)}, DATA, "tensor a: bytes 0 to 24 found, 0 to 32 expected"),
    "a gap": ({**HEADER, "b": span("F16", [1], 26, 28)}, DATA, "tensor b: bytes 26 to 28 found, 24 to 26 expected"),
    "overlap": ({**HEADER, "b": span("F16", [1], 22, 24)}, DATA, "tensor b: bytes 22 to 24 found, 24 to 26 expected"),
    "before the data": ({"a": span("F32", [2, 3], -24, 0)}, DATA, "tensor a: bytes -24 to 0 found, 0 to 24 expected"),
    "a negative shape": ({"a": span("F32", [-2, -3], 0, 24)}, DATA, "tensor a: the shape [-2, -3] found"),
    "backwards": ({"a": span("I64", [1], 0, -8)}, DATA, "tensor a: bytes 0 to -8 found, 0 to 0 expected"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_before_anything_is_read(damage: str, tmp_path: Path) -> None:
    header, data, problem = DAMAGED[damage]
    path = write(tmp_path / "w", header, data)
    with pytest.raises(DamagedWeights) as refusal:
        open_weights(path)
    assert str(refusal.value) == f"{path}: {problem}. Build the engine again."


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(DamagedWeights) as refusal:
        open_weights(path)
    problem = "a header up to byte 1,099,511,627,784 in a file of 10 bytes"
    assert str(refusal.value) == f"{path}: {problem}. Build the engine again."


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be mapped: No such file or directory"),
        (b"", "0 bytes found, a header expected"),
        (b"1234567", "7 bytes found, a header expected"),
    ],
)
def test_no_file_and_no_header_are_refused(content: bytes | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "w"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DamagedWeights) as refusal:
        open_weights(path)
    assert str(refusal.value) == f"{path}: {problem}. Build the engine again."


def ask_unknown(weights: WeightsFile) -> None:
    weights.tensor("b")


def ask_integers(weights: WeightsFile) -> None:
    weights.tensor("steps")


def ask_shape(weights: WeightsFile) -> None:
    weights.tensor("a", (3, 2))


@pytest.mark.parametrize(
    ("ask", "name", "problem"),
    [
        (ask_unknown, "b", "not in the file"),
        (ask_integers, "steps", "type I64 found, F32, F16, BF16 expected"),
        (ask_shape, "a", "shape [2, 3] found, [3, 2] expected"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(ask: Any, name: str, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path / "w", {**HEADER, "steps": span("I64", [1], 24, 32)}, DATA + bytes(8))
    with open_weights(path) as weights, pytest.raises(UnfitWeights) as refusal:
        ask(weights)
    assert str(refusal.value) == f"{path}: tensor {name}: {problem}. Build the engine again."


def test_an_odd_header_still_gives_aligned_tensors(tmp_path: Path) -> None:
    text = json.dumps(HEADER).encode()
    text += b" " * ((3 - len(text)) % 4)  # data begins at 4n + 3
    with open_weights(write(tmp_path / "w", text, np.arange(6, dtype=np.float32).tobytes())) as weights:
        found = weights.tensor("a")
    assert found.flags.aligned
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_reading_weights_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    model_and_file(tmp_path, "llama")
    code = (
        "import sys; from pathlib import Path; from extract.cpu.weights import open_weights\n"
        "open_weights(Path(sys.argv[1])).tensor('norm.weight')\n"
        "print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.safetensors")]
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "[]\n"
