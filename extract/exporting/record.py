"""What an export says of itself: `export.json` for programs and `README.md` for people, both beside the data."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from extract.exporting.rows import schema_facts
from extract.exporting.target import Part, Target

FORMAT = "extract-export"
VERSION = 1


def counts(parts: Sequence[Part]) -> dict[str, Any]:
    """Rows that were exported and rows that were not, with the reasons."""
    outcomes: Counter[str] = Counter()
    no_states: Counter[str] = Counter()
    for part in parts:
        outcomes.update(part.outcomes)
        no_states.update(part.no_states)
    return {
        "rows": sum(part.rows for part in parts),
        "outcomes": dict(sorted(outcomes.items())),
        "left_out_without_states": dict(sorted(no_states.items())),
        "left_out_not_chosen": sum(part.not_chosen for part in parts),
    }


def describe_export(target: Target, parts: Sequence[Part], checked: int) -> dict[str, Any]:
    """The content of `export.json`, but for the identity."""
    stream = target.stream
    job = stream.output.job
    return {
        "format": FORMAT,
        "version": VERSION,
        "kind": target.kind,
        "title": target.title,
        "made_from": {
            "path": str(stream.output.path.resolve()),
            "job": job.job_id,
            "complete": stream.complete,
            "shards": len(parts),
            "derived_from": job.derived_from,
        },
        "states": {
            "kind": stream.kind,
            "dtype": stream.dtype,
            "stored_as": stream.output.dtype,
            "width": stream.width,
            "layers": list(stream.layers),
        },
        **counts(parts),
        **target.facts(parts),
        "rows_read_back": checked,
        "cannot_carry": target.cannot_carry,
        "read": target.reading.replace("{path}", "."),
        "metadata": schema_facts(stream),
    }


def readme(record: dict[str, Any]) -> str:
    """`README.md` of an export."""
    made, states = record["made_from"], record["states"]
    complete = "" if made["complete"] else " (an unfinished output: what was committed)"
    left = sum(record["left_out_without_states"].values())
    lines = [
        f"# Hidden states: {record['title']}",
        "",
        f"Exported from `extract` job {made['job']}{complete}: {record['rows']:,} rows, {states['kind']}, "
        f"{states['dtype']}, width {states['width']:,}. Left out: {left:,} rows without states, "
        f"{record['left_out_not_chosen']:,} that were not asked for. All facts: `export.json`.",
        "",
        "Run in this directory:",
        "",
        "```python",
        record["read"],
        "```",
        "",
        record["cannot_carry"],
        "",
    ]
    return "\n".join(lines)
