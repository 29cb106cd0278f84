"""Progress counts what was done, never more than there is, and shows it as lines or a bar; it never stops a run."""

import io
import os
import re
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract import progress as progress_module
from extract.progress import LINE_EVERY_S, STAGES, Progress, duration


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module.time, "perf_counter", clock.perf_counter)
    return clock


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.01)


class TestCounting:
    def test_the_line_says_rows_speed_bytes_eta_and_shares(self, clock):
        progress = Progress(stream=io.StringIO())
        progress.expect(1000, 200)
        with progress:
            progress.begin_window(400, 2000)
            clock.now += 8
            progress.advance(1000)
            progress.spent("read+tokenise", 2.0)
            progress.spent("forward", 6.4)
            progress.spent("write", 0.8)
            progress.wrote(1_234_567)
            assert progress.line() == (
                "400 of 1,000 rows (40 %) | 125 tokens/s | 1.2 MB written | ETA 24 s | "
                "read+tokenise 25 %, forward 80 %, write 10 %"
            )

    def test_a_stream_of_unknown_length_has_no_percentage_and_no_eta(self, clock):
        progress = Progress(quiet=True)
        progress.expect(None, 0)
        progress.begin_window(10, 100)
        clock.now += 2
        progress.advance(50)
        assert progress.line() == ("5 rows | 25 tokens/s | 0.0 MB written | read+tokenise 0 %, forward 0 %, write 0 %")

    def test_the_eta_counts_from_the_first_pass_and_only_this_runs_rows(self, clock):
        progress = Progress(quiet=True)
        progress.expect(1100, 1000)
        clock.now += 500  # reading and loading
        progress.begin_window(100, 100)
        clock.now += 10
        progress.advance(25)
        assert "ETA 30 s" in progress.line()

    def test_nothing_is_known_before_the_first_pass(self, clock):
        progress = Progress(quiet=True)
        progress.expect(10, 0)
        clock.now += 60
        assert progress.line() == (
            "0 of 10 rows (0 %) | 0 tokens/s | 0.0 MB written | read+tokenise 0 %, forward 0 %, write 0 %"
        )

    def test_rows_without_a_token_are_done_when_their_window_begins(self):
        progress = Progress(quiet=True)
        progress.expect(7, 0)
        progress.begin_window(7, 0)
        assert progress.rows_done == 7

    def test_a_source_without_rows_is_done(self):
        progress = Progress(quiet=True)
        progress.expect(0, 0)
        assert progress.line().startswith("0 of 0 rows (0 %)")

    def test_shares_are_of_the_time_of_the_work_and_not_of_loading(self, clock):
        progress = Progress(stream=io.StringIO())
        clock.now += 1000
        with progress:
            progress.spent("forward", 3.0)
            clock.now += 4
            assert progress.shares() == {"read+tokenise": 0.0, "forward": 0.75, "write": 0.0}
            assert progress.wall_seconds == 4

    def test_stages_add_up_from_several_threads(self):
        progress = Progress(quiet=True)

        def work(stage: str) -> None:
            for _ in range(2000):
                progress.spent(stage, 1.0)
                progress.advance(1)
                progress.wrote(1)

        threads = [threading.Thread(target=work, args=(stage,)) for stage in (*STAGES, *STAGES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert progress.seconds == dict.fromkeys(STAGES, 4000.0)
        assert (progress.tokens, progress.bytes_written) == (12_000, 12_000)

    @settings(deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60), st.integers(1, 3)), max_size=12),
        st.integers(0, 1000),
        st.integers(0, 100),
    )
    def test_rows_done_never_fall_and_never_pass_the_total_even_when_shards_are_made_again(
        self, windows, total, before
    ):
        before = min(before, total)
        progress = Progress(quiet=True)
        progress.expect(total, before)
        last = before
        for rows, tokens, attempts in windows:
            for _ in range(attempts):
                progress.begin_window(rows, tokens)
                for _ in range(tokens):
                    assert last <= progress.rows_done <= total
                    last = progress.rows_done
                    progress.advance(1)
        assert last <= progress.rows_done <= total

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 60)), min_size=1, max_size=12))
    def test_all_rows_are_done_at_the_end(self, windows):
        progress = Progress(quiet=True)
        progress.expect(sum(rows for rows, _ in windows), 0)
        for rows, tokens in windows:
            progress.begin_window(rows, tokens)
            for _ in range(tokens):
                progress.advance(1)
        assert progress.rows_done == progress.rows_total


class TestLines:
    def test_a_sign_of_life_comes_within_ten_seconds(self):
        assert LINE_EVERY_S <= 10

    def test_lines_come_while_the_first_pass_is_still_running(self, monkeypatch):
        monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.01)
        stream = io.StringIO()
        progress = Progress(stream=stream)
        progress.expect(5, 0)
        with progress:
            wait_for(lambda: stream.getvalue().count("\n") >= 3)
        assert set(stream.getvalue().splitlines()) == {
            "0 of 5 rows (0 %) | 0 tokens/s | 0.0 MB written | read+tokenise 0 %, forward 0 %, write 0 %"
        }

    def test_the_last_line_has_everything(self):
        stream = io.StringIO()
        progress = Progress(stream=stream)
        progress.expect(5, 0)
        with progress:
            progress.begin_window(5, 10)
            progress.advance(10)
        assert re.fullmatch(r"5 of 5 rows \(100 %\) \| .*\n", stream.getvalue())

    def test_a_run_that_breaks_ends_without_a_last_line(self):
        stream = io.StringIO()
        with pytest.raises(KeyboardInterrupt), Progress(stream=stream) as progress:
            progress.advance(10)
            raise KeyboardInterrupt
        assert stream.getvalue() == ""

    def test_the_printing_thread_ends_with_the_work(self):
        with Progress(stream=io.StringIO()):
            assert any(thread.name == "extract-progress" for thread in threading.enumerate())
        assert not any(thread.name == "extract-progress" for thread in threading.enumerate())

    def test_quiet_is_quiet(self):
        stream = io.StringIO()
        with Progress(stream=stream, quiet=True) as progress:
            progress.advance(10)
            progress.say("shard 3 broke")
        assert stream.getvalue() == ""

    def test_a_message_is_a_line_of_its_own(self):
        stream = io.StringIO()
        Progress(stream=stream).say("loading engine")
        assert stream.getvalue() == "loading engine\n"

    def test_a_closed_pipe_or_stream_stops_the_printing_and_nothing_else(self):
        read, write = os.pipe()
        os.close(read)
        stream = os.fdopen(write, "w", buffering=1)
        with Progress(stream=stream) as progress:
            progress.say("nobody reads this")
            progress.say("nor this")
            progress.advance(10)
        with pytest.raises(BrokenPipeError):
            stream.close()
        with Progress(stream=stream) as progress:  # now it is closed
            progress.say("nor this")

    def test_a_process_without_a_stderr_runs_on(self, monkeypatch):
        monkeypatch.setattr("sys.stderr", None)
        with Progress() as progress:
            progress.say("nobody reads this")
            progress.advance(10)


class TestBar:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def test_a_terminal_gets_one_bar_that_ends_at_the_total(self):
        terminal = self.Terminal()
        progress = Progress(stream=terminal)
        progress.expect(1000, 250)
        with progress:
            progress.begin_window(750, 10)
            progress.advance(10)
            progress.wrote(3_000_000)
        text = terminal.getvalue()
        assert text.count("\n") == 1
        last = text.rstrip("\n").split("\r")[-1]
        assert "1000/1000" in last
        assert "tokens/s, 3.0 MB, read+tokenise 0 %, forward 0 %, write 0 %" in last

    def test_a_message_does_not_break_the_bar(self):
        terminal = self.Terminal()
        progress = Progress(stream=terminal)
        progress.expect(10, 0)
        with progress:
            progress.say("shard 3 broke")
        assert "\rshard 3 broke\n" in terminal.getvalue()
        assert terminal.getvalue().count("\n") == 2

    def test_a_stream_shows_a_count_without_a_total(self):
        terminal = self.Terminal()
        progress = Progress(stream=terminal)
        progress.expect(None, 0)
        with progress:
            progress.begin_window(7, 10)
            progress.advance(10)
        assert "7 rows" in terminal.getvalue()

    def test_the_bar_moves_by_itself(self, monkeypatch):
        monkeypatch.setattr(progress_module, "BAR_EVERY_S", 0.01)
        terminal = self.Terminal()
        progress = Progress(stream=terminal)
        progress.expect(10, 0)
        with progress:
            progress.begin_window(10, 10)
            progress.advance(5)
            wait_for(lambda: "5/10" in terminal.getvalue())


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (61, "1:01"),
        (3599, "59:59"),
        (3723, "1:02:03"),
        (360_000, "100:00:00"),
    ],
)
def test_durations_read_like_a_clock(seconds, shown):
    assert duration(seconds) == shown
