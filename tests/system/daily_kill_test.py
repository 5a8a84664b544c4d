"""Commands of examples/daily that are killed at random moments equal commands that never were."""

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
# Checkpoints within a day, so that a killed run has something to continue from.
OVERRIDES = ("--config.batch_size=16", "--config.checkpoint.every_steps=4")
COMMANDS = [
    (name, number)
    for number in range(DAYS)
    for name in ("prepare", "gate", "train", "predict")
    if (name != "gate" or number) and (name != "predict" or number == DAYS - 1)
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
        else:
            getattr(day, command)(chain, number)


class Chain:
    """A chain whose commands run in child processes."""

    def __init__(self, context, root, name, paths):
        self._context, self._root, self._name, self.paths = context, root, name, paths

    def started(self, command, number):
        local, remote = self._context.Pipe(duplex=False)
        args = (self._root, self._name, command, number, remote)
        process = self._context.Process(target=_command, args=args)
        process.start()
        remote.close()
        assert local.poll(120)
        local.recv()
        return process

    def finish(self, command, number):
        """Runs a command to its end, and returns its seconds."""
        process, began = self.started(command, number), time.monotonic()
        process.join(240)
        assert process.exitcode == 0, (command, number)
        return time.monotonic() - began

    def newest(self, number):
        """Returns the step of the newest checkpoint of a day, or -1."""
        paths = (self.paths.run(number) / "checkpoints").glob("*")
        return max((int(path.name) for path in paths if path.name.isdecimal()), default=-1)

    def wait_for_checkpoint(self, process, number, newest):
        """Waits until a run has saved a checkpoint after step `newest`, or has ended."""
        while process.is_alive() and self.newest(number) <= newest:
            time.sleep(0.005)

    def forget(self, command, number):
        """Removes the output of a command."""
        paths = self.paths
        if command in ("prepare", "train"):
            shutil.rmtree((paths.store if command == "prepare" else paths.run)(number))
        else:
            (paths.scores(number) if command == "gate" else predictions(paths, number)).unlink()

    def output(self, command, number):
        """Returns what a command has written, without speeds and without the chain's name."""
        paths = self.paths
        if command == "prepare":
            return lasting_content(paths.store(number))
        if command == "gate":
            text = paths.scores(number).read_text().replace(f"/{self._name}/", "/chain/")
            scores = json.loads(text, object_hook=lambda tree: without_speed([tree])[0])
            return scores, os.readlink(paths.production)
        if command == "predict":
            return predictions(paths, number).read_bytes()
        newest = self.newest(number)
        record = paths.run(number) / "checkpoints" / str(newest) / "run" / "metadata"
        saved = json.loads(record.read_text())
        metrics = [without_speed(records(paths.run(number), kind)) for kind in ("train", "valid")]
        return newest, saved["checksums"], saved["data"], metrics


@pytest.mark.slow
def test_daily_commands_killed_at_random_moments_equal_those_that_never_were(tmp_path):
    context = multiprocessing.get_context("forkserver")
    # Imported once; no device is used there, so a copy of it can begin to.
    context.set_forkserver_preload(["jaxrank.train", "jaxrank.evaluation.evaluate", __name__])
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
                os.kill(process.pid, signal.SIGKILL)
                process.join(60)
                killed[command, number] += 1
            else:  # faster than the whole one, which compiled its programs
                assert process.exitcode == 0
                seconds = min(seconds, time.monotonic() - began)
                broken.forget(command, number)
        broken.finish(command, number)
        assert broken.output(command, number) == whole.output(command, number), (command, number)
