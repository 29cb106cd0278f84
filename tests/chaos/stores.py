"""An object store that can be made to misbehave, and the kinds of fault that outputs in one meet."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ceph_rig
import moto_rig
import proxy_rig
import warm_command

from chaos.faults import KILLED, NUM_SHARDS, Job
from chaos.outputs import num_commits

BUCKET = "chaos"


class Trouble:
    """What the way to the store does to requests: nothing, or one kind of fault to some of them."""

    def __init__(self, real: bool) -> None:
        self.kind, self.struck = "", 0
        self._real, self._rate, self._draw, self._good = real, 0.0, random.Random(0), 0
        self._lock = threading.Lock()

    @contextmanager
    def of(self, kind: str, rate: float, draw: random.Random) -> Iterator[None]:
        """While the block runs."""
        self.kind, self.struck, self._rate, self._draw = kind, 0, rate, draw
        try:
            yield
        finally:
            self.kind = ""

    def __call__(self, command: str, headers: Any) -> str:
        """For one request; after each that goes wrong two go well, or a first request would be given up."""
        with self._lock:
            applies = {"cut upload": command == "PUT", "cut download": command == "GET"}.get(self.kind, True)
            if self.kind == "cut upload" and not self._real and "if-none-match" in headers:
                return ""  # moto keeps half of an object, which no store does
            self._good += 1
            if not self.kind or not applies or self._good < 3 or self._draw.random() >= self._rate:
                return ""
            self._good, self.struck = 0, self.struck + 1
            return self.kind


@dataclass
class Store:
    """A bucket behind a proxy; with a gateway that can be killed, if it is a real one."""

    environment: dict[str, str]
    trouble: Trouble
    gateway: ceph_rig.Gateway | None


@contextmanager
def store(folder: Path, which: str = "auto") -> Iterator[Store]:
    """Ceph's gateway where it is installed and not told otherwise, else moto; this process uses it, too."""
    real = which == "ceph" or (which == "auto" and ceph_rig.missing() is None)
    folder.mkdir()
    trouble, before = Trouble(real), dict(os.environ)
    with ceph_rig.ceph_gateway(folder) if real else moto_rig.moto_server() as behind:
        gateway = behind if isinstance(behind, ceph_rig.Gateway) else None
        endpoint = str(behind) if gateway is None else gateway.endpoint
        moto_rig.create_bucket(endpoint, BUCKET)
        with proxy_rig.proxy(endpoint, fault=trouble) as front:
            environment = {**moto_rig.KEYS, "AWS_ENDPOINT_URL": front, "EXTRACT_CACHE": str(folder / "cache")}
            os.environ |= environment
            try:
                yield Store(environment, trouble, gateway)
            finally:
                os.environ.clear()
                os.environ |= before


@dataclass(kw_only=True)
class StoreJob(Job):
    """A job whose output lies in a store; each machine has its own folder for temporary files."""

    store: Store
    scratch: Path

    def start(self, machine: int = 0, **options: Any) -> Any:
        """Start the run on one of several machines, which see nothing of each other's claims."""
        folder = self.scratch / f"machine-{machine}"
        folder.mkdir(exist_ok=True)
        environment = {**self.store.environment, "TMPDIR": str(folder)}
        return warm_command.start(*self.arguments, environment=environment, **options)

    def until_shards(self, least: int, *commands: Any) -> None:
        """Wait until so many are committed, or the commands have ended."""
        while num_commits(self.out) < least and any(command.state() != "Z" for command in commands):
            time.sleep(0.05)


def machines(job: StoreJob) -> None:
    """Several machines that know nothing of each other race for every shard; some are killed."""
    commands = [job.start(machine) for machine in range(job.draw.randint(2, 3))]
    victims = job.draw.sample(commands, job.draw.randint(0, len(commands) - 1))
    for victim in victims:
        job.pause()
        victim.signal(signal.SIGKILL)
    job.findings.injected += 1
    for command in commands:
        job.wait(command, {KILLED, 0} if command in victims else {0}, "one of several machines")


def zombie(job: StoreJob) -> None:
    """A machine stands still until another one has made more shards, or all of them, and then goes on."""
    held = job.start(0)
    job.until_shards(num_commits(job.out) + job.draw.randint(0, 3), held)
    time.sleep(job.draw.random() * 0.2)
    held.signal(signal.SIGSTOP)
    other = job.start(1)
    if job.draw.random() < 0.5:
        job.wait(other, {0}, "the machine beside it")
        held.signal(signal.SIGCONT)
    else:
        job.until_shards(num_commits(job.out) + job.draw.randint(1, 4), other)
        held.signal(signal.SIGCONT)
        job.wait(other, {0}, "the machine beside it")
    job.wait(held, {0}, "the machine that stood still")
    job.findings.injected += 1


def between(job: StoreJob) -> None:
    """SIGKILL between the upload of a file and its record."""
    left = max(1, NUM_SHARDS - num_commits(job.out))
    command = job.start(fault="between data and record", at=job.draw.randint(1, left))
    job.findings.injected += job.wait(command, {KILLED, 0}, "between file and record").code == KILLED


def gateway_gone(job: StoreJob) -> None:
    """The gateway is killed in the middle of the job and comes back; without one, every connection is reset."""
    command = job.start()
    for _ in range(job.draw.randint(1, 2)):
        job.until_shards(num_commits(job.out) + job.draw.randint(1, 4), command)
        if job.store.gateway is None:
            with job.store.trouble.of("reset", 1.0, job.draw):
                time.sleep(job.draw.random())
        else:
            job.store.gateway.kill()
            time.sleep(job.draw.random())
            job.store.gateway.start()
        job.findings.injected += 1
    job.wait(command, {0}, "a gateway that was away")


def troubled(kind: str) -> Callable[[StoreJob], None]:
    """Requests of one or two machines go wrong on the way, now and then."""

    def fault(job: StoreJob) -> None:
        with job.store.trouble.of(kind, job.draw.choice((0.1, 0.3)), job.draw):
            commands = [job.start(machine) for machine in range(job.draw.choice((1, 1, 2)))]
            for command in commands:
                job.wait(command, {0}, f"{kind} now and then")
            job.findings.injected += job.store.trouble.struck > 0

    fault.__doc__ = f"Requests meet this now and then: {kind}."
    return fault


STORE_KINDS: dict[str, Callable[[StoreJob], None]] = {
    "machines race, some killed": machines,
    "zombie after its shard": zombie,
    "SIGKILL before the record": between,
    "gateway killed, back": gateway_gone,
    **{f"store: {kind}": troubled(kind) for kind in proxy_rig.FAULTS},
}
