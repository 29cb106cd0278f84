"""The contract that travels with each engine, and what every runtime promises.

`contract.json` is the only file a worker needs to read first. It never mentions how an engine was built: a runtime may
have nothing to compile. This module imports no torch; hashing and limits are checked here, numbers (the probe) by the
runtime when it loads.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from extract.canonical import blocks_digest, canonical_json, digest, file_digest
from extract.errors import EngineRefused, ExtractError
from extract.records import Int64, States, TokenBatch
from extract.settings import parse
from extract.spec import OutputKind

CONTRACT_FILE = "contract.json"
FORMAT_VERSION = 1
MAX_CONTRACT_BYTES = 16 * 2**20
MOST_NAMES = 4
"""Layers and linears that are named where a precision is described."""

COMPILED_FILE = "regions.pt2"
"""Machine code that a build compiled. It follows from the rest of an engine, and no compiler writes it twice alike: it
is checked like every file, and is no part of the engine's id."""

LARGE_BYTES = 2**30
"""Files from here on are hashed by blocks: one sha256 over 15 GB of weights would take ten seconds at every start."""
BLOCK_BYTES = 2**26


class NotAnEngine(EngineRefused):
    """A directory without a contract."""

    template = "{path}: not an engine directory ({problem}). Build one: extract build CHECKPOINT -o {path}"


class EngineChanged(EngineRefused):
    """A file of the engine is not the one its contract was written for."""

    template = (
        "{path}: engine file {name} has {field} {found}, the contract says {expected}. "
        "Copy the engine again or rebuild it."
    )


class EngineDoesNotFit(EngineRefused):
    """This machine cannot run this engine."""

    template = "{path}: this engine needs {field} {expected}, this machine has {found}. {advice}"


class NoLayerStates(EngineRefused):
    """States of other layers than the final one cannot be taken from this model."""

    template = "{model}: no states of other layers beside the final one: {problem}. Run the job without states.layers."


class OutputDiffers(EngineRefused):
    """The states have another width or type than the contract says."""

    template = "{path}: the states have {field} {found}, the contract says {expected}. Build the engine again."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIdentity:
    """Which weights an engine was made from."""

    name: str
    kind: Literal["directory", "hub", "gguf", "tensorrt-llm"]
    sha256: str
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    dtype: str
    notes: tuple[str, ...] = ()
    origin_sha256: str | None = None
    """Of the checkpoint that this one was quantised or converted from; it is the one to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeIdentity:
    """Which code runs the engine, and how it lays sequences out."""

    name: Literal["torch", "tensorrt-llm"]
    version: str
    transformers: str
    layout: Literal["packed", "dense"]
    """packed: any sequences end to end; dense: only equal-length sequences share a pass."""
    attention: str
    decoder: Literal["own", "transformers", "vendor"] = "transformers"
    """own: our packed decoder, from `decoder.json`; transformers: the family's own model; vendor: the runtime
    package's own."""
    micro_batch: int | None = None
    """Tokens that one thread of the own decoder carries through all layers."""
    threads: int | None = None
    """Threads of a run that names no number; `None` is as many as it may use."""
    tensorrt: str | None = None
    """Version of TensorRT, which alone can read the engine file."""
    compile: Literal["ahead", "jit", "none"] | None = None
    """Of the own decoder on a card: how what lies between products is compiled; `None` is at every start, where that
    can be. ahead: by the build, into `COMPILED_FILE`, for this version of torch alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The one device that the engine is committed to."""

    type: Literal["cpu", "cuda"]
    name: str
    instruction_set: str | None = None
    compute_capability: str | None = None
    num_sms: int | None = None
    """Multiprocessors of a card: TensorRT chooses its kernels by them."""
    cuda: str | None = None
    driver: str | None = None
    """Of the machine that built the engine; another driver may run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Types of weights as they are stored, of arithmetic and of states."""

    weights: str
    """"fp8": linears are E4M3 with a float32 scale for each output channel, and the rest has the computing type."""
    activations: str
    output: str
    high_precision: tuple[str, ...] | None = None
    """Layers ("2") and linears ("5.down") of an int8 engine that compute in bfloat16; `None` where none do."""

    @property
    def described(self) -> str:
        """In words, what linears compute in."""
        names = self.high_precision
        if names is None:
            return self.activations
        shown = ", ".join(names[:MOST_NAMES])
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        return f"{self.activations} ({shown}{more} in bfloat16)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one batch takes, and one forward pass of it."""

    max_input_tokens: int
    max_sequences: int
    max_tokens: int
    binding: str
    """Why the limits are not higher."""
    pass_tokens: int | None = None
    """Tokens of one forward pass, where the runtime splits a batch into several; `None`: a batch is one pass."""
    memory_bytes: int | None = None
    """Free memory that the engine needs on its card: our own arithmetic, or what the vendor's package says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOutput:
    """What a state is: the output of this module, and how the head sees it."""

    module: str
    width: int
    dtype: str
    head_input: str
    """"identical": the head reads exactly this state; else how it differs."""
    position: str = "post_final_norm"
    tensor: str | None = None
    """Name of the output in an engine file; `None` where the states are caught in the process."""
    states: Literal["tokens", "last"] = "tokens"
    """Which states come out: every token's, from which the other kinds follow, or each sequence's last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerIdentity:
    """What turns text into ids, observed at build time rather than believed."""

    kind: Literal["fast", "slow", "none"]
    sha256: str | None = None
    prefix_ids: tuple[int, ...] = ()
    """Ids that the tokenizer puts before every text."""
    suffix_ids: tuple[int, ...] = ()
    truncation_side: Literal["left", "right"] = "right"
    bos_id: int | None = None
    eos_id: int | None = None
    chat_template: bool = False
    precut: bool = False
    """Long texts may be cut before they are tokenised (byte-pair tokenizers, right truncation)."""
    probe_text: str = ""
    probe_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFile:
    """One file of the engine directory."""

    name: str
    size: int
    sha256: str
    block_bytes: int | None = None
    """Where it is set, `sha256` is that of the sha256s of blocks of this size, so that several threads can hash."""

    def digest_of(self, path: Path) -> str:
        """What `sha256` must be for the file at `path`."""
        return file_digest(path) if self.block_bytes is None else blocks_digest(path, self.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the build tried, and what it saw."""

    neighbour: float
    """Largest change in other sequences when one sequence of a pass is replaced (0 = bit-identical)."""
    moved: float
    """Relative error of a sequence moved to another place of the pass."""
    plain: float
    """Largest relative error against the plain model run on each row alone, in the engine's own precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFidelity:
    """The engine against the model of a checkpoint on more rows than a build takes: what `extract fidelity` wrote.

    Errors and cosines are of single tokens' states. `*_low` and `*_high` bound a mean with 95 % confidence. Divergences
    are in nats; they and `top1` are `None` where the checkpoint holds no head.
    """

    checkpoint: str
    sha256: str
    reference: str
    """Precision of the model it was compared with."""
    rows: str
    """Where the rows came from."""
    num_rows: int
    num_tokens: int
    rel_error_mean: float
    rel_error_p99: float
    rel_error_max: float
    cosine_mean: float
    cosine_p01: float
    cosine_min: float
    kl_mean: float | None = None
    kl_low: float | None = None
    kl_high: float | None = None
    kl_median: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    top1: float | None = None
    top1_low: float | None = None
    top1_high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """The engine against the plain model in `reference` precision, on the build's passages."""

    reference: str
    num_tokens: int
    rel_error_max: float
    """Largest, over rows, of max |difference| / max |reference|."""
    cosine_mean: float
    cosine_min: float
    bound: float
    """Relative error that a row may have and still be called right."""
    kl_mean: float | None = None
    """Mean KL divergence of the next token's distribution, in nats; `None` where no tied head can tell."""
    top1: float | None = None
    """Part of the tokens whose most likely next token is the same."""
    measured: MeasuredFidelity | None = None
    """A later, longer comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSequence:
    """One sequence that every load replays: per token the dot product with a fixed sign vector, divided by H."""

    input_ids: tuple[int, ...]
    projection: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Sequences and their digest values; `tolerance` is absolute, in units of the projections' largest value."""

    tolerance: float
    sequences: tuple[ProbeSequence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Facts seen at build that a plan needs before weights load."""

    tokens_per_s: float
    stored_ratio: dict[str, float] = field(default_factory=dict)
    """Compressed over raw bytes of the states by value type, with zstd 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Everything that is promised about an engine."""

    checkpoint: CheckpointIdentity
    runtime: RuntimeIdentity
    device: Device
    precision: Precision
    limits: Limits
    output: StateOutput
    tokenizer: TokenizerIdentity
    files: tuple[EngineFile, ...]
    proof: Proof
    fidelity: Fidelity
    probe: Probe
    measured: Measured
    cache: Literal["none", "paged"] = "none"
    generated_tokens: int = 0
    format: Literal["extract-engine"] = "extract-engine"
    version: int = FORMAT_VERSION

    @property
    def engine_id(self) -> str:
        """sha256 of what the engine is, without what was measured on it: building it again gives the same id."""
        table = asdict(self)
        for measured in ("measured", "proof", "fidelity", "probe"):
            del table[measured]
        table["limits"]["memory_bytes"] = None
        table["files"] = [file for file in table["files"] if file["name"] != COMPILED_FILE]
        return digest(_without_nothing(table))


def _without_nothing(value: Any) -> Any:
    """Without keys that are `None`: a field that a later version adds changes no engine's id."""
    if isinstance(value, dict):
        return {key: _without_nothing(inner) for key, inner in value.items() if inner is not None}
    return [_without_nothing(inner) for inner in value] if isinstance(value, (list, tuple)) else value


class Runtime(Protocol):
    """An engine in memory. One implementation a vendor; the pipeline knows only this."""

    contract: Contract

    @property
    def arithmetic(self) -> str:
        """What computes, as far as it decides the last bits of a state."""

    def hidden_states(self, batch: TokenBatch, kind: OutputKind) -> States:
        """Final-norm states of one pass.

        Returns float32 (or float16, or uint16 holding bfloat16 bits, as `contract.output.dtype` says; `mean` is always
        float32): [T, H] for "tokens", else [B, H]: the last token's, the first token's, the mean over each sequence.

        Raises:
            PassOutOfMemory: the pass does not fit; a smaller one may.
        """

    def close(self) -> None:
        """Give back what the runtime holds beside memory."""


@runtime_checkable
class LayerRuntime(Runtime, Protocol):
    """A runtime that gives the states of other layers too."""

    def layer_states(self, batch: TokenBatch, kind: OutputKind, layers: Sequence[int]) -> tuple[States, ...]:
        """What `hidden_states` gives, and beside it the states of other layers, from one pass.

        Args:
            batch: as there.
            kind: as there, of all of them.
            layers: numbers of layers: n is the residual stream after n decoder layers, before any norm (0: the
                embeddings as they enter the first layer).

        Returns:
            1 + len(layers) arrays of one shape and type: the final-norm states, which are the same bits as without
            layers, then those of `layers` in their order.

        Raises:
            PassOutOfMemory: the pass does not fit; a smaller one may.
            NoLayerStates: the engine cannot give them.
        """


class Pending(Protocol):
    """States that are on their way."""

    def wait(self) -> Sequence[bool]:
        """Until they are where they belong.

        Returns:
            Of each array that they were written to: whether all of them are known to be finite. Where it says no, they
            may be all the same.
        """


@runtime_checkable
class AheadRuntime(LayerRuntime, Protocol):
    """A runtime that takes the next batch while the last one is still computed."""

    def submit(
        self, batch: TokenBatch, kind: OutputKind, layers: Sequence[int], into: Sequence[States], rows: Int64 | None
    ) -> Pending:
        """Begin what `layer_states` does, and return before it is done.

        Args:
            batch: as there; it may change as soon as this returns.
            kind: as there.
            layers: as there.
            into: 1 + len(layers) arrays of the states' type; `into[i][rows]` is written at any time until `wait`
                returns. One thread submits and waits, in one order.
            rows: int64, where each state belongs; `None`: they fill the arrays.

        Raises:
            PassOutOfMemory: the pass does not fit; what was submitted before is not lost.
        """


class PassOutOfMemory(ExtractError):
    """One forward pass needed more memory than there is; the pipeline halves the token budget once."""

    exit_code = 8
    template = (
        "a forward pass of {tokens} tokens in {sequences} sequences ran out of memory on {device}. "
        "Run again with a smaller --max-tokens."
    )


class SequenceTooLong(EngineRefused):
    """A pass with a longer sequence than the engine was built for: its tables and buffers end there."""

    template = (
        "a sequence of {found:,} tokens was given to an engine for {expected:,} at most. "
        "Cut it, or build the engine with --max-input-tokens {found}."
    )


def check_lengths(batch: TokenBatch, limits: Limits) -> None:
    """Ask before a decoder of our own computes: it trusts its plan.

    Raises:
        SequenceTooLong: a sequence is longer than `limits.max_input_tokens`.
    """
    longest = int(np.diff(batch.cu_seqlens).max(initial=0))
    if longest > limits.max_input_tokens:
        raise SequenceTooLong(found=longest, expected=limits.max_input_tokens)


def layer_states(runtime: Runtime, batch: TokenBatch, kind: OutputKind, layers: Sequence[int]) -> tuple[States, ...]:
    """`Runtime.hidden_states` and, of a runtime that has it, `LayerRuntime.layer_states`.

    Raises:
        PassOutOfMemory: see there.
        NoLayerStates: layers are asked for, and the runtime or its model gives none.
    """
    if not layers:
        return (runtime.hidden_states(batch, kind),)
    if not isinstance(runtime, LayerRuntime):
        name = f"{runtime.contract.runtime.name} on {runtime.contract.device.type}"
        raise NoLayerStates(model=runtime.contract.checkpoint.name, problem=f"its engine ({name}) gives that one alone")
    return runtime.layer_states(batch, kind, layers)


def write_contract(directory: Path, contract: Contract) -> None:
    """Write `contract.json`, the last file of a build."""
    (directory / CONTRACT_FILE).write_bytes(canonical_json(asdict(contract)) + b"\n")


def read_contract(directory: Path) -> Contract:
    """Read and check `contract.json`; files are not hashed here.

    Raises:
        NotAnEngine: no directory, no contract, not JSON, absurdly large, or another format version.
    """
    path = directory / CONTRACT_FILE
    if not directory.is_dir():
        raise NotAnEngine(path=directory, problem="not a directory" if directory.exists() else "no such directory")
    if not path.is_file():
        raise NotAnEngine(path=directory, problem=f"it holds no {CONTRACT_FILE}")
    if path.stat().st_size > MAX_CONTRACT_BYTES:
        raise NotAnEngine(path=directory, problem=f"{CONTRACT_FILE} has {path.stat().st_size:,} bytes, absurdly many")
    try:
        table = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise NotAnEngine(path=directory, problem=f"{CONTRACT_FILE} is not JSON: {error}") from None
    version = table.get("version") if isinstance(table, dict) else None
    if version != FORMAT_VERSION:
        problem = f"contract version {version!r} found, {FORMAT_VERSION} expected"
        raise NotAnEngine(path=directory, problem=problem)
    try:
        return parse(Contract, table, str(path))
    except ExtractError as error:
        raise NotAnEngine(path=directory, problem=str(error)) from None


def describe_file(path: Path) -> EngineFile:
    """A file of an engine as a contract names it: large ones by blocks."""
    size = path.stat().st_size
    block_bytes = BLOCK_BYTES if size >= LARGE_BYTES else None
    blank = EngineFile(name=path.name, size=size, sha256="", block_bytes=block_bytes)
    return replace(blank, sha256=blank.digest_of(path))


def check_files(directory: Path, contract: Contract) -> None:
    """Compare every file of the engine with the contract, by size and sha256.

    Raises:
        EngineChanged: the first file that is missing, of another size or of other bytes.
    """
    for expected in contract.files:
        path = directory / expected.name
        if Path(expected.name).name != expected.name or path.is_symlink() or not path.is_file():
            raise EngineChanged(path=directory, name=expected.name, field="state", found="missing", expected="present")
        size = path.stat().st_size
        if size != expected.size:
            raise EngineChanged(path=directory, name=expected.name, field="size", found=size, expected=expected.size)
        found = expected.digest_of(path)
        if found != expected.sha256:
            raise EngineChanged(
                path=directory,
                name=expected.name,
                field="sha256",
                found=found[:12],
                expected=expected.sha256[:12],
            )


def describe_json(contract: Contract) -> dict[str, Any]:
    """The contract as JSON values, with its id first."""
    return {"engine_id": contract.engine_id, **asdict(contract)}
