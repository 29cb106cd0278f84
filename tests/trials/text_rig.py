"""Tokenizers that add something, or nothing, and pad in every way; and texts that break careless code.

Nothing here needs a model: `tokenizer_engines` exports a tokenizer as a build does and opens it as a worker does. The
yardstick is the tokenizer's own call, one text at a time.
"""

import functools
from typing import Any

import rig
from tokenizer_engines import Exported, export

ADDS = {"bos": (True, False), "eos": (False, True), "bos and eos": (True, True), "nothing": (False, False)}

PADS = {"pads right": ("<pad>", "right"), "pads left with EOS": ("</s>", "left"), "does not pad": (None, "left")}

TOKENIZERS = {f"adds {adds}, {pads}": (ADDS[adds], PADS[pads]) for adds in ADDS for pads in PADS}
"""What the byte-pair tokenizer of `rig` puts around a text, and how it would pad."""

ONE_A_KIND = [name for name in TOKENIZERS if name.endswith("pads left with EOS")]

HOSTILE = {
    "NUL": "a\x00b\x00",
    "only NUL": "\x00",
    "BOM": "\ufeffbegins with a BOM",
    "only BOM": "\ufeff",
    "right to left": "שלום עולם \u202bمرحبا بالعالم\u202c end",
    "override": "\u202eabc\u202c\u2066def\u2069",
    "family of four": "👨\u200d👩\u200d👧\u200d👦",
    "flags": "🇩🇪🇫🇷🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "half a flag": "🇩",
    "skin tones": "👍👍🏻👍🏿🏿",
    "stacked marks": "e\u0301\u0323\u0300" + "\u0301" * 50,
    "decomposed": "Ame\u0301lie ﬁ Å \u212b \u00c5",
    "case": "İstanbul STRASSE straße ΟΔΟΣ",
    "last code point": "\U0010ffff\ufffe\ufffd",
    "controls": "\x01\x02\x1b[31mred\x7f\x85\u2028\u2029",
    "spaces around": "  \t lead and trail \n\n ",
    "one space": " ",
    "newlines": "\r\n\r\n\n\r",
    "thousand spaces": " " * 1000,
    "one letter": "a",
    "short": "Hi!",
    "path": "../../etc/passwd\\x00%00",
    "json": '{"text": null, "outcome": "ok"}',
    "the word null": "null",
    "EOS": "</s>",
    "EOS twice": "</s></s>",
    "BOS": "<s>",
    "BOS twice": "<s><s>",
    "pad": "<pad>",
    "pads": "<pad><pad>a<pad>",
    "unknown": "<unk>",
    "all of them": "<s></s><unk><pad>",
    "another model's": "<|endoftext|><bos><eos>[CLS][SEP]<|im_start|>",
    "inside a word": "in<s>side</s>",
    "almost": "<s<s>>< /s>",
}
"""Good texts, all of them: each must give exactly what the tokenizer's own call gives."""


def tokenizer(name: str, kind: rig.TokenizerKind = "bpe", **options: Any) -> Any:
    """One of `TOKENIZERS`."""
    (bos, eos), (pad, side) = TOKENIZERS[name]
    built = rig.tiny_tokenizer(kind, bos=bos, eos=eos, padding_side=side, **options)
    built.pad_token = pad
    return built


@functools.cache
def exported(name: str, kind: rig.TokenizerKind = "bpe", **options: Any) -> Exported:
    """One of `TOKENIZERS` as an engine holds it, beside the original; do not change its files."""
    return export(tokenizer(name, kind, **options))


def own_ids(original: Any, texts: list[str], **options: Any) -> list[list[int]]:
    """The tokenizer's own call, a text at a time; a text without ids of its own has none here."""
    around = original("", **options)["input_ids"]
    found = [original(text, **options)["input_ids"] for text in texts]
    return [[] if ids == around and not original(text, add_special_tokens=False)["input_ids"] else ids
            for text, ids in zip(texts, found, strict=True)]  # fmt: skip
