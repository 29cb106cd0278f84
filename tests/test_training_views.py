"""What people train from: every row once whatever the workers, an order that a seed decides, the rows as tensors."""

import itertools
import json
import os
import pickle
import warnings

import job_rig
import numpy as np
import pytest
import shard_rig as rig
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from extract.errors import BadValue
from extract.output import RanksMayDiffer, open_output
from extract.shards.shard_file import DamagedShard, ShardFile
from extract.shards.values import value_type
from extract.spec import StatesSpec
from extract.training_views import order
from extract.training_views.columns import NotInOutput
from extract.training_views.epoch import EpochRows
from extract.training_views.gathering import NoNumber, gathered
from extract.training_views.order import BatchPlan, num_batches
from extract.training_views.rows import NotFinished

KINDS = ("tokens", "last")
DTYPES = ("float16", "float32", "bfloat16", "int8")
NAMES = {"tokens": "hidden_states", "last": "hidden_state"}


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Five shards of 40 rows in some 30 record batches; two rows of seven have no states."""
    root = tmp_path_factory.mktemp("many") / "out"
    spec = StatesSpec(dtype="float32", record_batch_bytes=2**16)
    return root, rig.write_output(root, spec, num_shards=5, rows_per_shard=40)


def as_stored(dtype, states):
    """float32 states as they come back from a stored type."""
    rows = states.reshape(-1, states.shape[-1])
    encoded = value_type(dtype).encode(rows)
    return value_type(dtype).decode(encoded.values, encoded.scales).reshape(states.shape)


def with_states(expected):
    return [row for row, states in expected.items() if states is not None]


def rows_of(batches):
    """Source positions, batch by batch."""
    return [batch["row"].tolist() for batch in batches]


def flat(lists):
    return [row for rows in lists for row in rows]


def same(one, other):
    """Whether two batches or rows hold the same things, NaN included."""
    assert list(one) == list(other)
    return all(
        torch.equal(value.nan_to_num(7e4), other[name].nan_to_num(7e4)) and value.dtype == other[name].dtype
        if isinstance(value, torch.Tensor)
        else value == other[name]
        for name, value in one.items()
    )


class TestOrder:
    @given(st.integers(0, 500), st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.integers(1, 4))
    def test_every_row_is_in_one_batch_of_one_worker(self, num_rows, batch_size, lanes, ranks, workers):
        count = num_batches(num_rows, batch_size, drop_last=False, world_size=ranks)
        plan = BatchPlan(num_rows=num_rows, batch_size=batch_size, lanes=lanes, num_batches=count)
        found = []
        for rank in range(ranks):
            for worker in range(workers):
                for number in range(rank + ranks * worker, count, ranks * workers):
                    first, last = plan.rows(number)
                    assert 0 < last - first <= batch_size
                    assert last - first == batch_size or number == count - 1
                    found += range(first, last)
        assert sorted(found) == list(range(num_rows))

    @given(st.integers(0, 500), st.integers(1, 40), st.integers(1, 12), st.integers(1, 5))
    def test_dropping_the_last_leaves_whole_batches_and_as_many_for_each_rank(self, num_rows, size, lanes, ranks):
        count = num_batches(num_rows, size, drop_last=True, world_size=ranks)
        assert count % ranks == 0
        assert num_rows - count * size < size * ranks
        plan = BatchPlan(num_rows=num_rows, batch_size=size, lanes=lanes, num_batches=count)
        places = [plan.rows(number) for number in range(count)]
        assert sorted(row for first, last in places for row in range(first, last)) == list(range(count * size))

    def test_shards_record_batches_and_rows_are_permuted_by_seed_epoch_and_place(self):
        keys = [(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
        orders = [
            *(order.shard_order(30, *key) for key in keys),
            *(order.record_batch_order(30, *key, shard) for key in keys for shard in (0, 1)),
            *(order.row_order(30, *key, shard, block) for key in keys for shard in (0, 1) for block in (0, 1)),
        ]
        assert all(sorted(one) == list(range(30)) for one in orders)
        assert len({tuple(one) for one in [*orders, np.arange(30)]}) == len(orders) + 1
        assert order.shard_order(30, 1, 0).tolist() == orders[2].tolist()

    @given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 12))
    def test_a_lane_goes_forward_through_a_part_of_its_own(self, num_rows, batch_size, lanes):
        count = num_batches(num_rows, batch_size, drop_last=False, world_size=1)
        plan = BatchPlan(num_rows=num_rows, batch_size=batch_size, lanes=lanes, num_batches=count)
        in_lanes = [[plan.rows(number) for number in range(lane, count, lanes)] for lane in range(lanes)]
        joined = [place for lane in in_lanes for place in lane]
        assert [last for _, last in joined[:-1]] == [first for first, _ in joined[1:]]


class TestBatches:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("compression", ["zstd", "none"])
    def test_batches_hold_the_rows_in_the_order_of_the_source(self, tmp_path, kind, dtype, compression):
        spec = StatesSpec(kind=kind, dtype=dtype, compression=compression, record_batch_bytes=2**16)
        expected = rig.write_output(tmp_path / "out", spec, num_shards=3)
        batches = list(open_output(tmp_path / "out").torch_iterable(batch_size=4))
        assert flat(rows_of(batches)) == with_states(expected)
        assert [len(batch["row"]) for batch in batches] == [4, 4, 4, 3]
        for batch in batches:
            states = batch[NAMES[kind]]
            assert states.dtype == (torch.float32 if dtype == "int8" else getattr(torch, dtype))
            wanted = [as_stored(dtype, expected[row]) for row in batch["row"].tolist()]
            wanted = np.concatenate(wanted) if kind == "tokens" else np.stack(wanted)
            assert states.float().numpy().tobytes() == wanted.tobytes()
            assert batch["input_ids"].dtype == batch["cu_seqlens"].dtype == torch.int32
            lengths = [rig.LENGTHS[row % 7] for row in batch["row"].tolist()]
            assert batch["cu_seqlens"].diff().tolist() == lengths
            assert len(batch["input_ids"]) == sum(lengths)

    def test_columns_come_beside_the_states(self, tmp_path):
        rig.write_output(tmp_path / "out", StatesSpec(kind="last"))
        batch = next(iter(open_output(tmp_path / "out").torch_iterable(batch_size=3)))
        assert set(batch) == {"row", "id", "meta.url", "score", "input_ids", "hidden_state", "cu_seqlens"}
        assert (batch["row"].tolist(), batch["score"].tolist()) == ([0, 2, 3], [0.0, 1.0, 1.5])
        assert (batch["id"], batch["meta.url"]) == (["id/0", "id/2", "id/3"], ["http://0", "http://2", "http://3"])

    def test_only_columns_that_are_asked_for_are_read_and_given(self, tmp_path):
        rig.write_output(tmp_path / "out", StatesSpec())
        out = open_output(tmp_path / "out")
        batches = out.torch_iterable(["row", "outcome"], with_states_only=False, batch_size=7)
        batch = next(iter(batches))
        assert set(batch) == {"row", "outcome"}
        assert batch["outcome"] == ["ok" if length else "empty" for length in rig.LENGTHS]
        file, _ = batches._rows.open(out.shards[0])
        assert file.batch(0).arrow.schema.names == ["row", "outcome", "num_tokens"]

    def test_columns_are_not_chosen_where_choosing_would_copy_for_nothing(self, tmp_path):
        for number, (spec, asked, chosen) in enumerate(
            (
                (StatesSpec(compression="none"), ["row"], False),  # left out, but not read before it is looked at
                (StatesSpec(), ["hidden_states"], False),  # texts are nothing beside states of every token
                (StatesSpec(), ["id", "input_ids"], True),
                (StatesSpec(kind="last"), ["hidden_state"], True),
                (StatesSpec(kind="last"), ["id", "meta.url", "hidden_state"], False),
            )
        ):
            rig.write_output(tmp_path / str(number), spec)
            columns = open_output(tmp_path / str(number)).torch_dataset(asked)._rows.columns
            assert (columns.stored is not None) == chosen

    def test_a_column_that_is_not_there_is_refused_with_the_nearest_name(self, tmp_path):
        rig.write_output(tmp_path / "out", StatesSpec(dtype="int8"))
        with pytest.raises(NotInOutput) as refused:
            open_output(tmp_path / "out").torch_iterable(["hidden_state"])
        known = "hidden_states, row, id, meta.url, score, outcome, num_tokens, num_tokens_original, input_ids"
        assert str(refused.value) == f'{tmp_path / "out"}: no column "hidden_state" in this output. It has: {known}.'
        with pytest.raises(NotInOutput):
            open_output(tmp_path / "out").torch_dataset(["hidden_states_scale"])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("stored", DTYPES)
    def test_states_are_given_in_the_type_that_is_asked_for(self, tmp_path, stored, dtype):
        expected = rig.write_output(tmp_path / "out", StatesSpec(dtype=stored))
        batch = next(iter(open_output(tmp_path / "out").torch_iterable(batch_size=1, dtype=dtype)))
        wanted = torch.from_numpy(as_stored(stored, expected[0])).to(getattr(torch, dtype))
        assert torch.equal(batch["hidden_states"], wanted)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_states_that_are_not_there_are_nan_where_such_rows_are_kept(self, tmp_path, kind, dtype):
        root, spec = tmp_path / "out", StatesSpec(kind=kind, dtype=dtype)
        rig.write_output(root, spec, num_shards=1)
        rows = rig.token_rows()
        states = rig.random_states(rows, kind)
        states[4 if kind == "tokens" else 2] = np.nan  # in row 3, which has five tokens
        rig.replace_shard(root, 0, spec, rows, states)
        out = open_output(root)
        assert flat(rows_of(out.torch_iterable())) == [0, 2, 5, 6]
        for size in (2, 7):
            batches = list(out.torch_iterable(with_states_only=False, batch_size=size))
            assert flat(rows_of(batches)) == list(range(7))
            found = torch.cat([batch[NAMES[kind]] for batch in batches]).isnan().all(dim=1)
            if kind == "tokens":
                lengths = [length for batch in batches for length in batch["cu_seqlens"].diff().tolist()]
                assert lengths == list(rig.LENGTHS)
                assert [part.all().item() for part in found.split(list(rig.LENGTHS)) if len(part)] == [
                    row == 3 for row in (0, 2, 3, 5, 6)
                ]
            else:
                assert found.tolist() == [row in (1, 3, 4) for row in range(7)]

    def test_a_null_among_whole_numbers_is_named(self, tmp_path):
        root, spec = tmp_path / "out", StatesSpec(kind="last")
        rig.write_output(root, spec, num_shards=1)
        rig.replace_shard(root, 0, spec, rig.not_counted(rig.token_rows(), 3))
        with pytest.raises(NoNumber, match='row 3: no value in column "num_tokens_original"'):
            list(open_output(root).torch_iterable(["row", "num_tokens_original"]))

    def test_rows_that_lie_together_are_views_of_the_file_and_may_be_written_to(self, tmp_path):
        root = tmp_path / "out"
        for kind in KINDS:
            spec = StatesSpec(kind=kind, dtype="float32", compression="none")
            rig.write_output(root / kind, spec)
            before = {path: path.read_bytes() for path in (root / kind / "data").iterdir()}
            for _ in range(2):
                for batch in open_output(root / kind).torch_iterable(batch_size=3):
                    states = batch[NAMES[kind]]
                    assert states.abs().sum() > 0
                    states *= 0
                    batch["input_ids"] += 1
            assert {path: path.read_bytes() for path in (root / kind / "data").iterdir()} == before

    @pytest.mark.parametrize("kind", KINDS)
    def test_rows_of_one_record_batch_are_not_copied(self, tmp_path, kind):
        rig.write_output(tmp_path / "out", StatesSpec(kind=kind, dtype="float16"))
        rows = open_output(tmp_path / "out").torch_iterable()._rows
        (first,) = EpochRows(rows, None).pieces(1, 3)  # of rows that have states; row 4 has none
        found = gathered([first], rows.columns, rows.spec)
        view = first.batch.batch
        assert np.shares_memory(found[NAMES[kind]], view.values)
        assert np.shares_memory(found["input_ids"], view.input_ids)

    @pytest.mark.parametrize("options", [{}, {"kind": "last", "dtype": "int8"}], ids=["tokens", "pooled int8"])
    def test_states_of_other_layers_come_where_they_are_asked_for_by_name(self, engines, tmp_path, options):
        source = job_rig.parquet(tmp_path / "rows.parquet", {"text": [*job_rig.texts(12), None]})
        job = job_rig.job(engines.engine("llama"), source, tmp_path / "out", layers=(0, 2), rows_per_shard=5, **options)
        job_rig.run(job)
        out = open_output(tmp_path / "out")
        own = NAMES[options.get("kind", "tokens")]
        assert "layer_0" not in next(iter(out.torch_iterable()))
        (batch,) = out.torch_iterable(["row", "layer_2", own], batch_size=20)
        join = np.stack if "kind" in options else np.concatenate
        for name, layer in ((own, None), ("layer_2", 2)):
            wanted = join([out.states(row, layer=layer) for row in range(12)])
            assert batch[name].numpy().tobytes() == wanted.tobytes()
        item = out.torch_dataset(["layer_0"])[4]
        assert item["layer_0"].numpy().tobytes() == out.states(4, layer=0).tobytes()

    def test_chunks_of_a_row_are_rows_of_their_own(self, tmp_path):
        spec, root = StatesSpec(dtype="float32"), tmp_path / "out"
        rig.write_output(root, spec, num_shards=1, rows_per_shard=3, chunked=True)
        rows = rig.token_rows((4, 4, 2, 0, 3), source_index=[0, 0, 0, 1, 2], chunk=[0, 1, 2, 0, 0])
        rig.replace_shard(root, 0, spec, rows, chunked=True)
        batches = open_output(root).torch_iterable(batch_size=4)
        (batch,) = batches
        assert (batch["row"].tolist(), batch["chunk"].tolist()) == ([0, 0, 0, 2], [0, 1, 2, 0])
        assert batch["cu_seqlens"].tolist() == [0, 4, 8, 10, 13]

    def test_an_unfinished_output_gives_the_rows_that_are_there_when_it_was_asked(self, tmp_path):
        expected = rig.write_output(tmp_path / "out", StatesSpec(), missing=(1,))
        out = open_output(tmp_path / "out")
        rows = [row for row in with_states(expected) if not 7 <= row < 14]
        assert flat(rows_of(out.torch_iterable())) == rows
        assert [int(item["row"]) for item in out.torch_dataset()] == rows
        rig.write_output(tmp_path / "empty", StatesSpec(), missing=(0, 1, 2))
        empty = open_output(tmp_path / "empty")
        assert (list(empty.torch_iterable(shuffle=True)), len(empty.torch_dataset())) == ([], 0)

    def test_some_shards_are_trained_on_and_others_not(self, many):
        root, expected = many
        out = open_output(root)
        found = [flat(rows_of(out.torch_iterable(shards=shards))) for shards in ([4, 0], {1, 2, 3})]
        assert [row // 40 for row in found[0]] == sorted(row // 40 for row in found[0])
        assert sorted(found[0] + found[1]) == with_states(expected)
        with pytest.raises(NotFinished, match=r"shard 5 is not finished, or no shard of this job. Finished: 5 of 5."):
            out.torch_dataset(shards=[5])

    def test_a_shard_that_is_not_what_its_record_says_is_named(self, tmp_path):
        root = tmp_path / "out"
        rig.write_output(root, StatesSpec())
        record = root / "commits" / "shard-00001.json"
        table = json.loads(record.read_text())
        del table["check"]
        record.write_text(json.dumps({**table, "outcomes": {"ok": 7}}))
        with pytest.raises(DamagedShard, match="5 rows to train on found, 7 were committed"):
            list(open_output(root).torch_iterable())

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("batch_size", 0),
            ("seed", -1),
            ("mix", 0),
            ("lanes", 0),
            ("rank", 1),
            ("world_size", 0),
            ("dtype", "float16"),
        ],
    )
    def test_what_cannot_be_is_refused_at_once(self, many, key, value):
        with pytest.raises(BadValue, match=f": {key} is "):
            open_output(many[0]).torch_iterable(**{key: value})


class TestShuffling:
    def test_a_seed_and_an_epoch_decide_the_order_and_every_row_comes_once(self, many):
        root, expected = many
        orders = {}
        for seed, epoch in ((0, 0), (0, 1), (1, 0)):
            batches = open_output(root).torch_iterable(shuffle=True, seed=seed, batch_size=7)
            batches.set_epoch(epoch)
            orders[seed, epoch] = rows_of(batches)
            assert sorted(flat(orders[seed, epoch])) == with_states(expected)
            again = open_output(root).torch_iterable(shuffle=True, seed=seed, batch_size=7)
            again.set_epoch(epoch)
            assert rows_of(again) == orders[seed, epoch]
        assert len({str(order) for order in orders.values()}) == 3

    def test_consecutive_batches_come_from_distant_shards_and_a_batch_from_several_record_batches(self, many):
        root, _ = many
        batches = rows_of(open_output(root).torch_iterable(shuffle=True, batch_size=10))
        shards = [{row // 40 for row in rows} for rows in batches]
        assert sum(one != other for one, other in itertools.pairwise(shards)) >= len(batches) // 2
        record_batch = {}
        for number, batch in enumerate(open_output(root).batches()):
            record_batch |= dict.fromkeys(batch.row.tolist(), number)
        assert np.mean([len({record_batch[row] for row in rows}) for rows in batches]) > 2

    def test_shuffled_batches_hold_the_same_states_as_ordered_ones(self, many):
        root, expected = many
        for batch in open_output(root).torch_iterable(shuffle=True, batch_size=9):
            wanted = np.concatenate([expected[row] for row in batch["row"].tolist()])
            assert batch["hidden_states"].numpy().tobytes() == wanted.tobytes()

    def test_training_goes_on_in_the_middle_of_an_epoch(self, many):
        batches = open_output(many[0]).torch_iterable(shuffle=True, batch_size=7)
        whole = rows_of(batches)
        batches.set_epoch(0, first_batch=13)
        assert len(batches) == len(whole) - 13
        assert rows_of(batches) == whole[13:]

    def test_ranks_share_the_batches_of_an_epoch(self, many):
        out = open_output(many[0])
        lanes = {"shuffle": True, "batch_size": 7, "lanes": 6}
        whole = rows_of(out.torch_iterable(**lanes))
        ranks = [out.torch_iterable(**lanes, rank=rank, world_size=3) for rank in range(3)]
        assert [rows_of(rank) for rank in ranks] == [whole[0::3], whole[1::3], whole[2::3]]
        assert [len(rank) for rank in ranks] == [len(whole[rank::3]) for rank in range(3)]
        whole_batches = [out.torch_iterable(**lanes, rank=rank, world_size=3, drop_last=True) for rank in range(3)]
        found = [rows_of(rank) for rank in whole_batches]
        assert {len(rows) for rows in found} == {len(whole) // 3}
        assert all(len(rows) == 7 for rank in found for rows in rank)
        assert len(set(flat(flat(found)))) == 7 * 3 * (len(whole) // 3)

    def test_ranks_of_an_unfinished_output_name_their_shards(self, tmp_path):
        rig.write_output(tmp_path / "out", StatesSpec(), missing=(1,))
        out = open_output(tmp_path / "out")
        with pytest.raises(RanksMayDiffer) as refused:
            out.torch_iterable(world_size=2)
        assert "not finished (shard 1 is missing), so ranks" in str(refused.value)
        options = {"world_size": 2, "lanes": 2, "shards": [0, 2], "batch_size": 3}
        ranks = [rows_of(out.torch_iterable(rank=rank, **options)) for rank in (0, 1)]
        assert sorted(flat(flat(ranks))) == [0, 2, 3, 5, 6, 14, 16, 17, 19, 20]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on machines with fewer cores than workers
class TestWorkers:
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_any_number_of_workers_gives_the_same_batches_in_the_same_order(self, many, shuffle):
        batches = open_output(many[0]).torch_iterable(shuffle=shuffle, batch_size=7, lanes=6)
        alone = list(batches)
        for workers in (1, 2, 3):
            found = list(DataLoader(batches, batch_size=None, num_workers=workers, timeout=120))
            assert len(found) == len(alone) == len(batches)
            assert all(same(one, other) for one, other in zip(found, alone, strict=True))

    def test_the_workers_of_a_rank_share_the_batches_of_that_rank(self, many):
        batches = open_output(many[0]).torch_iterable(shuffle=True, batch_size=7, lanes=4, rank=1, world_size=2)
        assert rows_of(DataLoader(batches, batch_size=None, num_workers=2, timeout=120)) == rows_of(batches)

    def test_workers_that_stay_see_the_next_epoch(self, many):
        batches = open_output(many[0]).torch_iterable(shuffle=True, batch_size=20)
        expected = []
        for epoch in range(3):
            batches.set_epoch(epoch)
            expected.append(rows_of(batches))
        loader = DataLoader(batches, batch_size=None, num_workers=2, timeout=120, persistent_workers=True)
        for epoch in (2, 0, 1):
            batches.set_epoch(epoch)
            assert rows_of(loader) == expected[epoch]

    def test_workers_that_read_the_same_record_batches_say_so_once(self, many):
        batches = open_output(many[0]).torch_iterable(batch_size=50)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(rows_of(DataLoader(batches, batch_size=None, num_workers=2, timeout=120))) == 3
        message = (
            "each record batch is decompressed by 2 of 2 workers: lanes is 1, which is no multiple of 2. With lanes=2 "
            "each is decompressed once; the order of batches changes."
        )
        with pytest.warns(UserWarning) as warned:
            batches._warn_of_repeated_work(2)
        assert [str(warning.message) for warning in warned] == [message]

    @pytest.mark.slow
    def test_workers_that_are_started_afresh_open_the_files_themselves(self, many):
        root, expected = many
        batches = open_output(root).torch_iterable(shuffle=True, batch_size=7)
        alone = rows_of(batches)
        loader = DataLoader(
            batches,
            batch_size=None,
            num_workers=2,
            timeout=120,
            multiprocessing_context="spawn",
            persistent_workers=True,
        )
        assert rows_of(loader) == alone
        batches.set_epoch(1)
        assert rows_of(loader) == rows_of(batches) != alone
        data = open_output(root).torch_dataset()
        data[3]  # what is open here stays here
        options = {"num_workers": 1, "timeout": 120, "multiprocessing_context": "spawn"}
        found = flat(rows_of(DataLoader(data, batch_size=9, collate_fn=data.collate, **options)))
        assert found == with_states(expected)


class TestDataset:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_any_row_at_any_time(self, tmp_path, kind, dtype):
        expected = rig.write_output(tmp_path / "out", StatesSpec(kind=kind, dtype=dtype))
        data = open_output(tmp_path / "out").torch_dataset()
        rows = with_states(expected)
        assert len(data) == len(rows)
        for index in (14, 0, 3, 9, -1, -15):
            item = data[index]
            row = rows[index]
            states = item[NAMES[kind]]
            assert (int(item["row"]), item["id"]) == (row, f"id/{row % 7}")
            assert item["input_ids"].tolist() == list(
                range(sum(rig.LENGTHS[: row % 7]), sum(rig.LENGTHS[: row % 7 + 1]))
            )
            assert states.shape == expected[row].shape
            assert states.float().numpy().tobytes() == as_stored(dtype, expected[row]).tobytes()
        for index in (15, -16):
            with pytest.raises(IndexError, match=f"index {index} of 15 rows"):
                data[index]

    @pytest.mark.parametrize("kind", KINDS)
    def test_collated_rows_are_the_batches_of_the_iterable(self, tmp_path, kind):
        rig.write_output(tmp_path / "out", StatesSpec(kind=kind))
        out = open_output(tmp_path / "out")
        data = out.torch_dataset(with_states_only=False)
        found = list(DataLoader(data, batch_size=4, collate_fn=data.collate))
        assert all(
            same(one, other)
            for one, other in zip(found, out.torch_iterable(with_states_only=False, batch_size=4), strict=True)
        )

    def test_a_row_that_is_written_to_stays_as_it_was_stored(self, tmp_path):
        rig.write_output(tmp_path / "out", StatesSpec(dtype="float32", compression="none"))
        data = open_output(tmp_path / "out").torch_dataset()
        before = data[0]["hidden_states"].clone()
        data[0]["hidden_states"].zero_()
        assert torch.equal(data[0]["hidden_states"], before)

    def test_workers_and_a_sampler_give_every_row_once(self, many):
        root, expected = many
        data = open_output(root).torch_dataset()
        data[0]  # opens a file here
        loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=data.collate, num_workers=2, timeout=120)
        assert sorted(flat(rows_of(loader))) == with_states(expected)

    def test_a_worker_that_was_forked_opens_files_of_its_own(self, many, monkeypatch):
        data = open_output(many[0]).torch_dataset()
        data[0]
        inherited = data._open[0]
        other = os.getpid() + 1
        monkeypatch.setattr("os.getpid", lambda: other)
        data[0]
        assert data._open[0] is not inherited

    def test_rows_of_a_batch_that_lie_together_are_decompressed_once(self, many, monkeypatch):
        read = []
        own = ShardFile._read
        monkeypatch.setattr(
            ShardFile, "_read", lambda self, file, number: read.append(number) or own(self, file, number)
        )
        data = open_output(many[0]).torch_dataset()
        data[0]
        read.clear()
        data.__getitems__([3, 0, 2, 1, 0])
        assert read == []

    def test_a_dataset_travels_without_its_open_files(self, many):
        data = open_output(many[0]).torch_dataset()
        assert len(data[5]["hidden_states"]) > 0
        other = pickle.loads(pickle.dumps(data))
        assert same(other[5], data[5])
