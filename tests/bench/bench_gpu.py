"""Ours on a CUDA card beside its own ceilings, transformers and vLLM: one command, under six minutes, no downloads.

    make bench-gpu                               on a machine with a card
    python tests/bench/bench_gpu.py              the same without make; needs torch, transformers, numpy, pyarrow
    ... --parts "start,qwen3" --seconds 200      what time cut off the first time
    ... --device cpu --tiny                      the same code with tiny shapes, to try the script itself

Numbers come first: engines against float32 of the same weights. Then what binds: this card's own products (bfloat16,
FP8) and copies. Then models of 1 and 8 billion random weights over rows of 128 tokens: every token and last token,
without and with a shared prefix of 70 %, by size of a pass; transformers on the same card and rows; a whole job to
shards on disk; what a start costs. Parts come in the order of their worth and each has its time: what did not fit is
named, and so is what is missing here. The last line is one JSON object, whatever happened before.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the checkout, where it is not installed

from gpu import card, report  # noqa: E402
from gpu.time_box import Deadline  # noqa: E402

GRACE_S = 20.0
"""After the time of all parts: whoever hangs is ended, and what was measured is printed."""


PATIENCE = 20
"""Times as long as on a card a part may take where the script itself is tried, on whatever machine that is."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something to measure.

    Attributes:
        seconds: most that it may take.
        needs: packages that it imports beside torch and numpy.
    """

    name: str
    seconds: float
    run: Callable[["Bench", Deadline], dict[str, Any]]
    needs: tuple[str, ...] = ()


@dataclass(slots=True)
class Bench:
    """What parts share.

    Attributes:
        shapes: models that are measured, by name.
        found: results so far, by part.
        scratch: folder for weights and shards.
    """

    device: Any
    tiny: bool
    shapes: dict[str, Any]
    checked: dict[str, Any]
    scratch: Path
    vllm_python: str
    found: dict[str, Any] = field(default_factory=dict)


COMPILED = (("llama", "bfloat16"), ("llama", "fp8"), ("qwen3", "bfloat16"))
"""Whose numbers are checked with compiled regions, which takes ten seconds each; the others run plainly."""


def numbers(bench: Bench, deadline: Deadline) -> dict[str, Any]:
    import torch
    from gpu import numbers as check
    from gpu import ours
    from gpu.shapes import random_model

    found: dict[str, Any] = {}
    for name, shape in bench.checked.items():
        model = random_model(shape, bench.device, torch.bfloat16)
        rows = check.checked_rows(shape.vocabulary)
        expected = check.truth(model.float(), bench.device, rows)
        weights = ours.written(model.bfloat16(), bench.scratch / name)
        for precision in ours.PRECISIONS:
            label = f"{name} {precision}"
            compiled = (shape.family, precision) in COMPILED
            if not deadline.affords(1.0, label):
                continue
            try:
                engine, note = ours.working(weights, shape, precision, bench.device, compiled=compiled)
            except ours.NotHere as reason:
                found[label] = {"missing": str(reason)}
                continue
            except Exception as error:  # the other precisions may well run
                found[label] = {"missing": ours.short(error), "right": False}
                continue
            try:
                found[label] = check.compare(engine, expected, rows) | {"note": note}
            except Exception as error:
                found[label] = {"missing": ours.short(error), "right": False}
            finally:
                engine.close()
    return {"right": all(one.get("right", True) for one in found.values()), "engines": found}


def products(bench: Bench, deadline: Deadline) -> dict[str, Any]:
    from gpu import ceilings

    order = dict.fromkeys(name for part in PARTS if (name := part.name.partition(": ")[2]) in bench.shapes)
    return ceilings.products(bench.device, [bench.shapes[name] for name in order], deadline, tiny=bench.tiny)


def copies(bench: Bench, deadline: Deadline) -> dict[str, Any]:
    from gpu import ceilings

    return ceilings.copies(bench.device, deadline, tiny=bench.tiny)


def ours_on(name: str) -> Callable[[Bench, Deadline], dict[str, Any]]:
    def run(bench: Bench, deadline: Deadline) -> dict[str, Any]:
        from gpu import ours

        return ours.measure(bench.shapes[name], bench.device, bench.scratch / name, deadline, tiny=bench.tiny)

    return run


def transformers_on(name: str) -> Callable[[Bench, Deadline], dict[str, Any]]:
    def run(bench: Bench, deadline: Deadline) -> dict[str, Any]:
        import torch
        from gpu import ours, transformers_peer
        from gpu.rows import rows_of
        from gpu.shapes import random_model

        shape = bench.shapes[name]
        model = random_model(shape, bench.device, torch.bfloat16)
        size = ours.num_rows(shape, tiny=bench.tiny)
        found: dict[str, Any] = {}
        for kind, rows in (("full", "tokens"), ("mixed", "tokens")):
            work = rows_of(kind, size, shape.vocabulary)
            if deadline.affords(1.0, f"transformers {name} {kind}"):
                found[kind] = transformers_peer.measure(model, bench.device, work, deadline, tiny=bench.tiny, kind=rows)
        del model
        _free(bench.device)
        found["ours"] = ours.on_mixed_rows(shape, bench.device, bench.scratch / name, deadline, tiny=bench.tiny)
        return found

    return run


def whole_job(bench: Bench, deadline: Deadline) -> dict[str, Any]:
    from gpu import job

    name = next(iter(bench.shapes))
    return job.measure(bench.shapes[name], bench.device, bench.scratch / name, deadline, tiny=bench.tiny)


def starts(bench: Bench, deadline: Deadline) -> dict[str, Any]:
    from gpu import start

    name = next(iter(bench.shapes))
    return start.measure(bench.shapes[name], bench.device, bench.scratch / name, deadline, tiny=bench.tiny)


def vllm(bench: Bench, deadline: Deadline) -> dict[str, Any]:
    from gpu import vllm_peer

    shape = next(iter(bench.shapes.values()))
    reason = vllm_peer.missing(bench.vllm_python)
    if bench.device.type != "cuda":
        reason = "no card"
    if reason is not None:
        return {"skipped": reason}
    import torch
    from gpu.shapes import random_model

    model = random_model(shape, bench.device, torch.bfloat16)
    torch.cuda.empty_cache()
    return vllm_peer.measure(model, shape, deadline, python=bench.vllm_python, rows=4096, memory_part=0.5)


TRANSFORMERS = ("transformers", "safetensors")
JOB = ("transformers", "pyarrow")
PARTS = (
    Part("numbers", 60, numbers, TRANSFORMERS),
    Part("products", 35, products),
    Part("copies", 8, copies),
    Part("ours: llama-8b", 90, ours_on("llama-8b"), TRANSFORMERS),
    Part("transformers: llama-8b", 60, transformers_on("llama-8b"), TRANSFORMERS),
    Part("job", 40, whole_job, JOB),
    Part("ours: llama-1b", 45, ours_on("llama-1b"), TRANSFORMERS),
    Part("transformers: llama-1b", 25, transformers_on("llama-1b"), TRANSFORMERS),
    Part("start", 120, starts, TRANSFORMERS),
    Part("ours: qwen3-1.7b", 30, ours_on("qwen3-1.7b"), TRANSFORMERS),
    Part("ours: qwen3-8b", 50, ours_on("qwen3-8b"), TRANSFORMERS),
    Part("vllm", 150, vllm, TRANSFORMERS),
)
"""In the order of their worth: what the project promises of a card comes before what explains it."""


def main() -> None:
    given = _arguments()
    begun = time.monotonic()
    kind, _, number = (given.device or "").partition(":")
    if number:  # engines take the first card that they see
        seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[int(number)] if seen else number
    import torch

    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA card that torch can use. To try the script: --device cpu --tiny")
    if device.type == "cpu" and not given.tiny:
        raise SystemExit("on a CPU only with --tiny: these models are made for a card")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    import tempfile

    from gpu import shapes

    results: dict[str, Any] = {"card": card.about(device, ROOT), "parts": {}, "cut_off": [], "missing": {}}
    results["card"]["command"] = " ".join(["python", "tests/bench/bench_gpu.py", *sys.argv[1:]])
    print(report.heading(results["card"]), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=given.scratch) as folder, card.Watch(device) as watch:
        watchdog = threading.Timer(given.seconds + GRACE_S, _give_up, (results, folder))
        watchdog.daemon = True
        watchdog.start()
        bench = Bench(
            device=device,
            tiny=given.tiny,
            shapes=dict(shapes.TINY if given.tiny else shapes.SHAPES),
            checked=dict(shapes.TINY_CHECKED if given.tiny else shapes.CHECKED),
            scratch=Path(folder),
            vllm_python=given.vllm_python,
            found=results["parts"],
        )
        for part in PARTS:
            if given.parts and not any(word.strip() in part.name for word in given.parts.split(",")):
                continue
            _run(part, bench, results, begun + given.seconds, watch)
    watchdog.cancel()
    results["seconds"] = round(time.monotonic() - begun, 1)
    print(report.rest(results))
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(report.text(results) + "\n", encoding="utf-8")
    print(json.dumps(results))
    wrong = results["parts"].get("numbers", {}).get("right") is False
    raise SystemExit(1 if wrong or results.get("failed") else 0)


def _run(part: Part, bench: Bench, results: dict[str, Any], end: float, watch: card.Watch) -> None:
    """One part within its time; whatever goes wrong is a result too."""
    import importlib.util

    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        results["missing"][part.name] = f"not installed: {', '.join(missing)}"
        print(f"-- {part.name}: {results['missing'][part.name]}", flush=True)
        return
    started = time.monotonic()
    deadline = Deadline(min(started + part.seconds * (PATIENCE if bench.tiny else 1), end))
    if not deadline.affords(1.0, part.name):
        results["cut_off"].append(part.name)
        return
    try:
        found = part.run(bench, deadline)
    except Exception as error:  # the next part may well run
        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        results.setdefault("failed", []).append(part.name)
        traceback.print_exc()
    results["cut_off"] += [f"{part.name}: {what}" for what in deadline.cut_off]
    seconds = time.monotonic() - started
    results["parts"][part.name] = found | {"seconds": round(seconds, 1), "card": watch.since(started)}
    print(report.part(part.name, results["parts"][part.name], results["parts"]), flush=True)
    _free(bench.device)


def _free(device: Any) -> None:
    """Give memory of the card back that nobody refers to."""
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a card that one part broke must not cost the results of the others
            torch.cuda.empty_cache()


def _give_up(results: dict[str, Any], folder: str) -> None:
    """A part hangs: say what was measured, and end."""
    results.setdefault("failed", []).append("a part did not end in time")
    sys.stdout.write(f"\nout of time: a part hangs\n{json.dumps(results)}\n")
    sys.stdout.flush()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(3)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: a card where there is one")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: whether the script runs, not how fast")
    parser.add_argument("--seconds", type=float, default=330.0, help="for all parts; what does not fit is cut off")
    parser.add_argument("--parts", help="only parts whose names hold one of these words, between commas")
    parser.add_argument("--scratch", type=Path, help="folder for weights and shards (40 GB); default: TMPDIR")
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM; default: this one")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
