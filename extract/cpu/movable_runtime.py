"""An engine whose linears move between two precisions while it is loaded, for measuring what a precision does to them.

Each linear is packed in both precisions, so that a trial moves pointers and packs nothing again.
"""

from collections.abc import Set as AbstractSet
from pathlib import Path

from extract.cpu.decoder import Exceptions, with_linears
from extract.cpu.implementations import Choice, kernels_together
from extract.cpu.kernels import Precision
from extract.cpu.linear_names import LINEARS, linear_names
from extract.cpu.runtime import CpuRuntime, micro_batch_of, new_decoder, open_files
from extract.engine.contract import Contract


class MovableRuntime(CpuRuntime):
    """A loaded engine that computes in two given precisions, whatever its contract says.

    Moved as an engine's contract says, it gives that engine's states bit for bit.

    Args:
        directory: with `decoder.json` and `model.safetensors`.
        contract: its contract.
        rest: precision of the linears that are not moved, and of attention.
        moved: precision of those that are.
        threads: as for `open_cpu_runtime`.
        kernels: which ones; see `kernels_for`.
    """

    def __init__(
        self,
        directory: Path,
        contract: Contract,
        *,
        rest: Precision,
        moved: Precision,
        threads: int | None = None,
        kernels: Choice = "auto",
    ) -> None:
        architecture, weights = open_files(directory, contract)
        own, other = kernels_together((rest, moved), micro_batch=micro_batch_of(contract), choice=kernels)
        exceptions = Exceptions(kernels=other, linears=frozenset())
        decoder = new_decoder(architecture, weights, contract, own, exceptions, threads, share=True)
        super().__init__(contract, decoder, share=True)
        self._unmoved = decoder.layers
        self._moved = decoder.packed(weights, frozenset(linear_names(len(decoder.layers))))

    def move(self, linears: AbstractSet[str]) -> None:
        """Move exactly these linears, and all others back."""
        self._decoder.layers = [
            with_linears(layer, other, {linear for linear in LINEARS if f"{number}.{linear}" in linears})
            for number, (layer, other) in enumerate(zip(self._unmoved, self._moved, strict=True))
        ]
