"""A job's text policy over an engine's tokenizer: which special ids go around a row, where it is cut, what stops a job.

Pure: no tokenizer is opened and no text is read. A setting that would change nothing is refused, so that none is
believed to work.
"""

import json
from typing import Any

from extract.engine.contract import TokenizerIdentity
from extract.errors import SpecError
from extract.records import Outcome
from extract.spec import InputKind, TextSpec, as_table
from extract.text.cuts import CutRule


class NoSuchSpecialToken(SpecError):
    """A special token is asked for that the tokenizer does not have."""

    template = (
        'text.special_tokens is "{found}", but the engine\'s tokenizer has no {missing} token. '
        'Use "tokenizer" (what it adds by itself: {adds}) or "none".'
    )


class DoesNotApply(SpecError):
    """A text setting that means nothing for this kind of input."""

    template = 'text.{key} is {found}, which does not apply to source.input = "{input}". Leave it out.'


class NoRoom(SpecError):
    """The limit leaves no token for the text itself."""

    template = (
        "max_input_tokens is {max_input_tokens}, of which {num_special} are special tokens, and chunk_overlap is "
        "{overlap}: no room for new text. Raise the first or lower the others."
    )


def check_applies(text: TextSpec, input: InputKind) -> None:
    """Look for settings that would change nothing for this input.

    Raises:
        DoesNotApply: there is one.
    """
    only_for_text = {
        "special_tokens": text.special_tokens not in ("tokenizer", "none"),
        "split_special_tokens": text.split_special_tokens,
        "prefix": bool(text.prefix),
    }
    misplaced = [key for key, given in only_for_text.items() if given and input != "text"]
    if text.add_generation_prompt and input != "messages":
        misplaced.append("add_generation_prompt")
    for key in misplaced:
        raise DoesNotApply(key=key, found=json.dumps(getattr(text, key), ensure_ascii=False), input=input)


def cut_rule(identity: TokenizerIdentity, text: TextSpec, input: InputKind, max_input_tokens: int) -> CutRule:
    """How the ids of a row are cut and what goes around them.

    Raises:
        NoSuchSpecialToken: the job asks for one that the tokenizer does not have.
        NoRoom: special ids and overlap leave no token for the text.
    """
    prefix_ids, suffix_ids = special_ids(identity, text, input)
    rule = CutRule(
        max_input_tokens=max_input_tokens,
        on_long=text.on_long,
        truncation_side=truncation_side(identity, text),
        overlap=text.chunk_overlap,
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        bos_id=identity.bos_id,
    )
    if rule.room - rule.overlap < 1:
        num_special = len(prefix_ids) + len(suffix_ids)
        raise NoRoom(max_input_tokens=max_input_tokens, num_special=num_special, overlap=rule.overlap)
    return rule


def truncation_side(identity: TokenizerIdentity, text: TextSpec) -> str:
    """The side of a long row that is cut off: the one asked for, or the tokenizer's own."""
    return identity.truncation_side if text.truncation_side == "auto" else text.truncation_side


def special_ids(
    identity: TokenizerIdentity, text: TextSpec, input: InputKind
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that are put before and after every row.

    Raises:
        NoSuchSpecialToken: the job asks for one that the tokenizer does not have.
    """
    if input != "text" or identity.kind == "none":
        return (), ()
    if text.special_tokens == "tokenizer":
        return identity.prefix_ids, identity.suffix_ids
    around: dict[str, tuple[int, ...]] = {"bos": (), "eos": ()}
    for name, token_id in (("bos", identity.bos_id), ("eos", identity.eos_id)):
        if name not in text.special_tokens.split("+"):
            continue
        if token_id is None:
            adds = f"{len(identity.prefix_ids)} before and {len(identity.suffix_ids)} after a text"
            raise NoSuchSpecialToken(found=text.special_tokens, missing=name.upper(), adds=adds)
        around[name] = (token_id,)
    return around["bos"], around["eos"]


def refused_outcomes(text: TextSpec) -> frozenset[Outcome]:
    """Outcomes that stop the job."""
    actions = {
        Outcome.NULL: text.on_null,
        Outcome.EMPTY: text.on_empty,
        Outcome.BAD_TEXT: text.on_bad_text,
        Outcome.TOO_LONG: text.on_long,
    }
    return frozenset(outcome for outcome, action in actions.items() if action == "error")


def describe_policy(identity: TokenizerIdentity, text: TextSpec, input: InputKind) -> dict[str, Any]:
    """What decides the ids, with nothing left to `auto`, as JSON values for schema metadata."""
    prefix_ids, suffix_ids = special_ids(identity, text, input)
    return {
        "input": input,
        **as_table(text),
        "prefix_ids": prefix_ids,
        "suffix_ids": suffix_ids,
        "truncation_side": truncation_side(identity, text),
    }
