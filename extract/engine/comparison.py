"""The engine that a build wrote against the plain model, on real passages: fidelity, probe, speed, stored sizes.

The passages are docstrings, many of them short, which is what engines are built for. What is measured here goes into
the contract and not into the engine's id: it may differ in its last digits from build to build.
"""

import dataclasses
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from extract.engine.contract import Fidelity, Measured, Probe, ProbeSequence
from extract.engine.probe import Float32, cosines, projection, relative_error
from extract.errors import CheckpointRefused
from extract.sample import passages
from extract.shards.values import value_type
from extract.spec import ValueType

if TYPE_CHECKING:
    from extract.engine.contract import Runtime
    from extract.engine.plain import PlainStates

NUM_PASSAGES = 24
NUM_PROBE_SEQUENCES = 4
BOUND_MARGIN = 4.0
"""The bound of a row's error is this many times the worst seen at build: other rows will be somewhat worse."""


class NotFaithful(CheckpointRefused):
    """The engine that was written does not give the plain model's numbers."""

    template = (
        "{name}: the engine differs from the plain model by {found:.1e} (relative), {expected:.1e} expected at most. "
        "Nothing was written."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The engine and the plain model on the build's passages."""

    fidelity: Fidelity
    probe: Probe
    measured: Measured


def compare(runtime: "Runtime", plain: "PlainStates", name: str) -> Comparison:
    """Run the engine over the plain model's rows and say how near it is; `name` is the checkpoint's, for the message.

    Raises:
        NotFaithful: it differs by more than the proof's bound, where both compute in the same precision.
    """
    from extract.engine.replay import states_of

    contract = runtime.contract
    states_of(runtime, plain.ids[:2])  # the first pass allocates
    started = time.perf_counter()
    found = states_of(runtime, plain.ids)
    rate = sum(map(len, plain.ids)) / (time.perf_counter() - started)
    expected = plain.states if contract.output.states == "tokens" else [states[-1:] for states in plain.states]
    errors = [relative_error(one, other) for one, other in zip(found, expected, strict=True)]
    flat, flat_expected = np.concatenate(found), np.concatenate(expected)
    cosine = cosines(flat, flat_expected)
    worst, bound = max(errors), contract.fidelity.bound
    same, own = contract.precision.activations == plain.dtype, contract.runtime.decoder != "transformers"
    if (same or own) and worst > bound:  # the proof's own question, on real text
        raise NotFaithful(name=name, found=worst, expected=bound)
    if not same:
        bound = BOUND_MARGIN * worst if own else max(bound, BOUND_MARGIN * worst)
    divergence, top1 = (None, None) if plain.head is None else plain.head.compare(flat, flat_expected)
    probe = [
        ProbeSequence(input_ids=tuple(ids), projection=_rounded(states))
        for ids, states in zip(plain.ids, expected, strict=True)
    ]
    return Comparison(
        fidelity=dataclasses.replace(
            contract.fidelity,
            num_tokens=len(flat),
            rel_error_max=worst,
            cosine_mean=float(cosine.mean()),
            cosine_min=float(cosine.min()),
            bound=bound,
            kl_mean=divergence,
            top1=top1,
        ),
        probe=Probe(tolerance=max(10 * bound, 1e-4), sequences=tuple(probe[:NUM_PROBE_SEQUENCES])),
        measured=Measured(tokens_per_s=round(rate, 1), stored_ratio=_stored_ratios(flat)),
    )


def available_memory() -> int:
    """Bytes that this machine can give without swapping."""
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def passage_ids(tokenizer: Any, limit: int, vocabulary: int) -> list[list[int]]:
    """Real passages of many lengths where there is a tokenizer, else random ids."""
    if tokenizer is not None:
        texts = [passage.text for passage in itertools.islice(passages(), NUM_PASSAGES)]
        found = [list(tokenizer(text, truncation=True, max_length=limit)["input_ids"]) for text in texts]
        ids = [one for one in found if one and max(one) < vocabulary]
        if ids:
            return ids
    draw = np.random.Generator(np.random.PCG64(0))
    lengths = [max(1, limit * (place + 1) // NUM_PASSAGES) for place in range(NUM_PASSAGES)]
    return [draw.integers(0, vocabulary, length).tolist() for length in lengths]


def _rounded(states: Float32) -> tuple[float, ...]:
    return tuple(float(f"{value:.7g}") for value in projection(states))


def _stored_ratios(states: Float32) -> dict[str, float]:
    """Compressed over raw bytes of these states, by value type, with zstd 1: what a plan predicts sizes with.

    The passages often begin alike, rows of a dataset seldom do, so states that occur again are left out.
    """
    import zstandard

    _, first = np.unique(states, axis=0, return_index=True)
    states = states[np.sort(first)]
    compressor = zstandard.ZstdCompressor(level=1)
    kinds: tuple[ValueType, ...] = ("float16", "float32", "bfloat16", "int8")
    ratios: dict[str, float] = {}
    for kind in kinds:
        raw = value_type(kind).encode(states).values.tobytes()
        ratios[kind] = round(len(compressor.compress(raw)) / len(raw), 4)
    return ratios
