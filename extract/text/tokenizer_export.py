"""Write a checkpoint's tokenizer into an engine so that a worker needs neither the checkpoint nor transformers.

What a tokenizer does is observed on hard texts, not read from its settings: settings that look the same are obeyed or
ignored depending on which file they stand in. The fast form (`tokenizer.json` read by the tokenizers library alone) is
kept only if ids equal the original's, uncut and truncated at either side; otherwise the tokenizer's own Python class is
kept and used; a tokenizer that cannot be reproduced at all is refused.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from tokenizers import Tokenizer

from extract.canonical import digest, file_digest
from extract.engine.contract import TokenizerIdentity
from extract.errors import CheckpointRefused, EngineRefused
from extract.spec import TextSpec
from extract.text.encoders import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    first_difference,
    id_at,
    load_with_transformers,
)
from extract.text.precut import precut_is_exact
from extract.text.tokens import open_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_TEXT = "The quick brown fox, 1234.5 — naïve café 中文 🙂\n\tdef f(x):  return x\r\n"
LIMITS = (128, 16)
"""Token limits of the comparison, beside the least one that leaves room for text."""

_UNLIMITED = 2**31 - 1
_PLACES = ("name_or_path", "is_local", "local_files_only", "auto_map", "tokenizer_file", "vocab_file", "merges_file")
"""Keys of tokenizer_config.json that point elsewhere."""

HARD_TEXTS = (
    PROBE_TEXT, "a", " ", "  ", "\n", "\r\n", "a\r\nb\r\n", "\x00", "a\x00b", "\ufeffBOM", "tab\tend ",
    " lead", "trail  ",
    " " * 300, "x" + " " * 3000 + "y", "\n" * 200, "👩\u200d👩\u200d👧\u200d👦🏽 emoji 🇩🇪", "e\u0301\u0323\u0300 marks",
    "漢字かな交じり文とカタカナ。" * 8, "한국어 문장입니다", "שלום עולם, مرحبا بالعالم", "ภาษาไทยไม่มีช่องว่าง",
    "\u202eright to left\u202c", "\u00a0nbsp\u2003em\u200bzero", "ﬁ ligature Ǆ ß İ ı Σς", "1234567890" * 30,
    "0xdeadBEEF" * 30, "don't we'll I'M they'RE", "https://example.org/a?b=c&d=%20#e", '{"key": [1, 2.5e-3, null]}',
    "\U0010ffff\ue000\ufffd", "a" * 1000, "Lorem ipsum dolor sit amet. " * 200, "word " * 500 + "end",
    "<s></s><unk><pad>[CLS][SEP]<|endoftext|>",
)  # fmt: skip

CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n"}],
    [{"role": "assistant", "content": "first"}],
)  # fmt: skip


class TokenizerDiffers(CheckpointRefused):
    """No exported form gives the original's ids."""

    template = (
        "tokenizer {name}: what the engine would use gives other ids than the original for {text} ({setting}): token "
        "{position} is {found}, expected {expected}. Tokenise with the original and extract with source.input = "
        '"input_ids".'
    )


class TokenizerNotExported(CheckpointRefused):
    """A tokenizer that cannot be saved or loaded again."""

    template = (
        "tokenizer {name}: it cannot be stored in an engine ({problem}). Tokenise with the original and extract with "
        'source.input = "input_ids".'
    )


def export_tokenizer(tokenizer: "PreTrainedTokenizerBase", directory: Path) -> TokenizerIdentity:
    """Write the tokenizer's files into `directory` (which exists) and say what it was seen to do.

    Raises:
        TokenizerDiffers: neither the fast form nor the tokenizer's own class, loaded from the files, gives its ids.
        TokenizerNotExported: it cannot be saved or loaded, or its special tokens are not a constant prefix and suffix.
    """
    with _own_settings(tokenizer):
        refusal: CheckpointRefused | None = None
        for kind in _kinds(tokenizer):
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                try:
                    identity = _exported(tokenizer, Path(scratch), kind)
                except CheckpointRefused as error:
                    refusal = error
                    continue
                for path in sorted(Path(scratch).iterdir()):
                    shutil.move(path, directory / path.name)
                return identity
        assert refusal is not None
        raise refusal


def _kinds(tokenizer: Any) -> tuple[Literal["fast", "slow"], ...]:
    return ("fast", "slow") if isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer) else ("slow",)


def _exported(tokenizer: Any, scratch: Path, kind: Literal["fast", "slow"]) -> TokenizerIdentity:
    name = _name(tokenizer)
    precut = False
    try:
        tokenizer.save_pretrained(scratch / "saved")
        if kind == "fast":
            backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            backend.no_truncation()
            backend.no_padding()
            backend.save(str(scratch / TOKENIZER_FILE))
            precut = precut_is_exact(backend)
    except Exception as error:  # tokenizer classes and the tokenizers library raise what they like
        raise TokenizerNotExported(name=name, problem=error) from error
    _move_saved(tokenizer, scratch, kind)
    prefix_ids, suffix_ids = _around(tokenizer)
    identity = TokenizerIdentity(
        kind=kind,
        sha256=digest({path.name: file_digest(path) for path in scratch.iterdir()}),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        truncation_side=tokenizer.truncation_side,
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        chat_template=_template(tokenizer) is not None,
        precut=precut,
        probe_text=PROBE_TEXT,
        probe_ids=tuple(tokenizer(PROBE_TEXT)["input_ids"]),
    )
    _compare(tokenizer, scratch, identity)
    return identity


def _move_saved(tokenizer: Any, scratch: Path, kind: Literal["fast", "slow"]) -> None:
    """Keep the saved files that are needed, without paths of this machine; the chat template as one file."""
    saved = scratch / "saved"
    config = json.loads((saved / TOKENIZER_CONFIG_FILE).read_bytes())
    config = {key: value for key, value in config.items() if key not in _PLACES}
    if kind == "fast":
        # tokenizer.json is taken as it is, not rebuilt from its vocabulary by a class of some family.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    template = _template(tokenizer)
    config.pop("chat_template", None)
    if template is not None:
        (scratch / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (scratch / TOKENIZER_CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    if kind == "slow":
        for path in saved.iterdir():
            if path.is_file() and path.name not in (TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE):
                shutil.move(path, scratch / path.name)
    shutil.rmtree(saved)


def _template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the tokenizer puts before and after a text."""
    content = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    full = tokenizer(PROBE_TEXT)["input_ids"]
    for first in range(len(full) - len(content) + 1):
        if full[first : first + len(content)] == content:
            return tuple(full[:first]), tuple(full[first + len(content) :])
    problem = "with special tokens, a text's own ids change"
    raise TokenizerNotExported(name=_name(tokenizer), problem=problem)


def _compare(tokenizer: Any, directory: Path, identity: TokenizerIdentity) -> None:
    """Every hard text, uncut and at several limits from both sides, through the very path that a worker uses."""
    texts = [*HARD_TEXTS, *_with_special_tokens(tokenizer)]
    column = pa.array(texts)
    num_special = len(identity.prefix_ids) + len(identity.suffix_ids)
    try:
        uncut = open_tokenizer(
            directory, identity, TextSpec(), max_input_tokens=_UNLIMITED, input="text", vocab_size=_UNLIMITED
        )
        loaded = load_with_transformers(directory)
    except EngineRefused as error:
        raise TokenizerNotExported(name=_name(tokenizer), problem=error) from error
    sides: tuple[Literal["right", "left"], ...] = ("right", "left")
    limits = (*(limit for limit in LIMITS if limit > num_special), num_special + 1, _UNLIMITED)
    for limit, side in ((limit, side) for limit in limits for side in sides):
        rule = replace(uncut.rule, max_input_tokens=limit, truncation_side=side)
        rows = replace(uncut, rule=rule).tokenize(column, 0)
        tokenizer.truncation_side = side
        options = {} if limit == _UNLIMITED else {"truncation": True, "max_length": limit}
        for index, text in enumerate(texts):
            expected = tokenizer(text, verbose=False, **options)["input_ids"]
            found = rows.input_ids[rows.offsets[index] : rows.offsets[index + 1]].tolist()
            if found or expected != [*identity.prefix_ids, *identity.suffix_ids]:  # no content ids: the row is empty
                _same(tokenizer, text, f"limit {limit} from the {side}" if options else "uncut", found, expected)
            if not options:
                _same(tokenizer, text, "AutoTokenizer", loaded(text, verbose=False)["input_ids"], expected)
    if identity.chat_template:
        for chat in CHATS:
            _same(tokenizer, str(chat), "chat template", _chat_ids(loaded, chat), _chat_ids(tokenizer, chat))


def _chat_ids(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    """Ids of a conversation; none where the template refuses it, as it may."""
    try:
        return list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"])
    except Exception:  # a template may raise anything; the original and the export have to agree on it
        return []


def _same(tokenizer: Any, text: str, setting: str, found: list[int], expected: list[int]) -> None:
    if found == expected:
        return
    position = first_difference(found, expected)
    shown = repr(text if len(text) <= 40 else text[:37] + "...")
    raise TokenizerDiffers(
        name=_name(tokenizer),
        text=shown,
        setting=setting,
        position=position,
        found=id_at(found, position),
        expected=id_at(expected, position),
    )


def _with_special_tokens(tokenizer: Any) -> list[str]:
    """Texts with the tokenizer's own special and added tokens written out in them."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    written = list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))[:64]
    return [form for token in written for form in (f"{token}text", f"a {token} b{token}", token * 2)]


def _name(tokenizer: Any) -> str:
    return Path(str(tokenizer.name_or_path)).name or type(tokenizer).__name__


@contextmanager
def _own_settings(tokenizer: Any) -> Iterator[None]:
    """Leave the caller's tokenizer as it was: calls leave truncation behind, and the side is set for the comparison."""
    side = tokenizer.truncation_side
    backend = getattr(tokenizer, "backend_tokenizer", None)
    stored = (backend.truncation, backend.padding) if isinstance(backend, Tokenizer) else (None, None)
    try:
        yield
    finally:
        tokenizer.truncation_side = side
        if isinstance(backend, Tokenizer):
            backend.no_truncation()
            backend.no_padding()
            if stored[0] is not None:
                backend.enable_truncation(**stored[0])
            if stored[1] is not None:
                backend.enable_padding(**stored[1])
