"""A Ray cluster of a few nodes on this machine, the command as its driver, and the worker processes to kill.

Nodes listen on 127.0.0.2: Ray takes 127.0.0.1 for the name of the machine. Health checks are fast, so that a killed
node is missed within a second.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import runner_rig
import warm_command

FAST = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 2,
}
NODE = {"node_ip_address": "127.0.0.2", "object_store_memory": 80 * 2**20}
SETTINGS = {"look_every_s": 1.0, "count_every_s": 0.2}

DRIVER = """
import json, sys
from extract.cli import main
from extract.runners import ray_places
real, settings = ray_places.RaySettings, json.loads(sys.argv[1])
ray_places.RaySettings = lambda **given: real(**{**given, **settings})
main(sys.argv[2:])
"""


class TestCluster:
    """Nodes and the file of faults that their workers read."""

    __test__ = False

    def __init__(self, faults: Path) -> None:
        from ray.cluster_utils import Cluster

        self._faults = faults
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": FAST, **NODE}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.nodes: list[Any] = []

    def add_node(self, name: str = "good", **resources: Any) -> Any:
        """A node with one core, which faults can name."""
        os.environ["EXTRACT_TEST_NODE"] = name
        node = self._cluster.add_node(**{"num_cpus": 1, **resources}, **NODE)
        node.ray_test_name = name
        self.nodes.append(node)
        return node

    def kill_node(self, node: Any) -> None:
        """SIGKILL."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def raylet(self, node: Any) -> psutil.Process:
        """The process that makes a node alive."""
        return psutil.Process(node.all_processes["raylet"][0].process.pid)

    def faults(self, **settings: Any) -> None:
        """Of the workers of the next job."""
        self._faults.write_text(json.dumps(settings))

    def shutdown(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[TestCluster]:
    """A cluster of a head without cores."""
    faults = folder / "faults.json"
    before = dict(os.environ)
    os.environ |= {
        "EXTRACT_SABOTAGE": f"@{faults}",
        "PYTHONPATH": os.pathsep.join([str(runner_rig.SABOTAGE), *(path for path in sys.path if path)]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    found = TestCluster(faults)
    try:
        yield found
    finally:
        found.shutdown()
        os.environ.clear()
        os.environ |= before


class Driver:
    """`extract run --on ray` in a process of its own."""

    def __init__(self, address: str | None, arguments: list[str], **settings: Any) -> None:
        where = ["--boot-timeout", "60"] + ([] if address is None else ["--address", address])
        self._process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps({**SETTINGS, **settings}), *arguments, "--on", "ray", *where],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def state(self) -> str:
        """Z when it has ended, as `warm_command.Command` says it."""
        return "R" if self._process.poll() is None else "Z"

    def wait(self) -> warm_command.Ended:
        """Wait for the end."""
        out, err = self._process.communicate(timeout=240)
        return warm_command.Ended(self._process.returncode, out, err)

    def until(self, happened: Any) -> None:
        """Wait until something has happened, or fail if the driver ends before."""
        warm_command.wait_until(lambda: happened() or self._process.poll() is not None)
        if not happened():
            ended = self.wait()
            raise AssertionError(f"it ended before that with {ended.code}: {ended.err}")


def workers() -> list[psutil.Process]:
    """Processes of workers that have an engine or are about to."""
    return [process for process in psutil.process_iter() if _is_worker(process)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return any(word.startswith("ray::RemoteShardMaker") for word in process.cmdline()[:1])
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def kill(process: psutil.Process) -> None:
    """SIGKILL."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)
