"""The card's decoder and runtime over this machine's memory, for the tiny models and rows of `test_packed_decoder`."""

from typing import Any

import numpy as np
import torch
from test_packed_decoder import LONGEST, ROWS, Tiny, joined

from extract.cpu.architecture import Architecture, LayerKind, Rotary
from extract.cpu.weights import open_weights
from extract.cuda.decoder import PackedDecoder
from extract.cuda.host_card import HostCard
from extract.cuda.runtime import CudaRuntime
from extract.cuda.weights import COMPUTED, Precision, load_decoder
from extract.engine.contract import (
    CheckpointIdentity,
    Contract,
    Device,
    Fidelity,
    Limits,
    Measured,
    Probe,
    Proof,
    RuntimeIdentity,
    StateOutput,
    TokenizerIdentity,
)
from extract.engine.contract import Precision as Types
from extract.records import TokenBatch
from extract.shards.values import as_float32
from extract.tensorrt.card import Card

LLAMA_8B = Architecture(
    family="llama",
    vocab_size=128_256,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    norm_eps=1e-5,
    activation="silu",
    attention_scale=128**-0.5,
    layers=(LayerKind(rotary=0),) * 32,
    rotary=(Rotary(inv_freq=(1.0,) * 64),),
)
"""Llama 3.1 8B: for arithmetic, not to be computed."""

PASS = 200
"""Tokens of a pass: a third of all."""
CARD = Device(type="cuda", name="Card of the tests", compute_capability="9.0", num_sms=132)


def contract(
    architecture: Architecture, precision: Precision, *, pass_tokens: int = PASS, longest: int = LONGEST
) -> Contract:
    """As much of a contract as a runtime reads."""
    dtype = str(COMPUTED[precision]).removeprefix("torch.")
    return Contract(
        checkpoint=CheckpointIdentity(
            name="tiny", kind="directory", sha256="", architecture="", model_type=architecture.family,
            num_layers=len(architecture.layers), hidden_size=architecture.hidden_size,
            vocab_size=architecture.vocab_size, max_positions=None, dtype="float32",
        ),
        runtime=RuntimeIdentity(
            name="torch", version="", transformers="", layout="packed", attention="plain", decoder="own"
        ),
        device=CARD,
        precision=Types(weights="float32", activations=precision, output=dtype),
        limits=Limits(
            max_input_tokens=longest, max_sequences=8192, max_tokens=2**20, binding="", pass_tokens=pass_tokens
        ),
        output=StateOutput(module="norm", width=architecture.hidden_size, dtype=dtype, head_input="identical"),
        tokenizer=TokenizerIdentity(kind="none"),
        files=(),
        proof=Proof(neighbour=0.0, moved=0.0, plain=0.0),
        fidelity=Fidelity(
            reference="", num_tokens=0, rel_error_max=0.0, cosine_mean=1.0, cosine_min=1.0, bound=0.0
        ),
        probe=Probe(tolerance=0.0, sequences=()),
        measured=Measured(tokens_per_s=0.0),
    )  # fmt: skip


def loaded(tiny: Tiny, precision: Precision = "float32", *, longest: int = LONGEST) -> PackedDecoder:
    """The decoder on this machine, with plain attention."""
    with open_weights(tiny.path) as weights:
        return load_decoder(tiny.architecture, weights, precision, device="cpu", max_positions=longest, backend="plain")


def runtime(
    tiny: Tiny,
    precision: Precision = "float32",
    *,
    share: bool = False,
    pass_tokens: int = PASS,
    longest: int = LONGEST,
    card: Card | None = None,
) -> CudaRuntime:
    """A runtime on memory of this machine, or on a card of the tests."""
    return CudaRuntime(
        contract(tiny.architecture, precision, pass_tokens=pass_tokens, longest=longest),
        loaded(tiny, precision, longest=longest),
        card or HostCard(CARD, 2**34),
        share=share,
    )


def batch(rows: list[list[int]]) -> TokenBatch:
    input_ids, cu_seqlens = joined(rows)
    return TokenBatch(input_ids=input_ids, cu_seqlens=cu_seqlens, members=np.arange(len(rows)))


def states(found: CudaRuntime, rows: list[list[int]] = ROWS, kind: Any = "tokens") -> Any:
    """float32 [T, H] or [B, H]."""
    return as_float32(found.hidden_states(batch(rows), kind))


def positions_of(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """int32 [T]: each token's place in its sequence."""
    lengths = cu_seqlens.diff()
    return torch.cat([torch.arange(int(length), dtype=torch.int32) for length in lengths])
