"""Weights read by threads are the file's bits, whatever their sizes, in any order, and nothing is read twice."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from extract.cpu.mapped_weights import WeightsFile
from extract.cuda.loading import WeightsCut, WeightsLoader

CPU = torch.device("cpu")
PIECE = 1000
"""Bytes: no tensor's size is a multiple of it."""


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "wide": torch.randn(37, 129, generator=draw).bfloat16(),
        "exact": torch.randn(500, generator=draw),
        "half": torch.randn(3, 5, 7, generator=draw).half(),
        "one": torch.randn(1, generator=draw),
    }


@pytest.fixture(scope="module")
def path(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(tensors, path)
    return path


def loader(file: WeightsFile, threads: int = 3) -> WeightsLoader:
    return WeightsLoader(file, CPU, threads=threads, piece_bytes=PIECE)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_tensor_comes_whole_in_its_own_type(tensors: dict[str, torch.Tensor], path: Path, threads: int) -> None:
    with WeightsFile(path) as file, loader(file, threads) as loads:
        for name, expected in tensors.items():
            found = loads.take(file.tensor(name))
            assert found.dtype == expected.dtype and torch.equal(found, expected)
        assert loads.num_bytes == sum(one.numel() * one.element_size() for one in tensors.values())


def test_tensors_that_were_begun_early_are_taken_in_any_order(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with WeightsFile(path) as file, loader(file) as loads:
        for name in tensors:
            loads.begin(file.tensor(name))
        for name in reversed(tensors):
            assert torch.equal(loads.take(file.tensor(name)), tensors[name])


def test_what_was_begun_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    preadv = os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        count = preadv(file, buffers, offset)
        read.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    with WeightsFile(path) as file, loader(file) as loads:
        loads.begin(file.tensor("wide"))
        loads.begin(file.tensor("wide"))
        assert sum(read) <= file.tensor("wide").nbytes
        loads.take(file.tensor("wide"))
        assert sum(read) == file.tensor("wide").nbytes


def test_rows_of_a_tensor_are_read_alone(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with WeightsFile(path) as file, loader(file) as loads:
        assert torch.equal(loads.take(file.tensor("wide")[5:20]), tensors["wide"][5:20])


def test_an_array_that_does_not_lie_in_the_file_is_copied(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with WeightsFile(path) as file, loader(file) as loads:
        elsewhere = np.array(file.tensor("wide"))
        assert file.place_of(elsewhere) is None
        assert torch.equal(loads.take(elsewhere), tensors["wide"])


def test_blocks_of_one_product_are_read_each_to_its_place(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with WeightsFile(path) as file, loader(file) as loads:
        wide = file.tensor("wide")
        elsewhere = np.array(wide[2:5])
        loads.begin(wide[30:], wide[:7])
        found = loads.take(wide[30:], wide[:7]), loads.take(wide[20:21], elsewhere, wide)
        assert loads.num_bytes == 2 * 129 * (7 + 7 + 1 + 3 + 37)
    parts = [30, 37, 0, 7], [20, 21, 2, 5, 0, 37]
    for one, ends in zip(found, parts, strict=True):
        expected = [tensors["wide"][start:stop] for start, stop in zip(ends[::2], ends[1::2], strict=True)]
        assert torch.equal(one, torch.cat(expected))


def test_short_reads_are_read_on(tensors: dict[str, torch.Tensor], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:7]], offset))
    with WeightsFile(path) as file, loader(file) as loads:
        assert torch.equal(loads.take(file.tensor("wide")), tensors["wide"])


def test_a_file_that_shrinks_is_named_and_what_is_missing_is_not_made_up(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.safetensors"
    copy.write_bytes(path.read_bytes())
    with WeightsFile(copy) as file, loader(file) as loads:
        array = file.tensor("wide")
        place = file.place_of(array)
        assert place is not None
        os.truncate(copy, place + PIECE // 2)
        with pytest.raises(WeightsCut) as refused:
            loads.take(array)
    assert str(refused.value) == (
        f"{copy}: {PIECE // 2} bytes read at byte {place:,}, 1,000 expected. Copy the engine again."
    )
