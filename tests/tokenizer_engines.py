"""Tokenizers exported as a build exports them, once a session each, and opened as a worker opens them."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import rig

from extract.engine.contract import TokenizerIdentity
from extract.records import OUTCOMES, TokenRows
from extract.spec import InputKind, TextSpec
from extract.text.tokenizer_export import export_tokenizer
from extract.text.tokens import RowTokenizer, open_tokenizer

_ROOT = tempfile.TemporaryDirectory(prefix="tokenizer-engines-")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@dataclass(frozen=True)
class Exported:
    """An engine's tokenizer beside the original."""

    directory: Path
    identity: TokenizerIdentity
    original: Any

    def open(self, text: TextSpec | None = None, *, limit: int = 128, kind: InputKind = "text") -> RowTokenizer:
        return open_tokenizer(
            self.directory,
            self.identity,
            text or TextSpec(),
            max_input_tokens=limit,
            input=kind,
            vocab_size=len(self.original),
        )

    def rows(self, column: Any, text: TextSpec | None = None, *, limit: int = 128, first_row: int = 0) -> TokenRows:
        return self.open(text, limit=limit).tokenize(as_array(column), first_row)


def as_array(column: Any) -> pa.Array:
    return column if isinstance(column, pa.Array) else pa.array(column, pa.string())


def export(tokenizer: Any) -> Exported:
    directory = Path(tempfile.mkdtemp(dir=_ROOT.name))
    return Exported(directory, export_tokenizer(tokenizer, directory), tokenizer)


@functools.cache
def exported(kind: rig.TokenizerKind = "bpe", **options: Any) -> Exported:
    """The engine of `rig.tiny_tokenizer(kind, **options)`; do not change its files."""
    return export(rig.tiny_tokenizer(kind, **options))


def ids_of(rows: TokenRows) -> list[list[int]]:
    return [rows.input_ids[a:b].tolist() for a, b in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)]


def outcomes_of(rows: TokenRows) -> list[str]:
    return [OUTCOMES[code].value for code in rows.outcome]
