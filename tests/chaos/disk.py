"""The disk shim: compiled once with the system's C compiler, armed in the process that is to be broken.

`Armed` says which of the operations below a directory strikes, and how. The log that the shim writes is what
`power_loss` goes by.
"""

import ctypes
import errno
import functools
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OPERATIONS = {"create": 1, "write": 2, "fsync": 4, "rename": 8, "link": 16, "unlink": 32, "mkdir": 64}
ACTIONS = {"record": 0, "fail": 1, "short": 2, "kill before": 3, "kill after": 4, "short, then fail": 5}
SOURCE = Path(__file__).parent / "disk_shim.c"


@dataclass(frozen=True, kw_only=True)
class Armed:
    """The `nth` of `operations` (and, if it `stays`, every later one) meets `action`, failing with `error`."""

    operations: tuple[str, ...] = ()
    action: str = "record"
    error: str = "EIO"
    nth: int = 1
    stays: bool = False

    def preparation(self, root: Path, log: Path) -> tuple[str, dict[str, Any]]:
        """What `warm_command.start` is to call in the process."""
        return "chaos.disk:arm", {"root": str(root), "log": str(log), **asdict(self)}


def arm(*, root: str, log: str, operations: tuple[str, ...], action: str, error: str, nth: int, stays: bool) -> None:
    """Arm the shim in this process."""
    chosen = sum(OPERATIONS[operation] for operation in operations)
    function = ctypes.CDLL(None).shim_arm
    function.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    function.argtypes += [ctypes.c_int]
    function(root.encode(), log.encode(), chosen, ACTIONS[action], getattr(errno, error), nth, stays)


def struck(log: Path) -> bool:
    """Whether the armed operation was reached."""
    return log.is_file() and any(line.startswith("!") for line in log.read_text().splitlines())


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="extract-chaos-shim-")


@functools.cache
def shim() -> tuple[str, str]:
    """Path of the compiled shim and "", or "" and why there is none."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "", "no C compiler (cc, gcc, clang) is installed"
    target = Path(_folder().name) / "disk_shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(target), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return "", f"the shim does not compile here: {done.stderr.strip().splitlines()[-1]}"
    return str(target), ""
