"""The one module that imports Ray: connect to a cluster, see its nodes, and place workers on them.

Ray is used for placement, liveness and calls alone. It never restarts or retries anything (`max_restarts=0`,
`max_task_retries=0`): its own retries return to the same place and hide attempts. Workers are pinned to nodes that the
driver chooses, so that a node on which engines fail can be avoided.
"""

import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from extract.errors import ExtractError, SpecError
from extract.progress import Counts
from extract.runners.ray_actor import Loaded, Outcome, ShardMaker
from extract.spec import JobSpec

CONTROL, SHARDS = "control", "shards"
MAX_OUTSTANDING = 2
"""Shards that a worker may have at once: one that it computes, and the next one, which it reads meanwhile."""


class RayMissing(SpecError):
    """`--on ray` without Ray."""

    template = 'ray: {problem}. Install it on every node: pip install "extract-hidden-states[ray]".'


class NoCluster(ExtractError):
    """The cluster does not answer."""

    exit_code = 2
    template = "ray: no cluster at {address}: {problem}. Check --address, or leave it out to use this machine alone."


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive, how many workers it holds, and what each of them takes."""

    node_id: str
    name: str
    capacity: int
    num_gpus: int
    num_cpus: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A call that did not come back: the worker is dead, or unreachable, which is the same to us."""

    reason: str
    preempted: bool


class StdoutWithoutRay:
    """The stream that was stdout, for all threads but those of Ray's, which would print into a command's result."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.leaving = False
        """Ray ends, and prints what it held back from the thread that ends it."""

    def write(self, text: str) -> int:
        """Pass it on, or drop it."""
        if self.leaving or threading.current_thread().name.startswith("ray_"):
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Cluster:
    """A connection to Ray. Use as a context manager.

    Args:
        address: of a cluster; `None`: one is started on this machine, and ended with the run.
    """

    def __init__(self, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError as error:
            raise RayMissing(problem=f"does not import ({error})") from None
        self._ray: Any = ray
        self._address = address

    def __enter__(self) -> "Cluster":
        self._stdout = sys.stdout
        if self._stdout is not None:
            sys.stdout = StdoutWithoutRay(self._stdout)
        options: dict[str, Any] = {"include_dashboard": False} if self._address is None else {}
        try:
            self._ray.init(
                address=self._address or "local",
                namespace="extract",
                log_to_driver=False,
                logging_level="error",
                **options,
            )
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            problem = str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__
            sys.stdout = self._stdout
            raise NoCluster(address=self._address or "this machine", problem=problem) from None
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(sys.stdout, StdoutWithoutRay):
            sys.stdout.leaving = True
        self._ray.shutdown()
        sys.stdout = self._stdout

    def nodes(self, devices: set[str], num_cpus: int | None) -> list[Node]:
        """Nodes that are alive and hold at least one worker: one a card where there are cards, else one for its cores.

        Args:
            devices: "cuda", "cpu" or both: what there are engines for.
            num_cpus: cores of a worker; `None`: one beside a card, else all that a node has.
        """
        found = []
        for node in self._ray.nodes():
            resources = node["Resources"]
            if not node["Alive"]:
                continue
            gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
            num_gpus = int("cuda" in devices and gpus > 0)
            if not num_gpus and "cpu" not in devices:
                continue
            each = num_cpus or (1 if num_gpus else max(1, cpus))
            capacity = min(gpus, cpus // each) if num_gpus else cpus // each
            if capacity:
                found.append(Node(node["NodeID"], node["NodeManagerHostname"], capacity, num_gpus, each))
        return found

    def start(self, node: Node, spec: JobSpec, threads: int | None) -> Any:
        """Place a worker on a node; the handle is there at once, the process later."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return (
            _remote_class(self._ray)
            .options(  # plain values in the constructor: an object of the store can be lost
                num_gpus=node.num_gpus,
                num_cpus=node.num_cpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            )
            .remote(spec, threads)
        )

    def wait(self, calls: list[Any], timeout_s: float) -> list[Any]:
        """Those of the calls that have come back, or are lost."""
        if not calls:
            return []
        ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(calls, num_returns=1, timeout=timeout_s)
        return list(ready)

    def result(self, call: Any) -> Loaded | ExtractError | Outcome | Counts | Lost:
        """What a call that has come back says."""
        errors = self._ray.exceptions
        try:
            answer: Loaded | ExtractError | Outcome | Counts = self._ray.get(call)
            return answer
        except errors.RayTaskError as error:  # the method itself raised: it does not do so for a fault of a shard
            return Lost(f"{type(error.cause).__name__}: {error.cause}", preempted=False)
        except errors.RayActorError as error:
            return Lost(_first_line(error), preempted=bool(getattr(error, "preempted", False)))
        except errors.RayError as error:  # out of memory, a lost node, an object that is gone
            return Lost(_first_line(error), preempted=False)

    def kill(self, handle: Any) -> None:
        """End a worker at once."""
        self._ray.kill(handle, no_restart=True)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"


def _remote_class(ray: Any) -> Any:
    """`ShardMaker` as Ray wants it: `counts` and `stop` answer beside shards that are being made."""

    class RemoteShardMaker(ShardMaker):
        @ray.method(concurrency_group=SHARDS)  # type: ignore[untyped-decorator]
        def make(self, shard: int) -> Outcome:
            return super().make(shard)

        @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
        def counts(self) -> Counts:
            return super().counts()

        @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
        def stop(self) -> None:
            super().stop()

    return ray.remote(concurrency_groups={CONTROL: 1, SHARDS: MAX_OUTSTANDING})(RemoteShardMaker)
