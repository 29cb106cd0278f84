"""The C++ kernels compiled for this CPU: once per machine, into the user's cache.

The library's name is a hash of source, compiler and CPU, so a new version or another machine sharing the home directory
compiles its own. A compiler that is missing or fails means no native kernels, never a failed run: the portable ones
take over. Engines never carry the library. Whether it is right and fast is `extract.cpu.native_trial`'s business.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from extract.cpu.cpu_flags import cpu_identity
from extract.errors import EngineRefused

if TYPE_CHECKING:
    from extract.cpu.kernels import Precision

SOURCE = Path(__file__).parent / "native_source"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-shared",
    "-fPIC",
    "-w",
)
COMPILE_S = 300.0

_DIGEST_BYTES = 32
"""SHA-256 of a library, appended to it: loaders read no further than they must, and a cut file shows."""


class CompilerFailed(EngineRefused):
    """The compiler found fault with the source or with itself."""

    template = "{compiler} ended with {code}: {said}"


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A loaded library, or why there is none.

    Attributes:
        functions: `None` if there is none.
        problem: empty, or one sentence.
        path: where it lies.
    """

    functions: ctypes.CDLL | None
    problem: str = ""
    path: Path | None = None
    bfloat16: bool = False
    int8: bool = False
    amx: bool = False

    def missing(self, precision: "Precision") -> str:
        """Why a precision cannot be computed with it; empty if it can."""
        if self.problem:
            return self.problem
        if (precision == "bfloat16" and not self.bfloat16) or (precision == "int8" and not self.int8):
            return "this CPU has no instructions for it that they know"
        return ""


def cache_directory() -> Path:
    """Where compiled kernels lie: `$XDG_CACHE_HOME/extract` or `~/.cache/extract`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "extract" / "kernels"


@cache
def native_library() -> NativeLibrary:
    """Load the library, compiling it first if this machine has not done so yet (about ten seconds)."""
    found = _open(may_compile=True)
    assert found is not None
    return found


def library_if_compiled() -> NativeLibrary | None:
    """The same without compiling: `None` where that is still to be done."""
    return _open(may_compile=False)


def _open(*, may_compile: bool) -> NativeLibrary | None:
    compiler = find_compiler()
    if compiler is None:
        return NativeLibrary(None, "no C++ compiler (c++, g++ or clang++) on PATH")
    try:
        path = _path(compiler)
        if not _is_whole(path):
            if not may_compile:
                return None
            _compile(compiler, path)
        functions = ctypes.CDLL(str(path))
        functions.extract_capabilities.restype = ctypes.c_int
    except CompilerFailed as error:
        return NativeLibrary(None, str(error))
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError) as error:
        return NativeLibrary(None, f"{type(error).__name__}: {str(error)[:300]}")
    found = int(functions.extract_capabilities())
    return NativeLibrary(functions, path=path, bfloat16=bool(found & 1), int8=bool(found & 2), amx=bool(found & 4))


def find_compiler() -> str | None:
    """The C++ compiler that would compile the kernels."""
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def _path(compiler: str) -> Path:
    """Where the library for this source, compiler and CPU lies or will lie."""
    key = hashlib.sha256()
    for source in sorted(SOURCE.iterdir()):
        content = source.read_bytes()
        key.update(f"{source.name} {len(content)} ".encode() + content)
    about = Path(compiler).resolve()
    key.update(f"{about} {about.stat().st_size} {about.stat().st_mtime_ns} {cpu_identity()} {FLAGS}".encode())
    return cache_directory() / f"{key.hexdigest()[:24]}.so"


def _is_whole(path: Path) -> bool:
    if not path.is_file():
        return False
    content = path.read_bytes()
    return content[-_DIGEST_BYTES:] == hashlib.sha256(content[:-_DIGEST_BYTES]).digest()


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        draft = Path(scratch) / path.name
        command = [compiler, *FLAGS, "-o", str(draft), str(SOURCE / "kernels.cpp")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        if done.returncode != 0:
            raise CompilerFailed(compiler=Path(compiler).name, code=done.returncode, said=done.stderr.strip()[:200])
        content = draft.read_bytes()
        draft.write_bytes(content + hashlib.sha256(content).digest())
        draft.replace(path)  # whole or not at all, also when two processes compile at once
