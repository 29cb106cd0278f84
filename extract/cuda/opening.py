"""An engine directory -> its runtime on a card: checks first, then weights, then compiled regions.

The same function opens an engine on memory of this machine (`card=`), which is how everything but the card's own
kernels is tried without one; no command does so, because a contract names the device that its numbers were proven on.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch

from extract.cpu.architecture import Architecture, read_architecture
from extract.cpu.engine_check import check_engine
from extract.cpu.weights import WEIGHTS_FILE, open_weights
from extract.cuda.ahead_of_time import compile_regions, seen_variants
from extract.cuda.attention import Backend, choose_backend
from extract.cuda.cards import BUILD_HERE, check_room, choose_card, free_memory, take_card, visible_cards
from extract.cuda.memory import MAX_ELEMENTS, memory_model
from extract.cuda.packaged_regions import bind_regions
from extract.cuda.regions import fuse
from extract.cuda.runtime import CudaRuntime
from extract.cuda.trusted_code import check_trusted, trust
from extract.cuda.weights import COMPUTED, Precision, load_decoder
from extract.engine.contract import (
    COMPILED_FILE,
    Contract,
    Device,
    EngineChanged,
    EngineDoesNotFit,
    Limits,
    describe_file,
)
from extract.records import TokenBatch
from extract.storage.local_copies import cache_folder
from extract.tensorrt.card import Card

SMALLER = "Build an engine with a smaller --max-tokens."
LARGER = "Take a larger card, or a smaller precision."
Compile = Literal["ahead", "jit", "none"]
LEFT_ALONE = 0.85
"""Part of a card that an engine plans with: the same on all cards of a kind, whatever else runs there at the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a contract says of an engine on a card.

    Attributes:
        device: the card.
        attention: the backend, and why not the faster one.
        output: type of the states.
        limits: with tokens of a pass, and the memory that it needs.
        card_bytes: memory of the card.
    """

    device: Device
    attention: str
    output: str
    limits: Limits
    card_bytes: int


def terms_on_card(
    architecture: Architecture, precision: str, limits: Limits, *, path: object, how: Compile | None = None
) -> Terms:
    """The terms on which the first visible card runs this decoder.

    Args:
        architecture: of the decoder.
        precision: of its products.
        limits: what is asked for; passes are as large as the card takes where `pass_tokens` names no number.
        path: what needs it, for messages.
        how: regions will be compiled; see `RuntimeIdentity.compile`.

    Raises:
        EngineDoesNotFit: there is no card, or it is too small for one token, or for the passes that are asked for.
    """
    card = choose_card(visible_cards(), None, path)
    dtype = COMPUTED[cast("Precision", precision)]
    chosen = choose_backend(architecture, dtype, card.device.type, card.device.compute_capability)
    memory = memory_model(
        architecture,
        precision,
        backend=chosen.backend,
        max_positions=limits.max_input_tokens,
        fused=how == "ahead" or (how != "none" and can_fuse()),
    )
    tokens = limits.pass_tokens or memory.pass_tokens(int(LEFT_ALONE * card.total_bytes), limits.max_tokens)
    least = limits.max_input_tokens
    if tokens > (most := MAX_ELEMENTS // memory.widest):
        raise EngineDoesNotFit(
            path=path,
            field="passes of",
            expected=f"{tokens:,} tokens",
            found=f"kernels that count {most:,} at most",
            advice="Ask for no more --pass-tokens than that.",
        )
    check_room(card, int(LEFT_ALONE * card.total_bytes), memory.needed_bytes(max(tokens, least)), path, LARGER)
    return Terms(
        device=card.device,
        attention=chosen.described,
        output=str(dtype).removeprefix("torch."),
        limits=replace(limits, pass_tokens=max(tokens, least), memory_bytes=memory.needed_bytes(max(tokens, least))),
        card_bytes=card.total_bytes,
    )


def open_cuda_runtime(
    directory: Path, contract: Contract, *, share: bool = True, card: Card | None = None
) -> CudaRuntime:
    """Load an engine whose files have been checked.

    Args:
        directory: with `decoder.json` and `model.safetensors`.
        contract: its contract.
        share: compute common prefixes and exact duplicates of a pass once.
        card: where it runs; `None`: the first visible card of the contract's kind.

    Raises:
        EngineDoesNotFit: no such card, too little of its memory is free, or this torch has another attention.
        EngineChanged, UnfitWeights: the files do not hold exactly the decoder's weights.
        OutputDiffers: the contract promises another output than this decoder has.
        CompiledForAnother, CompiledCodeUnreadable, CodeNotTrusted: of the code that a build compiled.
    """
    architecture = read_architecture(directory)
    precision = cast("Precision", contract.precision.activations)
    where, how = torch.device("cpu"), contract.runtime.compile
    if card is None:
        chosen = choose_card(visible_cards(), contract.device, directory)
        check_room(chosen, free_memory(chosen), contract.limits.memory_bytes or 0, directory, SMALLER)
        if how == "jit" and not can_fuse():
            raise EngineDoesNotFit(
                path=directory,
                field="compiler",
                expected="Triton",
                found="none",
                advice="Install it: pip install triton",
            )
        where, card = torch.device("cuda", chosen.index), take_card(chosen)
    code = directory / COMPILED_FILE
    if how == "ahead":
        _check_code(directory, code)
    weights = open_weights(directory / WEIGHTS_FILE)
    dtype = str(COMPUTED[precision]).removeprefix("torch.")
    check_engine(directory, contract, architecture, weights, dtype)
    decoder = load_decoder(
        architecture,
        weights,
        precision,
        device=where,
        max_positions=contract.limits.max_input_tokens,
        backend=partial(_backend, directory, contract, architecture, where),
    )
    if where.type == "cuda":
        torch.cuda.synchronize(where)  # passes run on streams that do not wait for the one that loaded
    if how == "ahead":
        bind_regions(decoder, code, compiled_for(contract, where), where)
    elif how != "none" and where.type == "cuda" and can_fuse():
        fuse(decoder.modules())
    return CudaRuntime(contract, decoder, card, share=share)


def compile_engine(directory: Path, contract: Contract) -> None:
    """Compile an engine's regions into its directory, for the card at hand; raises as `open_cuda_runtime` does.

    What is compiled is what two passes of the runtime call, in the layouts in which it calls it.
    """
    runtime = open_cuda_runtime(directory, replace(contract, runtime=replace(contract.runtime, compile="none")))
    limits, vocabulary = contract.limits, contract.checkpoint.vocab_size
    lengths = [min(length, limits.max_input_tokens) for length in (3, 5, 2)]
    batch = TokenBatch(
        input_ids=np.arange(sum(lengths), dtype=np.int32) % vocabulary,
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        members=np.arange(len(lengths)),
    )
    try:
        variants = seen_variants(
            runtime.decoder, lambda: [runtime.hidden_states(batch, kind) for kind in ("tokens", "last")]
        )
        most = max(limits.pass_tokens or limits.max_tokens, limits.max_input_tokens)
        compile_regions(variants, directory / COMPILED_FILE, max_rows=most)
    finally:
        runtime.close()
    trust(describe_file(directory / COMPILED_FILE).sha256, cache_folder())


def _backend(directory: Path, contract: Contract, architecture: Architecture, where: torch.device) -> Backend:
    """The backend of attention, if it is the contract's. Its import takes a second, in which weights are read."""
    dtype = COMPUTED[cast("Precision", contract.precision.activations)]
    found = choose_backend(architecture, dtype, where.type, contract.device.compute_capability)
    if found.described != contract.runtime.attention:
        raise EngineDoesNotFit(
            path=directory,
            field="attention",
            expected=contract.runtime.attention,
            found=found.described,
            advice=BUILD_HERE,
        )
    return found.backend


def _check_code(directory: Path, code: Path) -> None:
    if not code.is_file():
        raise EngineChanged(path=directory, name=COMPILED_FILE, field="state", found="missing", expected="present")
    check_trusted(code, describe_file(code).sha256, cache_folder())


def compiled_for(contract: Contract, where: torch.device) -> dict[str, str]:
    """What an engine's compiled code was made for, in the words of `extract.cuda.packaged_regions.here`."""
    found = {"torch": contract.runtime.version}
    if where.type == "cuda":
        found["compute capability"] = str(contract.device.compute_capability)
    return found


def can_fuse() -> bool:
    """Whether regions can be compiled here for a card: torch's compiler writes them in Triton."""
    from torch.utils._triton import has_triton

    return bool(has_triton())
