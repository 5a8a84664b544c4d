"""Commands of examples/daily that are killed at random moments equal commands that never were.

Both its single commands and the run of all chains.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time

import daily_example
import pytest
from preparations import lasting_content
from runs import records, without_speed

DAYS, ROWS, KILLS = 3, 900, 2
WINDOW = 2  # days of training from scratch
CHAINS = ("evicting", "growing")
# Checkpoints within a day, so that a killed run has something to continue from.
OVERRIDES = ("--config.batch_size=16", "--config.checkpoint.every_steps=4")
COMMANDS = [
    (name, number)
    for number in range(DAYS)
    for name in ("generate", "prepare", "gate", "train", "predict", "scratch")
    if (name != "gate" or number) and (name not in ("predict", "scratch") or number == DAYS - 1)
]


def predictions(chain, number):
    return chain.folder / "predictions" / f"{number}.parquet"


def _command(root, name, command, number, connection):
    """Runs a command of a chain in a child process, and sends a message when it starts."""
    with daily_example.modules() as modules:
        day = modules["day"]
        chain = day.Chain(root, name, OVERRIDES)
        connection.send("it starts")
        if command == "gate":
            day.promote(chain, number, day.gate(chain, number))
        elif command == "predict":  # scores a day with the model that it trained
            path = predictions(chain, number)
            path.parent.mkdir(parents=True, exist_ok=True)
            data = (f"--data={chain.store(number)}", "--split=train", f"--output={path}")
            day.jaxrank("predict", f"--workdir={chain.run(number)}", *data)
        elif command == "generate":
            modules["generate"].write(chain.folder, number, ROWS)
        elif command == "scratch":
            modules["run"].from_scratch(chain.folder, number, WINDOW)
        else:
            getattr(day, command)(chain, number)


def _context():
    context = multiprocessing.get_context("forkserver")
    # Imported once; no device is used there, so a copy of it can begin to.
    context.set_forkserver_preload(["jaxrank.train", "jaxrank.evaluation.evaluate", __name__])
    return context


def _run(root, connection):
    """Runs a day of all chains in a child process, and sends a message when it starts."""
    with daily_example.modules() as modules:
        connection.send("it starts")
        modules["run"].compare(root, days=1, rows=ROWS)


def _started(context, function, *args):
    """Starts a function in a child process, and returns the process when it has begun."""
    local, remote = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(*args, remote))
    process.start()
    remote.close()
    assert local.poll(300)
    local.recv()
    return process


def _kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)


def _newest(run):
    """Returns the step of the newest checkpoint of a run, or -1."""
    paths = (run / "checkpoints").glob("*")
    return max((int(path.name) for path in paths if path.name.isdecimal()), default=-1)


def _weights(run):
    """Returns what the newest checkpoint of a run has recorded of its state and data."""
    newest = _newest(run)
    record = run / "checkpoints" / str(newest) / "run" / "metadata"
    saved = json.loads(record.read_text())
    return newest, saved["checksums"], saved["data"]


class Chain:
    """A chain whose commands run in child processes.

    Args:
        root: directory of all chains.
        name: of the chain.
        paths: the `Chain` of the example.
    """

    def __init__(self, context, root, name, paths):
        self._context, self._root, self._name, self.paths = context, root, name, paths

    def started(self, command, number):
        return _started(self._context, _command, self._root, self._name, command, number)

    def finish(self, command, number):
        """Runs a command to its end, and returns its seconds."""
        process, began = self.started(command, number), time.monotonic()
        process.join(600)
        assert process.exitcode == 0, (command, number)
        return time.monotonic() - began

    def newest(self, number):
        """Returns the step of the newest checkpoint of a day, or -1."""
        return _newest(self.paths.run(number))

    def wait_for_checkpoint(self, process, number, newest):
        """Waits until a run has saved a checkpoint after step `newest`, or has ended."""
        while process.is_alive() and self.newest(number) <= newest:
            time.sleep(0.005)

    def _file(self, command, number):
        """Returns the file or directory that a command writes."""
        name = self.paths.store(number).name
        return {
            "generate": self.paths.folder / "raw" / f"{name}.parquet",
            "prepare": self.paths.store(number),
            "gate": self.paths.scores(number),
            "train": self.paths.run(number),
            "predict": predictions(self.paths, number),
            "scratch": self.paths.folder / "scratch" / name,
        }[command]

    def forget(self, command, number):
        """Removes the output of a command."""
        path = self._file(command, number)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def output(self, command, number):
        """Returns what a command has written, without speeds and without the chain's folder."""
        path = self._file(command, number)
        if command in ("generate", "predict"):
            return path.read_bytes()
        if command == "prepare":
            content = lasting_content(path)
            return content | {"manifest.json": self._plain(content["manifest.json"])}
        if command == "gate":
            return self._scores(path), os.readlink(self.paths.production)
        if command == "scratch":
            return self._scores(path / "score.json"), _weights(path / "run")
        metrics = [without_speed(records(path, kind)) for kind in ("train", "valid")]
        return _weights(path), metrics

    def _scores(self, path):
        return self._plain(json.loads(path.read_text()))

    def _plain(self, tree):
        """Returns the tree without speeds and without the chain's folder in its texts."""
        text = json.dumps(tree)
        for folder in (self.paths.folder, self._root):
            text = text.replace(f"{folder}/", "")
        return json.loads(text, object_hook=lambda tree: without_speed([tree])[0])


@pytest.mark.slow
def test_daily_commands_killed_at_random_moments_equal_those_that_never_were(tmp_path):
    context = _context()
    with daily_example.modules() as modules:
        for number in range(DAYS):
            modules["generate"].write(tmp_path, number, ROWS)
        whole, broken = (
            Chain(context, tmp_path, name, modules["day"].Chain(tmp_path, name))
            for name in ("whole", "broken")
        )
    draw, killed = random.Random(11), dict.fromkeys(COMMANDS, 0)
    for command, number in COMMANDS:
        seconds = whole.finish(command, number)
        while killed[command, number] < KILLS:
            newest = broken.newest(number)
            process, began = broken.started(command, number), time.monotonic()
            if command == "train" and killed[command, number]:
                # A start takes most of the time, so one kill is while it trains.
                broken.wait_for_checkpoint(process, number, newest)
                process.join(draw.uniform(0, seconds / 10))
            else:
                process.join(draw.uniform(0, seconds))
            if process.exitcode is None:
                _kill(process)
                killed[command, number] += 1
            else:  # faster than the whole one, which compiled its programs
                assert process.exitcode == 0
                seconds = min(seconds, time.monotonic() - began)
                broken.forget(command, number)
        broken.finish(command, number)
        assert broken.output(command, number) == whole.output(command, number), (command, number)


def _outputs(root, day):
    """Returns what the run of a day has written, without speeds and without its folder."""
    outputs = {"generate": Chain(None, root, "", day.Chain(root, "")).output("generate", 0)}
    for name in CHAINS:
        chain = Chain(None, root, name, day.Chain(root, name))
        state = chain.paths.folder / "days" / f"{chain.paths.store(0).name}.json"
        outputs[name, "state"] = json.loads(state.read_text()) | {"prepare_seconds": None}
        for command in ("prepare", "train"):
            outputs[name, command] = chain.output(command, 0)
    return outputs


@pytest.mark.slow
def test_a_run_of_all_chains_killed_at_random_moments_equals_one_that_never_was(tmp_path):
    """Of one day, because daily_example_test.py interrupts more at each of their commands."""
    context, draw, killed = _context(), random.Random(12), 0
    whole, began = _started(context, _run, tmp_path / "whole"), time.monotonic()
    whole.join(600)
    assert whole.exitcode == 0
    seconds, broken = time.monotonic() - began, tmp_path / "broken"
    while killed < KILLS:
        process, began = _started(context, _run, broken), time.monotonic()
        process.join(draw.uniform(0, seconds / KILLS))
        if process.exitcode is None:
            _kill(process)
            killed += 1
        else:  # faster than the whole one, which compiled its programs
            assert process.exitcode == 0
            seconds, killed = min(seconds, time.monotonic() - began), 0
            shutil.rmtree(broken)
    process = _started(context, _run, broken)
    process.join(600)
    assert process.exitcode == 0
    with daily_example.modules() as modules:
        ours, others = (_outputs(root, modules["day"]) for root in (broken, tmp_path / "whole"))
    assert ours.keys() == others.keys()
    assert not [key for key in ours if ours[key] != others[key]]
