"""An engine in a process of its own: started, spoken to, held still while others run, ended.

Each is a session of its own, so that whatever a library starts is stopped, counted and ended with it. Between its
turns an engine is stopped by a signal: its threads cannot spin, and its memory stays warm.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from peers.disturbance import CpuTimes, Disturbance, cpu_times
from peers.protocol import Job

BENCH = Path(__file__).parent.parent
ROOT = BENCH.parent.parent


class EngineFailed(Exception):
    """It answered with an error, ended, or took too long."""


class EngineSkipped(Exception):
    """It cannot be had here; the message says why."""


class EngineProcess:
    """A resident driver.

    Args:
        driver: name of the module `peers.drive_*` without its prefix.
        python: the interpreter of the peer's environment.
        log: file that gets whatever the engine prints.
        environment: variables on top of this process's own.
    """

    def __init__(self, driver: str, python: Path, log: Path, environment: dict[str, str] | None = None) -> None:
        self.started = time.perf_counter()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        paths = f"{BENCH}{os.pathsep}{ROOT}"
        own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths}
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [str(python), "-m", f"peers.drive_{driver}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env=os.environ | own | (environment or {}),
            )
        self._stopped = False

    def prepare(self, settings: dict[str, Any], timeout_s: float = 1800) -> None:
        """Ask for what is made once per checkpoint."""
        self._ask({"do": "prepare", "settings": settings}, timeout_s)

    def load(self, settings: dict[str, Any], timeout_s: float = 600) -> dict[str, str]:
        """Load the model; returns versions."""
        return dict(self._ask({"do": "load", "settings": settings}, timeout_s)["versions"])

    def run(self, job: Job, timeout_s: float = 900) -> tuple[dict[str, Any], Disturbance]:
        """Run a job; the answer of the driver, and who else was busy meanwhile."""
        request = {name: getattr(job, name) for name in ("ids", "kind", "options", "limit", "output", "at_least_s")}
        before, started = cpu_times(self._process.pid), time.perf_counter()
        answer = self._ask({"do": "run", "job": request}, timeout_s)
        seconds = time.perf_counter() - started
        return answer, cpu_times(self._process.pid).since(before, seconds)

    def disturbance_since_start(self, before: CpuTimes, seconds: float) -> Disturbance:
        """Who else was busy since `before` was read, just before the start, with no process of the engine's."""
        return cpu_times(self._process.pid).since(before, seconds)

    def stop(self) -> None:
        """Hold it still."""
        self._signal(signal.SIGSTOP)
        self._stopped = True

    def go_on(self) -> None:
        """Let it run again."""
        if self._stopped:
            self._signal(signal.SIGCONT)
            self._stopped = False

    def close(self) -> None:
        """End it and whatever it started."""
        self._signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.go_on()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        if stdin.closed:
            raise EngineFailed("ended before")
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(f"ended: {self._last_words()}") from None
        if not select.select([stdout], [], [], timeout_s)[0]:
            self.close()  # an answer that comes too late would be taken for the next one's
            raise EngineFailed(f"no answer to {request['do']} in {timeout_s:.0f} s")
        line = stdout.readline()
        if not line:
            raise EngineFailed(f"ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if not answer["ok"]:
            if "not_possible" in answer:
                raise EngineSkipped(answer["not_possible"])
            raise EngineFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        """What it ended with; a signal's name (SIGFPE, SIGKILL) says more than its last line."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        status = self._process.poll()
        if status is not None and status < 0:
            return signal.Signals(-status).name
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit status {status}"
