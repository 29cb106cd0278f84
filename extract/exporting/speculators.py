"""The training data of vLLM's `speculators`: a dataset of token ids and loss masks, and a file of states a sample.

Its loader takes `hidden_states` [L, layers, H] of `hidden_states/hs_<n>.safetensors`: the last layer is the verifier's
last state, those before it are laid side by side. All of its drafters but `mtp` apply the verifier's final norm to that
last state themselves, so they need the state before the norm, which the final states here are not; `mtp` takes it as
it stands. Hence the layers are never guessed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from extract.exporting.drafter_samples import DrafterTarget
from extract.exporting.hf_directory import describe, features_of, write_stream
from extract.exporting.safetensors import torch_values
from extract.exporting.state_columns import FINAL
from extract.exporting.target import Part, TargetNeeds, Written
from extract.exporting.working_directory import new_file
from extract.shards.views import BatchView
from extract.store import clear_write_errors

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())),
        ("seq_len", pa.int64()),
        ("row", pa.int64()),
    ]
)
ROWS_PER_TABLE = 1024


class SpeculatorsTarget(DrafterTarget):
    """`data-00000.arrow`, ..., `state.json`, `dataset_info.json`, `hidden_states/hs_0.safetensors`, ..."""

    kind = "speculators"
    title = "training data of vLLM speculators, one sample a row"
    cannot_carry = (
        "Rows without states, ids and carried columns are left out; `row` of the dataset is the position in the "
        "source. The last of --layers is the verifier's last state: all drafters but mtp put it through the final "
        "norm themselves and need the last decoder layer's state, not `final`."
    )
    reading = (
        'from speculators.train.data import ArrowDataset\nsamples = ArrowDataset(8192, "{path}", on_missing="raise")'
    )

    def refuse(self) -> None:
        """See `Target.refuse`."""
        if not self.layers:
            raise TargetNeeds(
                path=self.stream.output.path,
                kind=self.kind,
                needed="states of intermediate layers and of the last layer before the final norm, in that order",
                advice=_layers_advice(self.stream.layers),
            )
        if FINAL in self.layers and self.layers != (FINAL,):
            raise TargetNeeds(
                path=self.stream.output.path,
                kind=self.kind,
                needed="`final` to be the only one of --layers, as drafters that take several layers put the last one "
                "through the final norm themselves",
                advice="Give the last decoder layer's number instead of `final`, or --layers final for mtp drafters.",
            )
        super().refuse()

    def write(self, shard: int, first_row: int, batches: Iterator[BatchView], done: Sequence[Part]) -> Written:
        """Files of a shard's samples, then the file that lists them."""
        import torch
        from safetensors.torch import save_file

        files: list[str] = []
        name = f"data-{shard:05d}.arrow"

        def tables() -> Iterator[pa.Table]:
            held: list[dict[str, Any]] = []
            for sample in self.samples(batches, self.layers):
                files.append(f"hidden_states/hs_{first_row + len(files)}.safetensors")
                path = new_file(self.folder / files[-1])
                states = torch.stack([sample.states[layer] for layer in self.layers], dim=1)
                with clear_write_errors(path):
                    save_file({"hidden_states": states, "token_ids": torch.from_numpy(sample.input_ids)}, path)
                length = len(sample.input_ids)
                held.append(
                    {"input_ids": sample.input_ids, "loss_mask": sample.loss_mask, "seq_len": length, "row": sample.row}
                )
                if len(held) == ROWS_PER_TABLE:
                    yield pa.Table.from_pylist(held, schema=SCHEMA)
                    held = []
            if held:
                yield pa.Table.from_pylist(held, schema=SCHEMA)

        rows = write_stream(self.folder / name, features_of(SCHEMA, self.folder), tables())
        return Written(files=(*files, name) if rows else (), facts={"masks": self.mask.take_counts()})

    def finish(self, parts: Sequence[Part]) -> tuple[str, ...]:
        """The two JSON files of the dataset."""
        files = [name for part in parts for name in part.files if name.endswith(".arrow")]
        return describe(self.folder, features_of(SCHEMA, self.folder), files, format_type="torch")

    @property
    def layer_read_back(self) -> str:
        """The last of the layers."""
        return self.layers[-1]

    def read_back(self, parts: Sequence[Part], row: int) -> npt.NDArray[Any] | None:
        """See `Target.read_back`: the states of the last of the layers."""
        from safetensors.torch import load_file

        states = load_file(self.folder / f"hidden_states/hs_{row}.safetensors")["hidden_states"]
        return np.ascontiguousarray(torch_values(states[:, -1].contiguous(), self.stream.dtype))

    def facts(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Layers and masks."""
        return {"layers": list(self.request.layers), "loss_mask": self.mask.summary(parts)}


def _layers_advice(known: Sequence[str]) -> str:
    if known:
        numbers = ",".join(name.removeprefix("layer_") for name in known)
        return f"The output has layers {numbers}: choose with --layers, the last decoder layer last."
    return (
        "The output holds the state after the final norm alone: --layers final writes it for mtp drafters; for eagle3 "
        "and others run a job that stores the layers."
    )


TARGET = SpeculatorsTarget
