"""Whole jobs in this process over Parquet files: tiny engines of several kinds, what their rows should hold, and edits.

An engine is loaded once a session and handed to every run; the reference is transformers' own base model, run on one
row at a time and remembered by row.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import rig

from extract.canonical import canonical_json, file_digest
from extract.commits import Commit, commit_path, read_commit, record_bytes, shard_name
from extract.job import read_job
from extract.spec import JobSpec, RunSpec, SourceSpec, StatesSpec, TextSpec

LIMIT = 32
"""Most tokens of a row for every engine of the table."""

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "gpt2": {"family": "gpt2", "tied": True, "tokenizer": {"bos": False, "pad": False}},
    "gemma2": {"family": "gemma2", "tokenizer": {"padding_side": "left"}},
    "bloom": {"family": "bloom", "tokenizer": {"eos": True, "padding_side": "left"}},
}
"""A packed decoder; learned positions, no BOS and no pad; an offset norm and left padding; dense, BOS and EOS."""


class Engines:
    """Checkpoints and float32 engines by name, made when they are first asked for. Do not change their files."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def checkpoint(self, name: str) -> Path:
        """The checkpoint directory."""
        path = self._root / "checkpoints" / name
        if not path.exists():
            settings = dict(CHECKPOINTS[name])
            rig.tiny_checkpoint(path, tokenizer=rig.tiny_tokenizer(**settings.pop("tokenizer", {})), **settings)
        return path

    def engine(self, name: str, decoder: Any = "auto") -> Path:
        """The engine directory; Llama and Gemma 2 run on our own decoder unless told otherwise."""
        from extract.engine.builder import build
        from extract.engine.recipe import Recipe

        path = self._root / f"{name}-{decoder}"
        if not path.exists():
            recipe = Recipe(dtype="float32", device="cpu", max_input_tokens=LIMIT, max_tokens=16_384, decoder=decoder)
            build(self.checkpoint(name), path, recipe)
        return path


def job(engine: Path, source: Path | str, output: Path, /, **settings: Any) -> JobSpec:
    """A job spec from flat settings; the disk's reserve is 0 and states are float32 unless told otherwise."""
    sections: dict[str, Any] = {}
    settings = {"dtype": "float32", "reserve_bytes": 0, "threads": 1, **settings}
    for key, cls in {"source": SourceSpec, "text": TextSpec, "states": StatesSpec, "run": RunSpec}.items():
        names = cls.__dataclass_fields__
        given = {name: settings.pop(name) for name in list(settings) if name in names}
        sections[key] = cls(path=str(source), **given) if key == "source" else cls(**given)
    assert not settings, settings
    return JobSpec(engine=str(engine), output=str(output), **sections)


def run(spec: JobSpec, **options: Any) -> Any:
    """Run a job with an engine that stays loaded."""
    from extract.runners import local

    return local.run(spec, runtime=runtime(str(spec.engine)), **options)


@functools.cache
def runtime(engine: str) -> Any:
    """A loaded engine."""
    from extract.engine.runtimes import load_runtime

    return load_runtime(Path(engine), threads=1)


def parquet(path: Path, table: Mapping[str, Any] | pa.Table, **options: Any) -> Path:
    """Write rows."""
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(dict(table)), path, **options)
    return path


def texts(count: int, *, seed: int = 0, characters: int = 90) -> list[str]:
    """Pieces of passages with shuffled lengths from one character on; different ones, as far as there are."""
    draw = np.random.default_rng(seed)
    whole = _whole_text()
    lengths = draw.integers(1, characters, count)
    starts = draw.integers(0, len(whole) - characters, count)
    return [whole[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@functools.cache
def _whole_text() -> str:
    return "\n".join(rig.passages())  # read once: an import may replace a documented function


def output_table(output: Path) -> pa.Table:
    """All rows of the committed shards, in order, through pyarrow alone."""
    tables = []
    for record in sorted((output / "commits").iterdir()):
        data = json.loads(record.read_bytes())["data"]
        with pa.ipc.open_file(output / "data" / data) as file:
            tables.append(file.read_all())
    return pa.concat_tables(tables)


def ids_of(checkpoint: Path, rows: Iterable[str], limit: int = LIMIT, **options: Any) -> list[list[int]]:
    """Ids of texts as transformers' tokenizer of the checkpoint cuts them."""
    tokenizer = _tokenizer(str(checkpoint))
    return [tokenizer(text, truncation=True, max_length=limit, **options)["input_ids"] for text in rows]


@functools.cache
def _tokenizer(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@functools.cache
def _model(checkpoint: str) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(checkpoint, attn_implementation="eager", local_files_only=True)


@functools.cache
def _states(checkpoint: str, ids: tuple[int, ...]) -> np.ndarray:
    return rig.reference_states(_model(checkpoint), [ids])[0]


def reference(checkpoint: Path, sequences: Iterable[Sequence[int]], kind: str = "tokens") -> list[np.ndarray]:
    """What each row should hold: float32 [L, H], or [H] for pooled kinds."""
    pooled = {
        "tokens": lambda states: states,
        "last": lambda states: states[-1],
        "first": lambda states: states[0],
        "mean": lambda states: states.astype(np.float64).mean(axis=0),
    }[kind]
    return [pooled(_states(str(checkpoint), tuple(ids))) for ids in sequences]


def stored(output: Path) -> list[np.ndarray | None]:
    """States of every output row, decoded to float32."""
    from extract.output import open_output

    return [row.states for row in open_output(output)]


def stored_ids(output: Path) -> list[list[int] | None]:
    """Token ids of every output row."""
    return output_table(output).column("input_ids").to_pylist()


def errors(found: Sequence[Any], expected: Sequence[np.ndarray]) -> np.ndarray:
    """Relative error of each row; shapes must agree."""
    assert [None if one is None else one.shape for one in found] == [one.shape for one in expected]
    return np.array([rig.relative_error([one], [other]) for one, other in zip(found, expected, strict=True)])


# --- damage ---------------------------------------------------------------------------------------------------------


def record_of(output: Path, shard: int) -> Commit:
    """A shard's commit record."""
    return read_commit(commit_path(output / "commits", shard))


def data_of(output: Path, shard: int) -> Path:
    """A shard's file."""
    return output / "data" / record_of(output, shard).data


def edit_record(output: Path, number: int, /, **changes: Any) -> None:
    """Change values of a commit record, as a bold hand would, without the digest that would tell."""
    path = commit_path(output / "commits", number)
    table = {**json.loads(path.read_bytes()), **changes}
    del table["check"]
    path.write_bytes(canonical_json(table) + b"\n")


def rewrite_shard(output: Path, shard: int, change: Any, **record: Any) -> None:
    """Rewrite a shard's rows with `change` (table -> table) and make its record, and the manifest, agree.

    What is left wrong after that, only a look at the contents or another forward can find.
    """
    from extract.manifest import finalize

    before = data_of(output, shard)
    with pa.ipc.open_file(before) as file:
        table, schema = file.read_all(), file.schema
    after = change(table)
    fresh = before.with_name("fresh")
    with pa.ipc.new_file(fresh, schema) as file:
        for batch in after.combine_chunks().to_batches():
            file.write_batch(batch)
    sha256 = file_digest(fresh)
    before.unlink()
    fresh.rename(before.with_name(f"{shard_name(shard)}-{sha256[:8]}.arrow"))
    named = {"data": f"{shard_name(shard)}-{sha256[:8]}.arrow", "sha256": sha256}
    commit = replace(record_of(output, shard), **named, **record)
    commit = replace(commit, num_bytes=(output / "data" / commit.data).stat().st_size)
    commit_path(output / "commits", shard).write_bytes(record_bytes(commit))
    finalize(read_job(output))


def snapshot(directory: Path) -> dict[str, str]:
    """sha256 of every file below a directory, by name."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def edit_contract(engine: Path, **changes: Any) -> None:
    """Change values of an engine's contract; a table is merged into the one that is there."""
    path = engine / "contract.json"
    table = json.loads(path.read_bytes())
    for key, value in changes.items():
        table[key] = {**table[key], **value} if isinstance(value, dict) else value
    path.write_bytes(canonical_json(table) + b"\n")
