"""The torch runtime: an engine directory on this machine's CPU or card -> `hidden_states` of token batches.

Loading checks, in this order: contract, file hashes, device, weights' loading report, width and type of the states, and
the probe. Only then does it compute. The plain model (`PlainModel`) is the same weights in transformers' own forward,
one row at a time, and serves every comparison.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from extract.engine.contract import (
    Contract,
    EngineChanged,
    PassOutOfMemory,
    check_files,
    read_contract,
)
from extract.engine.device import check_device
from extract.engine.probe import Float32, as_rows, projection, relative_error
from extract.engine.torch_decoder import PROBE_IDS, TorchDecoder, vocab_size
from extract.engine.torch_final_norm import find_final_norm
from extract.errors import EngineRefused
from extract.packing import TokenBudget, pack
from extract.records import States, TokenBatch, TokenRows
from extract.shards.values import as_float32
from extract.spec import OutputKind


class ProbeFailed(EngineRefused):
    """The engine's numbers on this machine are not those of its build."""

    template = (
        "{path}: probe sequence {sequence} differs from the contract by {found:.1e} (relative), at most {expected:.1e} "
        "expected. This machine or its libraries (torch {torch}, built with {built}) give other numbers: "
        "build the engine again here."
    )


class OutputDiffers(EngineRefused):
    """The states have another width or type than the contract says."""

    template = "{path}: the states have {field} {found}, the contract says {expected}. Build the engine again."


class TorchRuntime:
    """A loaded engine. See `extract.engine.contract.Runtime`."""

    def __init__(self, contract: Contract, decoder: TorchDecoder) -> None:
        self.contract = contract
        self._decoder = decoder
        self._device = decoder.device

    def hidden_states(self, batch: TokenBatch, kind: OutputKind) -> States:
        """Final-norm states of one pass: [T, H] for "tokens", else [B, H]; see `Runtime.hidden_states`."""
        input_ids = torch.from_numpy(batch.input_ids)
        try:
            if kind == "tokens":
                states = self._decoder.states(input_ids, batch.cu_seqlens)
            else:
                states = self._decoder.pooled(input_ids, batch.cu_seqlens, kind)
            return _as_numpy(states)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise PassOutOfMemory(
                tokens=f"{batch.num_tokens:,}", sequences=f"{batch.num_sequences:,}", device=self.contract.device.name
            ) from None

    def close(self) -> None:
        """Give the model its own attention back."""
        self._decoder.close()


def load_runtime(directory: Path, *, threads: int | None = None) -> TorchRuntime:
    """Open an engine directory on this machine.

    Raises:
        EngineRefused: no contract, another format version, changed files, another device, missing instructions, other
            weights, width or type, or a failed probe. Each message says found, expected and what to do.
    """
    contract = read_contract(directory)
    check_device(directory, contract)
    check_files(directory, contract)
    if threads is not None:
        torch.set_num_threads(threads)
    decoder = open_decoder(directory, contract)
    check_output(directory, contract, decoder)
    runtime = TorchRuntime(contract, decoder)
    replay_probe(directory, runtime)
    return runtime


def open_decoder(directory: Path, contract: Contract) -> TorchDecoder:
    """The engine's weights in the layout of its contract."""
    model = load_engine_model(directory, contract.precision.weights, contract.device.type)
    probe = torch.arange(PROBE_IDS, device=contract.device.type) % vocab_size(model)
    norm = find_final_norm(model, probe, allow_no_final_norm=contract.output.module.startswith("none"))
    return TorchDecoder(model, layout=contract.runtime.layout, device=contract.device.type, final_norm=norm)


def load_engine_model(directory: Path, dtype: str, device: str = "cpu") -> Any:
    """The weights of an engine directory as a transformers base model, memory-mapped where `dtype` is their own.

    Raises:
        EngineChanged: the files do not hold exactly the model's weights.
    """
    from extract.engine.quiet_transformers import quiet_transformers

    with quiet_transformers():
        from transformers import AutoModel

        model, report = AutoModel.from_pretrained(
            directory, dtype=getattr(torch, dtype), output_loading_info=True, trust_remote_code=False
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report.get(problem) or ())
        if names:
            raise EngineChanged(
                path=directory,
                name="model.safetensors",
                field=problem.replace("_", " "),
                found=names[:3],
                expected="none",
            )
    model.config.use_cache = False
    return model.requires_grad_(False).eval().to(device)


def check_output(directory: Path, contract: Contract, decoder: TorchDecoder) -> None:
    """Compare what the decoder gives with what the contract promises.

    Raises:
        OutputDiffers: another module, width or type.
    """
    dtype = str(decoder.model.dtype).removeprefix("torch.")
    seen = {"module": decoder.final_norm.described, "width": decoder.final_norm.width, "dtype": dtype}
    for field, found in seen.items():
        expected = getattr(contract.output, field)
        if found != expected:
            raise OutputDiffers(path=directory, field=field, found=found, expected=expected)


def replay_probe(directory: Path, runtime: TorchRuntime) -> None:
    """Run the contract's probe sequences and compare their digest values.

    Raises:
        ProbeFailed: a sequence differs by more than the contract's tolerance.
    """
    probe = runtime.contract.probe
    sequences = [sequence.input_ids for sequence in probe.sequences]
    states = states_of(runtime, sequences)
    for number, (sequence, found) in enumerate(zip(probe.sequences, states, strict=True)):
        error = relative_error(projection(found), np.array(sequence.projection, np.float32))
        if error > probe.tolerance:
            raise ProbeFailed(
                path=directory,
                sequence=number,
                found=error,
                expected=probe.tolerance,
                torch=torch.__version__,
                built=runtime.contract.runtime.version,
            )


def states_of(runtime: TorchRuntime, sequences: Sequence[Sequence[int]]) -> list[Float32]:
    """float32 [L, H] of each sequence, packed within the engine's limits as a run would."""
    lengths = [len(sequence) for sequence in sequences]
    rows = TokenRows(
        source_index=np.arange(len(sequences), dtype=np.int32),
        chunk=np.zeros(len(sequences), np.int32),
        outcome=np.zeros(len(sequences), np.uint8),
        num_tokens_original=np.array(lengths, np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        input_ids=np.array([token for sequence in sequences for token in sequence], np.int32),
    )
    limits, layout = runtime.contract.limits, runtime.contract.runtime.layout
    budget = TokenBudget(
        max_tokens=limits.max_tokens, max_sequences=limits.max_sequences, equal_length=layout == "dense"
    )
    found: list[Float32] = [np.zeros((0, 0), np.float32)] * len(sequences)
    for batch in pack(rows, budget):
        states = as_float32(runtime.hidden_states(batch, "tokens"))
        for member, one in zip(batch.members, as_rows(states, batch.lengths.tolist()), strict=True):
            found[int(member)] = one
    return found


class PlainModel:
    """An engine's (or a checkpoint's) base model as transformers runs it: one row, no padding, no cache."""

    def __init__(self, model: Any, *, allow_no_final_norm: bool = False) -> None:
        device = next(model.parameters()).device
        probe = torch.arange(PROBE_IDS, device=device) % vocab_size(model)
        norm = find_final_norm(model, probe, allow_no_final_norm=allow_no_final_norm)
        self._decoder = TorchDecoder(model, layout="dense", device=device, final_norm=norm)

    def states(self, input_ids: Sequence[int]) -> Float32:
        """float32 [L, H] of one row by itself."""
        states = self._decoder.states(torch.tensor(list(input_ids)), [0, len(input_ids)])
        return np.asarray(states.float().cpu().numpy(), dtype=np.float32)

    def close(self) -> None:
        """Remove the hook."""
        self._decoder.close()


def _as_numpy(states: torch.Tensor) -> States:
    states = states.cpu()
    if states.dtype == torch.bfloat16:
        return states.view(torch.uint16).numpy()
    return states.numpy()


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return not isinstance(error, RuntimeError) or "out of memory" in text or "can't allocate memory" in text
