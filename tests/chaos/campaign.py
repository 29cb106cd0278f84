"""Random faults on tiny jobs, round after round; prints a table by kind of fault, and each broken promise in words.

    python tests/chaos/campaign.py --rounds 300 --seed 7 --minutes 10
    python tests/chaos/campaign.py --output s3 --rounds 60
    python tests/chaos/campaign.py --output s3 --runner ray --rounds 20

A round makes one output: one to three faults of a kind (or of mixed kinds), each followed by the checks, then an
unbroken run to the end. The schedule depends on the seed and the round's number alone, so `--rounds 1 --first N`
repeats round N (as far as timing allows: faults by the shim strike at counted operations, others at a moment).
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

# ruff: noqa: E402  (a script in a package: the imports below need the path)
sys.path[:0] = [str(Path(__file__).parent.parent)]

import crash_rig
import warm_command

from chaos.faults import NUM_ROWS
from chaos.grounds import OUTPUTS, RUNNERS, Ground, ground, on_disk, seconds_of_an_unbroken_run
from chaos.invariants import Findings, check_finished, check_kept
from chaos.outputs import committed
from extract.storage import ObjectPath

MIXED = "mixed"
SAY_EVERY_S = 20.0


@dataclass
class Row:
    """One line of the table."""

    rounds: int = 0
    findings: Findings = field(default_factory=Findings)


class Campaign:
    """An engine, rows and an unbroken output in a directory, and rounds on them."""

    def __init__(self, folder: Path, engine: Path, seed: int, ground: Ground | None = None) -> None:
        self.folder, self.engine, self.seed = folder, engine, seed
        self.ground = on_disk() if ground is None else ground
        self.rows = crash_rig.write_rows(folder / "rows.parquet", crash_rig.texts(NUM_ROWS))
        self.unbroken = folder / "unbroken"
        self.table: dict[str, Row] = defaultdict(Row)
        preload = self.ground.preload
        ended = warm_command.call(*crash_rig.arguments(engine, self.rows, self.unbroken), preload=preload)
        assert ended.code == 0, ended.err
        trial = folder / "trial"
        trial.mkdir()
        self.seconds = seconds_of_an_unbroken_run(self.ground, trial, engine, self.rows)
        self.kinds = [*self.ground.kinds, MIXED]

    def round(self, number: int) -> Findings:
        """One round; the kinds take turns."""
        draw = random.Random(f"{self.seed} {number}")
        kind = self.kinds[number % len(self.kinds)]
        everything = self.ground.kinds
        watched = self.folder / f"round-{number}"
        watched.mkdir()
        out = self.ground.where(watched)
        arguments = crash_rig.arguments(self.engine, self.rows, out, draw.choice(("--overlap", "--sequential")))
        job = self.ground.job(arguments, out, self.seconds, draw)
        for _ in range(draw.randint(1, self.ground.most_faults)):
            name = draw.choice(list(everything)) if kind == MIXED else kind
            before = committed(out) if out.is_dir() and name != "files damaged between runs" else {}
            if (out / "manifest.json").exists() and name != "files damaged between runs":
                break  # nothing is left that could break
            try:
                everything[name](job)
            except (OSError, ValueError) as error:  # what is on the disk is not even what the checks can read
                job.findings.wrong.append(f"{name}: the checks cannot go on: {error!r}")
                break
            if name == "power loss":  # takes records that were not yet acknowledged; `power_loss` looks at the others
                before = {path: state for path, state in before.items() if (out / path).exists()}
            check_kept(job.findings, out, before, name)
        with job.kept("the last run"):
            ended = job.wait(job.start(), {0}, "the last run")
        self.ground.tidy(job)
        if ended.code == 0:
            check_finished(job.findings, out, self.unbroken)
        row = self.table[kind]
        row.rounds += 1
        job.findings.wrong = [f"round {number} ({kind}): {what}" for what in job.findings.wrong]
        row.findings.add(job.findings)
        if not job.findings.wrong:
            shutil.rmtree(watched)
            for path, _ in out.walk() if isinstance(out, ObjectPath) else ():
                path.unlink()
        for suffix in (".log", ".spare"):
            leftover = watched.with_suffix(suffix)
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
        return job.findings

    def rounds(self, first: int, count: int, minutes: float) -> Iterator[Findings]:
        """So many rounds, or as many as fit the time."""
        end = time.monotonic() + 60 * minutes
        for number in range(first, first + count):
            if time.monotonic() > end:
                return
            yield self.round(number)

    def report(self) -> str:
        """The table."""
        lines = [
            f"{'fault':28} {'rounds':>7} {'injected':>9} {'lost':>5} {'doubled':>8} {'rewritten':>10} {'other':>6}"
        ]
        total = Row()
        for kind in self.kinds:
            row = self.table[kind]
            lines.append(_line(kind, row))
            total.rounds += row.rounds
            total.findings.add(row.findings)
        lines.append(_line("all", total))
        if self.ground.untried:
            lines.append(f"not tried: {self.ground.untried}")
        return "\n".join(lines)

    @property
    def wrong(self) -> list[str]:
        """Every broken promise."""
        return [what for row in self.table.values() for what in row.findings.wrong]


def _line(kind: str, row: Row) -> str:
    found = row.findings
    counts = f"{row.rounds:7} {found.injected:9} {found.lost:5} {found.doubled:8} {found.rewritten:10}"
    return f"{kind:28} {counts} {len(found.wrong):6}"


def tiny_engine(folder: Path) -> Path:
    """An engine of one small layer."""
    import rig

    from extract.engine.builder import build
    from extract.engine.recipe import Recipe

    checkpoint = rig.tiny_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=1)
    build(checkpoint, folder / "engine", Recipe(dtype="float32", device="cpu", max_input_tokens=32, max_tokens=512))
    return folder / "engine"


def main() -> int:
    """The command line."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, help="at most so many (default 400)")
    parser.add_argument("--first", type=int, default=0, help="number of the first round (default 0)")
    parser.add_argument("--seed", type=int, default=None, help="of the schedule (default: drawn, and printed)")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this time (default 10)")
    parser.add_argument("--output", choices=OUTPUTS, default=OUTPUTS[0], help="where outputs lie (default directory)")
    parser.add_argument("--runner", choices=RUNNERS, default=RUNNERS[0], help="who makes the shards (default local)")
    parser.add_argument(
        "--store", choices=("auto", "ceph", "moto"), default="auto", help="for s3 (default: Ceph where it is installed)"
    )
    parser.add_argument("--keep", type=Path, help="an empty directory for the outputs; those of bad rounds stay")
    asked = parser.parse_args()
    seed = random.randrange(10**6) if asked.seed is None else asked.seed
    sys.stdout.write(f"seed {seed}\n")
    sys.stdout.flush()
    with ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="extract-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        place = stack.enter_context(ground(folder, asked.output, asked.runner, asked.store))
        campaign = Campaign(folder, tiny_engine(folder), seed, place)
        said = time.monotonic()
        for done, findings in enumerate(campaign.rounds(asked.first, asked.rounds, asked.minutes), 1):
            for what in findings.wrong:
                sys.stdout.write(f"{what}\n")
                sys.stdout.flush()
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                sys.stderr.write(f"{done} rounds, {len(campaign.wrong)} broken promises\n")
        sys.stdout.write(campaign.report() + "\n")
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
