"""All facts of a page, from an output directory as it is: unfinished, damaged, empty or whole."""

import importlib.metadata
import json
from collections.abc import Sequence

from extract.job import StoredJob, read_job
from extract.output import Output
from extract.record_sums import RecordSums
from extract.records import OUTCOMES
from extract.report_page.facts import Report, Sample, SampledRow, Setting
from extract.report_page.integrity import quick_check, readable_commits
from extract.report_page.neighbours import PAIR_COSINE, Neighbours, directions, find_neighbours
from extract.report_page.projection import pca, umap
from extract.report_page.row_counts import count_rows
from extract.report_page.sampling import SampledStates, sample_rows
from extract.report_page.texts import texts_of
from extract.report_page.throughput import throughput
from extract.shards.schema import METADATA_PREFIX
from extract.storage import Place

MAX_ROWS = 10_000
DEFAULT_ROWS = 2_000


def gather(root: Place, rows: int = DEFAULT_ROWS) -> Report:
    """What a page says of an output directory.

    Args:
        root: the output directory.
        rows: how many rows to read with their states; at most `MAX_ROWS`.

    Raises:
        NotAJob: it is no output directory.
    """
    job = read_job(root)
    width = Output(job).width
    commits, broken = readable_commits(job)
    integrity, bad = quick_check(job, commits, broken)
    sound = [commit for commit in commits if commit.shard not in bad]
    sums = RecordSums(job, commits)
    problem = sums.problem
    if problem is None and not job.directory.manifest.is_file():
        problem = "the manifest is not written yet"
    notes: list[str] = []
    counts = count_rows(job, sound, notes)
    sampled = sample_rows(job, sound, min(rows, MAX_ROWS), width, notes)
    done = sums.totals
    return Report(
        path=str(root),
        job=job.job_id,
        title=_title(job),
        version=importlib.metadata.version("extract-hidden-states"),
        complete=problem is None and integrity.state != "problems",
        problem=problem,
        kind=job.spec.states.kind,
        dtype=job.spec.states.dtype,
        width=width,
        num_rows=done.num_rows,
        num_rows_expected=job.num_rows,
        num_rows_out=done.num_rows_out,
        num_tokens=done.num_tokens,
        num_tokens_original=done.num_tokens_original,
        num_bytes=done.num_bytes,
        outcomes={str(outcome): done.outcomes[outcome] for outcome in OUTCOMES if outcome in done.outcomes},
        settings=tuple(_settings(job)),
        integrity=integrity,
        counts=counts,
        throughput=throughput(job, commits),
        states=None if sampled is None else sampled.tally.figures(),
        sample=None if sampled is None else _sample(job, sampled),
        notes=tuple(dict.fromkeys(notes)),
    )


def _sample(job: StoredJob, sampled: SampledStates) -> Sample:
    unit = directions(sampled.states)
    near = find_neighbours(unit)
    places, explained = pca(unit)
    mapped, umap_note = umap(unit)
    texts = texts_of(job, sampled)
    kind = job.spec.states.kind
    return Sample(
        represented_by="last" if kind == "tokens" else kind,
        num_batches=sampled.num_batches,
        num_shards=sampled.num_shards,
        text_from=texts.origin,
        text_note=texts.note,
        explained=explained,
        umap_note=umap_note,
        typical_cosine=near.typical,
        pair_cosine=PAIR_COSINE,
        pairs=near.pairs,
        num_pairs=near.num_pairs,
        rows=tuple(
            _row(sampled, near, texts.texts[n], n, places[n].tolist(), None if mapped is None else mapped[n].tolist())
            for n in range(len(sampled.outcomes))
        ),
    )


def _row(
    sampled: SampledStates, near: Neighbours, text: str, n: int, place: Sequence[float], mapped: Sequence[float] | None
) -> SampledRow:
    state = sampled.states[n].astype("float64")
    return SampledRow(
        row=int(sampled.row[n]),
        chunk=int(sampled.chunk[n]),
        id=sampled.ids[n],
        outcome=sampled.outcomes[n],
        num_tokens=int(sampled.num_tokens[n]),
        text=text,
        norm=round(float((state @ state) ** 0.5), 3),
        pca=(round(place[0], 5), round(place[1], 5)),
        umap=None if mapped is None else (round(mapped[0], 4), round(mapped[1], 4)),
        neighbours=tuple(near.nearest[n].tolist()),
        cosines=tuple(round(float(cosine), 4) for cosine in near.cosines[n]),
    )


def _title(job: StoredJob) -> str:
    name = str(job.contract.get("checkpoint", {}).get("name") or _metadata(job, "checkpoint_name") or "a checkpoint")
    paths = job.spec.source.paths
    return f"{name} on {paths[0]}" + (f" and {len(paths) - 1:,} more" if len(paths) > 1 else "")


def _metadata(job: StoredJob, key: str) -> str:
    value: bytes = (job.schema.metadata or {}).get(f"{METADATA_PREFIX}{key}".encode(), b"")
    return value.decode()


def _settings(job: StoredJob) -> list[Setting]:
    """What was run, in the order in which a reader asks."""
    contract, spec = job.contract, job.spec
    checkpoint, runtime, device, output = (
        contract.get(key, {}) for key in ("checkpoint", "runtime", "device", "output")
    )
    states = spec.states
    policy = json.loads(_metadata(job, "tokens") or "{}")
    shape = "every token's state" if states.kind == "tokens" else f"one state a row ({states.kind})"
    lines = [
        Setting(
            name="Checkpoint", value=str(checkpoint.get("name", "")), note="the model's weights as they were given"
        ),
        Setting(name="Checkpoint sha256", value=str(checkpoint.get("sha256", ""))),
        Setting(name="Architecture", value=_joined(checkpoint, "architecture", num_layers="{:,} layers")),
        Setting(name="Engine", value=str(contract.get("engine_id", "")), note="what was built from the checkpoint"),
        Setting(name="Runtime", value=_joined(runtime, "name", "version", transformers="transformers {}")),
        Setting(name="Device", value=_joined(device, "name", "instruction_set", "compute_capability")),
        Setting(name="Computed in", value=_metadata(job, "computed_in"), note="precision that the engine hands over"),
        Setting(name="State", value=f"{shape}, width {Output(job).width:,}", note="taken after the model's final norm"),
        Setting(name="Taken from", value=str(output.get("module", "")), note="the module whose output is stored"),
        Setting(
            name="Other layers",
            value=", ".join(map(str, states.layers)),
            note="stored too: the residual stream after so many decoder layers; no figure on this page is of them",
        ),
        Setting(
            name="Stored as", value=f"{states.dtype}, {states.compression}" + (", length 1" if states.normalize else "")
        ),
        Setting(name="Source", value=", ".join(spec.source.paths)),
        Setting(name="Column", value=f"{spec.source.column} ({spec.source.input})"),
        Setting(name="Rows chosen", value=spec.source.rows or ""),
        Setting(
            name="Longest row", value=f"{spec.text.max_input_tokens:,} tokens" if spec.text.max_input_tokens else ""
        ),
        Setting(name="Longer rows", value=spec.text.on_long, note="what was done with rows above that"),
        Setting(name="Text policy", value=", ".join(f"{key} = {json.dumps(value)}" for key, value in policy.items())),
        Setting(name="Job", value=job.job_id, note="equal jobs have equal ids"),
        Setting(name="Made from job", value=str((job.derived_from or {}).get("job", "")), note="without the model"),
    ]
    return [line for line in lines if line.value]


def _joined(table: dict[str, object], *keys: str, **formats: str) -> str:
    parts = [str(table[key]) for key in keys if table.get(key)]
    parts += [text.format(table[key]) for key, text in formats.items() if table.get(key)]
    return ", ".join(parts)
