"""What it costs until the first states are there: hashing and loading weights, and three ways to compile regions.

`none`: plain torch between products. `jit`: torch.compile at the first pass (its disk cache is left as it is, so a
second run of this script starts faster). `ahead`: code that was compiled once into a file, as a build does, and bound.
"""

import time
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
    from extract.cpu.mapped_weights import WeightsFile
    from extract.cuda.loading import WeightsLoader

    size = path.stat().st_size

    def loaded() -> None:
        with WeightsFile(path) as file, WeightsLoader(file, device) as loader:
            arrays = [file.tensor(name) for name in sorted(file.names)]
            loader.begin(arrays[:4])
            for place, array in enumerate(arrays):
                loader.begin(arrays[place : place + 4])
                loader.take(array)

    def plainly() -> None:
        with WeightsFile(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in sorted(file.names):
                torch.from_numpy(file.tensor(name)).to(device, copy=True)

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
