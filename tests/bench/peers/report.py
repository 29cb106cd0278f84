"""What was measured, as text, Markdown and JSON. Only medians and ranges of what counted; problems stand by name."""

import statistics
from dataclasses import asdict
from typing import Any

from peers.scenarios import Scenario
from peers.sittings import Resident, Row
from peers.whole_job import JobResult

Table = list[list[str]]


class Report:
    """All results of one run of the benchmark.

    Args:
        card: of `peers.card`.
        ceilings: of `peers.ceilings`.
        residents: engine name -> its process.
        skipped: engine name -> why it was left out.
    """

    def __init__(
        self,
        *,
        card: dict[str, Any],
        ceilings: dict[str, Any],
        scenarios: list[Scenario],
        rows: dict[str, list[Row]],
        residents: dict[str, Resident],
        skipped: dict[str, str],
        jobs: list[JobResult],
    ) -> None:
        self._card = card
        self._ceilings = ceilings
        self._scenarios = scenarios
        self._rows = rows
        self._residents = residents
        self._skipped = skipped
        self._jobs = jobs

    def markdown(self) -> str:
        """The whole report."""
        parts = ["# Peers benchmark", _lines(self._card_lines()), "## Ceilings", _table(self._ceiling_table())]
        for scenario in self._scenarios:
            size = f"{len(scenario.sequences)} rows, {scenario.num_tokens:,} tokens"
            parts += [f"## {scenario.name}: {scenario.says} ({size})", _table(self._speed_table(scenario))]
            ratios = self._ratio_table(scenario)
            if len(ratios) > 1 and len(ratios[0]) > 1:
                parts += ["Ours over each, median (range) of the ratios of each round:", _table(ratios)]
        if self._jobs:
            parts += ["## job: text to shards on disk", _table(self._job_table())]
        if self._skipped:
            parts += ["## Left out", _lines([f"{name}: {reason}" for name, reason in self._skipped.items()])]
        parts.append(_lines(NOTES))
        return "\n\n".join(parts) + "\n"

    def json(self) -> dict[str, Any]:
        """Everything, samples included."""
        return {
            "bench": "peers",
            "card": self._card,
            "ceilings": self._ceilings,
            "scenarios": {
                scenario.name: {
                    "rows": len(scenario.sequences),
                    "tokens": scenario.num_tokens,
                    "engines": [asdict(row) | {"tokens_per_s": row.tokens_per_s} for row in self._rows[scenario.name]],
                    "ratios": {
                        f"{ours.engine} / {row.engine}": found
                        for ours in self._ours(scenario)
                        for row in self._rows[scenario.name]
                        if row is not ours and (found := ratios(ours, row))
                    },
                }
                for scenario in self._scenarios
            },
            "starts": {
                name: {
                    "first_batch_s": resident.first_batch_s,
                    "quiet": resident.first_batch_quiet,
                    "peak_memory": resident.peak_memory,
                }
                for name, resident in self._residents.items()
            },
            "jobs": [asdict(job) for job in self._jobs],
            "skipped": self._skipped,
        }

    def _card_lines(self) -> list[str]:
        card = self._card
        versions: dict[str, str] = {}
        for resident in self._residents.values():
            for name, version in resident.versions.items():
                known = versions.setdefault(name, version)
                versions[name] = known if version in known.split(" and ") else f"{known} and {version}"
        return [
            f"device: {card['device']}, {card['cpus']} CPUs, {card['memory_gib']} GiB; {card['threads']} threads",
            f"instructions: {' '.join(card['flags'])}",
            f"versions: Python {card['python']}, " + ", ".join(f"{name} {versions[name]}" for name in sorted(versions)),
            f"commit: {card['commit']}, {card['date']}",
            f"command: {card['command']}",
        ]

    def _ceiling_table(self) -> Table:
        table = [["type", "GFLOP/s", "one thread", "best as", "tokens/s they mean"]]
        mark = "" if self._ceilings["quiet"] else " (disturbed)"
        for dtype, ceiling in self._ceilings["ceilings"].items():
            way = f"{ceiling['way']}, {ceiling['rows']} rows{mark}"
            one, tokens = f"{ceiling['one_thread_gflops']:,.0f}", f"{ceiling['tokens_per_s']:,.0f}"
            table.append([dtype, f"{ceiling['gflops']:,.0f}", one, way, tokens])
        return table

    def _speed_table(self, scenario: Scenario) -> Table:
        heading = (
            "engine; tokens/s; range; of ceiling; first batch s; peak GB; cos mean; cos p1; rel. error; KL; top-1; note"
        )
        return [
            heading.split("; "),
            *(
                [row.engine, *self._speed(row), *self._start(row), *_fidelity(row), _note(row)]
                for row in self._rows[scenario.name]
            ),
        ]

    def _speed(self, row: Row) -> list[str]:
        if row.tokens_per_s is None or row.problem:
            return ["-", "-", "-"]
        speeds = [sample.tokens_per_s for sample in row.counted]
        ceiling = self._ceilings["ceilings"][row.dtype]["tokens_per_s"]
        return [
            f"{row.tokens_per_s:,.0f}",
            f"{min(speeds):,.0f} to {max(speeds):,.0f}",
            f"{row.tokens_per_s / ceiling:.2f}",
        ]

    def _start(self, row: Row) -> list[str]:
        resident = self._residents.get(row.engine)
        if resident is None:
            return ["-", "-"]
        mark = "" if resident.first_batch_quiet else " (disturbed)"
        return [f"{resident.first_batch_s:.1f}{mark}", f"{resident.peak_memory / 1e9:.1f}"]

    def _ours(self, scenario: Scenario) -> list[Row]:
        return [row for row in self._rows[scenario.name] if row.engine.startswith("ours") and not row.problem]

    def _ratio_table(self, scenario: Scenario) -> Table:
        ours = self._ours(scenario)
        table = [["over", *(row.engine for row in ours)]]
        for row in self._rows[scenario.name]:
            cells = [_ratio_cell(ratios(mine, row)) if mine is not row else "1" for mine in ours]
            if not row.problem and row.samples:
                table.append([row.engine, *cells])
        return table

    def _job_table(self) -> Table:
        table = [["engine", "tokens/s", "job / engine alone", "note"]]
        for job in self._jobs:
            if job.problem or job.disturbance is None:
                table.append([job.engine, "-", "-", job.problem or ""])
                continue
            note = "" if job.disturbance.is_quiet else f"disturbed ({job.disturbance.foreign_cpus:.2f} CPUs)"
            table.append([job.engine, f"{job.tokens_per_s:,.0f}", f"{job.ratio:.3f}", note])
        return table


NOTES = [
    "tokens/s counts the rows' own tokens, also those that an engine did not compute because it shares them.",
    "Same token ids for all, at most 128 a row, made once by the checkpoint's tokenizer; tokenising counts for nobody.",
    "A time ends when every state lies in host memory. Other engines are stopped (SIGSTOP) meanwhile.",
    "Ceiling: the linears' multiplications alone, at the best speed that oneDNN reached here in that type.",
    "First batch: from process start to the states of 8 rows; files in the page cache, conversions and builds done.",
    "Peak memory: of the process after the first whole scenario. Engines that differ in batches alone share a process.",
    "Fidelity: against transformers in float32, row by row; KL and top-1 through the head on up to 4,096 states.",
    "disturbed: others used over 0.1 CPUs, or over 1 % was stolen, in each of the tries. Such samples count only where "
    "a row has no other, and never in a ratio beside quiet ones.",
]


def ratios(ours: Row, other: Row) -> dict[str, Any] | None:
    """Median, least and most of ours / other, turn by turn; quiet pairs, or all if no pair is quiet."""
    theirs = {sample.turn: sample for sample in other.samples}
    pairs = [(sample, theirs[sample.turn]) for sample in ours.samples if sample.turn in theirs]
    quiet = [pair for pair in pairs if all(sample.disturbance.is_quiet for sample in pair)]
    values = [mine.tokens_per_s / their.tokens_per_s for mine, their in quiet or pairs]
    if not values or ours.problem or other.problem:
        return None
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": len(values),
        "disturbed": not quiet,
    }


def _ratio_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    mark = " disturbed" if found["disturbed"] else ""
    return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f}){mark}"


def _fidelity(row: Row) -> list[str]:
    found = row.fidelity
    if found is None:
        return ["-"] * 5
    kl, top1 = (f"{found.kl:.1e}", f"{found.top1:.3f}") if found.kl is not None else ("-", "-")
    return [f"{found.cosine_mean:.5f}", f"{found.cosine_p1:.4f}", f"{found.rel_error:.1e}", kl, top1]


def _note(row: Row) -> str:
    if row.problem:
        return f"FAILED: {row.problem}"
    if row.disturbed:
        return f"disturbed {row.disturbed} of {len(row.samples)}"
    return ""


def _lines(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(table: Table) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in table
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
