"""Turn an output directory into what other tools read, without a model: streamed, going on where it was killed.

Memory holds a record batch (a few for targets that join some), whatever the size of the output. Before the export gets
its name, some of its rows are read back through the target's own loader and compared with what is stored, bit for bit.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from extract.errors import SpecError, VerificationFailed
from extract.exporting import target_class
from extract.exporting.record import describe_export, readme
from extract.exporting.request import Kind, Request
from extract.exporting.rows import RowStream, Tally
from extract.exporting.state_columns import read_states
from extract.exporting.target import Part, Target
from extract.exporting.working_directory import WorkingDirectory
from extract.job import read_job
from extract.output import Output
from extract.progress import Progress
from extract.storage import Place, locate
from extract.store import replace_file

README = "README.md"
ROWS_READ_BACK = 8
"""Of the first and of the last part; what a loader misreads it misreads in every row."""


class ExportIntoOutput(SpecError):
    """Nothing but a run writes into an output directory."""

    template = "{path}: lies within the output that it is made from. Choose another directory with -o."


class ExportDiffers(VerificationFailed):
    """The target's own loader reads other numbers than are stored."""

    template = "{path}: row {row} of the export reads back as other numbers than are stored; it was not given its name."


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was made.

    Attributes:
        parts_made: by this call; fewer than there are if an earlier one was interrupted.
        record: the content of `export.json`.
        reading: two lines of Python.
    """

    path: str
    kind: str
    made_from: str
    rows: int
    left_out_without_states: dict[str, int]
    left_out_not_chosen: int
    parts_made: int
    num_bytes: int
    seconds: float
    reading: str
    record: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def export(
    root: str | Place, target: str | Path, *, kind: Kind, progress: Progress | None = None, **options: Any
) -> Exported:
    """Write the rows of an output as `kind` into the directory `target`, or go on with it.

    Args:
        root: an output directory.
        target: a new directory.
        kind: "parquet", "npy", "safetensors", "hf", "lance", "speculators", "specforge" or "saelens".
        progress: where to say how far it is; nowhere by default.
        options: the other attributes of `extract.exporting.request.Request`.

    Raises:
        Unfinished: the output is not complete and `unfinished` is not given.
        TargetCannotHold, TargetNeeds, OptionDoesNotApply, MissingPackage: the request does not fit.
        ExportIntoOutput: the directory lies in the output.
        ExportExists, OtherExport, ExportIsBusy: the directory is taken.
        ExportDiffers: the target's own loader reads other numbers.
    """
    started = time.perf_counter()
    request = Request(kind=kind, **options)
    final, made_from = Path(target), locate(root)
    cls = target_class(kind)
    output = Output(read_job(made_from))
    if isinstance(made_from, Path) and final.resolve().is_relative_to(made_from.resolve()):
        raise ExportIntoOutput(path=final)
    stream = RowStream(output, request, with_states_only=cls.with_states_only)
    identity = {
        "job": output.job.job_id,
        "shards": [[commit.shard, commit.sha256] for commit in stream.shards],
        **request.identity(),
    }
    place = WorkingDirectory(final, identity)
    found = place.finished()
    if found is not None:
        place.remove()  # of whoever was killed between the last two steps
        return _exported(final, made_from, found, 0, started)
    writer = cls(stream, request, place.files)
    writer.refuse()
    progress = progress if progress is not None else Progress(quiet=True)
    try:
        parts = place.open(writer.shared_files)
        made = len(stream.shards) - len(parts)
        _write(writer, place, parts, progress)
        own = writer.finish(parts)
        checked = _read_back(writer, parts, final)
        record = describe_export(writer, parts, checked)
        replace_file(place.files / README, readme(record).encode())
        place.publish(record, own)
    finally:
        place.close()
    return _exported(final, made_from, record, made, started)


def _write(writer: Target, place: WorkingDirectory, parts: list[Part], progress: Progress) -> None:
    """Write the parts that are missing, and add them to `parts`."""
    shards = writer.stream.shards
    before = sum(commit.num_rows for commit in shards[: len(parts)])
    progress.expect(sum(commit.num_rows for commit in shards), before)
    with progress:
        for commit in shards[len(parts) :]:
            tally = Tally()
            first_row = sum(part.rows for part in parts)
            written = writer.write(commit.shard, first_row, writer.stream.batches(commit.shard, tally), parts)
            part = Part(
                shard=commit.shard,
                first_row=first_row,
                rows=tally.rows,
                outcomes=dict(sorted(tally.outcomes.items())),
                no_states=dict(sorted(tally.no_states.items())),
                not_chosen=tally.not_chosen,
                files=written.files,
                facts=written.facts,
            )
            place.record(part, [name for name in writer.shared_files if (place.files / name).exists()])
            parts.append(part)
            progress.begin_window(commit.num_rows, 0)
            progress.wrote(sum((place.files / name).stat().st_size for name in written.files))


def _read_back(writer: Target, parts: Sequence[Part], final: Path) -> int:
    """Compare the first rows of the first and of the last part with what is stored; returns how many."""
    checked = 0
    for part in {part.shard: part for part in (*parts[:1], *parts[-1:]) if part.rows}.values():
        row = part.first_row
        last = row + min(part.rows, ROWS_READ_BACK)
        for batch in writer.stream.batches(part.shard, Tally()):
            states = read_states(batch, writer.stream.spec, writer.layer_read_back)
            for n in range(batch.num_rows):
                if row == last:
                    break
                expected = states.values[int(states.offsets[n]) : int(states.offsets[n + 1])]
                if not writer.holds(parts, row, expected):
                    raise ExportDiffers(path=final, row=row)
                row, checked = row + 1, checked + 1
            if row == last:
                break
    return checked


def _exported(final: Path, made_from: Place, record: dict[str, Any], made: int, started: float) -> Exported:
    return Exported(
        path=str(final),
        kind=record["kind"],
        made_from=str(made_from),
        rows=record["rows"],
        left_out_without_states=record["left_out_without_states"],
        left_out_not_chosen=record["left_out_not_chosen"],
        parts_made=made,
        num_bytes=sum(path.stat().st_size for path in final.rglob("*") if path.is_file()),
        seconds=round(time.perf_counter() - started, 3),
        reading=target_class(record["kind"]).reading.replace("{path}", str(final)),
        record=record,
    )
