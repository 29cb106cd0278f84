"""The job spec: which rows, how they become tokens, what is written. Frozen; parsed once from TOML or options.

Defaults are written here and nowhere else; the command line reads them from these classes. Knows nothing of engines:
what depends on one (the token limit, the shard size) is `None` here and resolved by `plan`.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from extract.settings import parse, read_toml

SourceFormat = Literal["auto", "parquet", "arrow", "jsonl", "hf"]
InputKind = Literal["text", "messages", "input_ids"]
OnLong = Literal["truncate", "chunk", "skip", "error"]
OnBad = Literal["record", "error"]
SpecialTokens = Literal["tokenizer", "none", "bos", "eos", "bos+eos"]
OutputKind = Literal["tokens", "last", "mean", "first"]
ValueType = Literal["float16", "float32", "bfloat16", "int8"]
Compression = Literal["zstd", "lz4", "none"]
Fingerprint = Literal["exact", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Which rows are read, and from which columns."""

    path: str | tuple[str, ...]
    """File, glob, directory or list of them; or a Hugging Face dataset name with format = "hf"."""
    format: SourceFormat = "auto"
    """"auto" looks at names and contents."""
    column: str = "text"
    """Dotted name of the input column."""
    input: InputKind = "text"
    """What the column holds: text, conversations (lists of role and content), or ready token ids."""
    id_column: str | None = None
    """Column copied to the output as `id`."""
    carry: tuple[str, ...] = ()
    """Columns copied to the output as they are."""
    limit: int | None = None
    """Only the first rows of the source."""
    rows: str | None = None
    """Only these positions of the source: "0-99,250"."""
    name: str | None = None
    """Configuration name of a Hugging Face dataset."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face dataset."""
    streaming: bool = False
    """Read a Hugging Face dataset as it comes, without downloading it first; no random access."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 0:
            raise ValueError("limit: a whole number, 0 or more")
        if self.rows is not None and self.streaming:
            raise ValueError("rows: left out with streaming = true, which has no random access")
        if not self.paths or not all(self.paths) or any("\0" in path for path in self.paths):
            raise ValueError("path: a file, a directory, a glob or a dataset name")

    @property
    def paths(self) -> tuple[str, ...]:
        """`path` as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec:
    """How a row's text becomes at most `max_input_tokens` ids, and what is done with rows that do not fit."""

    max_input_tokens: int | None = None
    """At most the engine's own limit, which is the default."""
    on_long: OnLong = "truncate"
    """What is done with rows that are longer than the limit: cut, cut into chunks, recorded without states, or stop."""
    truncation_side: Literal["auto", "left", "right"] = "auto"
    """"auto" is the tokenizer's own side."""
    chunk_overlap: int = 0
    """Tokens that a chunk repeats from the one before it, with on_long = "chunk"."""
    special_tokens: SpecialTokens = "tokenizer"
    """Which are added: those that the tokenizer adds by itself, none, or these."""
    split_special_tokens: bool = False
    """Treat special tokens written in the text as plain text instead of as control ids."""
    prefix: str = ""
    """Text put before each row's text."""
    on_null: OnBad = "record"
    """A row without a value: record its outcome, or stop."""
    on_empty: OnBad = "record"
    """A row without a token: record its outcome, or stop."""
    on_bad_text: OnBad = "record"
    """A row that is not valid text: record its outcome, or stop."""
    on_non_finite: OnBad = "record"
    """A state that is not finite, or too large for the stored type: record the outcome of its row, or stop."""
    add_generation_prompt: bool = False
    """With input = "messages": end the rendered chat with the assistant's opening."""

    def __post_init__(self) -> None:
        if self.max_input_tokens is not None and self.max_input_tokens < 1:
            raise ValueError("max_input_tokens: a whole number, 1 or more")
        if self.chunk_overlap < 0:
            raise ValueError("chunk_overlap: a whole number, 0 or more")
        if self.chunk_overlap and self.on_long != "chunk":
            raise ValueError('chunk_overlap: 0 unless on_long is "chunk"')


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesSpec:
    """What is written for each row."""

    kind: OutputKind = "tokens"
    """States of every token, or one a row: the last token's, the mean of all, the first token's."""
    dtype: ValueType = "float16"
    """Stored type; int8 is rotated, with a scale for each state."""
    compression: Compression = "zstd"
    """Of the record batches; with "none" a file is read by mapping it."""
    compression_level: int = 1
    """Of zstd, 1 to 19."""
    normalize: bool = False
    """Scale pooled states to unit length (not offered for kind = "tokens")."""
    layers: tuple[int, ...] = ()
    """Decoder layers whose states are stored beside the final one: the residual stream after that many of them, 0 for
    the embeddings, counted from the end where negative. A plan has them ascending and not negative."""
    input_ids: bool = True
    """Store the token ids beside the states."""
    rows_per_shard: int | None = None
    """`None`: chosen by the plan from bytes and tokens."""
    record_batch_bytes: int = 16 * 2**20
    """Most bytes of a record batch, before compression; a larger row is a batch of its own."""
    reserve_bytes: int = 2**30
    """A run stops cleanly when the disk has less than this left."""

    def __post_init__(self) -> None:
        if self.normalize and self.kind == "tokens":
            raise ValueError('normalize: false unless kind is "last", "mean" or "first"')
        if self.normalize and self.layers:
            raise ValueError("layers: none with normalize = true, since layers differ by their lengths too")
        if self.rows_per_shard is not None and self.rows_per_shard < 1:
            raise ValueError("rows_per_shard: a whole number, 1 or more")
        if self.record_batch_bytes < 2**16:
            raise ValueError("record_batch_bytes: 65536 or more")
        if self.reserve_bytes < 0:
            raise ValueError("reserve_bytes: 0 or more")
        if self.compression == "zstd" and not 1 <= self.compression_level <= 19:
            raise ValueError("compression_level: 1 to 19")

    @property
    def identity(self) -> dict[str, Any]:
        """What of it a resume must find unchanged, as plain values; layers count where some are asked for."""
        table = dataclasses.asdict(self)
        for habit in ("reserve_bytes", "record_batch_bytes"):
            del table[habit]
        if not self.layers:
            del table["layers"]
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """How the work is done. Changes nothing in the output beyond rounding, so a resume may change it."""

    max_sequences: int | None = None
    """At most the engine's own limit, which is the default."""
    max_tokens: int | None = None
    """Token budget of one forward pass; at most the engine's own limit, which is the default."""
    threads: int | None = None
    """Threads of the forward pass; `None`: the engine's own number, else as many as this process may use."""
    share: bool = True
    """Compute common prefixes and exact duplicates of a pass once, where that saves something."""
    overlap: bool = True
    """Tokenise and write beside the forward pass; false is the plain sequential twin with the same bytes."""
    fingerprint: Fingerprint = "exact"
    """"exact": one engine makes all shards; "any": several of one checkpoint and precision may."""

    def __post_init__(self) -> None:
        for key in ("max_sequences", "max_tokens", "threads"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key}: a whole number, 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One extraction job."""

    source: SourceSpec
    """Which rows."""
    engine: str | None = None
    """Engine directory; relative paths start at the current directory."""
    other_engines: tuple[str, ...] = ()
    """Engines of the same checkpoint for devices that `engine` does not fit; a worker takes the first that fits."""
    output: str | None = None
    """Output directory; relative paths start at the current directory."""
    text: TextSpec = field(default_factory=TextSpec)
    states: StatesSpec = field(default_factory=StatesSpec)
    run: RunSpec = field(default_factory=RunSpec)

    def __post_init__(self) -> None:
        for key in ("engine", "output"):
            value = getattr(self, key)
            if value is not None and (not value or "\0" in value):  # "" would be the current directory
                raise ValueError(f"{key}: the path of a directory")


def load_job(path: str | Path) -> JobSpec:
    """Read a job spec from TOML (`jobs/*.toml`).

    Raises:
        SpecError: no such file, no TOML, an unknown key (the nearest known one is named) or a value that cannot be.
    """
    return parse(JobSpec, read_toml(Path(path)), str(path))


def as_table(spec: Any) -> dict[str, Any]:
    """A spec as plain JSON-ready values, in field order."""
    return dataclasses.asdict(spec)
