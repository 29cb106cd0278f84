"""The `extract` command in a process that is already warm: real processes to kill, without seconds of imports for each.

`python warm_command.py` imports everything once, on one thread, and then forks a child for each line that it reads. A
child runs `extract.cli.main` with the line's arguments, its output in files; a fault may be set up in it first, which
kills or breaks it at one named place. Everything after the fork is what the command does.
"""

import atexit
import errno
import functools
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Ended:
    """How a command ended: `code` is minus the signal if one killed it."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON document on stdout."""
        return json.loads(self.out)


class Command:
    """A running command."""

    def __init__(self, pid: int, files: Path, preload: str) -> None:
        self.pid, self._files, self._preload = pid, files, preload

    def signal(self, number: int) -> None:
        """Send a signal; a process that has ended already takes it without harm, for nobody has waited for it."""
        os.kill(self.pid, number)

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait until something has happened; fails at once, with what was said, if the process ends before."""
        wait_until(lambda: happened() or self.state() == "Z")
        if not happened():
            ended = self.wait()
            raise AssertionError(f"it ended before that with {ended.code}: {ended.err}")

    @contextmanager
    def held(self) -> Iterator[None]:
        """The process stands still while the block runs."""
        self.signal(signal.SIGSTOP)
        wait_until(lambda: self.state() == "T")
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def kill(self) -> Ended:
        """SIGKILL, and wait."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def state(self) -> str:
        """R running, S sleeping, T held, Z ended, as Linux says."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def wait(self) -> Ended:
        """Wait for the end."""
        code = _ask({"wait": self.pid}, self._preload)
        out, err = ((self._files / name).read_text() for name in ("out", "err"))
        return Ended(code, out, err)


def start(
    *arguments: object,
    fault: str | None = None,
    at: int = 1,
    file_bytes: int | None = None,
    preload: str = "",
    prepare: Iterable[tuple[str, dict[str, Any]]] = (),
    environment: Mapping[str, str] | None = None,
) -> Command:
    """Start a command: `fault` (see `_set_up`) strikes the `at`-th time, no file may grow beyond `file_bytes`.

    The process has the library `preload` loaded, and calls the functions of `prepare` (`module:name`, with these
    keyword arguments) before the command begins; `environment` is added to its own.
    """
    files = Path(tempfile.mkdtemp(dir=_scratch().name))
    for name in ("out", "err"):
        (files / name).touch()  # it may be killed before it does so itself
    request = {
        "arguments": [str(argument) for argument in arguments],
        "files": str(files),
        "fault": fault,
        "at": at,
        "file_bytes": file_bytes,
        "prepare": list(prepare),
        "environment": dict(environment or {}),
    }
    return Command(_ask(request, preload), files, preload)


def call(*arguments: object, **options: Any) -> Ended:
    """Run a command to its end."""
    return start(*arguments, **options).wait()


def wait_until(happened: Callable[[], bool], looks: int = 60_000) -> None:
    """Look again and again, two minutes at least; for moments that no file or signal announces.

    Looks are counted, not seconds: a machine that stands still for a while must not fail a test.
    """
    for _ in range(looks):
        if happened():
            return
        time.sleep(0.002)
    raise AssertionError("it did not happen")


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="extract-warm-")


@functools.cache
def _parent(preload: str) -> subprocess.Popen[bytes]:
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if preload:
        settings["LD_PRELOAD"] = preload
    parent = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **settings}
    )
    atexit.register(_end, parent)
    return parent


def _end(parent: subprocess.Popen[bytes]) -> None:
    assert parent.stdin is not None
    parent.stdin.close()
    parent.wait(30)


def _ask(request: dict[str, Any], preload: str) -> int:
    parent = _parent(preload)
    assert parent.stdin is not None and parent.stdout is not None
    parent.stdin.write(json.dumps(request).encode() + b"\n")
    parent.stdin.flush()
    return int(parent.stdout.readline())


# --- in the warm process --------------------------------------------------------------------------------------------


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _strike(module: Any, name: str, at: int, before: bool, effect: Callable[..., object] = _die) -> None:
    """Let the `at`-th call of a function end in `effect`, before or after it did its work."""
    real, calls = getattr(module, name), []

    def struck(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == at and before:
            effect()
        result = real(*arguments, **options)
        if len(calls) == at and not before:
            effect()
        return result

    setattr(module, name, struck)


def _set_up(fault: str, at: int) -> None:
    """Let a fault strike this process."""
    import extract.commits
    import extract.completion
    import extract.publishing

    if fault == "without locks":
        import fcntl

        def no_locks(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        fcntl.lockf = no_locks  # type: ignore[assignment]
    elif fault == "before job.json is linked":
        _strike(os, "link", 1, before=True)
    elif fault == "before the data is published":
        _strike(extract.publishing, "publish", at, before=True)
    elif fault == "between data and record":
        _strike(extract.publishing, "publish", at, before=False)
    elif fault == "before the record is linked":
        _strike(extract.commits, "create_once", at, before=True, effect=lambda: _strike(os, "link", 1, before=True))
    elif fault == "right after the record is linked":
        _strike(extract.commits, "create_once", at, before=True, effect=lambda: _strike(os, "link", 1, before=False))
    elif fault == "between the last record and the manifest":
        _strike(extract.completion, "finalize", 1, before=True)
    elif fault == "before the manifest is renamed":
        _strike(extract.completion, "finalize", 1, before=True, effect=lambda: _strike(Path, "rename", 1, before=True))
    else:
        raise ValueError(fault)


def _serve(requests: BinaryIO, answers: int) -> None:
    import datasets  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import extract.cli.check
    import extract.cli.jobs
    import extract.engine.runtimes
    import extract.runners.local  # noqa: F401

    torch.set_num_threads(1)
    for line in requests:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _run(request)
        os.write(answers, f"{answer}\n".encode())


def _run(request: dict[str, Any]) -> None:
    """Never returns."""
    code = 70
    try:
        for number, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(Path(request["files"]) / name, os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(request["environment"])
        tempfile.tempdir = None  # TMPDIR is asked again
        if request["file_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], resource.RLIM_INFINITY))
        if request["fault"] is not None:
            _set_up(request["fault"], request["at"])
        for function, settings in request["prepare"]:
            module, _, name = function.partition(":")
            getattr(importlib.import_module(module), name)(**settings)
        from extract.cli import main

        main(request["arguments"])
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, answers)
