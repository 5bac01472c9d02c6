"""Status messages of phases, on a terminal and elsewhere, with a clock that the test controls."""

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from plimsoll.framework.terminal import phases
from plimsoll.framework.terminal.phase_views import Lines, Spinner, human_seconds, show_phases_on_terminal
from plimsoll.framework.terminal.phases import Phase, PhaseTracker, StartupMessage, View


class Clock:
    """A clock that the test advances; meanwhile the tracker ticks as its thread would."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float, tracker: PhaseTracker) -> None:
        for _ in range(round(seconds * 10)):
            self.now = round(self.now + 0.1, 3)
            tracker.tick()


class ManualTracker(PhaseTracker):
    """A tracker without its own thread."""

    def _start_ticking(self) -> None:
        pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


@contextlib.contextmanager
def install_tracker(view: View, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[ManualTracker]:
    """Install a tracker with that view and clock as the process's tracker, and close it at the end."""
    tracker = ManualTracker(view, clock)
    monkeypatch.setattr(phases, "_tracker", tracker)
    yield tracker
    tracker.close()


def test_nothing_is_printed_without_a_board(capfd):
    with phases.phase("compiling") as compiling:
        compiling.progress(1, 2)
    assert capfd.readouterr() == ("", "")
    assert not phases.are_shown()


def test_a_line_grows_by_seconds_and_ends_as_one(clock, monkeypatch):
    stream = io.StringIO()
    with install_tracker(Lines(stream), clock, monkeypatch) as tracker, phases.phase("compiling the training step"):
        assert stream.getvalue() == "compiling the training step ..."
        clock.pass_by(4.4, tracker)
    assert stream.getvalue() == "compiling the training step .... 2 s .... 4 s ... done in 4.4 s\n"


def test_prints_progress_every_second(clock, monkeypatch):
    stream = io.StringIO()
    with install_tracker(Lines(stream), clock, monkeypatch) as tracker, phases.phase("compiling"):
        for _ in range(1200):
            size = len(stream.getvalue())
            clock.pass_by(1.0, tracker)
            assert len(stream.getvalue()) > size
    (line,) = stream.getvalue().splitlines()
    assert "10 s ............ 20 s ..." in line
    assert line.endswith(" done in 20 min 0 s")
    assert len(line) < 3000


def test_progress_replaces_seconds(clock, monkeypatch):
    stream = io.StringIO()
    with install_tracker(Lines(stream), clock, monkeypatch) as tracker, phases.phase("evaluating stdlib") as evaluating:
        clock.pass_by(1.0, tracker)
        evaluating.progress(40, 844)
        clock.pass_by(1.0, tracker)
        evaluating.percent(0.25)
        clock.pass_by(2.0, tracker)
        evaluating.outcome = ", from the cache"
    assert stream.getvalue() == "evaluating stdlib .... 40/844 .... 25% ... done in 4.0 s, from the cache\n"


def test_other_output_gets_its_own_lines(clock, monkeypatch):
    stream = io.StringIO()
    shared = cast(io.StringIO, phases._SharedStream(stream))
    with install_tracker(Lines(stream), clock, monkeypatch) as tracker:
        with phases.phase("saving"):
            clock.pass_by(2.0, tracker)
            print("warning: slow", file=shared)
            clock.pass_by(2.0, tracker)
            print("warning: slower", file=shared)
        with phases.phase("restoring"):
            pass
    assert stream.getvalue().splitlines() == [
        "saving .... 2 s ...",
        "warning: slow",
        "saving .... 4 s ...",
        "warning: slower",
        "saving: done in 4.0 s",
        "restoring ... done in 0.0 s",
    ]


def test_inner_phase_has_its_own_line_and_the_outer_continues(clock, monkeypatch):
    stream = io.StringIO()
    with install_tracker(Lines(stream), clock, monkeypatch) as tracker, phases.phase("preparing data", patience=0.5):
        with phases.phase("tokenizing train"):
            clock.pass_by(2.2, tracker)
        clock.pass_by(2.0, tracker)
    assert stream.getvalue().splitlines() == [
        "tokenizing train .... 2 s ... done in 2.2 s",
        "preparing data .... 4 s ... done in 4.2 s",
    ]


def test_phase_shorter_than_its_patience_is_not_printed(clock, monkeypatch):
    stream = io.StringIO()
    with install_tracker(Lines(stream), clock, monkeypatch) as tracker, phases.phase("looking for files", patience=0.5):
        clock.pass_by(0.4, tracker)
    assert stream.getvalue() == ""


def test_a_patient_phase_does_not_silence_the_one_around_it(clock, monkeypatch):
    stream = io.StringIO()
    with install_tracker(Lines(stream), clock, monkeypatch) as tracker, phases.phase("preparing data"):
        for _ in range(10):
            with phases.phase("looking for files", patience=0.5):
                clock.pass_by(0.4, tracker)
    assert stream.getvalue() == "preparing data .... 2 s .... 4 s ... done in 4.0 s\n"


def test_an_error_ends_the_line(clock, monkeypatch):
    stream = io.StringIO()

    def fail(tracker: PhaseTracker) -> None:
        with phases.phase("compiling"):
            clock.pass_by(1.5, tracker)
            raise KeyError

    with install_tracker(Lines(stream), clock, monkeypatch) as tracker, pytest.raises(KeyError):
        fail(tracker)
    assert stream.getvalue() == "compiling .... stopped after 1.5 s\n"


def test_a_full_disk_ends_nothing(clock, monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    for view in (Lines(Full()), Spinner(Full())):
        with install_tracker(view, clock, monkeypatch) as tracker, phases.phase("compiling"):
            clock.pass_by(2.0, tracker)


def test_startup_message_is_delayed_and_ends_at_other_output(clock, monkeypatch):
    stream = io.StringIO()
    with install_tracker(Lines(stream), clock, monkeypatch) as tracker:
        tracker.begin(StartupMessage("starting train of nanogpt-cpu", patience=0.4))
        clock.pass_by(0.3, tracker)
        assert stream.getvalue() == ""
        clock.pass_by(2.0, tracker)
        with phases.phase("looking for files", patience=0.5):
            clock.pass_by(0.2, tracker)
        with phases.phase("compiling"):
            clock.pass_by(0.5, tracker)
    assert stream.getvalue().splitlines() == [
        "starting train of nanogpt-cpu .... 2 s ...",
        "compiling ... done in 0.5 s",
    ]


def test_a_terminal_has_one_line_that_is_cleared(clock, monkeypatch):
    stream = io.StringIO()
    shared = cast(io.StringIO, phases._SharedStream(stream))
    with install_tracker(Spinner(stream), clock, monkeypatch) as tracker, phases.phase("compiling"):
        clock.pass_by(3.0, tracker)
        print("step 1", file=shared)
        print("half a line", end="", file=shared)
        size = len(stream.getvalue())
        clock.pass_by(3.0, tracker)
        assert len(stream.getvalue()) == size  # the half line is not overwritten
        print(file=shared)
        clock.pass_by(1.0, tracker)
    text = stream.getvalue()
    assert "compiling 2 s" in text
    assert "compiling 7 s" in text
    assert "\r\033[Kstep 1\nhalf a line\n" in text  # the spinner's line is cleared first
    assert text.endswith("\r\033[K")


def test_mute_ends_the_line_permanently(clock, monkeypatch):
    stream = io.StringIO()
    with install_tracker(Lines(stream), clock, monkeypatch) as tracker, phases.phase("compiling"):
        phases.mute()
        clock.pass_by(4.0, tracker)
        with phases.phase("saving"):
            pass
    assert stream.getvalue() == "compiling ...\n"


def test_phases_in_other_threads_are_not_shown(clock, monkeypatch):
    stream = io.StringIO()

    def other() -> None:
        with phases.phase("compiling ahead"):
            pass

    with install_tracker(Lines(stream), clock, monkeypatch):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert stream.getvalue() == ""


def test_context_restores_the_standard_streams(capsys):
    streams = sys.stdout, sys.stderr
    with phases.show_phases(Lines(sys.stderr)):
        assert (sys.stdout, sys.stderr) != streams
        with phases.phase("compiling"):
            print("a line")
    assert (sys.stdout, sys.stderr) == streams
    out, err = capsys.readouterr()
    assert out == "a line\n"
    assert err.splitlines()[0] == "compiling ..."


class Stream(io.StringIO):
    """A stream that can pretend to be a terminal."""

    def __init__(self, is_terminal: bool):
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_function_shows_phases_only_on_a_terminal(is_terminal: bool, monkeypatch):
    stream = Stream(is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    with show_phases_on_terminal():
        assert phases.are_shown() == is_terminal
        with phases.phase("compiling"):
            pass
    assert not phases.are_shown()
    assert sys.stderr is stream
    assert ("compiling" in stream.getvalue()) == is_terminal


def _join_threads() -> None:
    """Wait for the boards' threads, which end with their last phase."""
    for thread in threading.enumerate():
        if thread.name == "phases":
            thread.join(60.0)
            assert not thread.is_alive()


def test_the_boards_thread_ticks_and_ends_with_the_last_phase(capsys):
    ticked = threading.Event()

    class Seen(Lines):
        def show(self, phase: Phase, seconds: float) -> None:
            if threading.current_thread().name == "phases":
                ticked.set()

    with phases.show_phases(Seen(sys.stderr)):
        _join_threads()
        with phases.phase("compiling"):
            assert ticked.wait(60.0)
        _join_threads()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (4.4, "4.4 s"), (9.97, "10 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_human_readable_seconds(seconds: float, text: str):
    assert human_seconds(seconds) == text
