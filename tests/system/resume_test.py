"""A run that was stopped in any way and resumes equals an uninterrupted run to the bit."""

import functools
import json
import os
import shutil
import signal
import time

import pytest
from runs import nothing, records, without_speed
from sharing import share_programs
from variants import NAMES

from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.errors import StoppedError
from jaxrank.program import CompiledSteps
from jaxrank.runtime.prefetch import DevicePrefetcher
from jaxrank.train import train


class Stopped(Exception):
    pass


@pytest.fixture
def kept_programs(_programs):
    """The programs that equal runs of all modules share."""
    return _programs


@pytest.fixture
def programs(monkeypatch):
    """Returns a list of the programs that the runs of a test compile."""
    outputs, init = [], CompiledSteps.__init__

    def noted(program, *args):
        init(program, *args)
        outputs.append(program)

    monkeypatch.setattr(CompiledSteps, "__init__", noted)
    return outputs


def saved(workdir):
    """Checksums, position and monitor of the newest checkpoint."""
    newest = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    result = json.loads((newest / "run" / "metadata").read_text())
    assert len(result["checksums"]["training"]) > 10
    return newest.name, result


def assert_same_run(workdir, unbroken):
    assert saved(workdir) == saved(unbroken)
    for kind in ("train", "valid"):
        result, expected = (without_speed(records(path, kind)) for path in (workdir, unbroken))
        assert expected
        assert result == expected


# Ways to stop a run of 16 steps, two per execution. `start` starts it in `workdir`, with a function
# for its reports and changes of its config.


def stop_by_error(start, workdir):
    """After the second evaluation, before the checkpoint of that one is saved."""
    lines = []

    def report(text):
        lines.append(text)
        if sum(line.startswith("step ") for line in lines) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        start(report)
    assert len(list((workdir / "checkpoints").iterdir())) == 1


def stop_by_fewer_steps(start, workdir):
    start(nothing, num_steps=8)


def stop_after_save_by_time(start, workdir):
    """Before the first checkpoint by steps."""

    def report(text):
        if text.startswith("step 8:"):
            raise Stopped

    with pytest.raises(Stopped):
        start(report, **{"checkpoint.every_minutes": 1e-6})
    assert saved(workdir)[0] == "6"


def stop_by_signal(number, start, workdir):
    lines = []

    def report(text):
        lines.append(text)
        if text.startswith("step 8:"):
            os.kill(os.getpid(), number)

    with pytest.raises(StoppedError, match=f"after step 10 of 16 by {number.name}.*/10") as result:
        start(report)
    assert result.value.exit_status == 128 + number
    assert any(f"{number.name}: saving a checkpoint at step 10" in text for text in lines)


def stop_without_input(executions, start, workdir):
    """By a signal while the input gives nothing. After four executions a checkpoint exists."""
    step, inputs, in_vain = 2 * executions, [], []
    following, waiting = TrainBatches.__next__, DevicePrefetcher.wait

    def wait(feed, seconds):
        is_there = waiting(feed, seconds)
        if not is_there:
            in_vain.append(1)
        return is_there

    def stuck(batches):
        if len(inputs) == executions:
            in_vain.clear()
            while len(in_vain) < 2:  # the steps before are done
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            limit = time.monotonic() + 30
            while not (workdir / "checkpoints" / str(step)).exists():
                assert time.monotonic() < limit
                time.sleep(0.05)
            time.sleep(1)
        inputs.append(1)
        return following(batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrank.loop._LOOK", 0.05)
        patch.setattr(DevicePrefetcher, "wait", wait)
        patch.setattr(TrainBatches, "__next__", stuck)
        with pytest.raises(StoppedError, match=f"after step {step} of 16 by SIGTERM.*/{step}"):
            start(nothing)


STOPS = {
    "error": stop_by_error,
    "fewer steps": stop_by_fewer_steps,
    "after a save by time": stop_after_save_by_time,
    "SIGTERM": functools.partial(stop_by_signal, signal.SIGTERM),
    "SIGINT": functools.partial(stop_by_signal, signal.SIGINT),
    "without input at step 4": functools.partial(stop_without_input, 2),
    "without input at step 8": functools.partial(stop_without_input, 4),
}
CASES = [*((name, "error") for name in NAMES), *(("plain", stop) for stop in list(STOPS)[1:])]


def signal_handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize(("name", "stop"), CASES)
def test_a_run_that_stops_and_resumes_equals_the_unbroken_one(
    variants, tmp_path, programs, kept_programs, monkeypatch, name, stop
):
    """The first case compiles its own program. Others have that of the unbroken run."""
    is_first = (name, stop) == CASES[0]
    if not is_first:
        share_programs(monkeypatch, kept_programs)
    unbroken, result, _ = variants.unbroken(name)
    programs.clear()
    if is_first:
        share_programs(monkeypatch, {})
    workdir, handlers = tmp_path / "run", signal_handlers()

    def start(report, **changes):
        train(variants.config(name, **changes), workdir, report=report, **variants.start(name))

    STOPS[stop](start, workdir)
    assert signal_handlers() == handlers
    step = saved(workdir)[0]
    # In another place, without what it started from, and with another use of the machine.
    shutil.move(workdir, tmp_path / "moved")
    lines, gone = [], {key: str(tmp_path / "gone") for key in variants.start(name)}
    other = {"data.num_workers": 2, "data.prefetch_batches": 3, "watch.hang_seconds": 500.0}
    c = variants.config(name, **(other if is_first else {}))
    is_other = stop == "fewer steps"
    again = train(c, tmp_path / "moved", report=lines.append, allow_config_change=is_other, **gone)
    assert f"Resuming after step {step}" in lines
    assert signal_handlers() == handlers
    assert_same_run(tmp_path / "moved", unbroken)
    for what in ("step", "metrics", "days", "constant", "best_possible"):
        assert getattr(again, what) == getattr(result, what)
    if is_first:
        (program,) = programs  # compiled once for both runs
        assert program.train._cache_size() == program.predictor.predict._cache_size() == 1
