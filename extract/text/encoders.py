"""Text to content ids, by the tokenizer of an engine directory: no special tokens added, nothing cut.

`FastEncoder` needs `tokenizers` alone, so a worker imports neither transformers nor torch for it; `SlowEncoder` calls
the tokenizer's own Python class through transformers. Both are stateless towards the caller: truncation, padding and
special tokens are ours to decide, in `cuts`, because a tokenizer keeps what the last call set.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from extract.engine.contract import TokenizerIdentity
from extract.errors import EngineRefused
from extract.records import Int32, Int64
from extract.text.precut import PreCut

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"


class TokenizerUnreadable(EngineRefused):
    """The tokenizer files of an engine do not load."""

    template = "{path}: the tokenizer does not load ({problem}). Copy the engine again or rebuild it."


class TokenizerChanged(EngineRefused):
    """The tokenizer gives other ids than it gave when the engine was built."""

    template = (
        "{path}: the tokenizer turns the contract's probe text into other ids than at build: token {position} is "
        "{found}, expected {expected}. Install the tokenizers version that the engine was built with, or rebuild it."
    )


class Encoder(Protocol):
    """What the text policy needs of a tokenizer."""

    precut: PreCut | None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Content ids of each text, whole. Texts hold no lone surrogates."""

    def decode(self, ids: list[int]) -> str:
        """Ids as text, special tokens too, for people to read."""

    def piece(self, token_id: int) -> str:
        """One id as readable text."""


class FastEncoder:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, directory: Path, *, split_special_tokens: bool, precut: bool) -> None:
        # One background thread tokenises beside the forward pass, so the library's own threads would only take the
        # forward pass's cores, and deadlock a forked child. A user's own setting is left as it is.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        try:
            self._backend = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
            config = json.loads((directory / TOKENIZER_CONFIG_FILE).read_bytes())
        except Exception as error:  # the library raises bare Exception
            raise TokenizerUnreadable(path=directory, problem=error) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = split_special_tokens or config.get("split_special_tokens") is True
        self.precut = PreCut(self._backend) if precut else None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Content ids of each text, whole."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """Ids as text, special tokens too."""
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def places(self, text: str) -> tuple[Int32, Int64, Int64]:
        """Content ids of a text, whole, and which of its characters each one stands for (from, and up to)."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.int32), places[:, 0], places[:, 1]

    def piece(self, token_id: int) -> str:
        """One id as readable text; the vocabulary's own spelling where the id is not whole characters."""
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text if text and "\ufffd" not in text else str(self._backend.id_to_token(token_id))


class SlowEncoder:
    """A tokenizer that is Python code of transformers: no Rust twin exists, one call a text."""

    def __init__(self, directory: Path, *, split_special_tokens: bool) -> None:
        self.precut: PreCut | None = None
        self.tokenizer = load_with_transformers(directory)
        self._options = {"split_special_tokens": True} if split_special_tokens else {}

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Content ids of each text, whole."""
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False, **self._options)
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: list[int]) -> str:
        """Ids as text, special tokens too."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def piece(self, token_id: int) -> str:
        """One id as readable text; the vocabulary's own spelling where the id is not whole characters."""
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text if text and "\ufffd" not in text else str(self.tokenizer.convert_ids_to_tokens(token_id))


def load_with_transformers(directory: Path) -> Any:
    """The engine's tokenizer as transformers builds it; never runs code from the directory, never asks a hub."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each tokenizer class raises its own
        raise TokenizerUnreadable(path=directory, problem=error) from error


def open_encoder(directory: Path, identity: TokenizerIdentity, *, split_special_tokens: bool) -> Encoder:
    """The encoder for an engine whose tokenizer is "fast" or "slow", held to the contract's probe.

    Raises:
        TokenizerUnreadable: files are missing or do not load.
        TokenizerChanged: the probe text gives other ids than the contract says.
    """
    encoder: Encoder
    if identity.kind == "fast":
        encoder = FastEncoder(directory, split_special_tokens=split_special_tokens, precut=identity.precut)
    else:
        encoder = SlowEncoder(directory, split_special_tokens=split_special_tokens)
    found = (*identity.prefix_ids, *encoder.encode([identity.probe_text])[0], *identity.suffix_ids)
    if found != identity.probe_ids:
        position = first_difference(found, identity.probe_ids)
        raise TokenizerChanged(
            path=directory,
            position=position,
            found=id_at(found, position),
            expected=id_at(identity.probe_ids, position),
        )
    return encoder


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int:
    """The first position where two unequal sequences differ; the shorter one's length if it begins the other."""
    pairs = zip(found, expected, strict=False)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))


def id_at(ids: Sequence[int], position: int) -> int | str:
    """An id for a message."""
    return ids[position] if position < len(ids) else "missing"
