"""Runs of the tiny config on one store, and what tests ask of them afterwards."""

import json

import jax
import tiny

from jaxrank.job import build
from jaxrank.train import train


def nothing(text):
    """Tells nobody."""


def on_store(store, **changes):
    c = tiny.config(**changes)
    c.data.store = str(store)
    return c


def run(store, workdir, **changes):
    return train(on_store(store, **changes), workdir, report=nothing)


def newest(config, workdir):
    """The job of a run, and the state of its newest checkpoint."""
    job = build(config, workdir, nothing)
    job.batches.close()
    program = job.program
    state, _ = job.checkpoints.restore(
        job.checkpoints.step(), program.blank(), program.state_shape, program.state_sharding
    )
    return job, state


def newest_state(config, workdir):
    """The state of the newest checkpoint, on the host."""
    _, state = newest(config, workdir)
    return jax.device_get(state._replace(scratch={}))


def final_state(store, workdir, **changes):
    return newest_state(on_store(store, **changes), workdir)


def records(workdir, kind="train"):
    """The lines of metrics.jsonl of one kind, or of all with None, in order."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [r for r in lines if kind in (None, r["kind"])]


def without_speed(lines):
    return [{k: v for k, v in r.items() if k != "examples_per_second"} for r in lines]
