"""Run an engine without cache: token batches -> states, in passes whose copies overlap with the next pass.

All memory is taken once, for the largest pass. Three streams: ids go up, a pass runs, states come down. Two slots take
turns, so the ids of a pass go up while the one before runs, and its states come down while the one after runs. A slot
is written again only when its states have been collected, so nothing of its former pass is still under way. One pass
runs at a time: two at once would need the engine's memory twice.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from extract.engine.contract import Contract, EngineDoesNotFit, OutputDiffers
from extract.engine.torch_pooling import pool
from extract.errors import EngineRefused
from extract.records import States, TokenBatch
from extract.spec import OutputKind
from extract.tensorrt.card import Card, Event
from extract.tensorrt.engine_inputs import INPUTS, check_inputs, fixed_inputs, pass_values
from extract.tensorrt.marked_model import OUTPUT_NAME
from extract.tensorrt.passes import split

ENGINE_FILE = "rank0.engine"
NUM_SLOTS = 2


class PassRefused(EngineRefused):
    """The vendor's runtime did not take a pass."""

    template = (
        "TensorRT refused a pass of {tokens} tokens in {sequences} sequences; what it wrote above says why. "
        "Run again with a smaller --max-tokens, or build the engine again."
    )


@dataclass(slots=True)
class Slot:
    """Memory of one pass in flight, and how far it is.

    Attributes:
        inputs: on the card or in host memory, [T] or [B], at the largest pass.
        staged: page-locked sources of the inputs on the card.
        outputs: all outputs of the engine, on the card.
        arrived: page-locked memory that states come down to.
        states: of its latest pass, kept until they are down.
        downloaded: event behind its latest pass.
    """

    inputs: dict[str, torch.Tensor]
    staged: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    arrived: torch.Tensor
    states: torch.Tensor | None = None
    downloaded: Event | None = None


class SessionRuntime:
    """A loaded engine. See `extract.engine.contract.Runtime`."""

    def __init__(self, directory: Path, contract: Contract, session: Any, card: Card) -> None:
        self.contract = contract
        self._session, self._card = session, card
        self._limits = contract.limits
        self._engine = EngineTensors(directory, contract, session.engine)
        self._fixed = fixed_inputs(
            self._engine.inputs,
            num_layers=contract.checkpoint.num_layers,
            max_input_tokens=contract.limits.max_input_tokens,
        )
        self._dtype = getattr(torch, contract.output.dtype)
        self._shapes: tuple[int, int] | None = None
        self._up, self._compute, self._down = card.stream(), card.stream(), card.stream()
        self._slots = [self._slot() for _ in range(NUM_SLOTS)]

    @property
    def arithmetic(self) -> str:
        """The vendor's release; which kernels it chose lies in the engine file, whose hash is in the contract."""
        return f"tensorrt-llm {self.contract.runtime.version}"

    @property
    def pass_tokens(self) -> int:
        """Tokens of the largest pass."""
        return self._limits.pass_tokens or self._limits.max_tokens

    def hidden_states(self, batch: TokenBatch, kind: OutputKind) -> States:
        """Final-norm states of one batch, of which each pass takes a part; see `Runtime.hidden_states`."""
        width = self.contract.output.width
        rows = batch.num_tokens if kind == "tokens" else batch.num_sequences
        dtype = np.dtype(np.float32) if kind == "mean" else _numpy_type(self.contract.output.dtype)
        states: States = np.empty((rows, width), dtype)
        place = 0
        waiting: list[tuple[Slot, int, int]] = []
        try:
            for number, part in enumerate(split(batch, self.pass_tokens, self._limits.max_sequences)):
                if len(waiting) == NUM_SLOTS:  # the slot's former pass must be over
                    _collect(waiting.pop(0), states)
                slot = self._slots[number % NUM_SLOTS]
                count = self._start(slot, part, kind)
                waiting.append((slot, place, count))
                place += count
            for one in waiting:
                _collect(one, states)
        except BaseException:
            self._drain()
            raise
        return states

    def close(self) -> None:
        """Give the card's memory back."""
        self._slots.clear()
        self._session = None
        self._card.close()

    def _drain(self) -> None:
        """After a failure: let what is queued come to its end, so that the next batch finds its slots at rest."""
        with contextlib.suppress(Exception):  # the failure itself is on its way up
            for stream in (self._up, self._compute, self._down):
                stream.synchronize()

    def _start(self, slot: Slot, part: TokenBatch, kind: OutputKind) -> int:
        """Queue one pass and the copies around it; returns how many states it gives."""
        inputs, uploaded = self._upload(slot, part)
        self._infer_shapes(inputs, part)
        outputs = {
            name: tensor[: self._engine.rows_of(name, part.num_tokens, part.num_sequences)]
            for name, tensor in slot.outputs.items()
        }
        self._compute.wait(uploaded)
        if not self._session.run(inputs, outputs, self._compute.handle):
            raise PassRefused(tokens=f"{part.num_tokens:,}", sequences=f"{part.num_sequences:,}")
        states = outputs[OUTPUT_NAME]
        if kind != "tokens" and self.contract.output.states == "tokens":
            states = self._compute.run(lambda: _pooled(outputs[OUTPUT_NAME], inputs, part, kind))
        slot.states = states
        self._down.wait(self._compute.record())
        self._down.copy(_as(slot.arrived, states), states)
        slot.downloaded = self._down.record()
        return len(states)

    def _upload(self, slot: Slot, part: TokenBatch) -> tuple[dict[str, torch.Tensor], Event]:
        """Fill host tensors, queue the ids' way up; returns every input of the engine, and when they are there."""
        values = pass_values(part)
        inputs = dict(self._fixed)
        for name, tensor in slot.inputs.items():
            value = torch.from_numpy(values[name])
            view = tensor[: len(value)]
            if name in slot.staged:
                staged = slot.staged[name][: len(value)]
                staged.copy_(value)
                self._up.copy(view, staged)
            else:
                view.copy_(value)
            inputs[name] = view
        return inputs, self._up.record()

    def _infer_shapes(self, inputs: dict[str, torch.Tensor], part: TokenBatch) -> None:
        """Tell the engine T and B where they changed."""
        shapes = (part.num_tokens, part.num_sequences)
        if shapes == self._shapes:
            return
        from tensorrt_llm.runtime.session import TensorInfo

        given = [
            TensorInfo(name=name, dtype=self._engine.dtypes[name], shape=tuple(tensor.shape))
            for name, tensor in inputs.items()
        ]
        self._engine.check_shapes(self._session.infer_shapes(inputs=given), *shapes)
        self._shapes = shapes

    def _slot(self) -> Slot:
        tokens, sequences = self.pass_tokens, self._limits.max_sequences
        sizes = {"token": tokens, "sequence": sequences}
        inputs, staged = {}, {}
        for name in self._engine.inputs:
            known = INPUTS[name]
            if known.per == "engine":
                continue
            shape, dtype = (sizes[known.per],), getattr(torch, known.dtype)
            if known.place == "card":
                inputs[name] = self._card.empty(shape, dtype)
                staged[name] = self._card.pinned(shape, dtype)
            else:
                inputs[name] = torch.zeros(shape, dtype=dtype)
        outputs = {
            name: self._card.empty((self._engine.rows_of(name, tokens, sequences), self._engine.widths[name]), dtype)
            for name, dtype in self._engine.outputs.items()
        }
        rows = tokens if self.contract.output.states == "tokens" else sequences
        size = max(rows * self._dtype.itemsize, sequences * torch.float32.itemsize)
        arrived = self._card.pinned((size * self.contract.output.width,), torch.uint8)
        return Slot(inputs=inputs, staged=staged, outputs=outputs, arrived=arrived)


class EngineTensors:
    """Inputs and outputs as the engine lists them, held to the contract.

    Attributes:
        inputs: names, all of them known.
        outputs: torch types by name.
        dtypes: TensorRT's types of the inputs.
        widths: elements a row of each output.

    Raises:
        UnknownInput, InputMissing: see `check_inputs`.
        OutputDiffers: our output is missing, or has another type, width or place.
        EngineDoesNotFit: the engine's own limits are not the contract's.
    """

    def __init__(self, directory: Path, contract: Contract, engine: Any) -> None:
        import tensorrt
        from tensorrt_llm._utils import trt_dtype_to_torch

        self._directory, self._contract = directory, contract
        names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
        mode = {name: engine.get_tensor_mode(name) for name in names}
        inputs = [name for name in names if mode[name] == tensorrt.TensorIOMode.INPUT]
        self.inputs = check_inputs(directory, inputs)
        self.dtypes = {name: engine.get_tensor_dtype(name) for name in inputs}
        found = [name for name in names if name not in inputs]
        self.outputs = {name: trt_dtype_to_torch(engine.get_tensor_dtype(name)) for name in found}
        shapes = {name: tuple(engine.get_tensor_shape(name)) for name in found}
        self.widths = {name: int(shape[-1]) for name, shape in shapes.items()}
        self._every_token: dict[str, bool] = dict.fromkeys(found, False)
        output = contract.output
        self._same("output", ", ".join(found), OUTPUT_NAME, OUTPUT_NAME in found)
        self._same("dtype", str(self.outputs[OUTPUT_NAME]).removeprefix("torch."), output.dtype)
        self._same("shape", shapes[OUTPUT_NAME], (-1, output.width))
        on_card = engine.get_tensor_location(OUTPUT_NAME) == tensorrt.TensorLocation.DEVICE
        self._same("place", "the card" if on_card else "host memory", "the card")
        self._every_token[OUTPUT_NAME] = output.states == "tokens"
        limits = contract.limits
        for name, expected in (("input_ids", limits.pass_tokens), ("context_lengths", limits.max_sequences)):
            most = int(engine.get_tensor_profile_shape(name, 0)[2][0])
            if most != expected:
                raise EngineDoesNotFit(
                    path=directory,
                    field=f"passes of at most this many {'tokens' if name == 'input_ids' else 'sequences'}:",
                    expected=expected,
                    found=f"an engine file of {most}",
                    advice="The engine file is not the one that the contract was written for: build it again.",
                )

    def rows_of(self, name: str, tokens: int, sequences: int) -> int:
        """Rows of an output in a pass of T tokens and B sequences."""
        return tokens if self._every_token[name] else sequences

    def check_shapes(self, inferred: Any, tokens: int, sequences: int) -> None:
        """Compare what the engine says that it will write with what its buffers are for.

        Raises:
            OutputDiffers: it was marked before the gather and should be after it, or the other way round.
        """
        for info in inferred:
            expected = (self.rows_of(info.name, tokens, sequences), self.widths[info.name])
            self._same(f"shape of {info.name}", tuple(info.shape), expected)

    def _same(self, field: str, found: object, expected: object, same: bool | None = None) -> None:
        if not (found == expected if same is None else same):
            raise OutputDiffers(path=self._directory, field=field, found=found, expected=expected)


def _collect(waiting: tuple[Slot, int, int], states: States) -> None:
    """Wait until a pass's states are in page-locked memory, and copy them where they belong."""
    slot, place, count = waiting
    assert slot.downloaded is not None
    slot.downloaded.synchronize()
    part = states[place : place + count]
    arrived = slot.arrived.numpy().view(states.dtype)
    part[...] = arrived[: part.size].reshape(part.shape)


def _pooled(states: torch.Tensor, inputs: dict[str, torch.Tensor], part: TokenBatch, kind: OutputKind) -> torch.Tensor:
    """[B, H]; indices come from inputs that are on the card, so that nothing waits for the host."""
    if kind == "mean":
        return pool(states, part.cu_seqlens.astype(np.int64), kind)
    ends = inputs["last_token_ids"]
    return states.index_select(0, ends - 1 if kind == "last" else ends - inputs["context_lengths"])


def _as(memory: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The first bytes of `memory` in type and shape of `states`."""
    return memory[: states.numel() * states.element_size()].view(states.dtype).view(states.shape)


def _numpy_type(dtype: str) -> Any:
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
