"""Compares a model of two thousand features with one of forty, at equal numbers of ids per step.

    python -m benchmarks.step.many_features

Compiles the training step of both models and runs them in turn. Prints the compile time, the time
per step, and the ratio of the times per id.
"""

import argparse
import time

import jax
import numpy as np

from benchmarks.harness.arguments import positive
from jaxrank import config as configs
from jaxrank import defaults, json_files
from jaxrank import mesh as meshes
from jaxrank.build import Builder
from jaxrank.features import PAD, Batch, Categorical, Dense, Lists, Ragged, Schema, Table, Task
from jaxrank.layout import Layout, layout
from jaxrank.program import BatchShape, CompiledSteps
from jaxrank.runtime import huge_pages

DIM = 16
GROUP = 32
LENGTH = 3  # ids of a list on average
ROWS = 4_000_000  # total of all tables


def make_schema(ids: int, lists: int, floats: int, tables: int) -> Schema:
    names = [f"t{i}" for i in range(tables)]
    return Schema(
        tasks=(Task("click"),),
        dense=tuple(Dense(f"f{i}") for i in range(floats)),
        categorical=tuple(Categorical(f"c{i}", names[i % tables]) for i in range(ids)),
        ragged=tuple(Ragged(f"l{i}", names[i % tables]) for i in range(lists)),
        tables=tuple(Table(name, ROWS // tables, "integer") for name in names),
    )


def random_batch(lay: Layout, size: int, capacity: int, seed: int) -> Batch:
    """Draws uniform ids, and lists that fill their groups except for the slack of a real batch."""
    rng = np.random.default_rng(seed)
    (stack,) = lay.stacks
    rows = ROWS // len(lay.schema.tables)

    def draw(tables: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        offsets = np.resize(np.asarray(stack.offsets, np.int32)[list(tables)], shape)
        return rng.integers(0, rows, shape, dtype=np.int32) + offsets

    groups, used = size // GROUP, GROUP * len(stack.lists) * LENGTH
    segments = np.full((groups, capacity), PAD, np.int32)
    segments[:, :used] = np.repeat(np.arange(GROUP * len(stack.lists)), LENGTH)
    list_ids = np.full((groups, capacity), PAD, np.int32)
    list_ids[:, :used] = draw(tuple(np.repeat(stack.list_tables, LENGTH)), (groups, used))
    weights = np.where(list_ids == PAD, 0, 1 / LENGTH).astype(np.float32)
    labels = (rng.random((size, 1)) < 0.3).astype(np.float32)
    return Batch(
        dense=rng.normal(size=(size, len(lay.schema.dense))).astype(np.float32),
        ids={stack.name: draw(stack.column_tables, (size, len(stack.columns)))},
        lists={stack.name: Lists(list_ids, segments, weights)},
        labels=labels,
        weights=np.ones_like(labels),
        dropped=np.zeros((groups, len(stack.lists)), np.int32),
        logit_correction=np.zeros((size, 0), np.float32),
    )


class Case:
    """One model: its compiled step, its state and the batches of an execution."""

    def __init__(self, ids: int, lists: int, floats: int, tables: int, size: int, steps: int):
        lay = layout(make_schema(ids, lists, floats, tables), {f"t{i}": DIM for i in range(tables)})
        (stack,) = lay.stacks
        capacity = -(-GROUP * lists * LENGTH * 5 // 4 // 128) * 128
        c = configs.default()
        c.batch_size = size
        c.model.cross, c.model.mlp_units = "none", (32,)
        c = defaults.choose_unread(c, size, lay.schema, lambda _: None)
        mesh = meshes.make_mesh(devices=1)
        step_spec = Builder(c, lay.schema).step_spec(lay, mesh, num_steps=1000, room={})
        shape = BatchShape(size, GROUP, {stack.name: capacity})
        self.program = CompiledSteps(step_spec, mesh, shape)
        self.ids = size * (ids + lists * LENGTH)
        self.features = ids + lists + floats
        self.steps = steps
        batches = [random_batch(lay, size, capacity, seed) for seed in range(steps)]
        stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
        self.batch = meshes.put_batch(stacked, mesh, leading=1)
        start = time.perf_counter()
        lowered = self.program.train.lower(
            self.program.state_shape, self.batch, np.int32(self.steps)
        )
        lowered.compile()
        self.compile_seconds = time.perf_counter() - start
        self.state, metrics = self.program.train(
            self.program.init(), self.batch, np.int32(self.steps)
        )
        jax.block_until_ready(metrics)

    def step_seconds(self) -> float:
        start = time.perf_counter()
        self.state, metrics = self.program.train(self.state, self.batch, np.int32(self.steps))
        jax.block_until_ready((self.state, metrics))
        return (time.perf_counter() - start) / self.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--steps", type=positive, default=2)
    args = parser.parse_args()
    huge_pages.ensure()
    few = Case(30, 6, 4, tables=10, size=512 * 50, steps=args.steps)
    many = Case(1500, 300, 200, tables=500, size=512, steps=args.steps)
    assert few.ids == many.ids
    seconds: dict[Case, list[float]] = {few: [], many: []}
    for _ in range(args.rounds):
        for case, times in seconds.items():
            times.append(case.step_seconds())
    results = {}
    for case, times in seconds.items():
        step = float(np.median(times))
        print(
            f"{case.features:>5} features: compiled in {case.compile_seconds:5.1f} s,"
            f" {step * 1e3:7.1f} ms per step of {case.ids:,} ids,"
            f" {step / case.ids * 1e9:6.1f} ns per id"
        )
        results[case.features] = {"compile_seconds": case.compile_seconds, "step_seconds": step}
    ratios = np.array(seconds[many]) / np.array(seconds[few])
    print(f"time per id, {many.features} / {few.features} features: {np.median(ratios):.3f}")
    print(json_files.to_text({"ratio": float(np.median(ratios)), "features": results}))


if __name__ == "__main__":
    main()
