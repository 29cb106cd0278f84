"""What an engine without cache is fed: every input that it lists, each of its own type, in its own place.

`host_*` tensors are read by the CPU inside the vendor's plugin and must lie in host memory; the others must lie on the
card. The vendor's runtime checks neither, so it is all said here, once, and an input that is not known is refused by
name: feeding it nothing would compute nonsense.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from extract.errors import EngineRefused
from extract.records import Int32, TokenBatch

if TYPE_CHECKING:
    import torch

NUM_PERF_KNOBS = 16


class UnknownInput(EngineRefused):
    """The engine asks for something that an engine without cache does not have."""

    template = (
        "{path}: the engine lists input {name}, {problem}. It was built with other settings than its contract says: "
        "build it again with extract build."
    )


class InputMissing(EngineRefused):
    """The engine does not ask for what every decoder needs."""

    template = "{path}: the engine lists no input {name}, which every decoder has. Build it again with extract build."


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of an engine without cache.

    Attributes:
        dtype: torch's name.
        place: on the card, or in host memory.
        per: it has one number a token, one a sequence, or a fixed number of them.
        required: every engine has it.
    """

    dtype: Literal["int32", "int64"]
    place: Literal["card", "host"]
    per: Literal["token", "sequence", "engine"]
    required: bool = False


INPUTS: Mapping[str, Input] = {
    "input_ids": Input(dtype="int32", place="card", per="token", required=True),
    "position_ids": Input(dtype="int32", place="card", per="token"),
    "last_token_ids": Input(dtype="int32", place="card", per="sequence", required=True),
    "context_lengths": Input(dtype="int32", place="card", per="sequence", required=True),
    "host_context_lengths": Input(dtype="int32", place="host", per="sequence"),
    "host_request_types": Input(dtype="int32", place="host", per="sequence"),
    "host_max_attention_window_sizes": Input(dtype="int32", place="host", per="engine"),
    "host_sink_token_length": Input(dtype="int32", place="host", per="engine"),
    "host_runtime_perf_knobs": Input(dtype="int64", place="host", per="engine"),
    "host_context_progress": Input(dtype="int64", place="host", per="engine"),
}
"""All inputs of a packed decoder without cache on one card, with the vendor's attention plugin."""

NEEDS = {
    "all_reduce_workspace": "which belongs to an engine for several cards",
    "sequence_length": "which belongs to an engine with a cache",
    "host_past_key_value_lengths": "which belongs to an engine with a cache",
    "cache_indirection": "which belongs to an engine with a cache",
    "prompt_embedding_table": "which belongs to an engine with prompt tuning",
    "tasks": "which belongs to an engine with prompt tuning",
    "prompt_vocab_size": "which belongs to an engine with prompt tuning",
    "mrope_rotary_cos_sin": "which belongs to a model that sees images",
}


def check_inputs(path: Any, names: list[str]) -> tuple[str, ...]:
    """The inputs of an engine, all of them known.

    Raises:
        UnknownInput, InputMissing: with the name.
    """
    for name in names:
        if name in INPUTS:
            continue
        problem = NEEDS.get(name, "which is not known")
        if "kv_cache" in name or name.startswith("past_key_value"):
            problem = NEEDS["sequence_length"]
        elif "lora" in name:
            problem = "which belongs to an engine with LoRA adapters"
        elif "spec_decoding" in name:
            problem = "which belongs to an engine with speculative decoding"
        raise UnknownInput(path=path, name=name, problem=problem)
    for name, known in INPUTS.items():
        if known.required and name not in names:
            raise InputMissing(path=path, name=name)
    return tuple(names)


def fixed_inputs(names: tuple[str, ...], *, num_layers: int, max_input_tokens: int) -> "dict[str, torch.Tensor]":
    """Host tensors that are the same for every pass.

    `host_context_progress` is zero because anything else is followed as a pointer; performance knobs of -1 leave the
    vendor's own choice.
    """
    import torch

    values = {
        "host_max_attention_window_sizes": torch.full((num_layers,), max_input_tokens, dtype=torch.int32),
        "host_sink_token_length": torch.zeros(1, dtype=torch.int32),
        "host_runtime_perf_knobs": torch.full((NUM_PERF_KNOBS,), -1, dtype=torch.int64),
        "host_context_progress": torch.zeros(1, dtype=torch.int64),
    }
    return {name: values[name] for name in names if INPUTS[name].per == "engine"}


def pass_values(batch: TokenBatch) -> dict[str, Int32]:
    """Values of one pass, int32 [T] or [B]: positions restart in each sequence, last tokens are an inclusive sum."""
    bounds, lengths = batch.cu_seqlens, batch.lengths
    positions = np.arange(batch.num_tokens, dtype=np.int32) - np.repeat(bounds[:-1], lengths).astype(np.int32)
    return {
        "input_ids": batch.input_ids,
        "position_ids": positions,
        "last_token_ids": bounds[1:],
        "context_lengths": lengths,
        "host_context_lengths": lengths,
        "host_request_types": np.zeros(batch.num_sequences, np.int32),
    }
