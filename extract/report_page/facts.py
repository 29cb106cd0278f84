"""What a report page says, as plain values. Knows nothing of files and nothing of HTML.

Everything here can be printed as JSON. Lists run in parallel where a chart wants columns; a sampled row is one object,
because a page shows it as one thing.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One line of "what was run".

    Attributes:
        note: what the name means, for a reader who is new to it.
    """

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Integrity:
    """What a quick look at the files found.

    Attributes:
        state: "verified": sizes, hashes and row ranges are right; "unhashed": sizes and row ranges are, too many bytes
            to hash them here; "problems": something is not as it was committed.
        num_hashed: files whose sha256 was compared.
        command: checks everything.
    """

    state: Literal["verified", "unhashed", "problems"]
    num_files: int
    num_bytes: int
    num_hashed: int
    problems: tuple[str, ...]
    num_problems: int
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOutcomes:
    """Output rows of one source file, by outcome."""

    name: str
    num_rows: int
    outcomes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How many tokens rows have, in bins of equal width; the last bin also holds whatever is longer.

    Attributes:
        starts: first number of tokens of each bin.
        width: numbers of tokens in a bin.
        stored, original: output rows, and whole rows before any cut, in each bin.
        limit: most tokens of a row in this job; `None` if the job does not say.
        num_not_counted: rows so long that they were cut before all of their tokens were counted.
    """

    starts: tuple[int, ...]
    width: int
    stored: tuple[int, ...]
    original: tuple[int, ...]
    limit: int | None
    longest_original: int
    median_stored: int
    median_original: int
    num_not_counted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """What the small columns of the shards say about rows.

    Attributes:
        files: the source's files, those with the largest share of rows that are not `ok` first.
        num_files: all of them, `files` may be the first of many.
        num_shards_read, num_shards: the counts by file and length come from so many of the committed shards.
    """

    files: tuple[FileOutcomes, ...]
    num_files: int
    lengths: Lengths | None
    num_shards_read: int
    num_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFigures:
    """One kind of worker: an engine on a device with its settings. Equal processes are one kind."""

    name: str
    num_shards: int
    num_rows: int
    num_tokens: int
    seconds: dict[str, float]
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Speed over a job.

    Attributes:
        axis: "time": `edges` are seconds since `started`, from the times of the record files; "shard": they are shard
            numbers, because those times say nothing (the output was copied).
        edges: [bins + 1].
        tokens_per_s: one list [bins] for each worker.
    """

    axis: Literal["time", "shard"]
    started: str | None
    edges: tuple[float, ...]
    tokens_per_s: tuple[tuple[float, ...], ...]
    workers: tuple[WorkerFigures, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One position of a state, over all states that were looked at."""

    index: int
    mean: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFigures:
    """The states of the sampled rows: every token's, or one a row, as they are stored.

    Attributes:
        norm_edges, norm_counts: histogram of state lengths (Euclidean norm), [bins + 1] and [bins].
        norm_quantiles: least, 5 %, median, 95 %, largest.
        mean, variance: by dimension, [H].
        dead: dimensions that never change. Empty where fewer than two states were seen.
        outliers: dimensions whose size (root mean square) is many times the median dimension's, largest first.
        num_dead, num_outliers: all of them, the lists may be the first of many.
    """

    num_states: int
    width: int
    norm_edges: tuple[float, ...]
    norm_counts: tuple[int, ...]
    norm_quantiles: tuple[float, float, float, float, float]
    mean: tuple[float, ...]
    variance: tuple[float, ...]
    dead: tuple[Dimension, ...]
    num_dead: int
    outliers: tuple[Dimension, ...]
    num_outliers: int
    outlier_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """A row on the map.

    Attributes:
        text: as in the source, or decoded from its ids, or its ids; cut if long.
        pca, umap: place on the map; `umap` is `None` where it was not computed.
        neighbours: positions in the sample of the rows with the most similar states, nearest first.
        cosines: of those.
    """

    row: int
    chunk: int
    id: str | None
    outcome: str
    num_tokens: int
    text: str
    norm: float
    pca: tuple[float, float]
    umap: tuple[float, float] | None
    neighbours: tuple[int, ...]
    cosines: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two rows of the sample, by position in it, with almost the same state."""

    first: int
    second: int
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Rows that were read with their states.

    Attributes:
        represented_by: "last" state of a row, or the stored one of a pooled kind.
        num_batches: record batches that were read for it.
        text_from: "source", "column", "ids" (decoded), "raw ids" or "nothing".
        text_note: why not the source, or empty.
        explained: shares of the variance along the two PCA axes.
        umap_note: why there is no UMAP, or empty.
        typical_cosine: mean over all pairs; `None` for fewer than two rows.
        pairs: the most similar ones at `pair_cosine` or above, each row in one pair at most.
        num_pairs: all pairs at `pair_cosine` or above.
    """

    represented_by: str
    num_batches: int
    num_shards: int
    text_from: str
    text_note: str
    explained: tuple[float, float]
    umap_note: str
    typical_cosine: float | None
    pair_cosine: float
    pairs: tuple[Pair, ...]
    num_pairs: int
    rows: tuple[SampledRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a page shows.

    Attributes:
        complete: every shard is committed and the manifest is written; else `problem` says what is missing.
        num_rows: source rows in finished shards, of `num_rows_expected` (`None` for a stream that has not ended).
        settings: what was run.
        states, sample: `None` where no row has a state.
        notes: what could not be read, and why.
    """

    path: str
    job: str
    title: str
    version: str
    complete: bool
    problem: str | None
    kind: str
    dtype: str
    width: int
    num_rows: int
    num_rows_expected: int | None
    num_rows_out: int
    num_tokens: int
    num_tokens_original: int
    num_bytes: int
    outcomes: dict[str, int]
    settings: tuple[Setting, ...]
    integrity: Integrity
    counts: RowCounts
    throughput: Throughput | None
    states: StateFigures | None
    sample: Sample | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
