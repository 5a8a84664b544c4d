"""Tests of the line on the terminal."""

import errno
import io

import pytest

from jaxrank.telemetry import progress as progress_module
from jaxrank.telemetry.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(progress_module.time, "monotonic", lambda: Clock.now)
    monkeypatch.setenv("COLUMNS", "120")
    return Clock


def test_progress_shows_steps_speed_loss_and_time_left(clock):
    stream = Terminal()
    progress = Progress(stream=stream)
    progress.update(1000, 4000, 123456.7, 0.44321)
    clock.now += 10
    progress.update(1500, 4000, 123456.7, 0.44)
    first, second = stream.getvalue().split("\r\x1b[K")[1:]
    assert first == "step 1,000/4,000 (25%)  123,457 examples/s  loss 0.44321  -:--:-- left"
    assert second.endswith("loss 0.44000  0:00:50 left")
    progress.clear()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_progress_ends_and_the_run_continues_when_the_terminal_has_gone(clock):
    class Gone(io.StringIO):
        def isatty(self):
            return True

        def write(self, _):
            raise OSError(errno.EIO, "Input/output error")

    progress = Progress(stream=Gone())
    progress.update(1, 10, 1.0, 0.5)
    clock.now += 10
    progress.update(2, 10, 1.0, 0.5)
    progress.close()


def test_progress_shows_a_few_lines_a_second_and_always_the_last(clock):
    stream = Terminal()
    progress = Progress(stream=stream)
    for step in range(1, 1001):
        clock.now += 0.001
        progress.update(step, 1000, 1.0, 0.5)
    assert 4 <= stream.getvalue().count("step ") <= 6
    assert "step 1,000/1,000 (100%)" in stream.getvalue()


def test_progress_fits_the_terminal(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    Progress(stream=stream).update(1, 10, 1.0, 0.5)
    assert len(stream.getvalue().removeprefix("\r\x1b[K")) == 19


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_progress_is_silent_off_a_terminal_and_with_quiet(stream):
    stream = stream()
    progress = Progress(quiet=stream.isatty(), stream=stream)
    progress.update(1, 10, 1.0, 0.5)
    progress.clear()
    progress.close()
    assert stream.getvalue() == ""


def test_progress_on_standard_error_is_silent_when_it_is_captured(capsys):
    Progress().update(1, 10, 1.0, 0.5)
    assert capsys.readouterr().err == ""
