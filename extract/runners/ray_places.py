"""Where workers run on a Ray cluster: nodes that come and go, and a place for each worker that they hold.

Knows nothing of shards. A node on which engines fail to load is left alone after some failures; the places of a node
that is gone stay empty, for the report.
"""

import time
from collections import Counter
from dataclasses import dataclass

from extract.errors import ExtractError
from extract.runners.patience import USUAL_PATIENCE, Patience
from extract.runners.ray_cluster import Cluster, Node
from extract.runners.ray_slots import RaySlot
from extract.runners.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """How a cluster is used.

    Attributes:
        address: of the cluster; `None`: one is started on this machine.
        max_workers: at most so many; `None`: as many as the nodes hold.
        max_attempts: of one shard.
        node_budget: failures to load an engine after which a node is left alone.
        patience: how long workers may load, or make no progress.
        stop_timeout_s: that workers have to drop what is in flight.
        look_every_s: for nodes that have joined or left.
        count_every_s: for the progress.
        straggler_factor: times the median of a shard's time, after which it may be made a second time.
    """

    address: str | None = None
    max_workers: int | None = None
    max_attempts: int = 4
    node_budget: int = 3
    patience: Patience = USUAL_PATIENCE
    stop_timeout_s: float = 30.0
    look_every_s: float = 10.0
    count_every_s: float = 2.0
    straggler_factor: float = 3.0


class Places:
    """The workers of one run.

    Attributes:
        slots: every place that there was, by number.
        last_failure: why the latest worker did not get ready.
    """

    def __init__(self, session: Session, cluster: Cluster, settings: RaySettings) -> None:
        self._session, self._cluster, self._settings = session, cluster, settings
        engines = [session.plan.engine, *(plan.engine for _, plan in session.job.others)]
        self._spec = session.plan.spec
        self._devices = {str(contract.device.type) for contract in engines}
        self._num_cpus = self._spec.run.threads or engines[0].runtime.threads
        self.slots: list[RaySlot] = []
        self.last_failure: ExtractError | str = "no node has room for a worker"
        self._failures: Counter[str] = Counter()
        self._looked = float("-inf")
        self._empty_since: float | None = None

    @property
    def living(self) -> list[RaySlot]:
        """Those with a worker."""
        return [slot for slot in self.slots if slot.handle is not None]

    def fill(self, num_open: int) -> bool:
        """Look for nodes now and then, and start a worker wherever one is missing and there is work for it.

        Args:
            num_open: shards that are left.

        Returns:
            False where no worker runs, and none can.
        """
        now, living = time.monotonic(), self.living
        pause = self._settings.look_every_s if living else min(1.0, self._settings.look_every_s)
        if now - self._looked < pause:
            return True
        self._looked = now
        nodes = self._cluster.nodes(self._devices, self._num_cpus)
        usable = [node for node in nodes if self._failures[node.node_id] < self._settings.node_budget]
        if not usable and not living:
            return self._may_change(nodes)
        self._empty_since = None
        self._make_room(usable)
        here = {node.node_id for node in usable}
        most = min(num_open, self._settings.max_workers or num_open)
        for slot in self.slots:
            if len(living) >= most:
                break
            if slot.handle is None and slot.node.node_id in here:
                self._start(slot)
                living.append(slot)
        self._session.progress.num_workers = max(1, len(living))
        return True

    def lost(self, slot: RaySlot, reason: str, *, counts: bool) -> None:
        """End a worker that is lost or useless; `counts`: as a failure of its node, if it never got ready."""
        if slot.loaded is None:
            self._failures[slot.node.node_id] += counts
            self.last_failure = reason
        self._end(slot)
        self._looked = min(self._looked, time.monotonic() - self._settings.look_every_s + 1.0)  # look again soon

    def end(self) -> None:
        """End all workers."""
        for slot in self.slots:
            self._end(slot)

    def _make_room(self, nodes: list[Node]) -> None:
        """A slot for each worker that each node holds; node by node, so that few workers spread over many nodes."""
        known = Counter(slot.node.node_id for slot in self.slots)
        for depth in range(max((node.capacity for node in nodes), default=0)):
            for node in nodes:
                if known[node.node_id] <= depth < node.capacity:
                    self.slots.append(RaySlot(number=len(self.slots), node=node))
                    known[node.node_id] += 1

    def _may_change(self, nodes: list[Node]) -> bool:
        """Whether to wait for a node; not where every node that has room failed too often."""
        if nodes:
            return False
        now = time.monotonic()
        if self._empty_since is None:  # a cluster that still grows, or has just lost its machines
            self._empty_since = now
            self._session.progress.say("no node has room for a worker; waiting for one")
        return now - self._empty_since < self._settings.patience.boot_timeout_s

    def _start(self, slot: RaySlot) -> None:
        threads = self._spec.run.threads if slot.node.num_gpus else slot.node.num_cpus
        handle = self._cluster.start(slot.node, self._spec, threads)
        slot.began(handle, handle.load.remote())

    def _end(self, slot: RaySlot) -> None:
        if slot.handle is not None:
            self._cluster.kill(slot.handle)
            slot.ended()
