"""States of a real model -> a shard file: what each stage costs, and how fast one and several threads are.

Takes the states of an output (those of `make demo` by default), as a card hands them down: bfloat16, with the word that
they are finite. Stages run one after the other in one thread and are timed by that thread's own clock, in GB/s of
states, so that the cores that a rate needs follow by arithmetic: a card that makes 100,000 tokens/s of H = 4,096 gives
0.8 GB/s. `encode` makes record batches of the stored type, `compress` their messages; `hash` and `write` are of what is
left to store. Then whole shards by the job's own writer, on the wall's clock, interleaved by round; the best round
counts, as others may use the machine, and `cores` are the process's own seconds, which do not depend on them. All
shards of a case must be the same bytes. The binding limits are the cores, and memory where nothing is compressed.

    make demo && python tests/bench/bench_sink.py --folder /dev/shm
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent.parent))

import shard_rig

from extract.output import open_output
from extract.records import States, TokenRows
from extract.shards.batches import as_stored, bytes_by_row, cuts, encoded_part, record_batch
from extract.shards.sink import ShardWriter, write_options
from extract.shards.threaded_ipc import ThreadedIpcFile
from extract.shards.values import bfloat16_bits
from extract.spec import StatesSpec

CARD_GB_PER_S = 0.8
CASES = {
    f"{dtype} {compression}": StatesSpec(dtype=dtype, compression=compression)  # type: ignore[arg-type]
    for dtype, compression in (
        ("bfloat16", "zstd"),
        ("float16", "zstd"),
        ("bfloat16", "lz4"),
        ("bfloat16", "none"),
        ("float16", "none"),
    )
}
STAGES = ("encode", "compress", "hash", "write")


def main(words: list[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--output", default="demo/out", help="a job's output with states of every token")
    arguments.add_argument("--megabytes", type=float, default=150, help="of bfloat16 states in a window")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    arguments.add_argument("--folder", default=None, help="where shards are written")
    given = arguments.parse_args(words)

    rows, states = real_states(Path(given.output), given.megabytes)
    gigabytes = states.nbytes / 1e9
    print(f"device   {_cpu()}, {len(os.sched_getaffinity(0))} CPUs")
    print(f"versions pyarrow {pa.__version__}, numpy {np.__version__}, Python {platform.python_version()}")
    print(f"work     {gigabytes * 1e3:,.0f} MB of bfloat16 states [{states.shape[0]:,}, {states.shape[1]}] a shard")
    columns = [*STAGES, *(name for each in given.threads for name in (f"{each} thr.", "cores"))]
    print(f"GB/s of states; cores: busy ones for {CARD_GB_PER_S} GB/s; stored: bytes of a shard by bytes of states")
    print(f"{'':<16}{'stored':>8}{''.join(f'{name:>10}' for name in columns)}")
    found = {}
    with tempfile.TemporaryDirectory(prefix="bench-sink-", dir=given.folder) as folder:
        for name, spec in CASES.items():
            found[name] = one = measure(rows, states, spec, Path(folder), given.threads, given.rounds)
            rates = [one["stages"][stage] for stage in STAGES]
            speeds = [one[key][each] for each in given.threads for key in ("gb_per_s", "cores")]
            numbers = "".join(f"{number:10.2f}" for number in (*rates, *speeds))
            print(f"{name:<16}{one['stored']:8.2f}{numbers}", flush=True)
    print(json.dumps({"bench": "sink", "gigabytes": gigabytes, "cases": found}))


def real_states(root: Path, megabytes: float) -> tuple[TokenRows, States]:
    """Rows and bfloat16 states of an output, over and over until there are as many as asked for."""
    lengths, parts = [], []
    for batch in open_output(root).batches():
        spans = batch.state_spans
        lengths.append(spans.stops - spans.starts)
        parts.append(bfloat16_bits(batch.states))
    states = np.concatenate(parts)
    times = max(1, round(megabytes * 1e6 / states.nbytes))
    return shard_rig.token_rows(np.tile(np.concatenate(lengths), times)), np.tile(states, (times, 1))


def measure(
    rows: TokenRows, states: States, spec: StatesSpec, folder: Path, threads: list[int], rounds: int
) -> dict[str, Any]:
    """GB/s of states of each stage in one thread, and of whole shards by threads."""
    gigabytes, path = states.nbytes / 1e9, folder / "shard"
    taken, sizes = zip(*(_stages(rows, states, spec, path) for _ in range(rounds)), strict=True)
    seconds = {stage: min(one[stage] for one in taken) for stage in STAGES}
    wall, busy = (dict.fromkeys(threads, float("inf")) for _ in range(2))
    digests = set()
    for _ in range(rounds):
        for number in threads:
            clocks = time.perf_counter(), time.process_time()
            digests.add(_shard(rows, states, spec, path, number))
            wall[number] = min(wall[number], time.perf_counter() - clocks[0])
            busy[number] = min(busy[number], time.process_time() - clocks[1])
    assert len(digests) == 1, "shards differ by the number of threads"
    return {
        "stored": sizes[0] / states.nbytes,
        "stages": {stage: gigabytes / spent for stage, spent in seconds.items()},
        "gb_per_s": {number: gigabytes / spent for number, spent in wall.items()},
        "cores": {number: CARD_GB_PER_S * spent / gigabytes for number, spent in busy.items()},
    }


def _stages(rows: TokenRows, states: States, spec: StatesSpec, path: Path) -> tuple[dict[str, float], int]:
    """Seconds of each stage, and the bytes that were written."""
    schema = shard_rig.schema_for(spec, width=states.shape[1])
    count = len(rows.outcome)
    source, positions = as_stored(shard_rig.carried(count), schema), np.arange(count)
    seconds, size = dict.fromkeys(STAGES, 0.0), 0

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        clock = time.thread_time()
        result = work()
        seconds[stage] += time.thread_time() - clock
        return result

    with path.open("wb") as file:
        ipc, sha256 = ThreadedIpcFile(file, schema, write_options(spec)), hashlib.sha256()
        for cut in cuts(rows, states.shape[1], spec, bytes_by_row(source, count)):
            part = timed("encode", lambda cut=cut: encoded_part(cut, rows, states, spec, finite=(True,)))
            batch = timed("encode", lambda part=part: record_batch(part, rows, source, positions, spec, schema))
            message = timed("compress", lambda batch=batch: ipc.prepared(batch))
            timed("hash", lambda message=message: [sha256.update(piece) for piece in message.pieces])
            timed("write", lambda message=message: ipc.append(message))
            size += message.metadata + message.body
    return seconds, size


def _shard(rows: TokenRows, states: States, spec: StatesSpec, path: Path, threads: int) -> str:
    """The sha256 of a shard by the job's own writer."""
    schema = shard_rig.schema_for(spec, width=states.shape[1])
    count = len(rows.outcome)
    writer = ShardWriter(path, schema, spec, states.shape[1], 0, threads=threads)
    writer.write(rows, shard_rig.carried(count), np.arange(count), states, finite=(True,))
    return writer.close().sha256


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
