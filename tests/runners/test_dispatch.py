"""Handing out shards: each once, again elsewhere when it is lost, never for ever, and stragglers twice at the end."""

import random

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
