"""Reading an output back through our API against plain pyarrow on the same files, states touched in the same way.

Measures GB/s of stored or decoded states of three things in one process, interleaved by round: `pyarrow`, the record
batches of every file with nothing around them (int8 decoded by the lines of numpy that stand in the file's metadata);
`numpy`, `open_output(...).batches()`; `torch`, `open_output(...).torch_iterable()`, whole batches in the order of the
source. Touching is a bitwise exclusive or over all bytes: it reads each once, costs little, and must come out the same.
The binding limit is decompression where the files are compressed, else memory: our part should cost nothing beside it,
so each ratio to pyarrow should be near 1, 0.9 at least. The exception are batches for torch of files without
compression: a batch of a fixed number of rows that lies across two record batches is copied, and nothing else that is
done with states is as fast as the exclusive or that it is measured against. Files are in the page cache.

    make bench-read            or: python tests/bench/bench_read_back.py --megabytes 200
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import shard_rig

from extract.output import open_output
from extract.shards import schema as names
from extract.spec import StatesSpec

WIDTH = 576
LENGTH = 60
BATCH_SIZE = {"tokens": 32, "last": 256}
CASES = {
    "tokens float16 zstd": StatesSpec(kind="tokens", dtype="float16", compression="zstd"),
    "tokens float16 none": StatesSpec(kind="tokens", dtype="float16", compression="none"),
    "pooled float32 zstd": StatesSpec(kind="last", dtype="float32", compression="zstd"),
    "pooled float32 none": StatesSpec(kind="last", dtype="float32", compression="none"),
    "tokens int8 zstd": StatesSpec(kind="tokens", dtype="int8", compression="zstd"),
}
SHARDS = 2
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main(words: list[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--megabytes", type=float, default=200, help="of states a case, before compression")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu: on a machine that others use")
    given = arguments.parse_args(words)

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"device   {_cpu()}, {len(os.sched_getaffinity(0))} CPUs")
    print(
        f"versions pyarrow {pa.__version__}, numpy {np.__version__}, torch {torch.__version__}, {commit.stdout.strip()}"
    )
    print(
        f"work     {given.megabytes:g} MB of states a case, {given.rounds} rounds, GB/s of states as they are touched"
    )
    print(f"{'case':<22}{'pyarrow':>9}{'numpy':>9}{'torch':>9}{'numpy/pyarrow':>15}{'torch/pyarrow':>15}")
    found = {}
    with tempfile.TemporaryDirectory(prefix="bench-read-") as folder:
        for name in given.cases:
            root = Path(folder) / name.replace(" ", "-")
            write(root, CASES[name], given.megabytes)
            found[name] = measure(root, CASES[name], given.rounds, CLOCKS[given.clock])
            speeds, ratios = found[name]["speeds"], found[name]["ratios"]
            print(
                f"{name:<22}{''.join(f'{speed:9.2f}' for speed in speeds.values())}"
                f"{''.join(f'{ratio:15.3f}' for ratio in ratios.values())}"
            )
    print(json.dumps({"bench": "read-back", "megabytes": given.megabytes, "cases": found}))


def write(root: Path, spec: StatesSpec, megabytes: float) -> None:
    """An output of random states in some shards."""
    per_row = WIDTH * (LENGTH if spec.kind == "tokens" else 1) * {"float16": 2, "float32": 4, "int8": 1}[spec.dtype]
    num_rows = max(1, int(megabytes * 1e6 / per_row / SHARDS))
    lengths = np.random.default_rng(0).integers(LENGTH // 2, LENGTH * 3 // 2, num_rows)
    shard_rig.write_output(root, spec, num_shards=SHARDS, rows_per_shard=num_rows, lengths=lengths, width=WIDTH)


def measure(
    root: Path, spec: StatesSpec, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Speeds, and the median over rounds of each ratio."""
    ways: dict[str, Callable[[], tuple[int, int]]] = {
        "pyarrow": lambda: plain(sorted((root / "data").iterdir()), spec),
        "numpy": lambda: ours(root, spec),
        "torch": lambda: ours_for_torch(root, spec),
    }
    seen = {name: way() for name, way in ways.items()}  # which also warms up
    assert len(set(seen.values())) == 1, seen
    num_bytes = seen["pyarrow"][1]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(rounds):
        for name in order[number % 3 :] + order[: number % 3]:
            started = clock()
            ways[name]()
            seconds[name].append(clock() - started)
    return {
        "speeds": {name: num_bytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()},
        "ratios": {
            name: statistics.median(a / b for a, b in zip(seconds["pyarrow"], seconds[name], strict=True))
            for name in ("numpy", "torch")
        },
    }


def plain(files: list[Path], spec: StatesSpec) -> tuple[int, int]:
    """Arrow alone: what the states come to, and their bytes."""
    name, total, num_bytes = names.states_name(spec), 0, 0
    for path in files:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            recipe = compile(reader.schema.metadata[b"extract.read"].decode(), "extract.read", "exec")
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                column = batch.column(name)
                lists = column.values if spec.kind == "tokens" else column
                states = lists.values.to_numpy().reshape(-1, lists.type.list_size)
                if spec.dtype == "int8":
                    scale = batch.column(name + names.SCALE_SUFFIX).values.to_numpy()
                    variables = {"numpy": np, "values": states, "scale": scale}
                    exec(recipe, variables)
                    states = variables["states"]
                total ^= touched(states)
                num_bytes += states.nbytes
    return total, num_bytes


def ours(root: Path, spec: StatesSpec) -> tuple[int, int]:
    """The same through `batches`."""
    total = num_bytes = 0
    for batch in open_output(root).batches():
        states = batch.states if spec.dtype == "int8" else batch.values
        total ^= touched(states)
        num_bytes += states.nbytes
    return total, num_bytes


def ours_for_torch(root: Path, spec: StatesSpec) -> tuple[int, int]:
    """The same through `torch_iterable`."""
    name, total, num_bytes = names.states_name(spec), 0, 0
    for batch in open_output(root).torch_iterable([name], batch_size=BATCH_SIZE[spec.kind]):
        states = batch[name].numpy()
        total ^= touched(states)
        num_bytes += states.nbytes
    return total, num_bytes


def touched(states: np.ndarray) -> int:
    """All bytes, once."""
    return int(np.bitwise_xor.reduce(states.reshape(-1).view(np.uint64)))


def _cpu() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
