"""What an output directory holds, for `extract inspect`."""

from dataclasses import asdict, dataclass
from typing import Any

from extract.engine.contract import CONTRACT_FILE
from extract.errors import SpecError
from extract.job import JobDirectory
from extract.manifest import each_record
from extract.output import open_output
from extract.record_sums import RecordSums
from extract.shards.schema import METADATA_PREFIX, layer_name
from extract.storage import Place

SHOWN_VALUES = 6


class NothingToInspect(SpecError):
    """A path that is neither an engine nor an output."""

    template = "{path}: neither an engine (no contract.json) nor an output directory (no job.json)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Schema, metadata and size of an output, and one of its rows."""

    path: str
    job: str
    columns: dict[str, str]
    metadata: dict[str, str]
    num_shards: int
    num_rows: int
    num_rows_out: int
    num_bytes: int
    row: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def holds_engine(path: Place) -> bool:
    """Whether an engine lies there (else an output does).

    Raises:
        NothingToInspect: neither.
    """
    engine = (path / CONTRACT_FILE).is_file()
    if not engine and not JobDirectory(path).job_file.is_file():
        raise NothingToInspect(path=path)
    return engine


def inspect_output(path: Place, row: int | None = None) -> Inspection:
    """Read `job.json`, the commit records and, if asked, one row.

    Raises:
        NotAJob: it is no output directory.
        NoSuchRow: the row is not there (yet).
    """
    output = open_output(path)
    sums = RecordSums(output.job, each_record(output.job)).totals
    shown = None
    if row is not None:
        found = output.row(row)
        shown = {
            "row": found.row,
            "outcome": found.outcome,
            "num_tokens": found.num_tokens,
            "num_tokens_original": found.num_tokens_original,
            "input_ids": None if found.input_ids is None else found.input_ids.tolist(),
            "states_shape": None if found.states is None else list(found.states.shape),
            "first_values": None if found.states is None else found.states.reshape(-1)[:SHOWN_VALUES].tolist(),
            **{
                f"first_values of {layer_name(layer)}": states.reshape(-1)[:SHOWN_VALUES].tolist()
                for layer, states in found.layers.items()
            },
            **found.columns,
        }
    metadata = {key.decode(): value.decode() for key, value in (output.schema.metadata or {}).items()}
    return Inspection(
        path=str(path),
        job=metadata.get(f"{METADATA_PREFIX}job", ""),
        columns={field.name: str(field.type) for field in output.schema},
        metadata=metadata,
        num_shards=sums.num_shards,
        num_rows=sums.num_rows,
        num_rows_out=sums.num_rows_out,
        num_bytes=sums.num_bytes,
        row=shown,
    )
