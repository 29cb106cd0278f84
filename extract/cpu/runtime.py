"""The runtime of engines that our own packed decoder runs: an engine directory -> states of token batches, on a CPU.

Imports neither transformers nor, with native kernels, torch: a run begins seconds earlier. States are float32 whatever
the precision, because the residual stream and the final norm are.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from extract.cpu.architecture import Architecture, read_architecture
from extract.cpu.decoder import Exceptions, PackedDecoder
from extract.cpu.engine_check import check_engine
from extract.cpu.implementations import Choice, kernels_together
from extract.cpu.kernels import HIGH, Float32, Kernels, Precision
from extract.cpu.linear_names import linears_of, nearest
from extract.cpu.mapped_weights import WeightsFile
from extract.cpu.pass_plan import MAX_KEPT, plan_pass
from extract.cpu.weights import WEIGHTS_FILE, open_weights
from extract.engine.contract import Contract, PassOutOfMemory, check_lengths
from extract.errors import EngineRefused
from extract.records import Int32, States, TokenBatch
from extract.spec import OutputKind

MICRO_BATCH = 256
"""Tokens that one thread carries through all layers, where a recipe names no number: what stays in a 1 to 2 MiB L2."""


class NoSuchLinear(EngineRefused):
    """A contract names a linear that the engine's decoder does not have."""

    template = "{path}: the contract keeps {name} in high precision, but this decoder has {known}. Build it again."


class CpuRuntime:
    """A loaded engine. See `extract.engine.contract.Runtime`.

    Attributes:
        arithmetic: which kernels compute.
        share: compute common prefixes and exact duplicates of a pass once.
    """

    def __init__(self, contract: Contract, decoder: PackedDecoder, *, share: bool) -> None:
        self.contract = contract
        self.share = share
        self._decoder = decoder

    @property
    def arithmetic(self) -> str:
        """Which kernels compute: equal kernels give equal bytes."""
        return self._decoder.kernels.name

    def hidden_states(self, batch: TokenBatch, kind: OutputKind) -> States:
        """float32 [T, H] for "tokens", else [B, H]; see `Runtime.hidden_states`."""
        return self.layer_states(batch, kind, ())[0]

    def layer_states(self, batch: TokenBatch, kind: OutputKind, layers: Sequence[int]) -> tuple[States, ...]:
        """The same, then those after each of `layers`; see `LayerRuntime.layer_states`."""
        check_lengths(batch, self.contract.limits)
        try:
            plan = plan_pass(
                batch.input_ids,
                batch.cu_seqlens,
                kind,
                budget=self._decoder.micro_batch,
                threads=self._decoder.threads,
                share=self.share,
            )
            found = self._decoder.layer_states(plan, layers)
            if plan.output_index is not None:
                found = tuple(states[plan.output_index] for states in found)
            return tuple(means(states, batch.cu_seqlens) for states in found) if kind == "mean" else found
        except MemoryError:
            raise PassOutOfMemory(
                tokens=f"{batch.num_tokens:,}", sequences=f"{batch.num_sequences:,}", device=self.contract.device.name
            ) from None

    def close(self) -> None:
        """End the threads."""
        self._decoder.close()


def means(states: Float32, cu_seqlens: Int32) -> Float32:
    """Mean over each sequence: [T, H] -> [B, H], in float32."""
    sums: Float32 = np.add.reduceat(states, cu_seqlens[:-1], axis=0)
    return sums / np.diff(cu_seqlens).astype(np.float32)[:, None]


def open_cpu_runtime(
    directory: Path, contract: Contract, *, threads: int | None = None, share: bool = True, kernels: Choice = "auto"
) -> CpuRuntime:
    """Map the weights of an engine directory and pack them for the kernels of this machine.

    Args:
        directory: with `decoder.json` and `model.safetensors`.
        contract: its contract.
        threads: micro-batches at once; `None`: the contract's number, else as many as this process may use.
        share: compute common prefixes and exact duplicates of a pass once.
        kernels: which ones; see `kernels_for`.

    Raises:
        EngineChanged: the files do not hold exactly the decoder's weights.
        OutputDiffers: the contract promises another output than this decoder has.
        NoSuchLinear: the contract keeps a linear in high precision that is not there.
    """
    architecture, weights = open_files(directory, contract)
    arithmetic, exceptions = _arithmetic(directory, contract, architecture, kernels)
    decoder = new_decoder(architecture, weights, contract, arithmetic, exceptions, threads, share=share)
    return CpuRuntime(contract, decoder, share=share)


def open_files(directory: Path, contract: Contract) -> tuple[Architecture, WeightsFile]:
    """What an engine directory holds, checked against its contract."""
    architecture = read_architecture(directory)
    weights = open_weights(directory / WEIGHTS_FILE)
    check_engine(directory, contract, architecture, weights, "float32")
    return architecture, weights


def new_decoder(
    architecture: Architecture,
    weights: WeightsFile,
    contract: Contract,
    kernels: Kernels,
    exceptions: Exceptions | None,
    threads: int | None,
    *,
    share: bool,
) -> PackedDecoder:
    """A decoder as a contract has it."""
    return PackedDecoder(
        architecture,
        weights,
        kernels,
        max_positions=contract.limits.max_input_tokens,
        micro_batch=micro_batch_of(contract),
        threads=threads or contract.runtime.threads or len(os.sched_getaffinity(0)),
        max_kept=MAX_KEPT if share else 0,
        exceptions=exceptions,
    )


def micro_batch_of(contract: Contract) -> int:
    """Tokens that one thread carries through all layers."""
    return contract.runtime.micro_batch or MICRO_BATCH


def _arithmetic(
    directory: Path, contract: Contract, architecture: Architecture, choice: Choice
) -> tuple[Kernels, Exceptions | None]:
    """Kernels of the engine's precision, and of the linears that it keeps in a higher one."""
    precision, names = cast("Precision", contract.precision.activations), contract.precision.high_precision
    micro_batch = micro_batch_of(contract)
    if names is None:
        (kernels,) = kernels_together((precision,), micro_batch=micro_batch, choice=choice)
        return kernels, None
    num_layers = len(architecture.layers)
    try:
        linears = linears_of(names, num_layers)
    except KeyError as error:
        name = str(error.args[0])
        raise NoSuchLinear(path=directory, name=f'"{name}"', known=nearest(name, num_layers)) from None
    kernels, high = kernels_together((precision, HIGH), micro_batch=micro_batch, choice=choice)
    return kernels, Exceptions(kernels=high, linears=linears)
