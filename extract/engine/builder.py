"""Checkpoint + recipe -> engine directory: weights without the head, tokenizer, contract. Proves before it says done.

Order: check the checkpoint, run it as the plain model on real passages (in float32 where memory allows), write its
weights in the engine's type, load what was written as a run would, prove a layout, compare with the plain model, and
write the contract last. The directory appears under its name only when it is whole.
"""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extract.cpu.architecture import ARCHITECTURE_FILE
from extract.cpu.kernels import HIGH
from extract.cpu.linear_names import linears_of, nearest
from extract.engine.comparison import compare
from extract.engine.contract import (
    COMPILED_FILE,
    CONTRACT_FILE,
    CheckpointIdentity,
    Contract,
    EngineFile,
    Fidelity,
    Measured,
    Probe,
    TokenizerIdentity,
    describe_file,
    write_contract,
)
from extract.engine.device import FP8_CAPABILITY, computes_in, this_device
from extract.engine.plain import read_plain
from extract.engine.recipe import Recipe
from extract.errors import SpecError
from extract.whole_directory import whole_directory

if TYPE_CHECKING:
    from extract.engine.checkpoint import Checkpoint


class OutputExists(SpecError):
    """The engine directory is there already."""

    template = "{path}: exists already. Choose another directory with -o, or remove this one first."


class RecipeDoesNotFit(SpecError):
    """The recipe is for other models, or asks for what the device cannot do."""

    template = "{where}: {key} is {found}, {expected}."


class NoOwnDecoder(SpecError):
    """The recipe needs our own decoder, which cannot run this checkpoint."""

    template = (
        "{where}: it asks for our own decoder (or for int8, fp8, passes or a way to compile, which only that has), "
        "but {reason}. "
        "Leave out --decoder own, or choose --dtype float32 or bfloat16."
    )


def build(
    checkpoint: str | Path,
    output: str | Path,
    recipe: Recipe | None = None,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    allow_no_final_norm: bool = False,
    reference: str | Path | None = None,
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
        reference: with tensorrt-llm, the checkpoint or torch engine to compare with; see `build_tensorrt`.
        say: called with a line whenever a step begins.

    Raises:
        CheckpointRefused: the checkpoint is incomplete, quantised in a way torch does not run, not causal, ...
        EngineRefused: this machine cannot build what the recipe asks for.
    """
    recipe, output = recipe or Recipe(), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OutputExists(path=output)
    into: Callable[[Path], Contract]
    if recipe.runtime == "tensorrt-llm":
        from extract.engine.tensorrt_builder import build_tensorrt

        into = partial(
            build_tensorrt,
            checkpoint=checkpoint,
            recipe=recipe,
            reference=reference,
            revision=revision,
            allow_pickle=allow_pickle,
            files=_files,
            say=say,
        )
    else:
        from extract.engine.checkpoint import open_checkpoint

        opened = open_checkpoint(checkpoint, revision=revision, allow_pickle=allow_pickle)
        check_architecture(opened.architecture, recipe)
        check_linears(opened.config, recipe)
        into = partial(_build_torch, opened=opened, recipe=recipe, allow_no_final_norm=allow_no_final_norm, say=say)
    with whole_directory(output) as draft:
        contract = into(draft)
        write_contract(draft, contract)
        for path in draft.iterdir():
            _sync(path)
    return contract


def _build_torch(
    draft: Path, opened: "Checkpoint", recipe: Recipe, *, allow_no_final_norm: bool, say: Callable[[str], None]
) -> Contract:
    from extract.engine.checkpoint_tokenizer import load_tokenizer
    from extract.engine.proven import prove_own, prove_transformers
    from extract.text.tokenizer_export import export_tokenizer

    device = this_device(recipe.device)
    for key, found in (("compile", recipe.compile), ("pass_tokens", recipe.pass_tokens)):
        if device.type == "cpu" and found not in ("auto", None):
            raise RecipeDoesNotFit(where="recipe", key=key, found=found, expected="for a card alone; leave it out here")
    dtype = resolve_dtype(recipe, device, opened.dtype)
    tokenizer = load_tokenizer(opened)
    identity = export_tokenizer(tokenizer, draft) if tokenizer is not None else TokenizerIdentity(kind="none")
    plain = read_plain(draft, opened, recipe, dtype, tokenizer, allow_no_final_norm=allow_no_final_norm, say=say)
    proven = prove_own(draft, plain, recipe, dtype, device, say) if plain.facts is not None else None
    if proven is None or proven.refused is not None:
        reasons = [plain.not_own if proven is None else proven.refused]
        if recipe.decoder == "own" or dtype in ("int8", "fp8") or recipe.compile != "auto" or recipe.pass_tokens:
            reason = reasons[0] or "that runs packed only, and not in float16"
            raise NoOwnDecoder(where="recipe", reason=reason.rstrip("."))
        for name in (ARCHITECTURE_FILE, COMPILED_FILE):
            (draft / name).unlink(missing_ok=True)
        proven = prove_transformers(
            draft, plain, recipe, dtype, device, reasons, allow_no_final_norm=allow_no_final_norm, say=say
        )
    contract = Contract(
        checkpoint=CheckpointIdentity(
            name=opened.name,
            kind=opened.kind,
            sha256=opened.sha256,
            dtype=opened.dtype,
            max_positions=plain.max_positions,
            notes=tuple(dict.fromkeys((*opened.notes, *plain.notes, *proven.reasons))),
            **plain.model,
        ),
        runtime=proven.runtime,
        device=proven.device,
        precision=proven.precision,
        limits=proven.limits,
        output=proven.output,
        tokenizer=identity,
        files=_files(draft),
        proof=proven.proof,
        fidelity=Fidelity(
            reference=plain.dtype,
            num_tokens=0,
            rel_error_max=0.0,
            cosine_mean=1.0,
            cosine_min=1.0,
            bound=proven.bound,
        ),
        probe=Probe(tolerance=0.0, sequences=()),
        measured=Measured(tokens_per_s=0.0),
    )
    precision = contract.precision.described
    say(f"comparing it ({proven.runtime.layout}, {precision}) with the plain model in {plain.dtype}, row by row")
    runtime = proven.open(contract)
    seen = compare(runtime, plain, opened.name)
    runtime.close()
    return dataclasses.replace(contract, fidelity=seen.fidelity, probe=seen.probe, measured=seen.measured)


def check_architecture(found: str, recipe: Recipe) -> None:
    """Raise `RecipeDoesNotFit` where a recipe is meant for other architectures."""
    if recipe.architectures and found not in recipe.architectures:
        expected = "it is for " + ", ".join(recipe.architectures)
        raise RecipeDoesNotFit(where="recipe", key="architecture", found=found, expected=expected)


def check_linears(config: dict[str, Any], recipe: Recipe) -> None:
    """Raise `RecipeDoesNotFit` where a recipe names layers or linears that a checkpoint's decoder does not have.

    Args:
        config: of the checkpoint, or the metadata of a GGUF file.
        recipe: with `high_precision`.
    """
    if not recipe.high_precision:
        return
    text: Any = config.get("text_config")
    settings: dict[str, Any] = text if isinstance(text, dict) else config
    counts = (value for key, value in settings.items() if key.endswith(LAYER_COUNTS) and isinstance(value, int))
    num_layers = next(counts, None)
    if num_layers is None:  # no family of our own decoder, which is said later
        return
    try:
        linears_of(recipe.high_precision, num_layers)
    except KeyError as error:
        name = str(error.args[0])
        expected = f"but there are {nearest(name, num_layers)}"
        raise RecipeDoesNotFit(where="recipe", key="high_precision", found=f'"{name}"', expected=expected) from None


LAYER_COUNTS = ("num_hidden_layers", "block_count")
"""What configs of our own decoder's families, and GGUF files, call the number of layers."""


def resolve_dtype(recipe: Recipe, device: Any, own: str) -> str:
    """The precision that a recipe comes to on `device` for weights stored in `own`; raises `RecipeDoesNotFit`."""
    if recipe.high_precision and not computes_in(device, HIGH):
        expected = f"in bfloat16, which this {device.type} has no fast arithmetic for; leave it out"
        raise RecipeDoesNotFit(where="recipe", key="high_precision", found="set", expected=expected)
    if recipe.dtype == "auto":
        return own if own in ("bfloat16", "float16", "float32") and computes_in(device, own) else "float32"
    if not computes_in(device, recipe.dtype):
        expected = f"which this {device.type} has no fast arithmetic for; use float32"
        if device.type == "cpu" and recipe.dtype == "float16":
            expected = "which is ten times slower than float32 on a CPU; use float32 or bfloat16"
        if recipe.dtype == "fp8":
            here = "a CPU" if device.type == "cpu" else f"one of {device.compute_capability}"
            expected = (
                f"which needs a card of compute capability {FP8_CAPABILITY} or higher, and this is {here}; use bfloat16"
            )
        raise RecipeDoesNotFit(where="recipe", key="dtype", found=recipe.dtype, expected=expected)
    return recipe.dtype


def _files(draft: Path) -> tuple[EngineFile, ...]:
    paths = sorted(path for path in draft.iterdir() if path.is_file() and path.name != CONTRACT_FILE)
    return tuple(map(describe_file, paths))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
