"""What sampled rows say: the source's own text where it is still there and unchanged, else what their ids decode to.

Nothing here asks a network: a dataset that is not a local file or directory counts as gone. Nothing here fails: a page
without texts is still a page, and says why.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extract.engine.contract import read_contract
from extract.errors import ExtractError
from extract.job import StoredJob
from extract.records import Int32
from extract.report_page.sampling import SampledStates
from extract.sources import Source, identity, open_source

MAX_CHARACTERS = 600
ALL_CHARACTERS = 1_200_000
"""Of all texts of a page, which bounds its size."""
MAX_IDS = 64
MAX_JSONL_BYTES = 2**30
"""Lines are counted by reading them all: beyond this, ids are decoded instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A text for each row, where they come from, and why not from the source."""

    texts: list[str]
    origin: str
    note: str = ""


def texts_of(job: StoredJob, sampled: SampledStates) -> Texts:
    """Texts of sampled rows, cut to what a page can hold."""
    limit = max(80, min(MAX_CHARACTERS, ALL_CHARACTERS // max(1, len(sampled.outcomes))))
    if sampled.carried_text is not None and any(text is not None for text in sampled.carried_text):
        return Texts(texts=[shown(text or "", limit) for text in sampled.carried_text], origin="column")
    note = ""
    if job.spec.source.input != "input_ids":
        try:
            return Texts(texts=[shown(text, limit) for text in _from_source(job, sampled)], origin="source")
        except (ExtractError, _NotHere) as error:
            note = str(error)
        except OSError as error:
            note = f"the source cannot be read ({error})"
    if not job.spec.states.input_ids:
        return Texts(texts=[""] * len(sampled.outcomes), origin="nothing", note=note or "no ids are stored")
    ids = [row if row is not None else () for row in sampled.input_ids]
    try:
        decode = _decoder(job)
        return Texts(texts=[shown(decode(list(map(int, row))), limit) for row in ids], origin="ids", note=note)
    except (ExtractError, _NotHere) as error:
        note = f"{note} {error}".strip()
    return Texts(texts=[_listed(row) for row in ids], origin="raw ids", note=note)


class _NotHere(Exception):
    """Why the source, or the tokenizer, is not used for texts: said on the page, never raised to a caller."""


def shown(text: str, limit: int) -> str:
    """A text as any page can hold it: whole characters, not too many."""
    whole = text[: limit + 1].encode("utf-8", "replace").decode()
    return whole if len(text) <= limit else f"{whole[:limit]}…"


def _from_source(job: StoredJob, sampled: SampledStates) -> list[str]:
    source = _open(job)
    try:
        if identity(source.layout().fingerprint) != identity(job.fingerprint):
            raise _NotHere("the source has changed since the job ran.")
        texts: list[str] = []
        before = -1
        for row in sampled.row.tolist():
            if row == before:  # another chunk of the same text
                texts.append(texts[-1])
                continue
            texts.append(_text_at(source, job, row))
            before = row
        return texts
    finally:
        source.close()


def _open(job: StoredJob) -> Source:
    spec, format = job.spec.source, job.fingerprint.get("format")
    if spec.streaming or any("://" in path for path in spec.paths):
        raise _NotHere("the source is not on this machine.")
    if (format == "hf" or spec.format == "hf") and not all(Path(path).is_dir() for path in spec.paths):
        raise _NotHere("the source is not on this machine.")
    size = sum(int(entry.get("size") or 0) for entry in job.fingerprint.get("files") or ())
    if format == "jsonl" and size > MAX_JSONL_BYTES:
        raise _NotHere(f"the source is {size:,} bytes of lines, which would have to be read whole.")
    return open_source(spec, job.fingerprint)


def _text_at(source: Source, job: StoredJob, row: int) -> str:
    index = row if job.selection is None else job.selection.index_of(row)
    if index is None:
        return ""
    for batch in source.read(index, index + 1, 1):
        return _readable(batch.column(0)[0].as_py())
    return ""


def _readable(value: Any) -> str:
    """A text, or a conversation with a line a turn."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list):
        turns = [dict(turn) if not isinstance(turn, str) else {"content": turn} for turn in value]
        return "\n".join(f"{turn.get('role', '')}: {turn.get('content', '')}" for turn in turns)
    return "" if value is None else str(value)


def _decoder(job: StoredJob) -> Any:
    """Ids -> text, by the tokenizer of the engine that made the output."""
    from extract.text.encoders import open_encoder

    if job.spec.engine is None:
        raise _NotHere("the job names no engine to decode ids with.")
    directory = Path(job.spec.engine)
    contract = read_contract(directory)
    if contract.engine_id != job.contract.get("engine_id"):
        raise _NotHere(f"{directory} is another engine than the one that made the output.")
    if contract.tokenizer.kind == "none":
        raise _NotHere("the engine has no tokenizer to decode ids with.")
    return open_encoder(directory, contract.tokenizer, split_special_tokens=False).decode


def _listed(ids: Int32 | tuple[int, ...]) -> str:
    listed = " ".join(str(int(one)) for one in ids[:MAX_IDS])
    return f"ids {listed}{' …' if len(ids) > MAX_IDS else ''}"
