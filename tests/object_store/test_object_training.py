"""Training from an output in an object store: the rows of the directory; a forked worker is refused, it never hangs."""

import object_rig
import pytest
import shard_rig as rig
import torch
from torch.utils.data import DataLoader

from extract.output import open_output
from extract.spec import StatesSpec
from extract.storage import locate

pytestmark = pytest.mark.parametrize("scheme", ["s3"])


@pytest.fixture
def outputs(address, tmp_path):
    """The same output in a directory and in the store."""
    rig.write_output(tmp_path / "out", StatesSpec())
    object_rig.upload(tmp_path / "out", locate(address))
    return open_output(tmp_path / "out"), open_output(address)


def test_batches_and_rows_are_those_of_the_directory(outputs):
    here, there = outputs
    for one, other in zip(
        here.torch_iterable(shuffle=True, batch_size=4), there.torch_iterable(shuffle=True, batch_size=4), strict=True
    ):
        assert one["row"].tolist() == other["row"].tolist()
        assert torch.equal(one["hidden_states"], other["hidden_states"])
    assert torch.equal(here.torch_dataset()[7]["hidden_states"], there.torch_dataset()[7]["hidden_states"])
    assert [row.row for row in there[3:6]] == [3, 4, 5]


def test_a_forked_worker_is_refused_and_says_what_to_do(outputs):
    _, there = outputs
    loader = DataLoader(there.torch_iterable(batch_size=4), batch_size=None, num_workers=1, timeout=60)
    with pytest.raises(RuntimeError, match=r'forked from one that had used.*multiprocessing_context="spawn"'):
        list(loader)


@pytest.mark.slow
def test_a_worker_that_is_started_afresh_fetches_for_itself(outputs, monkeypatch):
    here, there = outputs
    batches = there.torch_iterable(batch_size=4)
    monkeypatch.setenv("TMPDIR", "/tmp")  # torch's workers put sockets there, whose names must be short
    loader = DataLoader(batches, batch_size=None, num_workers=1, timeout=120, multiprocessing_context="spawn")
    found = [batch["row"].tolist() for batch in loader]
    assert found == [batch["row"].tolist() for batch in here.torch_iterable(batch_size=4)]
