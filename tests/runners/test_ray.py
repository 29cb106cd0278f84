"""`extract run --on ray` on a cluster of three nodes on this machine: the bytes of one process, whatever dies."""

import json
import re
import signal
import time

import crash_rig
import pytest
from runner_rig import check_finished

pytest.importorskip("ray", reason='ray is not installed: pip install "extract-hidden-states[ray]"')

import ray_rig

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # Ray's own warnings are not ours
distributed = pytest.mark.distributed


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory):
    with ray_rig.cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def cluster(whole_cluster):
    """Three good nodes, and no faults."""
    for node in [node for node in whole_cluster.nodes if node.ray_test_name != "good"]:
        whole_cluster.kill_node(node)
    while len(whole_cluster.nodes) < 3:
        whole_cluster.add_node()
    whole_cluster.faults()
    yield whole_cluster
    for worker in ray_rig.workers():
        ray_rig.kill(worker)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def start(cluster, tiny_engine, rows, out):
    """Start the command as a driver of the cluster."""

    def start(*options, **settings):
        return ray_rig.Driver(cluster.address, crash_rig.arguments(tiny_engine, rows, out, *options), **settings)

    return start


def test_three_nodes_give_the_bytes_of_one_process_and_a_report_of_each(start, cluster, out, unbroken):
    cluster.faults(slow=0.1)
    ended = start().wait()
    assert (ended.code, ended.err) == (0, "")
    check_finished(out, unbroken)
    summary = json.loads(ended.out)
    parts = summary["workers"]
    assert len(parts) == len({part["node"] for part in parts}) == 3
    assert sum(part["num_shards"] for part in parts) == summary["num_shards_made"] == crash_rig.NUM_SHARDS
    assert sum(part["num_rows"] for part in parts) == crash_rig.NUM_ROWS
    assert sum(part["num_tokens"] for part in parts) == summary["totals"]["num_tokens"] == summary["tokens_computed"]
    at_work = [part for part in parts if part["num_tokens"]]  # a worker that loads slowly may find nothing left
    assert at_work and all(0 < part["idle_share"] < 1 for part in at_work)
    assert all(part["idle_share"] == float(part["seconds"] > 0) for part in parts if part not in at_work)
    before = crash_rig.everything(out)
    assert json.loads(start().wait().out)["num_shards_made"] == 0  # which does not even look for the cluster
    assert crash_rig.everything(out) == before


@distributed
def test_workers_and_nodes_that_are_killed_are_replaced_and_new_nodes_join(start, cluster, out, unbroken):
    cluster.faults(slow=0.5)
    driver = start()
    for least in (2, 5):
        driver.until(lambda least=least: crash_rig.num_commits(out) >= least)
        ray_rig.kill(ray_rig.workers()[0])
    before = crash_rig.committed(out)
    driver.until(lambda: crash_rig.num_commits(out) >= 8)
    cluster.kill_node(cluster.nodes[0])
    cluster.add_node()
    ended = driver.wait()
    assert ended.code == 0, ended.err
    check_finished(out, unbroken)
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before
    parts = json.loads(ended.out)["workers"]
    assert len(parts) == 4  # places: three nodes, and the one that joined
    assert sum(part["num_starts"] for part in parts) >= 6


@distributed
def test_a_shard_that_kills_its_workers_is_left_out_after_some_attempts(start, cluster, out):
    cluster.faults(dies=[5])
    ended = start().wait()
    assert (ended.code, ended.out) == (6, "")
    message = ended.err.splitlines()[-1]
    assert message.startswith(f"extract: {out}: 1 of 25 shards are missing: shard 5: ActorDiedError: ")
    assert message.endswith(". Run again to try them again.")
    assert crash_rig.num_commits(out) == crash_rig.NUM_SHARDS - 1
    assert not (out / "manifest.json").exists()


@distributed
def test_a_shard_that_raises_is_left_out_after_some_attempts(start, cluster, out):
    cluster.faults(breaks=[5])
    ended = start().wait()
    assert ended.code == 6
    assert ended.err.endswith(
        f"extract: {out}: 1 of 25 shards are missing: shard 5: RuntimeError: a bit flipped. Run again to try them "
        "again.\n"
    )
    assert crash_rig.num_commits(out) == crash_rig.NUM_SHARDS - 1


@distributed
@pytest.mark.parametrize("how", ["fails", "dies"])
def test_a_node_on_which_no_engine_loads_is_left_alone(how, start, cluster, out, unbroken):
    cluster.add_node("bad")
    cluster.faults(loading=how, on=["bad"], slow=0.3)
    ended = start().wait()
    assert ended.code == 0, ended.err
    check_finished(out, unbroken)
    starts = sorted(part["num_starts"] for part in json.loads(ended.out)["workers"])
    assert starts[:3] == [1, 1, 1]
    assert starts[3] <= 3


@distributed
def test_a_job_that_no_node_can_run_ends_with_the_reason(start, cluster, out):
    cluster.faults(loading="dies")
    ended = start().wait()
    assert (ended.code, ended.out) == (6, "")
    assert "25 of 25 shards are missing: shard 0: ActorDiedError" in ended.err


@distributed
def test_a_driver_that_is_killed_is_made_good_by_the_same_command(start, cluster, out, unbroken):
    cluster.faults(slow=0.4)
    driver = start()
    driver.until(lambda: crash_rig.num_commits(out) >= 6)
    driver.signal(signal.SIGKILL)
    driver.wait()
    before = crash_rig.committed(out)
    ended = start().wait()
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["num_shards_before"] >= 6
    check_finished(out, unbroken)
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before


@distributed
def test_a_worker_that_hangs_is_ended_and_its_shard_made_elsewhere(cluster, tiny_engine, rows, out, unbroken, tmp_path):
    cluster.faults(hangs=[5], once=str(tmp_path / "once"))
    arguments = [one for one in crash_rig.arguments(tiny_engine, rows, out) if one != "--quiet"]
    driver = ray_rig.Driver(cluster.address, [*arguments, "--stall-timeout", "4"], straggler_factor=1e9)
    ended = driver.wait()
    assert ended.code == 0, ended.err
    assert re.search(r", shards? .*\b5\b.*: no progress for 4 s", ended.err)
    check_finished(out, unbroken)


@distributed
def test_a_straggler_is_overtaken_by_a_second_attempt(start, cluster, out, unbroken, tmp_path):
    cluster.faults(hangs=[5], once=str(tmp_path / "once"), slow=0.2)
    clock = time.monotonic()
    ended = start(straggler_factor=5.0).wait()
    assert ended.code == 0, ended.err
    check_finished(out, unbroken)
    assert time.monotonic() - clock < 60
    assert sum(part["num_starts"] for part in json.loads(ended.out)["workers"]) == 3


@distributed
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_stops_the_workers_and_two_stop_them_at_once(times, start, cluster, out, unbroken):
    cluster.faults(slow=0.3, hangs=[9] if times == 2 else [])
    driver = start()
    driver.until(lambda: crash_rig.num_commits(out) >= 9)
    for _ in range(times):
        driver.signal(signal.SIGINT)
        time.sleep(0.7)
    ended = driver.wait()
    done = crash_rig.num_commits(out)
    assert (ended.code, ended.err) == (
        130,
        f"extract: interrupted: {done} of 25 shards are committed in {out}; what was in flight was dropped. "
        "Run the same command again to go on.\n",
    )
    cluster.faults()
    assert start().wait().code == 0
    check_finished(out, unbroken)
