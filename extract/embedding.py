"""`embed`: embeddings of a dataset by a decoder, in one call: settings read, engine built or found again, job run.

Gives what sentence-transformers gives for the same directory, row for row, as an ordinary job: one pooled state a row.
Says where each setting was taken from; what was asked for goes over what the directory says.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from extract.engine.contract import Contract, read_contract
from extract.engine.embedding_settings import EmbeddingSettings, NotApplied, read_embedding_settings
from extract.engine.engine_cache import cached_engine
from extract.engine.fetching import local_engine
from extract.engine.recipe import Recipe
from extract.errors import BadValue, EngineRefused, SpecError
from extract.progress import Progress
from extract.runners.local import run
from extract.runners.summary import Summary
from extract.spec import JobSpec, OutputKind, RunSpec, SourceSpec, StatesSpec, TextSpec

if TYPE_CHECKING:
    from extract.engine.checkpoint import Checkpoint

V = TypeVar("V")

MAX_BUILT_TOKENS = 2048
"""An engine is built for a directory's own longest row up to this; more is built when it is asked for, since every
build tries the longest row there may be."""


class NoSuchPrompt(SpecError):
    """A prompt is asked for by a name that the checkpoint does not have."""

    template = '{checkpoint}: no prompt of the name "{found}". {known}'


class OtherCheckpoint(EngineRefused):
    """The engine that was named is not one of the checkpoint that was named."""

    template = (
        "{path}: this engine was built from {found} (sha256 {found_sha256}), not from {expected} "
        "(sha256 {expected_sha256}). Name its own checkpoint, or leave out --engine to have one built."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Generic[V]):
    """One thing that decides the embeddings, and who said so."""

    name: str
    value: V
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """What `embed` chose and did."""

    settings: tuple[Setting[Any], ...]
    notes: tuple[str, ...]
    summary: Summary

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def embed(
    checkpoint: str | Path,
    source: str | SourceSpec,
    output: str | Path,
    *,
    pool: OutputKind | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    engine: str | Path | None = None,
    recipe: Recipe | None = None,
    text: TextSpec | None = None,
    states: StatesSpec | None = None,
    run_spec: RunSpec | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    workers: int = 1,
) -> Embedded:
    """One embedding for each row of a dataset; call it again to go on with what was stopped.

    Args:
        checkpoint: directory (of sentence-transformers, or a plain one), hub id or GGUF file.
        source: the rows, or where they are.
        output: output directory, an ordinary one.
        pool: "last", "mean" or "first"; `None` is the directory's own, or the last token's of a plain checkpoint.
        normalize: scale to unit length; `None` is as the directory does, not for a plain checkpoint.
        prompt: text put before each row's; "" for none.
        prompt_name: one of the directory's own prompts instead; neither is the directory's default.
        engine: an engine of this checkpoint, instead of one that is built or found in the cache.
        recipe: how to build one; `max_input_tokens` is chosen here, from `text` or the directory.
        text: the rest of the text policy; its `max_input_tokens` goes over the directory's own limit.
        states: how they are stored (float32 unless it says otherwise); `kind` and `normalize` are chosen here.
        run_spec: batch sizes and threads.
        revision: branch, tag or commit of a hub id.
        progress: where to say what was chosen and how far the work is.
        workers: processes, as of `run`.

    Raises:
        NotApplied: the directory's embeddings depend on something that is not computed here.
        NoSuchPrompt: no prompt of that name.
        OtherCheckpoint: `engine` is one of another checkpoint.
        CheckpointRefused, EngineRefused, SourceError, ResumeRefused, ...: as of `build` and `run`.
    """
    from extract.engine.checkpoint import open_checkpoint

    progress = progress or Progress(quiet=True)
    opened = open_checkpoint(checkpoint, revision=revision)
    found = read_embedding_settings(_root(opened, checkpoint, revision), opened.path, pool=pool)
    text, states = text or TextSpec(), states or StatesSpec(kind="last", dtype="float32")
    kind, unit = _pool(found, pool), _normalize(found, normalize)
    if states.layers and unit.value:  # which normalize = True of a job spec refuses too
        origin = f"no layers beside an embedding of unit length ({unit.origin})"
        raise BadValue(where="embed", key="states.layers", found=list(states.layers), expected=origin)
    prefix, limit = _prompt(found, prompt, prompt_name, opened.name), _max_input_tokens(found, text, engine is None)
    _check_prompt_counts(opened, found, kind.value, prefix.value)
    if engine is None:
        recipe = replace(recipe or Recipe(), max_input_tokens=limit.value)
        path, origin = cached_engine(opened, checkpoint, recipe, revision=revision, say=progress.say)
    else:
        path, origin = local_engine(str(engine)), "as named"
    contract = read_contract(path)
    _check_same(path, contract, opened)
    if text.max_input_tokens is None and contract.limits.max_input_tokens < limit.value:
        origin_of_limit = f"the engine's limit, less than the {limit.value:,} of: {limit.origin}"
        limit = replace(limit, value=contract.limits.max_input_tokens, origin=origin_of_limit)
    settings = (kind, unit, prefix, limit, Setting(name="engine", value=str(path), origin=origin))
    notes = _notes(found, kind.value, prefix.value, contract, text)
    for line in (*(f"{one.name}: {one.value!r} ({one.origin})" for one in settings), *notes):
        progress.say(line)
    spec = JobSpec(
        source=SourceSpec(path=source) if isinstance(source, str) else source,
        engine=str(engine if engine is not None else path),
        output=str(output),
        text=replace(text, prefix=prefix.value, max_input_tokens=limit.value),
        states=replace(states, kind=kind.value, normalize=unit.value),
        run=run_spec or RunSpec(),
    )
    summary = run(spec, progress=progress, workers=workers)
    return Embedded(settings=settings, notes=notes, summary=summary)


def _root(opened: "Checkpoint", checkpoint: str | Path, revision: str | None) -> Path:
    """The directory of the whole pipeline, of which `opened` is the decoder."""
    if opened.kind != "hub":
        return Path(checkpoint)
    from extract.engine.hub_cache import fetch_from_hub

    return fetch_from_hub(str(checkpoint), revision=revision)[0]


def _pool(found: EmbeddingSettings | None, asked: OutputKind | None) -> Setting[OutputKind]:
    if asked is not None:
        return Setting(name="pool", value=asked, origin="as asked")
    if found is None or found.pool is None:
        return Setting(name="pool", value="last", origin="default: the checkpoint names none")
    return Setting(name="pool", value=found.pool, origin=found.origins["pool"])


def _normalize(found: EmbeddingSettings | None, asked: bool | None) -> Setting[bool]:
    if asked is not None:
        return Setting(name="normalize", value=asked, origin="as asked")
    if found is None:
        return Setting(name="normalize", value=False, origin="default: the checkpoint does not say")
    return Setting(name="normalize", value=found.normalize, origin=found.origins["normalize"])


def _prompt(found: EmbeddingSettings | None, asked: str | None, name: str | None, checkpoint: str) -> Setting[str]:
    if asked is not None:
        return Setting(name="prompt", value=asked, origin="as asked")
    prompts: Mapping[str, str] = found.prompts if found is not None else {}
    if name is not None and name not in prompts:
        known = f"It has: {', '.join(prompts)}." if prompts else "It has none; give the text itself with --prompt TEXT"
        raise NoSuchPrompt(checkpoint=checkpoint, found=name, known=known)
    chosen = name or (found.default_prompt_name if found is not None else None)
    if found is None or chosen is None:
        return Setting(name="prompt", value="", origin="default: none is named")
    how = "as asked" if name is not None else "its default"
    return Setting(name="prompt", value=prompts[chosen], origin=f'"{chosen}" of {found.origins["prompts"]}, {how}')


def _max_input_tokens(found: EmbeddingSettings | None, text: TextSpec, to_build: bool) -> Setting[int]:
    if text.max_input_tokens is not None:
        return Setting(name="max_input_tokens", value=text.max_input_tokens, origin="as asked")
    own = found.max_input_tokens if found is not None else None
    if found is None or own is None:
        origin = "default: the checkpoint does not say"
        return Setting(name="max_input_tokens", value=Recipe().max_input_tokens, origin=origin)
    origin = found.origins["max_input_tokens"]
    if not to_build or own <= MAX_BUILT_TOKENS:
        return Setting(name="max_input_tokens", value=own, origin=origin)
    origin = f"default; {origin} says {own:,}, which --max-input-tokens {own} gives"
    return Setting(name="max_input_tokens", value=MAX_BUILT_TOKENS, origin=origin)


def _check_prompt_counts(opened: "Checkpoint", found: EmbeddingSettings | None, kind: OutputKind, prefix: str) -> None:
    """The last token's state is the same whether the prompt's own states count or not; no other is."""
    if found is None or found.include_prompt or not prefix or kind == "last":
        return
    problem = f'its {found.origins["pool"]} leaves the states of a prompt out of the pooling ("{kind}")'
    raise NotApplied(path=opened.name, found=problem, advice='Use no prompt: --prompt ""')


def _check_same(path: Path, contract: Contract, opened: "Checkpoint") -> None:
    made_from = contract.checkpoint
    if opened.sha256 not in (made_from.sha256, made_from.origin_sha256):
        raise OtherCheckpoint(
            path=path,
            found=made_from.name,
            found_sha256=made_from.sha256[:12],
            expected=opened.name,
            expected_sha256=opened.sha256[:12],
        )


def _notes(
    found: EmbeddingSettings | None, kind: OutputKind, prompt: str, contract: Contract, text: TextSpec
) -> tuple[str, ...]:
    """What a user may have meant otherwise."""
    notes = []
    if kind == "last" and text.special_tokens == "tokenizer" and not contract.tokenizer.suffix_ids:
        notes.append(
            "note: the tokenizer puts no token after a text, so an embedding is the state of the text's own last; "
            "for a model trained with an end-of-sequence token there: --special-tokens bos+eos, or eos"
        )
    if found is not None and not prompt and any(found.prompts.values()):
        names = ", ".join(name for name, one in found.prompts.items() if one)
        notes.append(f"note: no prompt is used; the checkpoint has some: --prompt-name {names}")
    return tuple(notes)
