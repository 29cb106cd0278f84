"""What a power failure leaves of a directory tree whose changes were recorded by the disk shim.

The harshest reading of what POSIX promises: of a file only what was there when it was last synced is sure, the rest
may be missing, in part or as zeros; of a directory's changes since it was last synced, any number from the first on may
have reached the disk, whatever happened in other directories.
"""

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

NOTHING = 0


@dataclass
class Names:
    """What is known of one directory: its names as they were last synced, and the changes after that, in order.

    A name stands for a file or directory, counted from 1 on as they were made (inode numbers are used again).
    """

    synced: dict[str, int] = field(default_factory=dict)
    later: list[tuple[str, int]] = field(default_factory=list)

    def change(self, name: str, thing: int, before: int = NOTHING) -> None:
        """A name stands for another thing, or for nothing; `before` is what it stood for."""
        if name not in self.synced and name not in dict(self.later):
            self.synced[name] = before
        self.later.append((name, thing))

    def sync(self) -> None:
        """All of it has reached the disk."""
        self.synced.update(self.later)
        self.later.clear()

    def survived(self, draw: random.Random) -> dict[str, int]:
        """What the names stand for after a power failure."""
        return {**self.synced, **dict(self.later[: draw.randint(0, len(self.later))])}


class Recording:
    """The log of the shim, read."""

    def __init__(self, log: Path) -> None:
        self.directories: dict[Path, Names] = {}
        self.synced_bytes: dict[int, int] = {}
        """Of files that were made while the log was kept."""
        self._things: dict[int, int] = {}
        self._count = 0
        for line in log.read_text().splitlines():
            kind, inode, size, path, other = line.split("\t")
            self._add(kind, int(inode), int(size), Path(path), Path(other))

    def _add(self, kind: str, inode: int, size: int, path: Path, other: Path) -> None:
        if kind in "CM":
            self._count += 1
            self._things[inode] = self._count
            if kind == "C":
                self.synced_bytes[self._count] = 0
        thing = self.thing(inode)
        names = self.directories.setdefault(path.parent, Names())
        if kind in "CML":
            names.change(path.name, thing)
        elif kind in "UX":
            names.change(path.name, NOTHING, thing)
        elif kind == "R":
            names.change(path.name, NOTHING, thing)
            self.directories.setdefault(other.parent, Names()).change(other.name, thing)
        elif kind == "S" and thing in self.synced_bytes:
            self.synced_bytes[thing] = size
        elif kind == "D":
            self.directories.setdefault(path, Names()).sync()

    def thing(self, inode: int) -> int:
        """The number of what an inode stands for now."""
        if inode not in self._things:
            self._count += 1
            self._things[inode] = self._count
        return self._things[inode]


def sure_files(log: Path) -> list[Path]:
    """Files that were made, synced and named for good: no power failure may take them."""
    recording = Recording(log)
    return [
        path / name
        for path, names in recording.directories.items()
        for name, thing in names.synced.items()
        if thing != NOTHING and name not in dict(names.later)
    ]


def lose_power(log: Path, spare: Path, draw: random.Random) -> int:
    """Undo what may not have reached the disk.

    Args:
        log: of the shim, from the beginning of the processes that the failure ends.
        spare: an empty directory of the same file system, outside of what the log is about.
        draw: which of the possible outcomes.

    Returns:
        How many names and files were lost or cut.
    """
    recording = Recording(log)
    held: dict[int, Path] = {}
    for path in recording.directories:
        for entry in os.scandir(path) if path.is_dir() else ():
            if entry.is_file(follow_symlinks=False) and recording.thing(entry.inode()) not in held:
                held[recording.thing(entry.inode())] = spare / str(entry.inode())
                os.link(entry.path, spare / str(entry.inode()))
    lost = 0
    for path, names in sorted(recording.directories.items(), key=lambda item: len(item[0].parts)):
        for name, thing in names.survived(draw).items():
            if path.is_dir():
                lost += _stand_for(path / name, thing, recording, held)
    for thing, file in held.items():
        lost += _cut(file, recording.synced_bytes.get(thing, file.stat().st_size), draw)
        file.unlink()
    return lost


def _stand_for(path: Path, thing: int, recording: Recording, held: dict[int, Path]) -> int:
    """Let a name stand for a thing again, or for nothing."""
    found = recording.thing(path.lstat().st_ino) if os.path.lexists(path) else NOTHING
    if found == thing:
        return 0
    if found != NOTHING:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if thing in held:
        os.link(held[thing], path)
    return 1


def _cut(path: Path, sure: int, draw: random.Random) -> int:
    """Take from a file what was not synced: all of it, some of it, or its contents."""
    size = path.stat().st_size
    if size <= sure:
        return 0
    left = draw.choice((sure, draw.randint(sure, size), size))
    os.truncate(path, left)
    if draw.random() < 0.5:
        with path.open("r+b") as file:
            file.seek(sure)
            file.write(bytes(left - sure))
    return 1
