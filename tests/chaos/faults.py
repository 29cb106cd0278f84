"""The kinds of fault: each does something bad to a job that is being made, and says what it may end with."""

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import crash_rig
import warm_command

from chaos.disk import Armed, struck
from chaos.invariants import Findings, check_kept
from chaos.outputs import committed, num_commits
from chaos.power_loss import lose_power, sure_files

NUM_ROWS, NUM_SHARDS = 46, 12
KILLED = -signal.SIGKILL
CHANGES = ("create", "write", "fsync", "rename", "link", "unlink", "mkdir")
BEGIN = {"create": 2, "write": 1, "fsync": 6, "rename": 0, "link": 1, "unlink": 1, "mkdir": 5}
SHARD = {"create": 2, "write": 2, "fsync": 4, "rename": 1, "link": 1, "unlink": 1, "mkdir": 0}
"""How often a job does each to begin, and for a shard; a fault is drawn from what is left to do."""


@dataclass
class Job:
    """One output directory that is being made, of an engine and rows that every round shares."""

    arguments: list[str]
    out: Any
    """A `Place`; faults of a disk need a path."""
    seconds: float
    """An unbroken run's."""
    shim: str
    draw: random.Random
    findings: Findings = field(default_factory=Findings)

    @property
    def watched(self) -> Path:
        """The directory whose changes the shim sees, two above the output: one that is there, and one to be made."""
        return Path(self.out.parent.parent)

    def start(self, armed: Armed | None = None, **options: Any) -> Any:
        """Start the run, with the shim armed or only recording where there is one."""
        prepare = [*options.pop("prepare", ())]
        if armed is not None:
            prepare.append(armed.preparation(self.watched, self.log))
        return warm_command.start(*self.arguments, preload=self.shim, prepare=prepare, **options)

    @property
    def log(self) -> Path:
        """Of the shim."""
        return self.watched.with_suffix(".log")

    def wait(self, command: Any, allowed: set[int], what: str) -> warm_command.Ended:
        """Wait for a command's end, and hold its exit code and its words to what is documented."""
        ended = command.wait()
        self.findings.expect(
            ended.code in allowed, f"{what}: exit code {ended.code}, not in {allowed}: {ended.err[-600:]}"
        )
        self.findings.expect("Traceback" not in ended.err, f"{what}: a traceback: {ended.err[-1500:]}")
        if ended.code > 0 and ended.code != 130:
            lines = ended.err.strip().splitlines()
            self.findings.expect(bool(lines) and lines[0].startswith("extract: "), f"{what}: said {ended.err[-300:]!r}")
        return ended

    def pause(self) -> None:
        """Wait for a random part of the time that a run takes."""
        time.sleep(self.draw.random() * self.seconds)

    @contextmanager
    def kept(self, when: str) -> Iterator[None]:
        """Whatever is committed before the block is untouched after it."""
        before = committed(self.out)
        yield
        check_kept(self.findings, self.out, before, when)


def kill(job: Job) -> None:
    """SIGKILL at a random moment."""
    command = job.start()
    job.pause()
    command.signal(signal.SIGKILL)
    ended = job.wait(command, {KILLED, 0}, "kill")
    job.findings.injected += ended.code == KILLED


def interrupt(job: Job) -> None:
    """SIGINT or SIGTERM, once or twice, when a random number of shards is committed."""
    least = num_commits(job.out) + job.draw.randint(1, 8)
    command = job.start()
    number = job.draw.choice((signal.SIGINT, signal.SIGTERM))
    warm_command.wait_until(lambda: num_commits(job.out) >= least or command.state() == "Z")
    for _ in range(job.draw.choice((1, 1, 2))):
        command.signal(number)
    ended = job.wait(command, {130, 0}, "interrupt")
    job.findings.injected += ended.code == 130


def hold(job: Job) -> None:
    """SIGSTOP at a random moment while another worker goes on, then SIGCONT or SIGKILL."""
    held, other = job.start(), job.start()
    job.pause()
    held.signal(signal.SIGSTOP)
    job.pause()
    killed = job.draw.random() < 0.3
    held.signal(signal.SIGKILL if killed else signal.SIGCONT)
    job.findings.injected += 1
    job.wait(held, {KILLED, 0} if killed else {0}, "the held worker")
    job.wait(other, {0}, "the worker beside it")


def workers(job: Job) -> None:
    """Several workers at once, with locks or without, some of them killed."""
    fault = job.draw.choice((None, None, "without locks"))
    commands = [job.start(fault=fault) for _ in range(job.draw.randint(2, 4))]
    victims = job.draw.sample(commands, job.draw.randint(0, len(commands) - 1))
    for victim in victims:
        job.pause()
        victim.signal(signal.SIGKILL)
    job.findings.injected += 1
    for command in commands:
        job.wait(command, {KILLED, 0} if command in victims else {0}, f"one of several workers ({fault})")


def clock(job: Job) -> None:
    """The wall clock jumps by up to ten years, back or forth, again and again, until a SIGKILL."""
    jump = ("chaos.faults:jumping_clock", {"seed": job.draw.randrange(2**32)})
    fault = job.draw.choice((None, "without locks"))
    command = job.start(prepare=[jump], fault=fault)
    job.pause()
    if job.draw.random() < 0.5:
        command.signal(signal.SIGKILL)
    job.wait(command, {KILLED, 0}, "clock")
    job.findings.injected += 1


def jumping_clock(seed: int) -> None:
    """Let `time.time` jump in this process."""
    draw, real = random.Random(seed), time.time

    def jumping() -> float:
        return real() + draw.choice((0, 1, -1)) * draw.random() * 3.2e8

    time.time = jumping  # type: ignore[assignment]
    time.time_ns = lambda: int(jumping() * 1e9)  # type: ignore[assignment]


def file_limit(job: Job) -> None:
    """No file may grow beyond a random size (ulimit -f)."""
    limit = job.draw.choice((job.draw.randint(0, 4000), job.draw.randint(4000, 40_000)))
    ended = job.wait(job.start(file_bytes=limit), {8, 0}, f"files of at most {limit} bytes")
    job.findings.injected += ended.code == 8


# --- by the shim ----------------------------------------------------------------------------------------------------


def kill_at_operation(job: Job) -> None:
    """SIGKILL right before or after a random change to the disk."""
    command = job.start(_killing(job))
    job.findings.injected += job.wait(command, {KILLED, 0}, "kill at an operation").code == KILLED


def io_error(job: Job) -> None:
    """One kind of change to the disk fails with EIO, once or from then on."""
    armed = _at_random(job, CHANGES, action="fail", error="EIO", stays=job.draw.random() < 0.5)
    job.wait(job.start(armed), {2, 0}, f"{armed}")
    job.findings.injected += struck(job.log)


def full_disk(job: Job) -> None:
    """From a random write on there is no space left; the write may come short before that."""
    armed = _at_random(
        job,
        ("create", "write", "fsync", "mkdir"),
        action=job.draw.choice(("fail", "short, then fail")),
        error=job.draw.choice(("ENOSPC", "EDQUOT")),
        stays=True,
    )
    job.wait(job.start(armed), {8, 0}, f"{armed}")
    job.findings.injected += struck(job.log)


def short_writes(job: Job) -> None:
    """Every write from a random one on takes half of what it is given."""
    armed = _at_random(job, ("write",), action="short", stays=True)
    job.wait(job.start(armed), {0}, "short writes")
    job.findings.injected += struck(job.log)


def power_loss(job: Job) -> None:
    """A power failure at a random change to the disk: what was not synced may be gone, cut or zeros."""
    command = job.start(_killing(job))
    job.findings.injected += job.wait(command, {KILLED, 0}, "power loss").code == KILLED
    if not job.log.is_file():
        return
    spare = job.watched.with_suffix(".spare")
    spare.mkdir(exist_ok=True)
    sure = [path for path in sure_files(job.log) if path.parent == job.out / "commits"]
    lose_power(job.log, spare, job.draw)
    gone = [path.name for path in sure if path.suffix == ".json" and not path.exists()]
    job.findings.lost += len(gone)
    job.findings.expect(not gone, f"power loss: records that were synced are gone: {gone}")
    if (job.out / "job.json").exists():
        job.wait(warm_command.start("verify", job.out, preload=job.shim), {0}, "verify after a power loss")


def _killing(job: Job) -> Armed:
    return _at_random(job, CHANGES, action=job.draw.choice(("kill before", "kill after")))


def _at_random(job: Job, operations: tuple[str, ...], **how: Any) -> Armed:
    """One operation, or any of them, at a random time."""
    job.log.unlink(missing_ok=True)
    some = (job.draw.choice(operations),) if job.draw.random() < 0.7 else operations
    left = NUM_SHARDS - num_commits(job.out)
    most = sum((0 if job.out.exists() else BEGIN[operation]) + left * SHARD[operation] + 2 for operation in some)
    return Armed(operations=some, nth=job.draw.randint(1, most), **how)


# --- damage between runs --------------------------------------------------------------------------------------------


def damage(job: Job) -> None:
    """Files of an unfinished or finished job are deleted, cut or changed by a bit; verify --repair brings it back."""
    command, least = job.start(), job.draw.randint(1, 2 * NUM_SHARDS)
    warm_command.wait_until(lambda: num_commits(job.out) >= least or command.state() == "Z")
    command.signal(signal.SIGKILL)
    job.wait(command, {KILLED, 0}, "the run before the damage")
    records = sorted(job.out.glob("commits/shard-*.json"))
    if not records:
        return
    before, touched = crash_rig.committed(job.out), set[Path]()
    manifest, seen = job.out / "manifest.json", False
    for record in job.draw.sample(records, min(len(records), job.draw.randint(1, 3))):
        data = job.out / "data" / json.loads(record.read_bytes())["data"]
        victim = job.draw.choice((record, data))
        touched |= {record, data}
        seen |= not _harm(job.draw, victim) or victim == data
        job.findings.injected += 1
    if manifest.exists() and job.draw.random() < 0.3:
        _harm(job.draw, manifest)
        job.findings.injected += 1
    # Without a manifest, a record that is gone is that of a shard that was never made.
    expected = 7 if seen or manifest.exists() else 0
    sound = {name: state for name, state in before.items() if job.out / name not in touched}
    for options in ((), ("--repair",)):
        job.wait(warm_command.start("verify", job.out, *options, preload=job.shim), {expected}, f"verify {options}")
    job.wait(job.start(), {0}, "the run after the repair")
    check_kept(job.findings, job.out, sound, "repair")
    job.wait(warm_command.start("verify", job.out, preload=job.shim), {0}, "verify after the repair")


def _harm(draw: random.Random, path: Path) -> bool:
    """Delete, cut or change a file; true if it is gone."""
    how, content = draw.choice(("delete", "cut", "flip", "flip", "empty")), path.read_bytes()
    if how == "delete" or not content:
        path.unlink()
        return True
    if how == "flip":
        place = draw.randrange(len(content))
        content = content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
    path.write_bytes(content if how == "flip" else content[: draw.randrange(len(content)) if how == "cut" else 0])
    return False


KINDS: dict[str, Callable[[Job], None]] = {
    "SIGKILL at a random time": kill,
    "SIGINT or SIGTERM": interrupt,
    "SIGSTOP beside a worker": hold,
    "several workers": workers,
    "clock jumps": clock,
    "ulimit -f": file_limit,
    "files damaged between runs": damage,
}
WITH_SHIM: dict[str, Callable[[Job], None]] = {
    "SIGKILL at an operation": kill_at_operation,
    "EIO": io_error,
    "disk full": full_disk,
    "short writes": short_writes,
    "power loss": power_loss,
}
