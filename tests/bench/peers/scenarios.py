"""The work: named sets of token ids, the same for every engine.

Text is the docstrings of the standard library (`extract.sample`), turned into ids once by the checkpoint's tokenizer
and truncated to 128; nobody's time counts tokenisation. Rows that no real set would give (shared prompts, exact
duplicates, one length) are cut out of the same stream of ids, so they are text too.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from extract.sample import spread
from peers.protocol import Kind

MAX_TOKENS = 128

Sequences = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Rows to run, and which states are asked for.

    Attributes:
        shares: rows have tokens in common, so engines that can share are also run without.
    """

    name: str
    kind: Kind
    says: str
    sequences: Sequences
    shares: bool = False

    @property
    def num_tokens(self) -> int:
        """All rows together."""
        return sum(len(sequence) for sequence in self.sequences)


NAMES: dict[str, tuple[Kind, str]] = {
    "tokens": ("tokens", "real passages, every token"),
    "last": ("last", "real passages, last token"),
    "mean": ("mean", "real passages, mean"),
    "short": ("tokens", "10 to 40 tokens a row, every token"),
    "full": ("tokens", "128 tokens a row, nothing shared, every token"),
    "prefix-30": ("tokens", "38 shared + 90 own tokens, every token"),
    "prefix-70": ("tokens", "90 shared + 38 own tokens, every token"),
    "prefix-30-last": ("last", "38 shared + 90 own tokens, last token"),
    "prefix-70-last": ("last", "90 shared + 38 own tokens, last token"),
    "duplicates": ("tokens", "30 % of the rows are exact copies, every token"),
}
"""All scenarios but `job`, which is not made of ids."""


class Workload:
    """Token ids of real passages, and the scenarios made of them.

    Args:
        checkpoint: directory with the tokenizer.
        passages: rows of every scenario.
    """

    def __init__(self, checkpoint: Path, passages: int) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        texts = [passage.text for passage in spread(max(256, 4 * passages))]
        self._whole: Sequences = [ids for ids in tokenizer(texts)["input_ids"] if ids]
        self._passages = passages

    def scenario(self, name: str) -> Scenario:
        """One of `NAMES`; the same rows each time."""
        kind, says = NAMES[name]
        makers: dict[str, Callable[[], Sequences]] = {
            "short": self._short,
            "full": lambda: self._prompted(0),
            "prefix-30": lambda: self._prompted(38),
            "prefix-70": lambda: self._prompted(90),
            "duplicates": self._duplicates,
        }
        make = makers.get(name.removesuffix("-last"), self._real)
        shares = name.startswith("prefix") or name == "duplicates"
        return Scenario(name=name, kind=kind, says=says, sequences=make(), shares=shares)

    def _real(self) -> Sequences:
        step = len(self._whole) / self._passages
        return [self._whole[int(row * step)][:MAX_TOKENS] for row in range(self._passages)]

    def _short(self) -> Sequences:
        lengths = random.Random(1)
        whole = [ids for ids in self._whole if len(ids) >= 40]
        return [whole[row % len(whole)][: lengths.randint(10, 40)] for row in range(self._passages)]

    def _prompted(self, shared: int) -> Sequences:
        """128 tokens a row, the first `shared` of them alike."""
        stream = [token for ids in self._whole for token in ids[:512]]
        prompt, own = stream[:shared], MAX_TOKENS - shared
        starts = range(shared, shared + self._passages * own, own)
        return [prompt + stream[start : start + own] for start in starts]

    def _duplicates(self) -> Sequences:
        chance = random.Random(2)
        copies = round(0.3 * self._passages)
        rows = self._real()[copies:]
        rows += [chance.choice(rows) for _ in range(copies)]
        chance.shuffle(rows)
        return rows
