"""Checkpoint + recipe -> engine directory: weights without the head, tokenizer, contract. Proves before it says done.

Order: check the checkpoint, run it as the plain model on real passages (in float32 where memory allows), write its
weights in the engine's type, load what was written as a run would, prove a layout, compare with the plain model, and
write the contract last. The directory appears under its name only when it is whole.
"""

import dataclasses
import os
import secrets
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extract.canonical import file_digest
from extract.engine.comparison import PlainStates, available_memory, compare, passage_ids
from extract.engine.contract import (
    CONTRACT_FILE,
    CheckpointIdentity,
    Contract,
    EngineFile,
    Fidelity,
    Limits,
    Measured,
    Precision,
    Probe,
    RuntimeIdentity,
    StateOutput,
    TokenizerIdentity,
    write_contract,
)
from extract.engine.device import computes_in, this_device
from extract.engine.recipe import Recipe
from extract.errors import OutOfSpace, SpecError
from extract.store import clear_write_errors, free_bytes, sync_directory

if TYPE_CHECKING:
    from extract.engine.checkpoint import Checkpoint

DEFAULT_MAX_TOKENS = {"cpu": 4096, "cuda": 131_072}


class OutputExists(SpecError):
    """The engine directory is there already."""

    template = "{path}: exists already. Choose another directory with -o, or remove this one first."


class RecipeDoesNotFit(SpecError):
    """The recipe is for other models, or asks for what the device cannot do."""

    template = "{where}: {key} is {found}, {expected}."


class NoRoomForEngine(OutOfSpace):
    """The engine does not fit on the disk."""

    template = "{path}: the engine needs {expected:,} bytes, {found:,} are free."


def build(
    checkpoint: str | Path,
    output: Path,
    recipe: Recipe | None = None,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    allow_no_final_norm: bool = False,
    say: Callable[[str], None] = lambda message: None,
) -> Contract:
    """Build an engine directory.

    Args:
        checkpoint: Hugging Face directory, hub id or GGUF file.
        output: the engine directory; it must not exist.
        recipe: what to build; the default one builds for this machine in the checkpoint's own precision.
        revision: branch, tag or commit of a hub id.
        allow_pickle: read weights from pickled `.bin` files (through torch's weights-only loader).
        allow_no_final_norm: take the model's output as it is where it has no final norm.
        say: called with a line whenever a step begins.

    Raises:
        CheckpointRefused: the checkpoint is incomplete, quantised in a way torch does not run, not causal, ...
        EngineRefused: this machine cannot build what the recipe asks for.
    """
    from extract.engine.checkpoint import open_checkpoint

    recipe = recipe or Recipe()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OutputExists(path=output)
    opened = open_checkpoint(checkpoint, revision=revision, allow_pickle=allow_pickle)
    if recipe.architectures and opened.architecture not in recipe.architectures:
        expected = "it is for " + ", ".join(recipe.architectures)
        raise RecipeDoesNotFit(where="recipe", key="architecture", found=opened.architecture, expected=expected)
    with clear_write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        draft = output.parent / f".{output.name}.{os.getpid()}-{secrets.token_hex(4)}"
        draft.mkdir()
    try:
        contract = _build_into(draft, opened, recipe, allow_no_final_norm=allow_no_final_norm, say=say)
        with clear_write_errors(output):
            if output.exists():
                output.rmdir()
            draft.rename(output)
            sync_directory(output.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return contract


def _build_into(
    draft: Path, opened: "Checkpoint", recipe: Recipe, *, allow_no_final_norm: bool, say: Callable[[str], None]
) -> Contract:
    from extract.engine.checkpoint_tokenizer import load_tokenizer
    from extract.engine.torch_decoder import TorchDecoder, vocab_size
    from extract.engine.torch_proof import prove
    from extract.engine.torch_runtime import TorchRuntime, load_engine_model
    from extract.text.tokenizer_export import export_tokenizer

    device = this_device(recipe.device)
    dtype = _resolve_dtype(recipe, device, opened.dtype)
    tokenizer = load_tokenizer(opened)
    identity = export_tokenizer(tokenizer, draft) if tokenizer is not None else TokenizerIdentity(kind="none")
    plain = _plain_states(draft, opened, recipe, dtype, tokenizer, allow_no_final_norm=allow_no_final_norm, say=say)

    say("proving a layout: sequences of a pass must not touch each other, and must equal the plain model")
    model = load_engine_model(draft, dtype, device.type)
    limits = _limits(recipe, device.type, plain.max_positions)
    proven = prove(
        model,
        max_input_tokens=limits.max_input_tokens,
        max_tokens=limits.max_tokens,
        layout=recipe.layout,
        device=device.type,
        allow_no_final_norm=allow_no_final_norm,
        decide_in_float32=plain.dtype == "float32",
    )
    if proven.limit_max_tokens is not None and proven.limit_max_tokens < limits.max_tokens:
        binding = "positions inside a packed pass of this family"
        limits = dataclasses.replace(limits, max_tokens=proven.limit_max_tokens, binding=binding)
    unmeasured = Fidelity(
        reference=plain.dtype, num_tokens=0, rel_error_max=0.0, cosine_mean=1.0, cosine_min=1.0, bound=proven.bound
    )
    contract = Contract(
        checkpoint=CheckpointIdentity(
            name=opened.name,
            kind=opened.kind,
            sha256=opened.sha256,
            architecture=type(model).__name__,
            model_type=model.config.model_type,
            num_layers=_num_layers(model.config),
            hidden_size=model.config.hidden_size,
            vocab_size=vocab_size(model),
            max_positions=plain.max_positions,
            dtype=opened.dtype,
            notes=tuple(dict.fromkeys((*opened.notes, *plain.notes, *proven.reasons))),
        ),
        runtime=RuntimeIdentity(
            name="torch",
            version=version("torch"),
            transformers=version("transformers"),
            layout=proven.layout,
            attention=proven.attention,
        ),
        device=device if dtype == "bfloat16" else _any_cpu(device),
        precision=Precision(weights=dtype, activations=dtype, output=dtype),
        limits=limits,
        output=StateOutput(
            module=proven.final_norm.described,
            width=proven.final_norm.width,
            dtype=dtype,
            head_input=proven.head_input,
        ),
        tokenizer=identity,
        files=_files(draft),
        proof=proven.proof,
        fidelity=unmeasured,
        probe=Probe(tolerance=0.0, sequences=()),
        measured=Measured(tokens_per_s=0.0),
    )
    say(f"comparing it ({proven.layout}, {dtype}) with the plain model in {plain.dtype}, row by row")
    decoder = TorchDecoder(model, layout=proven.layout, device=device.type, final_norm=proven.final_norm)
    seen = compare(TorchRuntime(contract, decoder), plain, opened.name)
    contract = dataclasses.replace(contract, fidelity=seen.fidelity, probe=seen.probe, measured=seen.measured)
    write_contract(draft, contract)
    for path in draft.iterdir():
        _sync(path)
    return contract


def _plain_states(
    draft: Path,
    opened: "Checkpoint",
    recipe: Recipe,
    dtype: str,
    tokenizer: Any,
    *,
    allow_no_final_norm: bool,
    say: Callable[[str], None],
) -> PlainStates:
    """Load the checkpoint once: run the plain model on real passages, then write its weights in the engine's type."""
    from extract.engine.decoder import load_decoder
    from extract.engine.torch_decoder import vocab_size
    from extract.engine.torch_runtime import PlainModel

    in_float32 = opened.decoder_bytes * (1 if opened.dtype == "float32" else 2)
    reference = "float32" if in_float32 < 0.6 * available_memory() else dtype
    say(f"loading {opened.name} ({opened.architecture}, {opened.dtype}) in {reference}, without its head")
    decoder = load_decoder(opened, reference)
    max_positions = getattr(decoder.config, "max_position_embeddings", None)
    limit = min(recipe.max_input_tokens, max_positions or recipe.max_input_tokens)
    vocabulary = vocab_size(decoder.model)
    ids = passage_ids(tokenizer, limit, vocabulary)
    plain = PlainModel(decoder.model, allow_no_final_norm=allow_no_final_norm)
    states = [plain.states(one) for one in ids]
    plain.close()
    _save(decoder.model, dtype, draft)
    return PlainStates(dtype=reference, ids=ids, states=states, max_positions=max_positions, notes=decoder.notes)


def _resolve_dtype(recipe: Recipe, device: Any, own: str) -> str:
    if recipe.dtype == "auto":
        return own if own in ("bfloat16", "float16", "float32") and computes_in(device, own) else "float32"
    if not computes_in(device, recipe.dtype):
        expected = f"which this {device.type} has no fast arithmetic for; use float32"
        if device.type == "cpu" and recipe.dtype == "float16":
            expected = "which is ten times slower than float32 on a CPU; use float32 or bfloat16"
        raise RecipeDoesNotFit(where="recipe", key="dtype", found=recipe.dtype, expected=expected)
    return recipe.dtype


def _any_cpu(device: Any) -> Any:
    """float32 arithmetic exists on every CPU of the same architecture."""
    import platform

    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return device
    return dataclasses.replace(device, instruction_set="baseline")


def _limits(recipe: Recipe, device: str, max_positions: int | None) -> Limits:
    max_input_tokens, binding = recipe.max_input_tokens, "the recipe"
    if max_positions is not None and max_positions < max_input_tokens:
        max_input_tokens, binding = max_positions, "the positions that the model knows"
    return Limits(
        max_input_tokens=max_input_tokens,
        max_sequences=recipe.max_sequences,
        max_tokens=recipe.max_tokens or DEFAULT_MAX_TOKENS[device],
        binding=binding,
    )


def _save(model: Any, dtype: str, draft: Path) -> None:
    """Write the base model's weights in the engine's type and its config, as any transformers can read them."""
    import torch

    from extract.engine.quiet_transformers import quiet_transformers

    target = getattr(torch, dtype)
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    weights = {
        name: tensor.to(target) if tensor.is_floating_point() and not any(part in name for part in kept) else tensor
        for name, tensor in model.state_dict().items()
    }
    needed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if free_bytes(draft) < needed:
        raise NoRoomForEngine(path=draft.parent, expected=needed, found=free_bytes(draft))
    model.config.dtype = target
    with clear_write_errors(draft), quiet_transformers():
        model.save_pretrained(draft, state_dict=weights, max_shard_size="1000TB")


def _files(draft: Path) -> tuple[EngineFile, ...]:
    paths = sorted(path for path in draft.iterdir() if path.is_file() and path.name != CONTRACT_FILE)
    return tuple(EngineFile(name=path.name, size=path.stat().st_size, sha256=file_digest(path)) for path in paths)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _num_layers(config: Any) -> int:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return 0
