"""The offline features of SGLang's SpecForge: a `.ckpt` a sample, with the keys that its trainers look for.

SpecForge projects the last state straight to the vocabulary, so it wants it after the final norm, as it is stored here.
Two trainers look for the same tensors under other names; a file holds each tensor once, under all of its names.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

from extract.exporting.drafter_samples import DrafterTarget
from extract.exporting.safetensors import torch_values
from extract.exporting.state_columns import FINAL
from extract.exporting.target import Part, TargetNeeds, Written
from extract.exporting.working_directory import new_file
from extract.shards.views import BatchView
from extract.store import clear_write_errors

FILES_PER_FOLDER = 5000


class SpecForgeTarget(DrafterTarget):
    """`rows_0-5000/data_0.ckpt`, ..."""

    kind = "specforge"
    title = "offline features of SGLang's SpecForge, one sample a row"
    cannot_carry = (
        "Rows without states, ids and carried columns are left out; each file's `row` is the position in the source. "
        "eagle3, dflash and dspark need --layers; --layers final writes the final state alone."
    )
    reading = 'import torch\nsample = torch.load("{path}/rows_0-5000/data_0.ckpt")'

    @property
    def aux(self) -> tuple[str, ...]:
        """Intermediate layers, side by side in this order."""
        return tuple(name for name in self.layers if name != FINAL)

    def refuse(self) -> None:
        """See `Target.refuse`."""
        if not self.layers:
            known = ",".join(name.removeprefix("layer_") for name in self.stream.layers)
            raise TargetNeeds(
                path=self.stream.output.path,
                kind=self.kind,
                needed="states of intermediate layers (aux_hidden_state) beside the final state",
                advice=f"The output has layers {known}: choose with --layers."
                if known
                else "The output holds the final state alone: run a job that stores the layers, or write files "
                "without aux_hidden_state: --layers final",
            )
        super().refuse()

    def write(self, shard: int, first_row: int, batches: Iterator[BatchView], done: Sequence[Part]) -> Written:
        """Files of a shard's samples."""
        import torch

        files: list[str] = []
        for sample in self.samples(batches, (*self.aux, FINAL)):
            number = first_row + len(files)
            files.append(_file(number))
            final = sample.states[FINAL].unsqueeze(0)
            tensors = {
                "input_ids": torch.from_numpy(sample.input_ids),
                "loss_mask": torch.from_numpy(sample.loss_mask),
                "hidden_state": final,
                "target_last_hidden_states": final,
                "row": torch.tensor(sample.row),
            }
            if self.aux:
                side_by_side = torch.cat([sample.states[layer] for layer in self.aux], dim=-1).unsqueeze(0)
                tensors |= {"aux_hidden_state": side_by_side, "hidden_states": side_by_side}
            path = new_file(self.folder / files[-1])
            with clear_write_errors(path):
                torch.save(tensors, path)
        return Written(files=tuple(files), facts={"masks": self.mask.take_counts()})

    def read_back(self, parts: Sequence[Part], row: int) -> npt.NDArray[Any] | None:
        """See `Target.read_back`."""
        import torch

        sample = torch.load(self.folder / _file(row), weights_only=True)
        return torch_values(sample["hidden_state"][0], self.stream.dtype)

    def facts(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Layers and masks."""
        return {"layers": list(self.request.layers), "loss_mask": self.mask.summary(parts)}


def _file(number: int) -> str:
    first = number // FILES_PER_FOLDER * FILES_PER_FOLDER
    return f"rows_{first}-{first + FILES_PER_FOLDER}/data_{number}.ckpt"


TARGET = SpecForgeTarget
