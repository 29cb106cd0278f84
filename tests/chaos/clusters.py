"""Jobs on a Ray cluster of this machine, and the kinds of fault that they meet: of workers, nodes and the driver."""

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray_rig
import warm_command

from chaos.faults import KILLED, Job, interrupt, kill
from chaos.outputs import num_commits
from chaos.stores import Store

NUM_NODES = 2
SLOW_S = 0.15
"""Added to each shard, so that there is something to break."""


@dataclass(kw_only=True)
class RayJob(Job):
    """A job with a driver and one worker on each node of a cluster."""

    cluster: ray_rig.TestCluster
    store: Store | None = None
    beside: dict[str, str] = field(default_factory=dict)
    """Environment of a run without Ray on the same output."""

    def start(self, **settings: Any) -> ray_rig.Driver:
        """Start the driver."""
        return ray_rig.Driver(self.cluster.address, self.arguments, straggler_factor=2.5, **settings)

    def pause(self) -> None:
        """Wait for a random part of the time that a run takes, most of which is the start of its workers."""
        time.sleep((0.5 + 0.6 * self.draw.random()) * self.seconds)

    def until_more(self, most: int, driver: ray_rig.Driver) -> None:
        """Wait until up to so many further shards are committed, or the driver has ended."""
        least = num_commits(self.out) + self.draw.randint(1, most)
        while num_commits(self.out) < least and driver.state() != "Z":
            time.sleep(0.05)

    def tidy(self) -> None:
        """No worker is left, and all nodes are there."""
        for worker in ray_rig.workers():
            ray_rig.kill(worker)
        while len(self.cluster.nodes) < NUM_NODES:
            self.cluster.add_node()


def workers_killed(job: RayJob) -> None:
    """SIGKILL of up to three workers, one after the other."""
    driver = job.start()
    for _ in range(job.draw.randint(1, 3)):
        job.until_more(3, driver)
        for worker in job.draw.sample(found := ray_rig.workers(), min(1, len(found))):
            ray_rig.kill(worker)
            job.findings.injected += 1
    job.wait(driver, {0}, "killed workers")


def node_killed(job: RayJob) -> None:
    """SIGKILL of a node with all that runs there; another one joins."""
    driver = job.start()
    job.until_more(5, driver)
    job.cluster.kill_node(job.draw.choice(job.cluster.nodes))
    job.findings.injected += 1
    job.cluster.add_node()
    job.wait(driver, {0}, "a killed node")


def node_cut_off(job: RayJob) -> None:
    """A node stands still until it is believed dead; its worker goes on all the while, and commits what it has."""
    driver = job.start()
    job.until_more(4, driver)
    node = job.draw.choice(job.cluster.nodes)
    with held(job.cluster.raylet(node)):
        time.sleep(2 + 2 * job.draw.random())
    job.findings.injected += 1
    job.cluster.kill_node(node)
    job.cluster.add_node()
    job.wait(driver, {0}, "a node that was cut off")


def worker_held(job: RayJob) -> None:
    """A worker stands still while others overtake it, and goes on with a shard that has been made meanwhile."""
    driver = job.start()
    job.until_more(4, driver)
    found = ray_rig.workers()
    if found:
        with held(job.draw.choice(found)):
            time.sleep(0.5 + 3.5 * job.draw.random())
        job.findings.injected += 1
    job.wait(driver, {0}, "a worker that stood still")


def run_beside(job: RayJob) -> None:
    """A plain run makes the same job beside the cluster; neither sees who works on what."""
    driver = job.start()
    job.until_more(2, driver)
    plain = warm_command.start(*job.arguments, environment=job.beside)
    killed = job.draw.random() < 0.4
    if killed:
        time.sleep(job.draw.random())
        plain.signal(signal.SIGKILL)
    job.findings.injected += 1
    job.wait(plain, {KILLED, 0} if killed else {0}, "a plain run beside a cluster")
    job.wait(driver, {0}, "a cluster beside a plain run")


def store_and_workers(job: RayJob) -> None:
    """Answers of the store are lost, requests are refused and reset, while a worker is killed."""
    assert job.store is not None
    driver = job.start()
    with job.store.trouble.of(job.draw.choice(("answer lost", "slow down", "reset")), 0.3, job.draw):
        job.until_more(4, driver)
        for worker in ray_rig.workers()[:1]:
            ray_rig.kill(worker)
        job.wait(driver, {0}, "a store in trouble")
        job.findings.injected += job.store.trouble.struck > 0


def gateway_gone(job: RayJob) -> None:
    """The gateway of the store is killed in the middle of the job and comes back."""
    assert job.store is not None
    driver = job.start()
    job.until_more(6, driver)
    if job.store.gateway is not None:
        job.store.gateway.kill()
        time.sleep(2 * job.draw.random())
        job.store.gateway.start()
        job.findings.injected += 1
    job.wait(driver, {0}, "a gateway that was away")


@contextlib.contextmanager
def held(process: psutil.Process) -> Any:
    """SIGSTOP while the block runs; the process may be killed meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


RAY_KINDS: dict[str, Callable[[RayJob], None]] = {
    "ray: workers killed": workers_killed,
    "ray: driver killed": kill,
    "ray: driver interrupted": interrupt,
    "ray: node killed": node_killed,
    "ray: node cut off": node_cut_off,
    "ray: worker held, wakes": worker_held,
    "ray: plain run beside": run_beside,
}
WITH_STORE: dict[str, Callable[[RayJob], None]] = {
    "ray: store in trouble": store_and_workers,
    "ray: gateway killed, back": gateway_gone,
}
