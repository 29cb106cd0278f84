"""`fidelity`: run an engine and the plain model over the same rows, window by window, and say how far they are apart.

The engine runs as a job would run it; the plain model takes each row alone. What is kept of a window is a few numbers a
token, so rows may be many and a vocabulary large.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from extract.canonical import canonical_json
from extract.engine.contract import CONTRACT_FILE, MeasuredFidelity, Runtime, read_contract
from extract.engine.fetching import local_engine
from extract.engine.next_token import LOGITS_BYTES
from extract.errors import CheckpointRefused, SpecError, VerificationFailed
from extract.fidelity_check.intervals import NUM_RESAMPLES, summarise
from extract.fidelity_check.reference import Reference, check_tokenizer, open_reference
from extract.fidelity_check.results import FidelityReport
from extract.fidelity_check.rows import NothingToCompare, open_rows
from extract.fidelity_check.token_figures import Gathered, TokenFigures
from extract.spec import SourceSpec
from extract.store import replace_file

NUM_ROWS = 256
WINDOW_BYTES = 64 * 2**20
"""Of one window's states, in float32; engine's and reference's are held at a time."""

SAY_EVERY_S = 5.0


class TooFar(VerificationFailed):
    """The engine diverges from the reference by more than was allowed."""

    template = "{engine}: mean KL of the next token is {found}, above the {target:g} of --max-kl{noise}."


class NothingToHold(SpecError):
    """A target for a divergence that cannot be measured."""

    template = "{option} cannot be checked: {problem}. Name a reference that holds its head, or leave out {option}."


class ReferenceNotFinite(CheckpointRefused):
    """The plain model itself gives no numbers to compare with."""

    template = (
        "{name}: in {dtype} the plain model's states of compared row {row} are not finite. Use a machine with memory "
        "for float32, or another reference."
    )


def fidelity(
    engine: str | Path,
    reference: str | Path,
    *,
    source: SourceSpec | None = None,
    rows: int = NUM_ROWS,
    max_kl: float | None = None,
    write: bool = False,
    runtime: Runtime | None = None,
    threads: int | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    seed: int = 0,
    logits_bytes: int = LOGITS_BYTES,
    window_bytes: int = WINDOW_BYTES,
    say: Callable[[str], None] = lambda message: None,
) -> FidelityReport:
    """Compare an engine with the unquantised model of a checkpoint; see `FidelityReport`.

    Args:
        engine: the engine directory.
        reference: Hugging Face directory, hub id or GGUF file.
        source: rows to compare on; `None`: docstrings of the standard library.
        rows: how many, at even distances.
        max_kl: the largest mean KL that passes, in nats; only noted here, `check` holds the report to it.
        write: put the figures into the engine's contract, unless some are not finite; the engine's id stays.
        runtime: the engine, loaded already.
        threads: CPU threads of the engine; `None`: the engine's own number.
        revision: branch, tag or commit of a hub checkpoint.
        allow_pickle: read a reference's weights from pickled `.bin` files.
        seed: of the resampling.
        logits_bytes: of a block of logits; changes nothing but memory and speed.
        window_bytes: of the states that are held at a time, in float32; the same.
        say: called with a line whenever a step begins, and every few seconds.

    Raises:
        EngineRefused: the engine does not load here, or is not of the reference's model (`NotOneModel`).
        CheckpointRefused, SourceError, SpecError: whatever is wrong with the reference, the rows or the options.
    """
    from extract.engine.checkpoint import open_checkpoint
    from extract.engine.runtimes import load_runtime

    started, engine = time.perf_counter(), local_engine(str(engine))
    contract = read_contract(engine)
    checkpoint = open_checkpoint(reference, revision=revision, allow_pickle=allow_pickle)
    notes = check_tokenizer(engine, contract, checkpoint)
    chosen = open_rows(engine, contract, source, rows)
    say(f"loading the engine {engine}")
    loaded = runtime if runtime is not None else load_runtime(engine, threads=threads)
    try:
        say(f"loading {checkpoint.name} ({checkpoint.architecture}, {checkpoint.dtype})")
        plain = open_reference(engine, contract, checkpoint)
        if max_kl is not None and plain.head is None:
            raise NothingToHold(option="--max-kl", problem=plain.no_head)
        say(f"comparing with {checkpoint.name} in {plain.dtype}, row by row")
        window_tokens = max(1, window_bytes // (4 * contract.output.width))
        gathered = Gathered(plain.head, logits_bytes=logits_bytes)
        tokens = _compare(loaded, plain, _windows(chosen.sequences(), window_tokens), gathered, rows, say)
    finally:
        if runtime is None:
            loaded.close()
    if tokens is None:
        raise NothingToCompare(rows=chosen.described, count=rows)
    if chosen.num_left_out:
        notes += (f"{chosen.num_left_out:,} rows without a token were left out",)
    seen = summarise(tokens, seed=seed)
    report = FidelityReport(
        engine=str(engine),
        engine_id=contract.engine_id,
        precision=contract.precision.described,
        arithmetic=loaded.arithmetic,
        checkpoint=plain.name,
        checkpoint_sha256=plain.sha256,
        reference=plain.dtype,
        own_checkpoint=plain.sha256 == contract.checkpoint.sha256,
        rows=chosen.described,
        num_rows=int(tokens.row.max()) + 1,
        num_tokens=len(tokens.row),
        num_non_finite=int((~tokens.finite).sum()),
        num_resamples=NUM_RESAMPLES,
        seed=seed,
        rel_error=seen.rel_error,
        cosine=seen.cosine,
        worst_row=tokens.worst_row,
        bound=contract.fidelity.bound,
        kl=seen.kl,
        top1=seen.top1,
        no_head=plain.no_head,
        by_position=seen.by_position,
        by_length=seen.by_length,
        notes=notes,
        seconds=time.perf_counter() - started,
        max_kl=max_kl,
    )
    return _written(engine, report) if write else report


def check(report: FidelityReport) -> None:
    """Hold a report to its `max_kl`.

    Raises:
        TooFar: the mean KL is above it, or states are not finite.
    """
    target = report.max_kl
    if target is None:
        return
    if report.num_non_finite:
        found = f"not finite ({report.num_non_finite:,} of {report.num_tokens:,} states are not)"
        raise TooFar(engine=report.engine, found=found, target=target, noise="")
    assert report.kl is not None  # `fidelity` refuses a target without a head
    mean = report.kl.mean
    if mean.mean <= target:
        return
    noise = f", but within the noise of {report.num_rows:,} rows" if mean.holds(target) else ""
    found = f"{mean.mean:.2e} [{mean.low:.2e}, {mean.high:.2e}]"
    raise TooFar(engine=report.engine, found=found, target=target, noise=noise)


def _windows(sequences: Iterator[list[int]], max_tokens: int) -> Iterator[list[list[int]]]:
    """Rows in order, as many together as fit, one at least."""
    window: list[list[int]] = []
    size = 0
    for ids in sequences:
        if window and size + len(ids) > max_tokens:
            yield window
            window, size = [], 0
        window.append(ids)
        size += len(ids)
    if window:
        yield window


def _compare(
    runtime: Runtime,
    plain: Reference,
    windows: Iterator[list[list[int]]],
    gathered: Gathered,
    rows: int,
    say: Callable[[str], None],
) -> TokenFigures | None:
    from extract.engine.replay import states_of

    done, said = 0, time.perf_counter()
    for window in windows:
        found = states_of(runtime, window)
        expected = []
        for ids, states in zip(window, found, strict=True):
            expected.append(plain.states(ids)[-len(states) :])  # an engine may give the last token's state alone
            if not np.isfinite(expected[-1]).all():
                raise ReferenceNotFinite(name=plain.name, dtype=plain.dtype, row=f"{done:,}")
            done += 1
            if time.perf_counter() - said > SAY_EVERY_S:
                said = time.perf_counter()
                say(f"{done:,} of {rows:,} rows")
        lengths = [len(ids) for ids in window]
        positions = [np.arange(len(ids) - len(states), len(ids)) for ids, states in zip(window, found, strict=True)]
        gathered.add(lengths, positions, found, expected)
    return gathered.figures() if done else None


def _written(engine: Path, report: FidelityReport) -> FidelityReport:
    """Put the figures into the contract as it is now, whole or not at all; an engine that is broken gets none."""
    kl, top1 = report.kl, report.top1
    if report.num_non_finite or (kl is not None and not np.isfinite(kl.worst)):
        return replace(report, notes=(*report.notes, "not written into the contract: figures are not finite"))
    measured = MeasuredFidelity(
        checkpoint=report.checkpoint,
        sha256=report.checkpoint_sha256,
        reference=report.reference,
        rows=report.rows,
        num_rows=report.num_rows,
        num_tokens=report.num_tokens,
        rel_error_mean=report.rel_error.mean.mean,
        rel_error_p99=report.rel_error.tail,
        rel_error_max=report.rel_error.worst,
        cosine_mean=report.cosine.mean.mean,
        cosine_p01=report.cosine.tail,
        cosine_min=report.cosine.worst,
        kl_mean=None if kl is None else kl.mean.mean,
        kl_low=None if kl is None else kl.mean.low,
        kl_high=None if kl is None else kl.mean.high,
        kl_median=None if kl is None else kl.median,
        kl_p99=None if kl is None else kl.tail,
        kl_max=None if kl is None else kl.worst,
        top1=None if top1 is None else top1.mean,
        top1_low=None if top1 is None else top1.low,
        top1_high=None if top1 is None else top1.high,
    )
    contract = read_contract(engine)
    contract = replace(contract, fidelity=replace(contract.fidelity, measured=measured))
    replace_file(engine / CONTRACT_FILE, canonical_json(asdict(contract)) + b"\n")
    return replace(report, written=True)
