"""The first ids of a very long text without tokenising all of it.

A tokenizer truncates after it has done the whole text: 5 MB cost seconds and hundreds of MiB although 128 ids are kept.
Here only the first characters are encoded, and the result is believed when the last id asked for ends far enough
before the cut that the cut cannot have reached it. Otherwise four times as many characters are tried, up to all.

The margin is the questionable part: byte-pair merges are local in practice, not in theory, and runs of spaces change
up to a whole token before a cut (63 characters with a vocabulary of code; a fixed margin of 64 gives wrong ids where
tokens are 256 long). So the margin is 64 characters or twice the longest token, whichever is more, `precut_is_exact`
tries it on each tokenizer when an engine is built, and the uncut way stays as the reference.
"""

from functools import cached_property
from typing import Final

from tokenizers import Tokenizer

LONG_TEXT_CHARACTERS: Final = 32_768
"""Texts up to this length are always tokenised whole, so their tokens are counted."""

FIRST_CUT_CHARACTERS: Final = 2_048
GROWTH: Final = 4
MIN_MARGIN_CHARACTERS: Final = 64

_PROBE_CHARACTERS = 4_096
_PROBE_CUTS = (2_048, 2_049, 3_001)
_PROBE_UNITS = (
    " ", "\n", "\t", " \n", "a", "ab", "aab", "7", "13579", "0f3a9c", "-", "=-", "a ", "é", "e\u0301\u0323", "中",
    "漢字かな", "ไทย", "👩\u200d👩\u200d👧",
    "QUJDREVG", ".,;", "\r\n", "don't ", "שלום ", "\u00a0", "x\n\n", "1,000 ", "   z",
)  # fmt: skip


class PreCut:
    """First ids of long texts by one tokenizer, which must have truncation and padding off."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    @cached_property
    def margin(self) -> int:
        """Characters before a cut in which ids are not believed; a pass over the vocabulary, made at the first use."""
        return max(MIN_MARGIN_CHARACTERS, 2 * max(map(len, self._backend.get_vocab()), default=0))

    def first_ids(self, text: str, wanted: int) -> list[int] | None:
        """The first `wanted` content ids of `text`, or None where the whole text has to be tokenised.

        Ids are given only when the text is known to have more than `wanted` of them.
        """
        size = FIRST_CUT_CHARACTERS
        while size < len(text):
            ids = self.ids_before_cut(text[:size], wanted)
            if ids is not None:
                return ids
            size *= GROWTH
        return None

    def ids_before_cut(self, head: str, wanted: int) -> list[int] | None:
        """The first `wanted` ids of a text that begins with `head`, or None if what follows may change them."""
        encoding = self._backend.encode(head, add_special_tokens=False)
        if len(encoding) <= wanted or not self._is_sure(encoding.offsets, wanted, len(head)):
            return None
        return list(encoding.ids[:wanted])

    def sure_ids(self, head: str) -> list[int]:
        """As many first ids as the margin lets one believe, of any text that begins with `head`."""
        encoding = self._backend.encode(head, add_special_tokens=False)
        offsets = encoding.offsets
        wanted = len(offsets) - 1
        while wanted > 0 and not self._is_sure(offsets, wanted, len(head)):
            wanted -= 1
        return list(encoding.ids[: max(wanted, 0)])

    def _is_sure(self, offsets: list[tuple[int, int]], wanted: int, cut: int) -> bool:
        # The next token's start guards against post-processors that trim spaces off a token's end.
        return max(offsets[wanted - 1][1], offsets[wanted][0]) <= cut - self.margin


def precut_is_exact(backend: Tokenizer) -> bool:
    """Whether long texts may be cut for this tokenizer: byte-pair merges, no token that looks back, and it is tried.

    Some pre-tokenizers group digits from the right, so that the end of a number changes its beginning; some added
    tokens swallow all white space before them. Such tokenizers do the whole text.
    """
    added = backend.get_added_tokens_decoder().values()
    if type(backend.model).__name__ != "BPE" or any(token.lstrip for token in added):
        return False
    precut = PreCut(backend)
    for unit in _PROBE_UNITS:
        text = (unit * (_PROBE_CHARACTERS // len(unit) + 1))[:_PROBE_CHARACTERS]
        ids = backend.encode(text, add_special_tokens=False).ids
        for cut in _PROBE_CUTS:
            sure = precut.sure_ids(text[:cut])
            if sure != ids[: len(sure)]:
                return False
    return True
