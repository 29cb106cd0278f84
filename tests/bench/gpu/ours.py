"""Our engines on this device: weights written once as an engine directory holds them, opened as a run opens them.

The contract is written by hand, because a build compares with the plain model on the CPU, which takes minutes at this
size; whether numbers are right is asked by `gpu.numbers` on small models, and every run here looks for values that are
not finite. On a CPU the same code runs over this machine's memory (`HostCard`).
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpu.rows import LIMIT, rows_of
from gpu.shapes import Shape, random_model
from gpu.time_box import Deadline, on_host, timed

PRECISIONS = ("float32", "bfloat16", "fp8")
PASSES = 4
"""Passes of a timed batch: copies of one run beside the next."""
BATCHES = (8192, 32_768, 131_072, 524_288, 1_048_576)
"""Token budgets of a batch, which is cut into passes."""
SPARE_BYTES = 2**30


class NotHere(Exception):
    """This engine cannot be had here, and why."""


def short(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Ours:
    """A loaded engine, and how long that took."""

    def __init__(self, runtime: Any, precision: str, load_s: float, device: Any) -> None:
        self.runtime, self.precision, self.load_s, self.device = runtime, precision, load_s, device

    def run(self, batch: Any, kind: str) -> Any:
        """States in host memory."""
        return self.runtime.hidden_states(batch, kind)

    def states(self, batch: Any, kind: str) -> Any:
        """The same as float32."""
        from extract.shards.values import as_float32

        return as_float32(self.run(batch, kind))

    def set_pass_tokens(self, tokens: int) -> None:
        """Tokens of the largest pass from now on."""
        contract = self.runtime.contract
        self.runtime.contract = replace(contract, limits=replace(contract.limits, pass_tokens=tokens))

    def close(self) -> None:
        """Give the memory back; compiled regions refer to each other in circles."""
        import gc

        import torch

        self.runtime.close()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def batch_of(rows: Sequence[Any]) -> Any:
    """One token batch of these rows in their order."""
    from extract.records import TokenBatch

    lengths = [len(row) for row in rows]
    return TokenBatch(
        input_ids=np.concatenate(rows).astype(np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        members=np.arange(len(rows), dtype=np.int64),
    )


def written(model: Any, folder: Path, *, fp8: bool = False) -> Path:
    """The weights and description of a base model, as an engine directory has them, plain or as FP8; made once."""
    import torch

    from extract.cpu.architecture import ARCHITECTURE_FILE, write_architecture
    from extract.cpu.weights import WEIGHTS_FILE
    from extract.cuda.fp8_weights import fp8_kinds, fp8_tensors
    from extract.cuda.weights_writing import TensorKind, file_bytes, write_tensors

    if (folder / ARCHITECTURE_FILE).is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    weights, architecture = model.state_dict(), _architecture(model)
    if fp8:
        kinds = fp8_kinds(architecture, torch.bfloat16)
        tensors = fp8_tensors(weights, architecture, torch.bfloat16, next(model.parameters()).device)
    else:
        kinds = {name: TensorKind(tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
        tensors = iter(weights.values())
    size, free = file_bytes(kinds), shutil.disk_usage(folder).free
    if free < size + SPARE_BYTES:
        raise NotHere(f"{folder} has {free / 2**30:.1f} GiB free, weights of {size / 2**30:.1f} GiB need more")
    write_tensors(folder / WEIGHTS_FILE, kinds, tensors)
    write_architecture(folder, architecture)
    return folder


def _architecture(model: Any) -> Any:
    """What a Llama or a Qwen 3 is; by hand, so that any transformers will do. The check of the numbers would tell."""
    from extract.cpu.architecture import Architecture, LayerKind, Rotary

    config = model.config
    fresh = type(model.rotary_emb)(config)
    return Architecture(
        family=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        activation="silu",
        attention_scale=config.head_dim**-0.5,
        layers=(LayerKind(rotary=0),) * config.num_hidden_layers,
        rotary=(Rotary(inv_freq=tuple(fresh.inv_freq.float().tolist())),),
        head_norm="head" if config.model_type == "qwen3" else "none",
    )


def made(shape: Shape, device: Any, folder: Path, *, fp8: bool = False) -> Path:
    """`written`, with weights drawn on the device where that was not done before."""
    import torch

    from extract.cpu.architecture import ARCHITECTURE_FILE

    if not (folder / ARCHITECTURE_FILE).is_file():
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2.2 * shape.num_weights:
            raise NotHere(f"{shape.num_weights * 2 / 2**30:.1f} GiB of weights do not fit in this card's free memory")
        written(random_model(shape, device, torch.bfloat16), folder, fp8=fp8)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return folder


def contract_of(folder: Path, shape: Shape, precision: str, device: Any, pass_tokens: int) -> Any:
    """A contract for these weights: what an engine needs to run, and no proof."""
    import torch

    from extract.cpu.architecture import read_architecture
    from extract.cpu.weights import WEIGHTS_FILE, holds_scales, open_weights
    from extract.cuda.attention import choose_backend
    from extract.cuda.weights import COMPUTED
    from extract.engine.contract import (
        CheckpointIdentity,
        Contract,
        EngineFile,
        Fidelity,
        Limits,
        Measured,
        Precision,
        Probe,
        Proof,
        RuntimeIdentity,
        StateOutput,
        TokenizerIdentity,
    )
    from extract.engine.device import this_device

    here = this_device(device.type)
    attention = choose_backend(read_architecture(folder), COMPUTED[precision], device.type, here.compute_capability)
    output = "float32" if precision == "float32" else "bfloat16"
    with open_weights(folder / WEIGHTS_FILE) as weights:
        stored = "fp8" if holds_scales(weights) else "bfloat16"
    files = tuple(
        EngineFile(name=path.name, size=path.stat().st_size, sha256="0" * 64)
        for path in sorted(folder.iterdir())
        if path.name != "contract.json"
    )
    return Contract(
        checkpoint=CheckpointIdentity(
            name=f"{shape.name}, random weights",
            kind="directory",
            sha256="0" * 64,
            architecture=f"{shape.family} shapes",
            model_type=shape.family,
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            vocab_size=shape.vocabulary,
            max_positions=4096,
            dtype="bfloat16",
        ),
        runtime=RuntimeIdentity(
            name="torch",
            version=str(torch.__version__),
            transformers="",
            layout="packed",
            attention=attention.described,
            decoder="own",
        ),
        device=here,
        precision=Precision(weights=stored, activations=precision, output=output),
        limits=Limits(
            max_input_tokens=LIMIT,
            max_sequences=8192,
            max_tokens=1_048_576,
            binding="the benchmark",
            pass_tokens=pass_tokens,
        ),
        output=StateOutput(module="norm", width=shape.hidden, dtype=output, head_input="identical"),
        tokenizer=TokenizerIdentity(kind="none"),
        files=files,
        proof=Proof(neighbour=0.0, moved=0.0, plain=0.0),
        fidelity=Fidelity(
            reference="none", num_tokens=0, rel_error_max=0.0, cosine_mean=1.0, cosine_min=1.0, bound=0.0
        ),
        probe=Probe(tolerance=0.0, sequences=()),
        measured=Measured(tokens_per_s=0.0),
    )


def host_card(device: Any) -> Any:
    """This machine's memory in the place of a card; `None`: there is one."""
    from extract.cuda.host_card import HostCard
    from extract.engine.device import this_device

    return None if device.type == "cuda" else HostCard(this_device("cpu"), 2**34)


def memory_of(folder: Path, precision: str, device: Any, *, fused: bool) -> Any:
    """The model of an engine's memory."""
    from extract.cpu.architecture import read_architecture
    from extract.cuda.attention import choose_backend
    from extract.cuda.memory import memory_model
    from extract.cuda.weights import COMPUTED
    from extract.engine.device import this_device

    architecture, here = read_architecture(folder), this_device(device.type)
    backend = choose_backend(architecture, COMPUTED[precision], device.type, here.compute_capability).backend
    return memory_model(architecture, precision, backend=backend, max_positions=LIMIT, fused=fused)


def opened(folder: Path, shape: Shape, precision: str, device: Any, *, compiled: bool = True) -> Ours:
    """An engine in memory, with passes as large as it takes; `compiled`: its regions, where this machine can.

    Raises:
        NotHere: the card has no such arithmetic, or too little memory.
    """
    import torch

    from extract.cuda.opening import can_fuse, open_cuda_runtime
    from extract.engine.device import FP8_CAPABILITY
    from extract.errors import ExtractError

    card, most = host_card(device), 1024
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if precision == "fp8" and float(f"{major}.{minor}") < FP8_CAPABILITY:
            raise NotHere(f"compute capability {major}.{minor}, {FP8_CAPABILITY} needed")
        memory = memory_of(folder, precision, device, fused=compiled and can_fuse())
        most = memory.pass_tokens(torch.cuda.mem_get_info(device)[0], 1_048_576)
        if most == 0:
            raise NotHere(f"{memory.weight_bytes / 2**30:.1f} GiB of weights leave no room for a pass")
    contract = contract_of(folder, shape, precision, device, most)
    if not compiled:
        contract = replace(contract, runtime=replace(contract.runtime, compile="none"))
    started = time.perf_counter()
    try:
        runtime = open_cuda_runtime(folder, contract, card=card)
    except ExtractError as error:
        raise NotHere(str(error)) from error
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Ours(runtime, precision, time.perf_counter() - started, device)


def working(folder: Path, shape: Shape, precision: str, device: Any, *, compiled: bool = True) -> tuple[Ours, str]:
    """`opened`, and run once: where its regions cannot be compiled, without that, and the reason."""
    import torch

    engine = opened(folder, shape, precision, device, compiled=compiled)
    rows = batch_of(rows_of("mixed", 8, shape.vocabulary))
    try:
        engine.run(rows, "tokens")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler fails in many ways, and all of them leave the plain lines
        if not compiled:
            raise
        engine.close()
        engine = opened(folder, shape, precision, device, compiled=False)
        engine.run(rows, "tokens")
        return engine, f"not compiled: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return engine, ""


def num_rows(shape: Shape, *, tiny: bool) -> int:
    """Rows of a workload that takes a card a second or so."""
    if tiny:
        return 6
    return 512 if shape.flops_per_token > 6e9 else 4096


def measure(shape: Shape, device: Any, folder: Path, deadline: Deadline, *, tiny: bool) -> dict[str, Any]:
    """Rates of one model in every precision that a job would choose."""
    try:
        made(shape, device, folder)
    except NotHere as reason:
        return {"skipped": str(reason)}
    found: dict[str, Any] = {"engines": {}}
    for precision in ("bfloat16", "fp8"):
        if not deadline.affords(0.5 if tiny else 8.0, f"{shape.name} {precision}"):
            continue
        half = Deadline(deadline.end - (deadline.left / 2 if precision == "bfloat16" else 0.0), deadline.cut_off)
        seen = found["engines"][precision] = {}
        try:
            _rates(shape, device, folder, precision, half, seen, tiny=tiny)
        except NotHere as reason:
            seen["missing"] = str(reason)
        except Exception as error:  # what was measured before it counts, and so may the other precision
            seen["failed"] = short(error)
    return found


def _rates(
    shape: Shape,
    device: Any,
    folder: Path,
    precision: str,
    deadline: Deadline,
    found: dict[str, Any],
    *,
    tiny: bool,
) -> None:
    """Fills `found`, so that what was measured is there if something breaks; raises `NotHere` as `opened` does."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    engine, note = working(folder, shape, precision, device)
    first_s = time.perf_counter() - started
    try:
        most = engine.runtime.pass_tokens
        tokens = min(PASSES * most, 2 * num_rows(shape, tiny=tiny) * LIMIT)
        size = max(LIMIT, min(most, tokens // PASSES))  # so that the last copy down, which waits for nobody, is small
        engine.set_pass_tokens(size)
        full, shared = (
            batch_of(rows_of(kind, max(2, tokens // LIMIT), shape.vocabulary)) for kind in ("full", "shared")
        )
        engine.run(full, "tokens")
        again_s = on_host(device, lambda: engine.run(full, "tokens"))
        found |= {
            "load_s": engine.load_s,
            "first_batch_s": first_s,
            "note": note,
            "weights_gib": memory_of(folder, precision, device, fused=True).weight_bytes / 2**30,
            "pass_tokens": size,
            "batch_tokens": full.num_tokens,
            "rates": {},
        }
        works = {
            "every token": (full, "tokens"),
            "last token": (full, "last"),
            "every token, 70 % shared": (shared, "tokens"),
            "last token, 70 % shared": (shared, "last"),
        }
        for label, (batch, kind) in works.items():
            if deadline.affords(3.2 * again_s, f"{shape.name} {precision} {label}"):
                found["rates"][label] = rate(engine, batch, kind, deadline, tiny=tiny)
        if device.type == "cuda":
            memory = memory_of(folder, precision, device, fused=True)
            found["memory"] = {
                "measured": torch.cuda.max_memory_allocated(device),
                "expected": memory.weight_bytes + memory.pass_bytes(size),
            }
        engine.set_pass_tokens(most)
        per_token = again_s / full.num_tokens
        found["by_pass_tokens"] = _by_pass(engine, shape, most, per_token, deadline, tiny=tiny)
        found["by_batch_tokens"] = _by_batch(engine, shape, per_token, deadline, tiny=tiny)
    finally:
        engine.close()


def _by_pass(
    engine: Ours, shape: Shape, most: int, per_token: float, deadline: Deadline, *, tiny: bool
) -> dict[str, float]:
    """Tokens/s by tokens of a pass, doubled up to the largest."""
    found: dict[str, float] = {}
    size = 256 if tiny else 4096
    while size <= most:
        tokens = max(size, min(num_rows(shape, tiny=tiny) * LIMIT // 2, 8 * size))
        if deadline.affords(2.5 * tokens * per_token, f"{shape.name} {engine.precision} passes of {size:,} tokens"):
            batch = batch_of(rows_of("full", max(2, tokens // LIMIT), shape.vocabulary))
            engine.set_pass_tokens(size)
            found[str(size)] = rate(engine, batch, "tokens", deadline, tiny=True, runs=1)
        size *= 2
    engine.set_pass_tokens(most)
    return found


def _by_batch(engine: Ours, shape: Shape, per_token: float, deadline: Deadline, *, tiny: bool) -> dict[str, float]:
    """Tokens/s by token budget of a batch, up to a million; passes as large as they may be."""
    found: dict[str, float] = {}
    for tokens in (256, 512) if tiny else BATCHES:
        if deadline.affords(2.2 * tokens * per_token, f"{shape.name} batches of {tokens:,} tokens"):
            batch = batch_of(rows_of("full", tokens // LIMIT, shape.vocabulary))
            found[str(tokens)] = rate(engine, batch, "last", deadline, tiny=True, runs=1)
    return found


def rate(engine: Ours, batch: Any, kind: str, deadline: Deadline, *, tiny: bool, runs: int = 2) -> float:
    """Tokens/s until states lie in host memory; the rows' own tokens count, computed or shared."""
    from extract.shards.values import as_float32

    states = engine.run(batch, kind)  # also the warm-up of this shape
    if not np.isfinite(as_float32(states[:: max(1, len(states) // 256)])).all():
        raise RuntimeError(f"{engine.precision}: states that are not finite")
    del states
    found = timed(
        lambda: on_host(engine.device, lambda: engine.run(batch, kind)),
        at_least_s=0.0 if tiny else 0.3,
        runs=runs,
        most=8,
        deadline=deadline,
    )
    return batch.num_tokens / found.median


def on_mixed_rows(
    shape: Shape, device: Any, folder: Path, deadline: Deadline, *, tiny: bool
) -> dict[str, dict[str, float]]:
    """Ours on the very rows that transformers runs, by kind of rows and precision."""
    found: dict[str, dict[str, float]] = {"full": {}, "mixed": {}}
    for precision in ("bfloat16", "fp8"):
        try:
            engine, _ = working(made(shape, device, folder), shape, precision, device)
        except NotHere:
            continue
        try:
            for kind in found:
                if deadline.affords(0.1 if tiny else 5.0, f"ours on {kind} rows in {precision}"):
                    batch = batch_of(sorted(rows_of(kind, num_rows(shape, tiny=tiny), shape.vocabulary), key=len))
                    found[kind][precision] = rate(engine, batch, "tokens", deadline, tiny=tiny, runs=2)
        finally:
            engine.close()
    return found
