"""What it costs until the first states are there: hashing and loading weights, and three ways to compile regions.

Weights are in the page cache. An FP8 engine stores half the bytes of a bfloat16 one; `ready` is what a process waits
for it after its imports: every byte hashed, read and on the device, as a run opens engines. Beside it the same from
plain weights, rounded by the load.

`none`: plain torch between products. `jit`: torch.compile at the first pass (its disk cache is left as it is, so a
second run of this script starts faster). `ahead`: code that was compiled once into a file, as a build does, and bound.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu import ours
from gpu.rows import LIMIT, rows_of
from gpu.shapes import Shape
from gpu.time_box import Deadline, on_host, timed

BLOCK_BYTES = 64 * 2**20


def measure(shape: Shape, device: Any, folder: Path, deadline: Deadline, *, tiny: bool) -> dict[str, Any]:
    """Rates of reading, and seconds and tokens/s by way of compiling."""
    from extract.cpu.weights import WEIGHTS_FILE

    try:
        ours.made(shape, device, folder)
    except ours.NotHere as reason:
        return {"skipped": str(reason)}
    found: dict[str, Any] = reading(folder / WEIGHTS_FILE, device)
    stored = folder.with_name(f"{folder.name}-fp8")
    if deadline.affords(1.0 if tiny else 30.0, "an engine that stores FP8"):
        try:
            ours.made(shape, device, stored, fp8=True)
            found["stored as FP8"] = reading(stored / WEIGHTS_FILE, device)
            found["FP8 ready"] = ready(stored, shape, device)
            found["FP8 ready from plain weights"] = ready(folder, shape, device)
        except ours.NotHere as reason:
            found["stored as FP8"] = {"missing": str(reason)}
    for mode in ("none", "ahead", "jit"):
        if deadline.affords(0.0 if mode == "none" else 1.0 if tiny else 12.0, f"regions: {mode}"):
            try:
                found[f"regions: {mode}"] = _mode(mode, shape, device, folder, deadline, tiny=tiny)
            except Exception as error:  # no compiler, no Triton: the other ways still count
                found[f"regions: {mode}"] = {"missing": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return found


def reading(path: Path, device: Any) -> dict[str, Any]:
    """GB/s of a weights file in the page cache: hashed, and brought to the device."""
    import warnings

    import torch

    from extract.canonical import blocks_digest, file_digest
    from extract.cpu.mapped_weights import FP8, PLAIN, WeightsFile
    from extract.cuda.loading import WeightsLoader

    size = path.stat().st_size

    def loaded() -> None:
        with WeightsFile(path) as file, WeightsLoader(file, device) as loader:
            arrays = [file.tensor(name, types=PLAIN + FP8) for name in sorted(file.names)]
            for place, array in enumerate(arrays):
                for soon in arrays[place : place + 4]:
                    loader.begin(soon)
                loader.take(array)

    def plainly() -> None:
        with WeightsFile(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in sorted(file.names):
                torch.from_numpy(file.tensor(name, types=PLAIN + FP8)).to(device, copy=True)

    ways = {
        "hashed as one stream": lambda: file_digest(path),
        "hashed in blocks": lambda: blocks_digest(path, BLOCK_BYTES),
        "loaded plainly": plainly,
        "loaded by threads": loaded,
    }
    rates = {}
    for name, work in ways.items():
        seconds = timed(lambda work=work: on_host(device, work), at_least_s=0.0, runs=2, most=2).fastest
        rates[f"GB/s {name}"] = size / seconds / 1e9
    return {"file_gib": size / 2**30} | rates


def ready(folder: Path, shape: Shape, device: Any) -> dict[str, Any]:
    """Seconds and GB/s until an FP8 engine is open: its files hashed, and its weights on the device."""
    from dataclasses import replace

    from extract.cuda.opening import open_cuda_runtime
    from extract.engine.contract import describe_file
    from extract.engine.runtimes import load_while_hashing

    contract = ours.contract_of(folder, shape, "fp8", device, 1024)
    contract = replace(contract, runtime=replace(contract.runtime, compile="none"))
    hashed = tuple(describe_file(folder / file.name) for file in contract.files)
    contract = replace(contract, files=hashed)
    size = sum(file.size for file in hashed)

    def opened() -> Any:
        return open_cuda_runtime(folder, contract, card=ours.host_card(device))

    def once(work: Callable[[], Any]) -> float:
        return on_host(device, lambda: work().close())

    ways = {"hashed while read": lambda: load_while_hashing(folder, contract, opened), "read alone": opened}
    fastest = {
        name: timed(lambda work=work: once(work), at_least_s=0.0, runs=2, most=2).fastest for name, work in ways.items()
    }
    seconds = fastest["hashed while read"]
    return {"gib": size / 2**30, "s": seconds, "s without hashing": fastest["read alone"], "GB/s": size / seconds / 1e9}


def _mode(mode: str, shape: Shape, device: Any, folder: Path, deadline: Deadline, *, tiny: bool) -> dict[str, Any]:
    import torch

    from extract.cpu.architecture import read_architecture
    from extract.cpu.mapped_weights import WeightsFile
    from extract.cpu.weights import WEIGHTS_FILE
    from extract.cuda.ahead_of_time import compile_regions, seen_variants
    from extract.cuda.attention import choose_backend
    from extract.cuda.packaged_regions import bind_regions, here
    from extract.cuda.regions import fuse
    from extract.cuda.weights import load_decoder
    from extract.engine.contract import COMPILED_FILE
    from extract.engine.device import this_device

    architecture = read_architecture(folder)
    about = this_device(device.type)
    backend = choose_backend(architecture, torch.bfloat16, device.type, about.compute_capability).backend
    with WeightsFile(folder / WEIGHTS_FILE) as weights:
        decoder = load_decoder(architecture, weights, "bfloat16", device=device, max_positions=LIMIT, backend=backend)
    pass_tokens = 256 if tiny else 16_384
    inputs = _inputs(rows_of("full", pass_tokens // LIMIT, shape.vocabulary), device)
    found: dict[str, Any] = {}
    if mode == "ahead":
        path = folder.parent / f"{shape.name}-{COMPILED_FILE}"

        def passes() -> None:
            small = _inputs(rows_of("full", 4, shape.vocabulary, limit=16), device)
            decoder(*small, LIMIT)
            decoder(*small, LIMIT, last=True)

        started = time.perf_counter()
        variants = seen_variants(decoder, passes)
        compile_regions(variants, path, max_rows=pass_tokens)
        found["compile_s"] = time.perf_counter() - started
        found |= {"pieces": len(variants), "file_mib": path.stat().st_size / 2**20}
        found["bind_s"] = on_host(device, lambda: bind_regions(decoder, path, here(device), device))
    elif mode == "jit":
        fuse(decoder.modules())
    with torch.inference_mode():
        found["first_pass_s"] = on_host(device, lambda: decoder(*inputs, LIMIT))
        run = timed(
            lambda: on_host(device, lambda: decoder(*inputs, LIMIT)),
            at_least_s=0.0 if tiny else 0.5,
            most=20,
            deadline=deadline,
        )
    found["tokens_per_s"] = len(inputs[0]) / run.median
    return found


def _inputs(rows: list[Any], device: Any) -> tuple[Any, Any, Any]:
    """ids, positions and cumulative lengths on the device."""
    import numpy as np
    import torch

    batch = ours.batch_of(rows)
    positions = np.concatenate([np.arange(len(row), dtype=np.int32) for row in rows])
    return tuple(torch.from_numpy(one).to(device) for one in (batch.input_ids, positions, batch.cu_seqlens))
