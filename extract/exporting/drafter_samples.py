"""What trainers of drafters read: one sample a row, with token ids, a loss mask and the states of some layers.

Which layers, and in which order, is the caller's to say; a layer that the output does not hold is refused by name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from extract.exporting.loss_mask import LossMask, open_loss_mask
from extract.exporting.safetensors import row_ids
from extract.exporting.state_columns import FINAL, as_torch, check_stored, read_states
from extract.exporting.target import Target, TargetCannotHold, TargetNeeds
from extract.shards.views import BatchView


@dataclass(frozen=True, slots=True)
class Sample:
    """One row.

    Attributes:
        row: position in the source.
        input_ids: int64 [L].
        loss_mask: int64 [L], 1 where a drafter learns.
        states: by layer, torch tensors [L, H] of the stored type.
    """

    row: int
    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.int64]
    states: dict[str, Any]


class DrafterTarget(Target):
    """A target whose samples are rows; see `samples`."""

    with_states_only = True

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of a sample as they were asked for: "layer_<i>" or "final"."""
        return tuple(FINAL if name == FINAL else f"layer_{name}" for name in self.request.layers)

    @cached_property
    def mask(self) -> LossMask:
        """Where loss masks come from."""
        return open_loss_mask(self.stream, self.request)

    def refuse(self) -> None:
        """See `Target.refuse`."""
        super().refuse()
        path, spec = self.stream.output.path, self.stream.spec
        if spec.kind != "tokens":
            raise TargetCannotHold(
                path=path,
                problem=f"holds one state a row ({spec.kind})",
                kind=self.kind,
                advice='Export an output of kind "tokens".',
            )
        if not spec.input_ids:
            raise TargetNeeds(
                path=path, kind=self.kind, needed="token ids", advice="Run the job with states.input_ids = true."
            )
        check_stored(self.layers, spec, path)
        _ = self.mask

    def samples(self, batches: Iterator[BatchView], layers: tuple[str, ...]) -> Iterator[Sample]:
        """Rows one by one, with the states of `layers`."""
        spec = self.stream.spec
        for batch in batches:
            masks = self.mask.masks(batch)
            ids, lengths = row_ids(batch)
            ends = np.cumsum(lengths)
            found = {name: read_states(batch, spec, name) for name in layers}
            for n in range(batch.num_rows):
                own = slice(int(ends[n] - lengths[n]), int(ends[n]))
                yield Sample(
                    int(batch.row[n]),
                    ids[own].astype(np.int64),
                    masks[n],
                    {
                        name: as_torch(one.values[int(one.offsets[n]) : int(one.offsets[n + 1])], spec.dtype)
                        for name, one in found.items()
                    },
                )
