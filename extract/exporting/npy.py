"""NumPy files that can be mapped: all states in one array, offsets by row, and the rows' other columns beside them.

A .npy file has its shape in its first bytes; it is written last, over room left for it, so that states are only ever
appended.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from extract.exporting.parquet import write_parquet
from extract.exporting.rows import plain_columns
from extract.exporting.state_columns import FINAL, read_states
from extract.exporting.target import Part, Target, Written
from extract.exporting.working_directory import append, new_file
from extract.shards import schema as names
from extract.shards.values import value_type
from extract.shards.views import BatchView
from extract.store import clear_write_errors

HEADER_BYTES = 128
"""Room for magic, shape and type; numpy itself pads to a multiple of 64."""


class NpyTarget(Target):
    """`states.npy`, `offsets.npy` (for every token's state), `rows/*.parquet`."""

    kind = "npy"
    title = "one array of states that np.load maps, with a table of its rows"
    cannot_carry = (
        "Rows without states are left out and counted. bfloat16 has no NumPy type: states.npy holds its bits as "
        "uint16; numbers are (states.astype('uint32') << 16).view('float32')."
    )
    reading = 'import numpy\nstates = numpy.load("{path}/states.npy", mmap_mode="r")'
    with_states_only = True

    @property
    def _arrays(self) -> dict[str, str]:
        """File by layer."""
        return {FINAL: "states.npy", **{name: f"{name}.npy" for name in self.stream.layers}}

    @property
    def shared_files(self) -> tuple[str, ...]:
        """The arrays."""
        files = tuple(self._arrays.values())
        return (*files, "offsets.npy") if self.stream.kind == "tokens" else files

    def write(self, shard: int, first_row: int, batches: Iterator[BatchView], done: Sequence[Part]) -> Written:
        """Append a shard to the arrays, and its rows as a file of their own."""
        vectors = done[-1].facts["vectors_end"] if done else 0
        storage = value_type(self.stream.dtype).storage
        places = dict.fromkeys(self._arrays, HEADER_BYTES + vectors * self.stream.width * storage.itemsize)
        row = first_row
        columns = names.state_columns(self.stream.spec)
        name = f"rows/part-{shard:05d}.parquet"

        def tables() -> Iterator[Any]:
            nonlocal vectors, row
            for batch in batches:
                for layer, place in places.items():
                    found = read_states(batch, self.stream.spec, layer)
                    values = np.ascontiguousarray(found.values)
                    places[layer] = append(self.folder / self._arrays[layer], place, lambda file: file.write(values))  # noqa: B023
                    if layer == FINAL:
                        offsets = found.offsets[1:] + vectors
                if self.stream.kind == "tokens":
                    append(
                        self.folder / "offsets.npy",
                        HEADER_BYTES + 8 * (row + 1),
                        lambda file: file.write(offsets),  # noqa: B023
                    )
                vectors, row = int(offsets[-1]), row + batch.num_rows
                yield plain_columns(batch, without=columns)

        groups = write_parquet(new_file(self.folder / name), tables(), ())
        for layer, place in places.items():
            append(self.folder / self._arrays[layer], place, lambda file: None)
        if self.stream.kind == "tokens":
            append(self.folder / "offsets.npy", HEADER_BYTES + 8 * (row + 1), lambda file: None)
        return Written(files=(name,) if groups else (), facts={"vectors_end": vectors})

    def finish(self, parts: Sequence[Part]) -> tuple[str, ...]:
        """Write the shapes."""
        vectors = parts[-1].facts["vectors_end"]
        rows = parts[-1].first_row + parts[-1].rows
        for name in self._arrays.values():
            self._head(name, (vectors, self.stream.width), value_type(self.stream.dtype).storage)
        if self.stream.kind == "tokens":
            self._head("offsets.npy", (rows + 1,), np.dtype(np.int64))
        return self.shared_files

    def read_back(self, parts: Sequence[Part], row: int) -> npt.NDArray[Any] | None:
        """See `Target.read_back`."""
        states = np.load(self.folder / "states.npy", mmap_mode="r")
        if self.stream.kind != "tokens":
            return np.asarray(states[row])
        offsets = np.load(self.folder / "offsets.npy", mmap_mode="r")
        return np.asarray(states[offsets[row] : offsets[row + 1]])

    def _head(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        described = (
            f"{{'descr': {np.lib.format.dtype_to_descr(dtype)!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
        )
        text = described.ljust(HEADER_BYTES - 11) + "\n"
        with clear_write_errors(self.folder / name), (self.folder / name).open("r+b") as file:
            file.write(b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little") + text.encode("latin1"))


TARGET = NpyTarget
