"""The step on one GPU, for published shapes: jaxrank, PyTorch on the same card, and the floor.

    PYTHONPATH=. python benchmarks/gpu_step.py
    JAX_PLATFORMS=cpu PYTHONPATH=. python benchmarks/gpu_step.py --scale=0.002 --seconds=0.2

Needs JAX with flax, optax and ml_collections, and PyTorch for its own lines; no data, as ids are
drawn on the device. Each program has the card to itself, in a process of its own, and all run once
a round. Of each case is printed:

examples/s and ms of a step, by jaxrank (bfloat16 products, row optimizer as the case has it) and by
    PyTorch: nn.EmbeddingBag with sparse gradients and its AdaGrad (SparseAdam for lazy Adam),
    compiled layers under autocast.
tables: ms of the lookup, the gradient of each row and its exact update, without layers, and the
    bytes that these move at least (of each id a vector read, of each feature of an example a vector
    written and its gradient read, of each different row the row and its slots read and written)
    over the time, against what a copy moves in the same run.
floor: ms of the model's products at the rate that XLA has for them alone, and of those bytes at the
    rate of the copy.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gpu_cases import CASES, EXPONENT, Case

GROUP = 512
STEPS = 4  # of a call
PROGRAMS = ("step", "tables", "products", "copy", "torch")
COPIED = 2**30  # bytes that a copy reads, and writes


def jax_ids(key: Any, rows: int, shape: tuple[int, ...]) -> Any:
    """i32[shape] below `rows`: a bounded power law, the most frequent first."""
    import jax
    import jax.numpy as jnp

    tail = 1 - EXPONENT
    u = jax.random.uniform(key, shape)
    drawn = jnp.power((float(rows) ** tail - 1) * u + 1, 1 / tail)
    return jnp.clip(drawn.astype(jnp.int32), 1, rows) - 1


def program_of(case: Case):
    """jaxrank's programs of a case, and a call's batches on the device."""
    import jax
    import jax.numpy as jnp

    from jaxrank import mesh as meshes
    from jaxrank.features import (
        Batch,
        Categorical,
        Dense,
        Lists,
        Ragged,
        Schema,
        Table,
        Task,
        layout,
    )
    from jaxrank.program import BatchShape, Program, make_trainee

    names = [f"t{i}" for i in range(len(case.tables))]
    single = [f for f in case.features if f.ids == 1]
    several = [f for f in case.features if f.ids > 1]
    schema = Schema(
        tasks=(Task("click"),),
        floats=tuple(Dense(f"f{i}") for i in range(case.floats)),
        ids=tuple(Categorical(f"c{i}", names[f.table]) for i, f in enumerate(single)),
        lists=tuple(Ragged(f"l{i}", names[f.table], "sum") for i, f in enumerate(several)),
        tables=tuple(
            Table(n, rows, "integer") for n, (rows, _) in zip(names, case.tables, strict=True)
        ),
    )
    dims = {n: dim for n, (_, dim) in zip(names, case.tables, strict=True)}
    found = layout(schema, dims)
    size, key = case.config.batch_size, jax.random.key(0)
    group = GROUP if size % GROUP == 0 else size
    mesh = meshes.make_mesh(devices=1)
    trainee = make_trainee(case.config, found, mesh, num_steps=1000, room={})
    capacities = {
        s.name: group * sum(several[i].ids for i in s.lists) for s in found.stacks if s.lists
    }
    program = Program(trainee, mesh, BatchShape(size, group, capacities))

    def draw(key, feature: Any, shape: tuple[int, ...], stack: Any, table: int) -> Any:
        return jax_ids(key, case.tables[feature.table][0], shape) + stack.offsets[table]

    @jax.jit
    def batches(key):
        keys = iter(jax.random.split(key, len(case.features) + 2))
        ids, lists = {}, {}
        for s in found.stacks:
            if s.columns:
                columns = [
                    draw(next(keys), single[column], (STEPS, size), s, table)
                    for column, table in zip(s.columns, s.column_tables, strict=True)
                ]
                ids[s.name] = jnp.stack(columns, axis=2)
            if s.lists:
                values = [
                    draw(next(keys), several[i], (STEPS, size, several[i].ids), s, table)
                    for i, table in zip(s.lists, s.list_tables, strict=True)
                ]
                lengths = np.array([several[i].ids for i in s.lists])
                numbers = np.arange(len(lengths)).repeat(lengths)
                numbers = numbers + np.arange(group)[:, None] * len(lengths)
                shape = (STEPS, size // group, capacities[s.name])
                lists[s.name] = Lists(
                    ids=jnp.concatenate(values, axis=2).reshape(shape),
                    segments=jnp.broadcast_to(jnp.asarray(numbers.reshape(-1), jnp.int32), shape),
                    weights=jnp.ones(shape, jnp.float32),
                )
        labels = jax.random.bernoulli(next(keys), 0.25, (STEPS, size, 1)).astype(jnp.float32)
        return Batch(
            floats=jax.random.normal(next(keys), (STEPS, size, case.floats)),
            ids=ids,
            lists=lists,
            labels=labels,
            weights=jnp.ones_like(labels),
            dropped=jnp.zeros((STEPS, size // group, len(several)), jnp.int32),
            shifts=jnp.zeros((STEPS, size, 0), jnp.float32),
        )

    return program, jax.block_until_ready(batches(key))


def step(case: Case) -> Iterator[int]:
    import jax

    program, batch = program_of(case)
    state = program.init()
    while True:
        state, told = program.train(state, batch)
        jax.block_until_ready(told)
        yield STEPS


def tables(case: Case) -> Iterator[int]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    program, batch = program_of(case)
    embedding = program.trainee.embedding

    def one(state, batch):
        vectors, _ = embedding.lookup({k: t.rows for k, t in state[0].items()}, {}, batch)
        grads = jax.tree.map(lambda v: v * 1e-4, vectors)
        rate, count = jnp.float32(0.01), jnp.zeros((), jnp.int32)
        return embedding.update(*state, {}, batch, grads, rate=rate, step=count), ()

    mapped = jax.shard_map(
        lambda state, batch: jax.lax.scan(one, state, batch),
        mesh=program.mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    train = jax.jit(mapped, donate_argnums=0)
    first = program.init()
    state = first.tables, first.scratch
    del first
    while True:
        state, _ = train(state, batch)
        jax.block_until_ready(state)
        yield STEPS


def products(case: Case) -> Iterator[int]:
    import jax
    import jax.numpy as jnp

    size = case.config.batch_size

    @jax.jit
    def every(given):
        return [
            jnp.dot(a, b, preferred_element_type=jnp.float32)
            for x, kernel, grad in given
            for a, b in ((x, kernel), (grad, kernel.T), (x.T, grad))
        ]

    keys = iter(jax.random.split(jax.random.key(0), 64))
    given = [
        tuple(
            jax.random.normal(next(keys), s, jnp.bfloat16) for s in ((size, a), (a, b), (size, b))
        )
        for a, b in case.products()
    ]
    while True:
        jax.block_until_ready(every(given))
        yield 1


def copy(case: Case) -> Iterator[int]:
    """Calls a number of bytes steps."""
    import jax
    import jax.numpy as jnp

    x = jnp.zeros(COPIED // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    while True:
        x = jax.block_until_ready(add(x))
        yield 2 * COPIED


def torch_step(case: Case) -> Iterator[int]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, size = case.config.model, case.config.batch_size
    bags = [
        torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, device=device)
        for rows, dim in case.tables
    ]
    weights = [bag.weight for bag in bags]
    with torch.no_grad():
        for weight in weights:
            weight.normal_(std=0.01)

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            cross = model.cross_layers if model.cross == "low_rank" else 0
            linear, rank, width = torch.nn.Linear, model.cross_rank, case.width
            self.down = torch.nn.ModuleList(linear(width, rank, bias=False) for _ in range(cross))
            self.up = torch.nn.ModuleList(linear(rank, width) for _ in range(cross))
            sizes = (width, *model.hidden)
            self.tower = torch.nn.ModuleList(
                linear(a, b) for a, b in zip(sizes, model.hidden, strict=False)
            )
            self.head = linear(sizes[-1], 1)

        def forward(self, x0):
            x = x0
            for down, up in zip(self.down, self.up, strict=True):
                x = x0 * up(down(x)) + x
            for layer in self.tower:
                x = torch.relu(layer(x))
            return self.head(x)[:, 0]

    layers = Layers().to(device)
    compiled = torch.compile(layers) if device == "cuda" else layers
    if case.config.optim.tables.name == "lazy_adam":
        row_optimizer: Any = torch.optim.SparseAdam(weights, lr=1e-3)
    else:
        row_optimizer = torch.optim.Adagrad(weights, lr=0.01)
    optimizers = [row_optimizer, torch.optim.Adam(layers.parameters(), lr=1e-3, fused=True)]

    def ids(feature: Any) -> Any:
        rows, tail = case.tables[feature.table][0], 1 - EXPONENT
        u = torch.rand(size, feature.ids, device=device)
        drawn = ((float(rows) ** tail - 1) * u + 1) ** (1 / tail)
        return drawn.long().clamp(1, rows) - 1

    made = [[ids(f) for f in case.features] for _ in range(STEPS)]
    floats = torch.randn(size, case.floats, device=device)
    labels = (torch.rand(size, device=device) < 0.25).float()
    loss_of = torch.nn.BCEWithLogitsLoss()
    while True:
        for given in made:
            vectors = [bags[f.table](x) for f, x in zip(case.features, given, strict=True)]
            with torch.autocast(device, dtype=torch.bfloat16):
                logits = compiled(torch.cat([floats, *vectors], dim=1))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(logits.float(), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        yield STEPS


MAKERS: dict[str, Callable[[Case], Iterator[int]]] = {
    "step": step,
    "tables": tables,
    "products": products,
    "copy": copy,
    "torch": torch_step,
}


def table_bytes(case: Case) -> float:
    """The fewest that lookup and update of a step move; see above."""
    size, rng = case.config.batch_size, np.random.default_rng(0)
    slots = {"rowwise_adagrad": 0, "adagrad": 1, "lazy_adam": 2}[case.config.optim.tables.name]
    reads: dict[int, int] = {}
    total = 0
    for f in case.features:
        reads[f.table] = reads.get(f.table, 0) + f.ids * size
        total += 4 * case.tables[f.table][1] * size * (f.ids + 2)
    for table, count in reads.items():
        rows, dim = case.tables[table]
        tail = 1 - EXPONENT
        drawn = ((float(rows) ** tail - 1) * rng.random(count) + 1) ** (1 / tail)
        different = len(np.unique(drawn.astype(np.int32).clip(1, rows)))
        total += 2 * 4 * different * (dim * (1 + slots) + (slots == 0))
    return float(total)


def measured(maker: str, case: Case, seconds: float) -> float:
    """Steps (bytes, of `copy`) in a second."""
    made = MAKERS[maker](case)
    for _ in range(3):
        next(made)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        done += next(made)
    return done / (time.perf_counter() - began)


def in_a_process(name: str, maker: str, args: argparse.Namespace) -> float | None:
    """What `measured` gives, with the device to itself; None where it failed, which is told."""
    # The largest case needs nearly all memory; what is left is for the compiler's library.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"} | os.environ
    flags = [f"--seconds={args.seconds}", f"--scale={args.scale}", f"--program={maker}"]
    found = subprocess.run(
        [sys.executable, __file__, "--cases", name, *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["no words"])[-1]
        print(f"{name} {maker}: failed: {last}", file=sys.stderr, flush=True)
        return None
    return float(json.loads(found.stdout.splitlines()[-1]))


def line(name: str, case: Case, rates: dict[str, float]) -> str:
    size, moved = case.config.batch_size, table_bytes(case)
    flops = 6 * size * sum(a * b for a, b in case.products())
    shown = [f"{name}: {case.rows:,} rows, batch {size:,}, {case.ids} ids an example"]
    ms = {maker: 1e3 / rate for maker, rate in rates.items() if maker != "copy"}
    if "step" in rates:
        shown.append(f"jaxrank {size * rates['step']:,.0f} examples/s, {ms['step']:.3f} ms")
    shown.append(f"to reach on one H200: {case.target}")
    if "torch" in rates:
        shown.append(f"PyTorch {size * rates['torch']:,.0f} examples/s, {ms['torch']:.3f} ms")
        if "step" in rates:
            shown.append(f"jaxrank is {rates['step'] / rates['torch']:.2f} times as fast")
    if "tables" in rates and "copy" in rates:
        reached = moved * rates["tables"]
        shown.append(
            f"tables {ms['tables']:.3f} ms: {moved / 1e9:.3f} GB at {reached / 1e9:,.0f} GB/s,"
            f" {reached / rates['copy']:.0%} of a copy's {rates['copy'] / 1e9:,.0f}"
        )
    if "products" in rates and "copy" in rates:
        floor = ms["products"] + 1e3 * moved / rates["copy"]
        shown.append(
            f"floor {floor:.3f} ms: products {ms['products']:.3f} ms at"
            f" {flops * rates['products'] / 1e12:.1f} TFLOP/s, bytes {floor - ms['products']:.3f}"
        )
        if "step" in rates:
            shown.append(f"the step is at {floor / ms['step']:.0%} of it")
    return "\n  ".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each program in a round")
    parser.add_argument("--scale", type=float, default=1.0, help="of rows and batches")
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        case = CASES[args.cases[0]]()
        case = case if args.scale == 1 else case.scaled(args.scale)
        print(json.dumps(measured(args.program, case, args.seconds)))
        return
    for name in args.cases:
        case = CASES[name]()
        case = case if args.scale == 1 else case.scaled(args.scale)
        found: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for maker in args.programs:
                rate = in_a_process(name, maker, args)
                if rate is not None:
                    found.setdefault(maker, []).append(rate)
        print(line(name, case, {m: statistics.median(r) for m, r in found.items()}), flush=True)


if __name__ == "__main__":
    main()
