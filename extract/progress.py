"""How far a run is, on stderr: a tqdm bar on a terminal, a line every few seconds elsewhere.

A thread of its own prints, so that a sign of life comes within ten seconds even while the first pass is long, and the
stages only add to counters. Nobody needs to listen: a closed stderr stops the printing, never the run.
"""

import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

LINE_EVERY_S = 10.0
BAR_EVERY_S = 0.3
STAGES = ("read+tokenise", "forward", "write")


@dataclass(frozen=True, slots=True)
class Counts:
    """What a process has done so far, for the progress of a run that has several.

    Attributes:
        began: a window has begun its passes, which is when the clock of tokens/s starts.
    """

    rows: float = 0.0
    tokens: int = 0
    bytes_written: int = 0
    seconds: tuple[float, ...] = (0.0,) * len(STAGES)
    began: bool = False


class Progress:
    """Counters of one run, and their rendering. Use as a context manager around the work, after `expect`.

    Attributes:
        num_workers: how many processes add to the counters; shares of busy time are of all their time.
    """

    def __init__(self, *, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.num_workers = 1
        self.rows_total: int | None = None
        self.rows_before = 0
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.tokens = 0
        self.bytes_written = 0
        self._rows_done = 0.0
        self._window_rows_per_token = 0.0
        self._started = time.perf_counter()
        self._first_pass: float | None = None
        self._stream = stream if stream is not None else sys.stderr
        nobody_listens = self._stream is None or self._stream.closed  # a process may be started without a stderr
        self._quiet = quiet or nobody_listens
        self._bar: Any = None
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._keep_printing, name="extract-progress", daemon=True)

    def expect(self, rows_total: int | None, rows_before: int) -> None:
        """Say how many rows there are (`None`: a stream of unknown length) and how many earlier runs have done."""
        self.rows_total, self.rows_before = rows_total, rows_before

    def __enter__(self) -> "Progress":
        self._started = time.perf_counter()
        if not self._quiet:
            if self._stream.isatty():
                from tqdm import tqdm

                self._bar = tqdm(
                    total=self.rows_total,
                    initial=self.rows_before,
                    unit=" rows",
                    file=self._stream,
                    dynamic_ncols=True,
                    mininterval=BAR_EVERY_S,
                    smoothing=0.05,
                    unit_scale=False,
                )
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._bar is not None:
            self._draw()
            self._bar.close()
        elif not self._quiet and kind is None and self.tokens:
            self._write(self.line())

    def spent(self, stage: str, seconds: float) -> None:
        """Add busy time of a stage."""
        with self._lock:
            self.seconds[stage] += seconds

    def begin_window(self, rows: int, tokens: int) -> None:
        """A window of so many source rows starts its passes; rows without any token are done at once."""
        with self._lock:
            if self._first_pass is None:
                self._first_pass = time.perf_counter()
            self._window_rows_per_token = rows / tokens if tokens else 0.0
            if not tokens:
                self._rows_done += rows

    def advance(self, tokens: int) -> None:
        """A pass over so many tokens is done."""
        with self._lock:
            self.tokens += tokens
            self._rows_done += tokens * self._window_rows_per_token

    def wrote(self, num_bytes: int) -> None:
        """A shard of so many bytes is committed."""
        with self._lock:
            self.bytes_written += num_bytes

    def counts(self) -> Counts:
        """What this process has done."""
        with self._lock:
            spent = tuple(self.seconds[stage] for stage in STAGES)
            return Counts(self._rows_done, self.tokens, self.bytes_written, spent, self._first_pass is not None)

    def add(self, now: Counts, before: Counts) -> None:
        """Another process has done this much, where it had done `before` when it was last heard of."""
        with self._lock:
            if self._first_pass is None and now.began:
                self._first_pass = time.perf_counter()
            self._rows_done += now.rows - before.rows
            self.tokens += now.tokens - before.tokens
            self.bytes_written += now.bytes_written - before.bytes_written
            for stage, one, other in zip(STAGES, now.seconds, before.seconds, strict=True):
                self.seconds[stage] += one - other

    def say(self, message: str) -> None:
        """Print a message without breaking the bar; nothing if quiet."""
        if self._bar is not None:
            self._bar.write(message, file=self._stream)
        elif not self._quiet:
            self._write(message)

    @property
    def wall_seconds(self) -> float:
        """Since the work began."""
        return time.perf_counter() - self._started

    @property
    def tokens_per_s(self) -> float:
        """Over the time since the first pass began."""
        since = self._first_pass
        return 0.0 if since is None else self.tokens / max(1e-9, time.perf_counter() - since)

    def shares(self) -> dict[str, float]:
        """Busy time of each stage over wall time; they overlap, so they may add up to more than 1."""
        wall = max(1e-9, self.wall_seconds * self.num_workers)
        return {stage: seconds / wall for stage, seconds in self.seconds.items()}

    @property
    def rows_done(self) -> int:
        """Rows done by this and earlier runs, as far as tokens tell; never more than the total.

        A shard that broke and is made again would count twice.
        """
        done = self.rows_before + round(self._rows_done)
        return done if self.rows_total is None else min(done, self.rows_total)

    def line(self) -> str:
        """The state in one line."""
        done = self.rows_done
        if self.rows_total is None:
            rows = f"{done:,} rows"
        else:
            rows = f"{done:,} of {self.rows_total:,} rows ({100 * done / max(1, self.rows_total):.0f} %)"
        parts = [rows, f"{self.tokens_per_s:,.0f} tokens/s", f"{self.bytes_written / 1e6:,.1f} MB written"]
        eta = self._eta()
        if eta is not None:
            parts.append(f"ETA {duration(eta)}")
        parts.append(self._shares_text())
        return " | ".join(parts)

    def _eta(self) -> float | None:
        if self.rows_total is None or self._first_pass is None or self._rows_done <= 0:
            return None
        left = self.rows_total - self.rows_before - self._rows_done
        return max(0.0, left * (time.perf_counter() - self._first_pass) / self._rows_done)

    def _shares_text(self) -> str:
        return ", ".join(f"{stage} {100 * share:.0f} %" for stage, share in self.shares().items())

    def _keep_printing(self) -> None:
        every = BAR_EVERY_S if self._bar is not None else LINE_EVERY_S
        while not self._leaving.wait(every):
            if self._bar is not None:
                self._draw()
            else:
                self._write(self.line())

    def _draw(self) -> None:
        self._bar.n = self.rows_done
        text = f"{self.tokens_per_s:,.0f} tokens/s, {self.bytes_written / 1e6:,.1f} MB, {self._shares_text()}"
        self._bar.set_postfix_str(text, refresh=True)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # a closed pipe or a closed stream
            self._quiet = True


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03` or `4 s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
