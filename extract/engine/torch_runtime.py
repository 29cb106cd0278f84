"""The torch runtime: an engine directory on this machine's CPU or card -> `hidden_states` of token batches.

Loading checks the weights' loading report and the width and type of the states; `extract.engine.runtimes` does the rest
of the checking, before and after. The plain model (`PlainModel`) is the same weights in transformers' own forward,
one row at a time, and serves every comparison.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from extract.engine.contract import (
    Contract,
    EngineChanged,
    NoLayerStates,
    OutputDiffers,
    PassOutOfMemory,
)
from extract.engine.probe import Float32
from extract.engine.torch_decoder import PROBE_IDS, TorchDecoder, vocab_size
from extract.engine.torch_final_norm import find_final_norm
from extract.engine.torch_memory import is_out_of_memory
from extract.records import States, TokenBatch
from extract.spec import OutputKind


class TorchRuntime:
    """A loaded engine. See `extract.engine.contract.Runtime`."""

    def __init__(self, contract: Contract, decoder: TorchDecoder) -> None:
        self.contract = contract
        self._decoder = decoder
        self._device = decoder.device

    @property
    def arithmetic(self) -> str:
        """Torch, as its version in the contract and the device make it."""
        return "torch"

    def hidden_states(self, batch: TokenBatch, kind: OutputKind) -> States:
        """Final-norm states of one pass: [T, H] for "tokens", else [B, H]; see `Runtime.hidden_states`."""
        return self.layer_states(batch, kind, ())[0]

    def layer_states(self, batch: TokenBatch, kind: OutputKind, layers: Sequence[int]) -> tuple[States, ...]:
        """The same, then those after each of `layers`; see `LayerRuntime.layer_states`."""
        if layers:
            self._check_layers()
        input_ids = torch.from_numpy(batch.input_ids)
        try:
            found = self._decoder.layer_states(input_ids, batch.cu_seqlens, kind, layers)
            return tuple(_as_numpy(states) for states in found)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise PassOutOfMemory(
                tokens=f"{batch.num_tokens:,}", sequences=f"{batch.num_sequences:,}", device=self.contract.device.name
            ) from None

    def close(self) -> None:
        """Give the model its own attention back."""
        self._decoder.close()

    def _check_layers(self) -> None:
        """Their numbers are those of the contract, by which a job names them."""
        found, expected = len(self._decoder.layers.modules), self.contract.checkpoint.num_layers
        if found != expected:
            problem = f"it has {found} decoder layers, its contract says {expected}"
            raise NoLayerStates(model=self.contract.checkpoint.name, problem=problem)


def open_torch_runtime(directory: Path, contract: Contract, *, threads: int | None = None) -> TorchRuntime:
    """Load the weights of an engine directory and look at what comes out of them.

    Args:
        directory: an engine whose files and device have been checked.
        contract: its contract.
        threads: torch's; `None`: the contract's number, else as many as this process may use.

    Raises:
        EngineRefused: other weights, width or type than the contract says.
    """
    torch.set_num_threads(threads or contract.runtime.threads or len(os.sched_getaffinity(0)))
    decoder = open_decoder(directory, contract)
    check_output(directory, contract, decoder)
    return TorchRuntime(contract, decoder)


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
    return _checked(directory, model, report).to(device)


def load_fp8_model(directory: Path) -> Any:
    """What an engine that stores FP8 multiplies with, as a transformers base model in float32.

    Raises:
        UnfitWeights: the file does not hold the decoder's weights with their scales.
        EngineChanged: it holds others than config.json asks for.
    """
    from extract.cpu.architecture import read_architecture
    from extract.cpu.weights import WEIGHTS_FILE, open_weights
    from extract.cuda.fp8_weights import plain_weights
    from extract.engine.quiet_transformers import quiet_transformers

    with open_weights(directory / WEIGHTS_FILE) as weights:
        state = plain_weights(weights, read_architecture(directory))
    with quiet_transformers():
        from transformers import AutoConfig, AutoModel

        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with torch.device("meta"):
            kind = type(AutoModel.from_config(config))
        model, report = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    return _checked(directory, model, report)


def _checked(directory: Path, model: Any, report: Any) -> Any:
    """The model, ready to run, if its loading report names nothing."""
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
    return model.requires_grad_(False).eval()


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

    def layer_states(self, input_ids: Sequence[int], layers: Sequence[int]) -> tuple[Float32, ...]:
        """The same, then the residual stream after each of `layers`, ascending; see `LayerRuntime.layer_states`."""
        ids = torch.tensor(list(input_ids))
        found = self._decoder.layer_states(ids, [0, len(ids)], "tokens", layers)
        return tuple(np.asarray(states.float().cpu().numpy(), dtype=np.float32) for states in found)

    def close(self) -> None:
        """Remove the hook."""
        self._decoder.close()


def _as_numpy(states: torch.Tensor) -> States:
    states = states.cpu()
    if states.dtype == torch.bfloat16:
        return states.view(torch.uint16).numpy()
    return states.numpy()
