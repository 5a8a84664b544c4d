"""Runs of the tiny config on one store, and functions that read their results."""

import json

import jax
import numpy as np
import tiny
from declarations import check_line
from examples import stack_rows

from jaxrank.checkpoints.reader import dotted
from jaxrank.embedding.storage import logical_rows
from jaxrank.run import build
from jaxrank.train import train
from jaxrank.workdir import files as workdirs


def nothing(text):
    """Ignores a report."""


def store_config(store, **changes):
    c = tiny.config(**changes)
    c.data.store = str(store)
    return c


def run(store, workdir, **changes):
    return train(store_config(store, **changes), workdir, report=nothing)


def newest(config, workdir):
    """Builds a run, and restores the state of its newest checkpoint."""
    job = build(config, workdir, nothing)
    job.batches.close()
    program = job.program
    state, _ = job.checkpoints.restore(
        job.checkpoints.step(), program.blank(), program.state_shape, program.state_sharding
    )
    return job, state


def newest_state(config, workdir):
    """Returns the state of the newest checkpoint, on the host."""
    _, state = newest(config, workdir)
    return jax.device_get(state._replace(scratch={}))


def saved(config, workdir):
    """Saves a run with a checkpoint of random numbers at step 16, without training."""
    job = build(config, workdir, nothing)
    rng = np.random.default_rng(0)

    def noise(path, x):
        name = dotted(path)
        random = 0.1 * rng.normal(size=x.shape) * (x.dtype == np.float32)
        if "slots" in name or ".nu." in name:
            random = np.abs(random)
        if ".bias_" in name:
            random *= 0  # of DCN: with it, an empty feature would affect the output
        return jax.device_put(np.asarray(x + random, x.dtype), x.sharding)

    state = jax.tree_util.tree_map_with_path(noise, job.program.init())

    def is_adam(part):
        return hasattr(part, "mu")

    opt_state = jax.tree.map(
        lambda part: part._replace(count=part.count + 16) if is_adam(part) else part,
        state.opt_state,
        is_leaf=is_adam,
    )
    state = state._replace(step=state.step + 16, opt_state=opt_state)
    job.save(16, state, None)
    workdirs.save(workdir, config, job.schema, job.hot)
    job.checkpoints.close()
    job.batches.close()
    return job, state


def rows_by_value(job, state, kind):
    """Returns {table: {raw value: its row}} of a run. kind: "rows", "average" or a slot."""
    result = {}
    for stack in job.program.step_spec.embedding.layout.stacks:
        if kind == "average":
            arrays = dict(state.average.rows)
        else:
            arrays = {
                name: table.rows if kind == "rows" else table.slots[kind]
                for name, table in state.tables.items()
            }
        rows = logical_rows(jax.device_get(arrays), stack)
        for name in stack.tables:
            values = ["missing", "unknown", *job.store.vocabulary(name)[0]]
            places = stack_rows(stack, name, np.arange(len(values)))
            result[name] = dict(zip(values, rows[places], strict=True))
    return result


def final_state(store, workdir, **changes):
    return newest_state(store_config(store, **changes), workdir)


def records(workdir, kind="train"):
    """Returns `lines` of a run, all of which must be as they are declared."""
    for line in lines(workdir, None):
        check_line(line)
    return lines(workdir, kind)


def lines(workdir, kind="train"):
    """Returns the lines of metrics.jsonl of one kind in order, or all lines for None."""
    every = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line for line in every if kind in (None, line["kind"])]


def without_speed(every):
    speed = ("seconds", "examples_per_second")
    return [{k: v for k, v in r.items() if k not in speed} for r in every]
