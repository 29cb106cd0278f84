"""Weight files: a whole one passes, and every way of being broken is said with the bytes found and expected."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import rig
from hypothesis import given, settings
from hypothesis import strategies as st

from extract.engine.checkpoint import open_checkpoint
from extract.engine.weights_files import INDEX, BrokenWeights, find_weights, read_header

WAY_OUT = "Copy the checkpoint again, or take a whole one."


@pytest.fixture
def sharded(sharded_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded_checkpoint, tmp_path / "sharded")


@pytest.fixture(scope="module")
def sharded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.tiny_checkpoint(tmp_path_factory.mktemp("sharded"), "llama", tied=True, shards=3, tokenizer=None)


def write(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(BrokenWeights) as caught:
        read_header(path) if path.is_file() else find_weights(path)
    return str(caught.value)


def test_a_header_gives_names_types_shapes_and_bytes(llama_checkpoint):
    from safetensors import safe_open

    path = llama_checkpoint / "model.safetensors"
    tensors = {tensor.name: tensor for tensor in read_header(path)}
    with safe_open(path, "np") as file:
        assert set(tensors) == set(file.keys())
        for name, tensor in tensors.items():
            assert tensor.shape == file.get_tensor(name).shape
            assert tensor.num_bytes == file.get_tensor(name).nbytes


def test_a_file_cut_by_a_kilobyte_says_bytes_found_and_expected(tmp_path, llama_checkpoint):
    content = (llama_checkpoint / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(content[:-1024])
    expected, found = len(content), len(content) - 1024
    assert refusal(path) == (
        f"{path}: the file is cut short: 30 tensors need {expected:,} bytes, found {found:,}. {WAY_OUT}"
    )


def test_a_file_with_bytes_left_over_is_refused(tmp_path):
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    path = write(tmp_path / "m.safetensors", header, bytes(9))
    expected, found = path.stat().st_size - 1, path.stat().st_size
    assert refusal(path) == (
        f"{path}: the file has bytes left over: 1 tensors need {expected:,} bytes, found {found:,}. {WAY_OUT}"
    )


@pytest.mark.parametrize("content", [b"", b"\x10\0\0"])
def test_a_file_too_short_for_a_header_is_refused(tmp_path, content):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    assert f"the file is cut short: a header of {int.from_bytes(content, 'little')} bytes need" in refusal(path)


def test_an_absurd_header_is_refused_without_being_read(tmp_path):
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**30))
        file.truncate(2**31)  # sparse: takes no space
    assert refusal(path) == (
        f"{path}: a safetensors header of 1,073,741,824 bytes found, at most 100,000,000 expected. {WAY_OUT}"
    )


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    assert refusal(path) == (
        f"{path}: the file is cut short: a header of {2**60:,} bytes need {2**60 + 8:,} bytes, found 10. {WAY_OUT}"
    )


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"{no", "the safetensors header is not JSON (Expecting property name"),
        (b'{"a":1,"a":2}', "the safetensors header is not JSON (a name stands twice)"),
        ([], "the safetensors header is not a JSON object"),
        ({}, "the file has bytes left over: 0 tensors need"),
        ({"a": 1}, "tensor a has a header that does not parse (TypeError"),
        ({"a": {**ENTRY, "dtype": "F33"}}, "tensor a has a header that does not parse (KeyError('F33'))"),
        ({"a": {**ENTRY, "shape": [-2]}}, "tensor a has a header that does not parse (ValueError"),
        ({"a": {**ENTRY, "shape": [3]}}, "tensor a (F32 [3]) needs 12 bytes, its header gives 8."),
        ({"a": {**ENTRY, "data_offsets": [8, 16]}}, "tensor a starts at byte 8 of the data, 0 expected."),
        ({"a": ENTRY, "b": ENTRY}, "tensor b starts at byte 0 of the data, 8 expected."),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, header, problem):
    path = write(tmp_path / "m.safetensors", header, bytes(8))
    assert refusal(path).startswith(f"{path}: {problem}")


def test_a_file_without_tensors_is_refused(tmp_path):
    path = write(tmp_path / "m.safetensors", {})
    assert refusal(path) == f"{path}: the file holds no tensors. {WAY_OUT}"


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, 10**9), flip=st.integers(0, 10**9), value=st.integers(1, 255))
def test_no_damage_to_a_header_gets_out_as_another_error(tmp_path_factory, llama_checkpoint, cut, flip, value):
    content = bytearray((llama_checkpoint / "model.safetensors").read_bytes())
    length = int.from_bytes(content[:8], "little")
    content[flip % (length + 8)] ^= value
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content[: len(content) - cut % 2 * (cut % len(content))])
    try:
        read_header(path)
    except BrokenWeights as error:
        assert str(path) in str(error)


# --- several files --------------------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(sharded):
    shards = sorted(sharded.glob("model-*.safetensors"))
    shards[1].unlink()
    assert refusal(sharded) == (
        f"{sharded / INDEX}: 1 of {len(shards)} shards are missing: {shards[1].name}. {WAY_OUT}"
    )


def test_a_cut_shard_is_named(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[-1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1024])
    message = refusal(sharded)
    assert message.startswith(f"{shard}: the file is cut short: ")
    assert message.endswith(f"need {len(content):,} bytes, found {len(content) - 1024:,}. {WAY_OUT}")


def edit_map(sharded: Path, change) -> None:
    table = json.loads((sharded / INDEX).read_text())
    change(table["weight_map"])
    (sharded / INDEX).write_text(json.dumps(table))


def test_a_tensor_of_the_index_that_its_shard_lacks_is_named(sharded):
    first = min(path.name for path in sharded.glob("model-*.safetensors"))
    edit_map(sharded, lambda names: names.update({"model.extra.weight": first}))
    assert refusal(sharded) == (
        f"{sharded / INDEX}: tensor model.extra.weight should be in {first}, but no shard holds it. {WAY_OUT}"
    )


def test_a_tensor_in_another_shard_than_the_index_says_is_named(sharded):
    names = json.loads((sharded / INDEX).read_text())["weight_map"]
    tensor, right = next(iter(names.items()))
    wrong = next(shard for shard in names.values() if shard != right)
    edit_map(sharded, lambda names: names.update({tensor: wrong}))
    assert refusal(sharded) == (
        f"{sharded / INDEX}: tensor {tensor} should be in {wrong}, but it is in {right}. {WAY_OUT}"
    )


def test_a_tensor_in_two_shards_is_refused(sharded):
    from safetensors.numpy import load_file, save_file

    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    weights = load_file(second)
    name, value = next(iter(load_file(first).items()))
    save_file({**weights, name: value}, second)
    assert refusal(sharded) == (
        f"{sharded}: tensor {name} stands in two shards, {first.name} and {second.name}. {WAY_OUT}"
    )


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "..\\model.safetensors", "sub/a.safetensors"])
def test_an_index_cannot_lead_out_of_its_directory(sharded, shard):
    edit_map(sharded, lambda names: names.update({"model.norm.weight": shard}))
    assert refusal(sharded) == (
        f'{sharded / INDEX}: tensor model.norm.weight is said to be in "{shard}", which is not a file of this '
        f"directory. {WAY_OUT}"
    )


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"weight_map": 3}'])
def test_an_index_that_does_not_parse_is_refused(sharded, content):
    (sharded / INDEX).write_bytes(content)
    assert refusal(sharded).startswith(f"{sharded / INDEX}: not an index with a weight_map (")


def test_all_shards_and_the_index_make_the_identity(sharded):
    before = open_checkpoint(sharded)
    assert [path.name for path in before.files] == [
        *sorted(path.name for path in sharded.glob("model-*.safetensors")), INDEX, "config.json",
    ]  # fmt: skip
    edit_map(sharded, lambda names: names.update(dict(reversed(names.items()))))
    (sharded / INDEX).write_text((sharded / INDEX).read_text() + "\n")
    assert open_checkpoint(sharded).sha256 != before.sha256
