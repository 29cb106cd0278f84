"""Checkpoint + recipe -> engine that TensorRT-LLM runs: limits first, then the vendor's build, then the same proof.

Nothing expensive starts before the arithmetic, the version gate and the reference have said yes. What the vendor built
is opened as a run would open it, tried with rows that must not touch each other, and compared with the plain model.
"""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extract.engine.contract import (
    CheckpointIdentity,
    Contract,
    Device,
    Fidelity,
    Limits,
    Measured,
    Precision,
    Probe,
    Proof,
    RuntimeIdentity,
    StateOutput,
)
from extract.engine.recipe import Recipe
from extract.engine.tensorrt_reference import (
    NotAReference,
    OtherReference,
    Reference,
    from_checkpoint,
    from_engine,
    is_engine,
)
from extract.errors import CheckpointRefused, SpecError
from extract.tensorrt.gate import VendorVersions, check_vendor
from extract.tensorrt.marked_model import OUTPUT_NAME
from extract.tensorrt.model_shape import ModelShape, read_shape
from extract.tensorrt.pass_limits import GIB, PassLimits, pass_limits
from extract.tensorrt.vendor_checkpoint import NoReference, is_vendor_checkpoint, read_origin, vendor_identity

if TYPE_CHECKING:
    from extract.tensorrt.card import Card


class QuantiseFirst(CheckpointRefused):
    """FP8 was asked for, and the weights are not quantised."""

    template = (
        "{path}: its weights are {found}, fp8 expected. Quantise once, build often: "
        "extract quantize {path} --to fp8 -o {path}-fp8"
    )


class VendorPrecision(SpecError):
    """A vendor checkpoint has its precision in it."""

    template = "recipe: dtype is {found}, but {path} holds {expected}. Leave out --dtype."


class CardTooSmall(SpecError):
    """The recipe is for a larger card."""

    template = (
        "recipe: card_memory_gib is {found:g}, this card ({name}) has {expected:.1f}. Use a recipe for this card."
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is built from.

    Attributes:
        path: Hugging Face directory, or a checkpoint in the vendor's format.
        shape: in the precision that will be built.
        vendor: it is in the vendor's format.
        name, sha256: its identity; sha256 is `None` for Hugging Face, whose reference gives it.
    """

    path: Path
    shape: ModelShape
    vendor: bool
    name: str
    sha256: str | None


def open_source(checkpoint: str | Path, recipe: Recipe, *, revision: str | None = None, hashed: bool = True) -> Source:
    """Find a checkpoint and say in which precision it will be built.

    Unless `hashed`, its config alone is read, and one that is still to be quantised is taken as if it were.

    Raises:
        CheckpointRefused: no config, a size is missing, split into ranks, not quantised where the recipe says so.
        VendorPrecision: the recipe asks for another precision than a vendor checkpoint has.
    """
    path = Path(checkpoint)
    if not path.exists():
        from extract.engine.checkpoint import open_checkpoint

        path = open_checkpoint(checkpoint, revision=revision).path
    shape = read_shape(path)
    if is_vendor_checkpoint(path):
        if recipe.dtype not in ("auto", shape.dtype, shape.weights):
            raise VendorPrecision(found=recipe.dtype, path=path, expected=shape.weights)
        sha256 = vendor_identity(path, shape) if hashed else None
        return Source(path=path, shape=shape, vendor=True, name=path.resolve().name, sha256=sha256)
    dtype = shape.dtype if recipe.dtype in ("auto", "fp8") else recipe.dtype
    weights = "fp8" if recipe.dtype == "fp8" else dtype
    if weights == "fp8" and hashed:
        raise QuantiseFirst(path=checkpoint, found=shape.weights)
    shape = dataclasses.replace(shape, dtype=dtype, weights=weights, cache=dtype)
    name = path.resolve().name if Path(checkpoint).exists() else str(checkpoint)
    return Source(path=path, shape=shape, vendor=False, name=name, sha256=None)


def build_tensorrt(
    draft: Path,
    checkpoint: str | Path,
    recipe: Recipe,
    *,
    reference: str | Path | None,
    revision: str | None,
    allow_pickle: bool,
    files: Callable[[Path], Any],
    say: Callable[[str], None],
) -> Contract:
    """Build into `draft` and return the whole contract, which the caller writes.

    Args:
        draft: an empty directory.
        checkpoint: Hugging Face directory or hub id, or a vendor checkpoint.
        recipe: with runtime tensorrt-llm.
        reference: checkpoint or torch engine to compare with; `None`: the checkpoint itself, or the one that a vendor
            checkpoint says it was made from.
        revision: as for `build`.
        allow_pickle: as for `build`.
        files: lists the draft's files with sizes and hashes.
        say: called with a line whenever a step begins.

    Raises:
        CheckpointRefused, EngineRefused, SpecError: as the parts say; nothing is left behind.
    """
    from extract.engine.builder import check_architecture
    from extract.tensorrt.cuda_card import claim_card

    versions = check_release(recipe)
    source = open_source(checkpoint, recipe, revision=revision)
    card = claim_card(None, "recipe")
    try:
        limits = limits_on(card, source, recipe)
        check_architecture(source.shape.architecture, recipe)
        word = _reference(source, checkpoint, recipe, reference, draft, revision, allow_pickle, say)
        with tempfile.TemporaryDirectory(prefix="extract-build-", dir=draft.parent) as scratch:
            _vendor_part(source, recipe, limits, draft, Path(scratch), versions, say)
        return _finish(draft, source, recipe, limits, word, versions, card, files(draft), say)
    finally:
        card.close()


def check_release(recipe: Recipe) -> VendorVersions:
    """Whether the installed package builds and runs what a recipe asks for; raises as `check_vendor` does."""
    return check_vendor("build", "executor" if recipe.cache == "paged" else "run")


def check_can_build(recipe: Recipe, checkpoint: str | Path) -> None:
    """Ask for package and card before a plan for them is made: several builds are about to follow.

    Raises:
        EngineRefused: either is missing, or all cards are taken.
    """
    from extract.tensorrt.cuda_card import claim_card

    check_release(recipe)
    claim_card(None, checkpoint).close()


def limits_on(card: "Card", source: Source, recipe: Recipe) -> PassLimits:
    """Limits on a card at hand, or on the smaller one that the recipe is for.

    Raises:
        CardTooSmall: the recipe is for a larger card.
        DoesNotFit: no pass fits.
    """
    memory = card.total_bytes
    if recipe.card_memory_gib is not None:
        if recipe.card_memory_gib * GIB > memory * 1.1:  # nominal sizes are larger than what a driver gives
            raise CardTooSmall(found=recipe.card_memory_gib, name=card.device.name, expected=memory / GIB)
        memory = min(memory, int(recipe.card_memory_gib * GIB))
    sms = card.device.num_sms
    return pass_limits(source.shape, recipe, memory, name=source.name, **({} if sms is None else {"num_sms": sms}))


def _reference(
    source: Source,
    checkpoint: str | Path,
    recipe: Recipe,
    asked: str | Path | None,
    draft: Path,
    revision: str | None,
    allow_pickle: bool,
    say: Callable[[str], None],
) -> Reference:
    """The plain model's word, of the very checkpoint that is built from."""
    origin = read_origin(source.path) if source.vendor else None
    where = asked
    if where is None:
        if not source.vendor:
            where = checkpoint
        elif origin is None:
            raise NoReference(path=source.path, problem="nothing says which checkpoint it was made from")
        elif not Path(origin.path).exists():
            raise NoReference(path=source.path, problem=f"it was made from {origin.path}, which is gone")
        else:
            where = origin.path
    if is_engine(Path(where)):
        found = from_engine(Path(where), recipe, draft, say=say)
    else:
        _check_transformers(where)
        found = from_checkpoint(where, recipe, draft, revision=revision, allow_pickle=allow_pickle, say=say)
    expected = origin.sha256 if origin is not None else None
    if not source.vendor and asked is not None:
        from extract.engine.checkpoint import open_checkpoint

        expected = open_checkpoint(checkpoint, revision=revision, allow_pickle=allow_pickle).sha256
    if expected is not None and found.sha256 != expected:
        raise OtherReference(path=where, field="sha256", found=found.sha256[:12], expected=expected[:12])
    shape = source.shape
    for field, size in (("hidden_size", shape.hidden_size), ("num_layers", shape.num_layers)):
        if found.plain.model[field] != size:
            raise OtherReference(path=where, field=field, found=found.plain.model[field], expected=size)
    return found


def _check_transformers(where: str | Path) -> None:
    """The vendor's packages pin an older transformers than the one that reads checkpoints here."""
    installed, wanted = metadata.version("transformers"), "5."
    if not installed.startswith(wanted):
        problem = f"transformers {installed} is installed, which this package does not read checkpoints with (5.24)"
        raise NotAReference(path=where, problem=problem)


def _vendor_part(
    source: Source,
    recipe: Recipe,
    limits: PassLimits,
    draft: Path,
    scratch: Path,
    versions: VendorVersions,
    say: Callable[[str], None],
) -> None:
    from extract.tensorrt.vendor_build import build_engine, convert

    path = source.path
    if not source.vendor:
        say(f"converting {source.name} with tensorrt-llm {versions.tensorrt_llm}, in {source.shape.dtype}")
        path = scratch / "checkpoint"
        convert(source.path, source.shape.dtype, path, versions.tensorrt_llm)
    say(f"building with TensorRT {versions.tensorrt}: passes of {limits.pass_tokens:,} tokens ({limits.binding})")
    built = scratch / "engine"
    built.mkdir()
    build_engine(path, recipe, source.shape, limits, built, scratch, versions.tensorrt_llm)
    for file in built.iterdir():
        shutil.move(str(file), draft / file.name)


def _finish(
    draft: Path,
    source: Source,
    recipe: Recipe,
    limits: PassLimits,
    word: Reference,
    versions: VendorVersions,
    card: "Card",
    files: Any,
    say: Callable[[str], None],
) -> Contract:
    """Open what was built, try it, compare it; the contract that says so."""
    from extract.engine.comparison import compare
    from extract.engine.row_trial import try_rows
    from extract.tensorrt.open_runtime import engine_memory, open_tensorrt_runtime

    contract = _contract(source, recipe, limits, word, versions, card.device, files)
    precision = source.shape.weights
    if recipe.cache == "none":
        memory = engine_memory(draft, versions.tensorrt_llm)
        if memory is not None:
            total = memory + limits.memory.weights + limits.memory.outputs
            contract = dataclasses.replace(contract, limits=dataclasses.replace(contract.limits, memory_bytes=total))
    say(
        f"opening it as a run would: rows must not touch each other, and are compared ({precision}) with the plain "
        f"model in {word.plain.dtype}"
    )
    runtime = open_tensorrt_runtime(draft, contract, card)
    try:
        vocabulary = word.plain.model["vocab_size"]
        trial = try_rows(runtime, word.plain.ids, word.plain.states, precision, vocabulary, source.name)
        fidelity = dataclasses.replace(contract.fidelity, bound=trial.bound)
        contract = dataclasses.replace(contract, proof=trial.proof, fidelity=fidelity)
        runtime.contract = contract
        seen = compare(runtime, word.plain, source.name)
    finally:
        runtime.close()
    return dataclasses.replace(contract, fidelity=seen.fidelity, probe=seen.probe, measured=seen.measured)


def _contract(
    source: Source,
    recipe: Recipe,
    limits: PassLimits,
    word: Reference,
    versions: VendorVersions,
    device: Device,
    files: Any,
) -> Contract:
    shape, plain = source.shape, word.plain
    longest = min(recipe.max_input_tokens, plain.max_positions or recipe.max_input_tokens)
    products = "fp8" if shape.weights == "fp8" else shape.dtype
    notes = word.notes
    if source.vendor:
        notes = (*notes, f"weights from {source.name}, a checkpoint that TensorRT-LLM wrote")
    return Contract(
        checkpoint=CheckpointIdentity(
            name=word.name,
            kind="tensorrt-llm" if source.vendor else "directory",
            sha256=source.sha256 or word.sha256,
            dtype=word.dtype,
            max_positions=plain.max_positions,
            notes=notes,
            origin_sha256=word.sha256 if source.vendor else None,
            **plain.model,
        ),
        runtime=RuntimeIdentity(
            name="tensorrt-llm",
            version=versions.tensorrt_llm,
            transformers=metadata.version("transformers"),
            layout="packed",
            attention="the vendor's plugin" + (", paged cache" if recipe.cache == "paged" else ""),
            decoder="vendor",
            tensorrt=versions.tensorrt,
        ),
        device=device,
        precision=Precision(weights=shape.weights, activations=products, output=shape.dtype),
        limits=Limits(
            max_input_tokens=longest,
            max_sequences=limits.max_sequences,
            max_tokens=limits.max_tokens,
            binding=limits.binding,
            pass_tokens=limits.pass_tokens,
        ),
        output=StateOutput(
            module="final norm of the vendor's decoder",
            width=shape.hidden_size,
            dtype=shape.dtype,
            head_input="identical",
            tensor=OUTPUT_NAME,
            states=recipe.states,
        ),
        tokenizer=word.tokenizer,
        files=files,
        proof=Proof(neighbour=0.0, moved=0.0, plain=0.0),
        fidelity=Fidelity(
            reference=plain.dtype, num_tokens=0, rel_error_max=0.0, cosine_mean=1.0, cosine_min=1.0, bound=0.0
        ),
        probe=Probe(tolerance=0.0, sequences=()),
        measured=Measured(tokens_per_s=0.0),
        cache=recipe.cache,
        generated_tokens=1 if recipe.cache == "paged" else 0,
    )
