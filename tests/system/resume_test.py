"""A run that was stopped in any way and resumes equals an uninterrupted run to the bit."""

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
def shared_programs(_programs, monkeypatch):
    """Shares programs per test, because the first test below counts the programs of its runs."""
    share_programs(monkeypatch, _programs)


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


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_resumes_equals_the_unbroken_one(
    variants, tmp_path, programs, kept_programs, monkeypatch, name
):
    """Interrupts a run after its second evaluation, before the checkpoint of that one is saved.

    The first run compiles its own program. Others have that of the unbroken run.
    """
    if name != "plain":
        share_programs(monkeypatch, kept_programs)
    unbroken, result, _ = variants.unbroken(name)
    programs.clear()
    if name == "plain":
        share_programs(monkeypatch, {})
    lines, workdir = [], tmp_path / "run"

    def stop(text):
        lines.append(text)
        if sum(line.startswith("step ") for line in lines) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        train(variants.config(name), workdir, report=stop, **variants.start(name))
    (step,) = (int(path.name) for path in (workdir / "checkpoints").iterdir())
    # In another place, without what it started from, and with another use of the machine.
    shutil.move(workdir, tmp_path / "moved")
    start = {key: str(tmp_path / "gone") for key in variants.start(name)}
    other = {"data.num_workers": 2, "data.prefetch_batches": 3, "watch.hang_seconds": 500.0}
    c = variants.config(name, **(other if name == "plain" else {}))
    again = train(c, tmp_path / "moved", report=lines.append, **start)
    assert f"Resuming after step {step}" in lines
    assert_same_run(tmp_path / "moved", unbroken)
    for what in ("step", "metrics", "days", "constant", "best_possible"):
        assert getattr(again, what) == getattr(result, what)
    if name == "plain":
        (program,) = programs  # compiled once for both runs
        assert program.train._cache_size() == program.predictor.predict._cache_size() == 1


@pytest.mark.usefixtures("shared_programs")
def test_a_run_of_fewer_steps_resumes_with_more(variants, tmp_path):
    train(variants.config("plain", num_steps=8), tmp_path, report=nothing)
    c = variants.config("plain")
    train(c, tmp_path, report=nothing, allow_config_change=True)
    assert_same_run(tmp_path, variants.unbroken("plain")[0])


@pytest.mark.usefixtures("shared_programs")
def test_a_run_resumes_from_a_checkpoint_that_was_saved_by_time(variants, tmp_path):
    def stop(text):
        if text.startswith("step 8:"):  # before the first checkpoint by steps
            raise Stopped

    by_time = {"checkpoint.every_minutes": 1e-6}
    with pytest.raises(Stopped):
        train(variants.config("plain", **by_time), tmp_path, report=stop)
    assert saved(tmp_path)[0] == "6"
    train(variants.config("plain"), tmp_path, report=nothing)
    assert_same_run(tmp_path, variants.unbroken("plain")[0])


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_after_a_checkpoint_from_which_it_resumes(variants, tmp_path, number):
    before, lines = signal.getsignal(number), []

    def send(text):
        lines.append(text)
        if text.startswith("step 8:"):
            os.kill(os.getpid(), number)

    c = variants.config("plain")
    with pytest.raises(StoppedError, match=f"after step 10 of 16 by {number.name}.*/10") as result:
        train(c, tmp_path, report=send)
    assert result.value.exit_status == 128 + number
    assert signal.getsignal(number) is before
    assert any(f"{number.name}: saving a checkpoint at step 10" in text for text in lines)

    train(c, tmp_path, report=nothing)
    assert signal.getsignal(number) is before
    assert_same_run(tmp_path, variants.unbroken("plain")[0])


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("executions", [2, 4])
def test_a_signal_while_the_input_gives_nothing_saves_what_there_is(
    variants, tmp_path, monkeypatch, executions
):
    """Executions have two steps. After four of them a checkpoint exists already."""
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
            while not (tmp_path / "checkpoints" / str(step)).exists():
                assert time.monotonic() < limit
                time.sleep(0.05)
            time.sleep(1)
        inputs.append(1)
        return following(batches)

    c = variants.config("plain")
    with monkeypatch.context() as patch:
        patch.setattr("jaxrank.loop._LOOK", 0.05)
        patch.setattr(DevicePrefetcher, "wait", wait)
        patch.setattr(TrainBatches, "__next__", stuck)
        with pytest.raises(StoppedError, match=f"after step {step} of 16 by SIGTERM.*/{step}"):
            train(c, tmp_path, report=nothing)
    train(c, tmp_path, report=nothing)
    assert_same_run(tmp_path, variants.unbroken("plain")[0])
