"""Run an engine with a paged cache through the vendor's executor: one request a sequence, one generated token.

The vendor's own way to an extra output, for what only it offers (FP8 attention, models that need a cache). It copies
states request by request into host memory, so it is slower than `session_runtime` with thousands of short rows. Block
reuse is off: tokens that come out of reused blocks would be missing from the states.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from extract.engine.contract import Contract, OutputDiffers
from extract.errors import EngineRefused
from extract.records import States, TokenBatch
from extract.spec import OutputKind
from extract.tensorrt.card import Card
from extract.tensorrt.marked_model import OUTPUT_NAME
from extract.tensorrt.passes import split

CONTEXT_OUTPUT = f"context_{OUTPUT_NAME}"
"""The executor prefixes names with the phase; the generated token's state is not asked for."""
CACHE_PART = 0.9
"""Part of the card's free memory that the cache may take; it needs far less for 128 tokens a row."""


class RequestFailed(EngineRefused):
    """The executor gave up on a sequence."""

    template = "the vendor's executor refused a sequence of {tokens} tokens: {problem}. Build the engine again."


class ExecutorRuntime:
    """A loaded engine. See `extract.engine.contract.Runtime`."""

    def __init__(self, directory: Path, contract: Contract, card: Card) -> None:
        self.contract = contract
        self._directory, self._card = directory, card
        self._executor, self._output = _open(directory, contract)

    @property
    def arithmetic(self) -> str:
        """The vendor's release; which kernels it chose lies in the engine file, whose hash is in the contract."""
        return f"tensorrt-llm {self.contract.runtime.version}"

    def hidden_states(self, batch: TokenBatch, kind: OutputKind) -> States:
        """Final-norm states of one batch; see `Runtime.hidden_states`."""
        limits = self.contract.limits
        parts = [
            one
            for part in split(batch, limits.pass_tokens or limits.max_tokens, limits.max_sequences)
            for one in self._run(part, kind)
        ]
        found = torch.cat(parts)
        return found.view(torch.uint16).numpy() if found.dtype == torch.bfloat16 else found.numpy()

    def close(self) -> None:
        """End the executor and give the card back."""
        self._executor.shutdown()
        self._card.close()

    def _run(self, part: TokenBatch, kind: OutputKind) -> list[torch.Tensor]:
        """States of each sequence in the order of `part`: [L, H] each, or [1, H] pooled."""
        from tensorrt_llm.bindings.executor import Request

        bounds = part.cu_seqlens.tolist()
        rows = [part.input_ids[start:stop] for start, stop in pairwise(bounds)]
        # An end token that cannot occur: the one token is generated and dropped whatever it is.
        requests = [
            Request(input_token_ids=row.tolist(), max_tokens=1, output_config=self._output, end_id=-1) for row in rows
        ]
        places = {number: place for place, number in enumerate(self._executor.enqueue_requests(requests=requests))}
        found: list[torch.Tensor | None] = [None] * len(rows)
        left = len(rows)
        while left:
            for response in self._executor.await_responses():
                place = places.get(response.request_id)
                if place is None:  # of a batch that failed before all of it was answered
                    continue
                row = rows[place]
                if response.has_error():
                    raise RequestFailed(tokens=len(row), problem=response.error_msg.strip().rstrip("."))
                found[place] = self._states(response.result.additional_outputs, row, kind)
                left -= bool(response.result.is_final)
        return [one for one in found if one is not None]

    def _states(self, outputs: Any, row: np.ndarray[Any, Any], kind: OutputKind) -> torch.Tensor:
        named = {output.name: output.output for output in outputs}
        if CONTEXT_OUTPUT not in named:
            self._differ("output", ", ".join(named) or "none", CONTEXT_OUTPUT)
        states: torch.Tensor = torch.as_tensor(named[CONTEXT_OUTPUT])
        output = self.contract.output
        states = states.reshape(-1, states.shape[-1])
        expected = (len(row), output.width)
        if tuple(states.shape) != expected:
            self._differ("shape", tuple(states.shape), expected)
        if str(states.dtype) != f"torch.{output.dtype}":
            self._differ("dtype", str(states.dtype).removeprefix("torch."), output.dtype)
        if kind == "tokens":
            return states.clone()  # it lies in memory of the executor's
        if kind == "mean":
            return states.mean(0, keepdim=True, dtype=torch.float32)
        return states[-1:].clone() if kind == "last" else states[:1].clone()

    def _differ(self, field: str, found: object, expected: object) -> None:
        raise OutputDiffers(path=self._directory, field=field, found=found, expected=expected)


def _open(directory: Path, contract: Contract) -> tuple[Any, Any]:
    """The executor, and what each request asks for."""
    from tensorrt_llm.bindings.executor import (
        AdditionalModelOutput,
        Executor,
        ExecutorConfig,
        KvCacheConfig,
        ModelType,
        OutputConfig,
    )

    # Without gathering it gives the generated token's state alone, or nothing where none is generated.
    wanted = AdditionalModelOutput(name=OUTPUT_NAME, gather_context=True)
    config = ExecutorConfig(
        max_beam_width=1,
        kv_cache_config=KvCacheConfig(enable_block_reuse=False, free_gpu_memory_fraction=CACHE_PART),
        enable_chunked_context=False,
        max_batch_size=contract.limits.max_sequences,
        max_num_tokens=contract.limits.pass_tokens,
        **_asked_at_start(ExecutorConfig, wanted),
    )
    executor = Executor(model_path=str(directory), model_type=ModelType.DECODER_ONLY, executor_config=config)
    return executor, OutputConfig(additional_model_outputs=[wanted])


def _asked_at_start(config: Any, wanted: Any) -> dict[str, Any]:
    """How the executor is told of the output: releases to 0.18 take its name, later ones what requests take."""
    if "additional_model_outputs" in (config.__init__.__doc__ or "") or hasattr(config, "additional_model_outputs"):
        return {"additional_model_outputs": [wanted]}
    return {"additional_output_names": [OUTPUT_NAME]}
