"""The C++ kernels compiled for this CPU: once per machine, into the user's cache, kept only when they prove right.

The library's name is a hash of source, compiler and CPU, so a new version or another machine sharing the home directory
compiles its own. A compiler that is missing or fails means no native kernels, never a failed run: the portable ones
take over. Engines never carry the library.
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

from extract.cpu.cpu_flags import cpu_identity

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


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A loaded library, or why there is none.

    Attributes:
        functions: `None` if there is none.
        problem: empty, or one sentence.
    """

    functions: ctypes.CDLL | None
    problem: str = ""
    bfloat16: bool = False
    int8: bool = False
    amx: bool = False


def cache_directory() -> Path:
    """Where compiled kernels lie: `$XDG_CACHE_HOME/extract` or `~/.cache/extract`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "extract" / "kernels"


@cache
def native_library() -> NativeLibrary:
    """Load the library, compiling it first if this machine has not done so yet (about ten seconds)."""
    compiler = _compiler()
    if compiler is None:
        return NativeLibrary(None, "no C++ compiler (c++, g++ or clang++) on PATH")
    try:
        path = _compiled(compiler)
        functions = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return NativeLibrary(None, f"{type(error).__name__}: {str(error)[:300]}")
    functions.extract_capabilities.restype = ctypes.c_int
    found = int(functions.extract_capabilities())
    return NativeLibrary(functions, bfloat16=bool(found & 1), int8=bool(found & 2), amx=bool(found & 4))


def _compiler() -> str | None:
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def _compiled(compiler: str) -> Path:
    """The library for this source, compiler and CPU."""
    key = hashlib.sha256()
    sources = sorted(SOURCE.iterdir())
    for source in sources:
        key.update(source.read_bytes())
    about = Path(compiler).resolve()
    key.update(f"{about} {about.stat().st_size} {about.stat().st_mtime_ns} {cpu_identity()} {FLAGS}".encode())
    path = cache_directory() / f"{key.hexdigest()[:24]}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            draft = Path(scratch) / path.name
            command = [compiler, *FLAGS, "-o", str(draft), str(SOURCE / "kernels.cpp")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{Path(compiler).name} ended with {done.returncode}: {done.stderr.strip()[:200]}")
            draft.replace(path)  # whole or not at all, also when two processes compile at once
    return path
