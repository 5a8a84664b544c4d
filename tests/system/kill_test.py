"""A run that is killed again and again, at any moment, equals one that never was."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import tiny
from runs import nothing, records, without_speed

KILLS = 4


def _train(store, workdir, connection):
    """Trains in a child process, and sends a message when the step is compiled."""
    from jaxrank.runtime.stop import ShutdownSignal
    from jaxrank.train import train

    whole = ShutdownSignal.asked

    def asked(self, save=False):
        connection.send("it trains")
        ShutdownSignal.asked = whole
        return whole(self, save)

    ShutdownSignal.asked = asked

    c = tiny.config(num_steps=120, log_every_steps=2, ema_decay=0.9)
    c.data.store = store
    c.eval.every_steps = 20
    c.checkpoint.every_steps = 4

    train(c, workdir, report=nothing, quiet=True)


def started(context, store, workdir):
    """A process that has begun to train, or that ended because nothing was left to train."""
    local, remote = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(str(store), str(workdir), remote))
    process.start()
    remote.close()
    assert local.poll(120)
    with contextlib.suppress(EOFError):  # killed between its last checkpoint and its end
        local.recv()
    return process


def saved(workdir):
    """Step, checksums, data and monitor of the newest checkpoint."""
    newest = max((workdir / "checkpoints").iterdir(), key=lambda p: int(p.name))
    run = json.loads((newest / "run" / "metadata").read_text())
    return newest.name, run["checksums"], run["data"], run["monitor"]


@pytest.mark.slow
def test_a_run_killed_at_random_moments_equals_one_that_never_was(store, tmp_path):
    context = multiprocessing.get_context("forkserver")
    # Imported once; no device is used there, so a copy of it can begin to.
    context.set_forkserver_preload(["jaxrank.train", __name__])
    whole = started(context, store, tmp_path / "whole")
    began = time.monotonic()
    whole.join(240)
    assert whole.exitcode == 0
    seconds = time.monotonic() - began

    draw, killed, during_saves = random.Random(7), 0, 0
    workdir = tmp_path / "killed"
    # More kills if none of them hit a save, which depends on the load of the machine.
    while killed < KILLS or (not during_saves and killed < 4 * KILLS):
        process = started(context, store, workdir)
        process.join(draw.uniform(0, 3 * seconds / KILLS))
        if process.exitcode is not None:  # it came to the end: once more, from a random checkpoint
            assert process.exitcode == 0
            assert saved(workdir) == saved(tmp_path / "whole")
            forget(workdir, draw)
            continue
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        killed += 1
        during_saves += any(not p.name.isdecimal() for p in (workdir / "checkpoints").iterdir())
    last = started(context, store, workdir)
    last.join(240)
    assert last.exitcode == 0
    assert during_saves
    assert saved(workdir) == saved(tmp_path / "whole")
    for kind in ("train", "valid"):
        result, expected = (
            without_speed(records(path, kind)) for path in (workdir, tmp_path / "whole")
        )
        assert result == expected


def forget(workdir: Path, draw):
    """Leaves the oldest checkpoint only."""
    steps = sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdecimal())
    for step in steps[1:]:
        (workdir / "checkpoints" / str(step)).rename(workdir / f"gone-{step}-{draw.random()}")
