"""What must hold after a round: the unbroken run's content, each row once, and nothing touched that was committed."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import crash_rig

from chaos.outputs import as_directory, committed
from extract.storage import Place


@dataclass
class Findings:
    """What a round did, and what it broke. `wrong` says it in words, for whoever has to find the cause."""

    injected: int = 0
    lost: int = 0
    doubled: int = 0
    rewritten: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: "Findings") -> None:
        """Sum up."""
        self.injected += other.injected
        self.lost += other.lost
        self.doubled += other.doubled
        self.rewritten += other.rewritten
        self.wrong += other.wrong

    def expect(self, claim: bool, message: str) -> None:
        """Note what is not as it should be."""
        if not claim:
            self.wrong.append(message)


def check_kept(findings: Findings, out: Place, before: dict[str, tuple[object, ...]], when: str) -> None:
    """Whatever was committed before is the same file, or object, with the same time and bytes."""
    after = committed(out)
    changed = [name for name in before if after.get(name) != before[name]]
    findings.rewritten += len(changed)
    findings.expect(not changed, f"{when}: committed files were touched: {changed[:4]}")


def check_finished(findings: Findings, out: Place, unbroken: Path) -> None:
    """The same bytes under the same names as an unbroken run's, and nothing else beside them."""
    with as_directory(out) as folder:
        _check_directory(findings, folder, unbroken)


def _check_directory(findings: Findings, out: Path, unbroken: Path) -> None:
    expected, found = crash_rig.content(unbroken), crash_rig.content(out)
    keys = Counter(crash_rig.stored_keys(out))
    wanted = crash_rig.stored_keys(unbroken)
    findings.lost += sum(1 for key in wanted if key not in keys)
    findings.doubled += sum(count - 1 for count in keys.values())
    differing = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    findings.expect(not differing, f"content differs from the unbroken run's: {differing[:4]}")
    findings.expect(crash_rig.stored_keys(out) == wanted, "rows are not those of the unbroken run, in order")
    left = {name for name in crash_rig.names(out) - crash_rig.expected_names(out) if not name.startswith("quarantine")}
    findings.expect(left <= {"tmp"}, f"left behind: {sorted(left)[:4]}")
