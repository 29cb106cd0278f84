"""How fast this machine multiplies matrices of the model's shapes: the limit that every engine is measured against.

torch's oneDNN linears with prepacked weights: float32, bfloat16 and int8 (uint8 times int8, bfloat16 out, as a W8A8
layer needs it), the four linears of one layer one after the other. Three ways: one thread, all threads in one GEMM, and
one independent GEMM a thread; the best of all ways and batch sizes is the ceiling. A process of its own: it leaves no
threads behind, and malloc keeps its pages, or wide outputs would measure page faults.

    python -m peers.ceilings CHECKPOINT --threads 2 --seconds 3      -> one JSON object
"""

import argparse
import ctypes
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "int8")
ROWS = (128, 256, 512, 1024, 2048)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The linears of a decoder: (outputs, inputs) of each one in a layer."""

    shapes: tuple[tuple[int, int], ...]
    num_layers: int

    @property
    def flops_per_token(self) -> int:
        """Of the linears alone: attention adds some 2 % at 100 tokens, the head is not part of the task."""
        return 2 * self.num_layers * sum(outputs * inputs for outputs, inputs in self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The best of all ways for one dtype, and the best of one thread."""

    gflops: float
    rows: int
    way: str
    one_thread_gflops: float
    tokens_per_s: float


def model_of(checkpoint: Path) -> Model:
    """Shapes out of a checkpoint's config.json (llama-like layers)."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    shapes = (
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    )
    return Model(shapes=shapes, num_layers=config["num_hidden_layers"])


def measure(model: Model, dtype: str, threads: int, seconds: float) -> Ceiling:
    """Spend about `seconds` on one dtype."""
    ways: dict[str, tuple[int, int]] = {"1 thread": (1, 1)}  # how many GEMMs at once, threads of each
    if threads > 1:
        ways |= {f"1 GEMM of {threads} threads": (1, threads), f"{threads} GEMMs of 1 thread": (threads, 1)}
    seen: list[tuple[float, int, str]] = []
    for way, (gemms, of_threads) in ways.items():
        for rows in ROWS:
            layers = [_layer(model, dtype, rows) for _ in range(gemms)]
            passes = _passes_per_s(layers, of_threads, seconds / len(ways) / len(ROWS))
            seen.append((passes * rows * model.flops_per_token / model.num_layers / 1e9, rows, way))
    gflops, rows, way = max(seen)
    return Ceiling(
        gflops=round(gflops, 1),
        rows=rows,
        way=way,
        one_thread_gflops=round(max(speed for speed, _, way in seen if way == "1 thread"), 1),
        tokens_per_s=round(gflops * 1e9 / model.flops_per_token, 1),
    )


def _layer(model: Model, dtype: str, rows: int) -> Callable[[], None]:
    calls = [_linear(outputs, inputs, dtype, rows) for outputs, inputs in model.shapes]

    def run() -> None:
        for call in calls:
            call()

    return run


def _linear(outputs: int, inputs: int, dtype: str, rows: int) -> Callable[[], Any]:
    import torch

    if dtype == "int8":
        a = torch.randint(0, 256, (rows, inputs), dtype=torch.uint8)
        w = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(w, [rows, inputs])
        scales, zeros = torch.full((outputs,), 1e-4), torch.zeros(outputs, dtype=torch.int64)
        quantized = torch.ops.onednn.qlinear_pointwise.default
        return lambda: quantized(a, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], "")
    a = torch.randn(rows, inputs, dtype=getattr(torch, dtype))
    w = torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs, dtype=a.dtype), rows)
    plain = torch.ops.mkldnn._linear_pointwise.default
    return lambda: plain(a, w, None, "none", [], "")


def _passes_per_s(layers: list[Callable[[], None]], threads: int, seconds: float) -> float:
    """Layer passes a second, all GEMMs together."""
    import torch

    together = threading.Barrier(len(layers))
    found = [0.0] * len(layers)

    def work(number: int) -> None:
        torch.set_num_threads(threads)  # of this thread's own GEMMs
        run = layers[number]
        with torch.inference_mode():
            run()
            together.wait()
            started, passes = time.perf_counter(), 0
            while (spent := time.perf_counter() - started) < seconds or passes == 0:
                run()
                passes += 1
        found[number] = passes / spent if spent else 0.0

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(layers))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(found)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("checkpoint", type=Path)
    arguments.add_argument("--threads", type=int, required=True)
    arguments.add_argument("--seconds", type=float, default=3.0)
    given = arguments.parse_args()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    model = model_of(given.checkpoint)
    found = {dtype: asdict(measure(model, dtype, given.threads, given.seconds)) for dtype in DTYPES}
    print(json.dumps({"flops_per_token": model.flops_per_token, "ceilings": found}))


if __name__ == "__main__":
    main()
