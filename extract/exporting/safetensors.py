"""safetensors files of a bounded number of rows: `states`, `row`, and `offsets` and `input_ids` where there are any."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from extract.exporting.rows import schema_facts
from extract.exporting.state_columns import FINAL, as_torch, read_states
from extract.exporting.target import Part, Target, Written, part_of
from extract.exporting.working_directory import new_file
from extract.shards.views import BatchView
from extract.store import clear_write_errors

ROWS_PER_FILE = 4096
FILE_BYTES = 2**26
"""Most bytes of states in a file, if a single record batch is not larger."""


class SafetensorsTarget(Target):
    """`part-00000-00000.safetensors`, ...: shard, and file within the shard."""

    kind = "safetensors"
    title = "safetensors files of some thousand rows each"
    cannot_carry = (
        "Rows without states are left out and counted; id and carried columns are left out: `row` tells which rows of "
        "the source these are. NumPy's loader has no bfloat16: use torch's for it."
    )
    reading = 'import safetensors.torch\nfirst = safetensors.torch.load_file("{path}/part-00000-00000.safetensors")'
    with_states_only = True

    def write(self, shard: int, first_row: int, batches: Iterator[BatchView], done: Sequence[Part]) -> Written:
        """Files of at most the asked number of rows, and of bounded bytes."""
        most = self.request.rows_per_file or ROWS_PER_FILE
        files: list[str] = []
        counts: list[int] = []
        held: list[BatchView] = []

        def flush() -> None:
            files.append(f"part-{shard:05d}-{len(files):05d}.safetensors")
            counts.append(sum(batch.num_rows for batch in held))
            self._save(files[-1], held)
            held.clear()

        for batch in batches:
            start = 0
            while start < batch.num_rows:
                room = most - sum(other.num_rows for other in held)
                piece = BatchView(batch.arrow.slice(start, room), self.stream.spec)
                if held and sum(other.arrow.nbytes for other in (*held, piece)) > FILE_BYTES:
                    flush()
                    continue
                held.append(piece)
                start += piece.num_rows
                if piece.num_rows == room:
                    flush()
        if held:
            flush()
        return Written(files=tuple(files), facts={"file_rows": counts})

    def read_back(self, parts: Sequence[Part], row: int) -> npt.NDArray[Any] | None:
        """See `Target.read_back`."""
        from safetensors import safe_open

        part = part_of(parts, row)
        place, number = row - part.first_row, 0
        while place >= part.facts["file_rows"][number]:
            place -= part.facts["file_rows"][number]
            number += 1
        with safe_open(self.folder / part.files[number], framework="pt") as file:
            start, stop = place, place + 1
            if self.stream.kind == "tokens":
                start, stop = file.get_slice("offsets")[place : place + 2].tolist()
            states = file.get_slice("states")[start:stop]
        values = torch_values(states, self.stream.dtype)
        return values if self.stream.kind == "tokens" else values[0]

    def _save(self, name: str, batches: Sequence[BatchView]) -> None:
        import torch
        from safetensors.torch import save_file

        spec, layers = self.stream.spec, {"states": FINAL, **{layer: layer for layer in self.stream.layers}}
        found = {key: [read_states(batch, spec, layer) for batch in batches] for key, layer in layers.items()}
        tensors = {
            key: as_torch(np.concatenate([one.values for one in states]), spec.dtype) for key, states in found.items()
        }
        tensors["row"] = torch.from_numpy(np.concatenate([batch.row for batch in batches]))
        if spec.kind == "tokens":
            lengths = np.concatenate([np.diff(one.offsets) for one in found["states"]])
            tensors["offsets"] = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
        if spec.input_ids:
            ids, spans = zip(*(row_ids(batch) for batch in batches), strict=True)
            tensors["input_ids"] = torch.from_numpy(np.concatenate(ids))
            if spec.kind != "tokens":
                lengths = np.concatenate(spans)
                tensors["id_offsets"] = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
        # One key only: the library writes several in an order of its own, and the same rows should be the same bytes.
        metadata = {"extract": json.dumps(schema_facts(self.stream))}
        path = new_file(self.folder / name)
        with clear_write_errors(path):
            save_file(tensors, path, metadata=metadata)


def row_ids(batch: BatchView) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Token ids of a batch's rows end to end, and how many each row has; every row of the batch has some."""
    spans = batch.id_spans
    return batch.input_ids[int(spans.starts[0]) : int(spans.stops[-1])], spans.stops - spans.starts


def torch_values(tensor: Any, dtype: str) -> npt.NDArray[Any]:
    """A tensor as numpy holds stored values: bfloat16 as uint16."""
    import torch

    values: npt.NDArray[Any] = (tensor.view(torch.int16) if dtype == "bfloat16" else tensor).numpy()
    return values.view(np.uint16) if dtype == "bfloat16" else values


TARGET = SafetensorsTarget
