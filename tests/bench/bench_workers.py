"""How the work of one machine grows with workers, and what Ray costs over worker processes.

Limit: memory bandwidth and the clock under load. One process of one thread, then N workers of one thread, then N
workers of one thread on a Ray instance of this machine, in turns on the same rows. Rates count from the first pass of
the first worker, so start-up (which is printed beside them) is not in them, but the wait for the last shard is.

    python tests/bench/bench_workers.py --engine demo/engine --data demo/passages.parquet --rows 400
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any


def run(arguments: argparse.Namespace, out: Path, *options: object) -> dict[str, Any]:
    """One run in a process of its own, with the seconds of the whole command."""
    command = [sys.executable, "-m", "extract", "run", "--engine", arguments.engine, "--data", arguments.data]
    command += ["-o", str(out), "--limit", str(arguments.rows), "--rows-per-shard", str(arguments.rows_per_shard)]
    command += ["--threads", "1", "--kind", "last", "--reserve-bytes", "0", "--quiet", "--json", *map(str, options)]
    started = time.perf_counter()
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    found: dict[str, Any] = json.loads(ended.stdout)
    return {**found, "command_seconds": time.perf_counter() - started}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--rows-per-shard", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("--without-one", action="store_true", help="only workers against Ray: a long job")
    arguments = parser.parse_args()
    several = ["--workers", arguments.workers]
    ways: dict[str, list[object]] = {} if arguments.without_one else {"one process": []}
    ways[f"{arguments.workers} workers"] = several
    if not arguments.without_ray:
        ways[f"{arguments.workers} on ray"] = [*several, "--on", "ray"]
    rates: dict[str, list[float]] = {way: [] for way in ways}
    startup: dict[str, list[float]] = {way: [] for way in ways}
    manifests = set()
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.rounds):
            for way, options in ways.items():
                out = Path(folder) / f"{turn}-{way.replace(' ', '-')}"
                found = run(arguments, out, *options)
                rates[way].append(found["tokens_per_s"])
                startup[way].append(found["command_seconds"] - found["tokens_computed"] / found["tokens_per_s"])
                manifests.add((out / "manifest.json").read_bytes())
                shutil.rmtree(out)
    if len(manifests) != 1:
        raise SystemExit("the ways gave different bytes")
    packages = {name: metadata.version(name) for name in ("torch", "numpy", "pyarrow", "ray")}
    card = {
        "machine": f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "load": os.getloadavg()[0],
        "rows": arguments.rows,
        "rounds": arguments.rounds,
        **packages,
    }
    print(" | ".join(f"{key} {value}" for key, value in card.items()))
    first, last = next(iter(ways)), list(ways)[-1]
    medians = {way: statistics.median(found) for way, found in rates.items()}
    for way, found in rates.items():
        print(
            f"{way:<14} {medians[way]:>9,.0f} tokens/s (from {min(found):,.0f} to {max(found):,.0f}), "
            f"{medians[way] / medians[first]:.2f} x {first}, {statistics.median(startup[way]):.1f} s around it"
        )
    if not arguments.without_ray:
        second = f"{arguments.workers} workers"
        print(f"ray takes {100 * (1 - medians[last] / medians[second]):+.1f} % of the rate of {second}")
    print(json.dumps({"card": card, "tokens_per_s": rates, "seconds_around": startup}))


if __name__ == "__main__":
    main()
