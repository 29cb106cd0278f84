"""Handing out shards: each once, again elsewhere when it is lost, never for ever, and stragglers twice at the end."""

import random

import pytest

from extract.runners.dispatch import Dispatch


def dispatch(count, **settings):
    return Dispatch(range(count), **{"max_attempts": 3, "straggler_factor": 3.0, **settings})


def test_shards_are_handed_out_in_order_and_once():
    found = dispatch(3)
    assert [found.take("a", 0.0) for _ in range(4)] == [0, 1, 2, None]
    assert found.num_open == 3


def test_a_lost_shard_goes_to_another_node_first():
    found = dispatch(3)
    assert found.take("a", 0.0) == 0
    assert not found.lost(0, "a", "it died")
    assert found.take("a", 0.0) == 1
    assert found.take("b", 0.0) == 0


def test_the_last_node_gets_a_shard_that_failed_there():
    found = dispatch(1)
    for _ in range(2):
        assert found.take("a", 0.0) == 0
        assert not found.lost(0, "a", "it died")
    assert found.take("a", 0.0) == 0
    assert found.lost(0, "a", "it died again")
    assert (found.failed, found.num_open) == ({0: "it died again"}, 0)


def test_a_machine_that_was_taken_away_is_no_attempt():
    found = dispatch(1)
    for _ in range(10):
        assert found.take("a", 0.0) == 0
        assert not found.lost(0, "a", "preempted", counts=False)


def test_a_straggler_is_handed_out_a_second_time_and_not_a_third():
    found = dispatch(5)
    for shard in range(5):
        assert found.take("a", float(shard)) == shard
    for shard in range(4):
        found.done(shard, shard + 10.0)
    assert found.take("b", 30.0) is None
    assert found.take("b", 34.1) == 4
    assert found.take("c", 99.0) is None
    assert not found.lost(4, "b", "it died")
    assert found.num_open == 1
    found.done(4, 100.0)
    assert not found.lost(4, "a", "killed at the end")
    assert (found.num_open, found.failed) == (0, {})


def test_the_next_shard_is_handed_out_ahead_while_enough_wait():
    found = dispatch(5)
    assert [found.take(node, 0.0) for node in "ab"] == [0, 1]
    assert found.take_ahead(0, "a", 2, 0.0) == 2
    assert found.take_ahead(1, "b", 2, 0.0) == 3
    assert found.take_ahead(0, "a", 2, 0.0) is None  # the last one is for whoever is free first
    assert found.take("b", 1.0) == 4


def test_a_shard_that_has_failed_is_made_alone():
    found = dispatch(9)
    assert (found.take("a", 0.0), found.take_ahead(0, "a", 1, 0.0)) == (0, 1)
    for shard in (1, 0):
        found.lost(shard, "a", "it died")
    assert found.take_ahead(2, "a", 1, 0.0) == 2  # not 0 or 1, which are not for this node now
    assert found.take_ahead(2, "b", 1, 0.0) is None  # for they are the next for this one
    assert found.take("b", 0.0) == 0
    assert found.take_ahead(0, "b", 1, 0.0) is None


def test_what_was_lost_for_another_shard_has_not_failed():
    found = dispatch(9)
    assert (found.take("a", 0.0), found.take_ahead(0, "a", 1, 0.0)) == (0, 1)
    found.lost(1, "a", "the worker was ended", counts=False)
    assert found.take("a", 0.0) == 1
    assert found.take_ahead(1, "a", 1, 0.0) == 2


def test_the_time_of_a_shard_counts_from_its_turn():
    found = dispatch(8)
    assert (found.take("a", 0.0), found.take_ahead(0, "a", 1, 0.0)) == (0, 1)
    for shard in range(6):
        found.done(shard, 10.0 * shard + 10.0)
        assert found.take_ahead(shard + 1, "a", 1, 0.0) == shard + 2
        found.began(shard + 1, 10.0 * shard + 10.0)
    found.began(7, 70.0)
    found.done(6, 70.0)
    assert found.take("b", 99.0) is None
    assert found.take("b", 100.1) == 7


@pytest.mark.parametrize("seed", range(20))
def test_only_the_shards_that_kill_their_workers_fail(seed):
    """Workers on three nodes, each with up to two shards, die now and then for no reason, and of a poison always."""
    draw = random.Random(seed)
    poison = set(draw.sample(range(40), 3))
    found = dispatch(40, max_attempts=4)
    workers: list[list[int]] = [[] for _ in range(5)]
    done, now, accidents = set(), 0.0, 2
    while found.num_open:
        now += 1.0
        for number, outstanding in enumerate(workers):
            node = "abc"[number % 3]
            if not outstanding:
                shard = found.take(node, now)
            else:
                shard = found.take_ahead(outstanding[0], node, 5, now) if len(outstanding) == 1 else None
            outstanding += [] if shard is None else [shard]
            accident = bool(accidents and outstanding and draw.random() < 0.05)
            if poison & set(outstanding) or accident:
                accidents -= accident
                for shard in reversed(outstanding):
                    found.lost(shard, node, "it died")
                outstanding.clear()
            elif outstanding and draw.random() < 0.6:
                done.add(outstanding[0])
                found.done(outstanding.pop(0), now)
                if outstanding:
                    found.began(outstanding[0], now)
    assert set(found.failed) == poison
    assert done == set(range(40)) - poison


def test_whatever_is_lost_each_shard_ends_once():
    draw = random.Random(3)
    for _ in range(200):
        count = draw.randrange(1, 9)
        found = dispatch(count)
        out, done, now = [], set(), 0.0
        while found.num_open:
            now += 1.0
            shard = found.take(draw.choice("abc"), now)
            if shard is not None:
                assert shard not in done
                out.append(shard)
            if out and (shard is None or draw.random() < 0.5):
                ended = out.pop(draw.randrange(len(out)))
                if draw.random() < 0.5:
                    done.add(ended)
                    found.done(ended, now)
                else:
                    found.lost(ended, draw.choice("abc"), "lost")
        assert done | set(found.failed) == set(range(count))
        assert not done & set(found.failed)
