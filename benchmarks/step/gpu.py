"""Measures the step on one GPU for published shapes: jaxrank, PyTorch, fbgemm and the floor.

    python -m benchmarks.step.gpu
    JAX_PLATFORMS=cpu python -m benchmarks.step.gpu --scale=0.002 --seconds=0.2

Needs JAX with flax, optax and ml_collections, PyTorch for its own lines, and fbgemm_gpu for its
tables. A program whose package is missing is reported, and the others run. No data is needed,
because ids are drawn, and they are the same for all programs. For each case, the programs of JAX
run in one process, and those of PyTorch in another one after it. Each process uses the GPU alone
while the next one draws its ids. Executions are dispatched as in training: the next one before the
last one is done. Prints for each case, as medians of the rounds:

examples/s and ms per step of jaxrank, with its memory. Products are bfloat16, and in criteo-mixed
    activations too. The row optimizer is that of the case. PyTorch uses nn.EmbeddingBag with sparse
    gradients, compiled layers and autocast. Its row optimizer is row-wise AdaGrad in a few lines,
    because PyTorch has none, or its own AdaGrad or SparseAdam.
tables: ms of the lookup, the gradient of each row and its exact update, without layers. The bytes
    per second of these are compared with those of a copy in the same run. The bytes are one vector
    read per id, one vector written and its gradient read per feature of an example, and the row and
    its slots read and written per distinct row. Also ms of the same with XLA only.
fbgemm_tables: ms of the same with fbgemm's table-batched embeddings (TBE), which TorchRec uses.
    Rows are float32, with the optimizer of the case and one exact update per distinct row.
floor: ms of the model's products at the rate of XLA for products alone, with sizes padded for the
    matrix units, plus ms of these bytes at the rate of the copy.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.harness import checkout
from benchmarks.harness.arguments import positive
from benchmarks.step import data, programs
from benchmarks.step.gpu_cases import CASES, RATE, Case

GROUP = 512
STEPS = 4  # per execution
PROGRAMS = ("step", "tables", "tables_xla", "products", "copy", "torch", "fbgemm_tables")
BY_TORCH = ("torch", "fbgemm_tables")
COPIED = 2**30  # bytes that a copy reads and writes, each


@functools.lru_cache(maxsize=1)
def draw_ids(case: Case) -> list[np.ndarray]:
    """Draws the ids of each feature for an execution, i32[STEPS, B, ids], equal in all programs."""
    size, rng = case.config.batch_size, np.random.default_rng(0)
    return [
        data.power_law(rng, case.tables[f.table][0], (STEPS, size, f.ids)).astype(np.int32)
        for f in case.features
    ]


def build_program(case: Case, mesh: Any):
    """Builds jaxrank's programs of a case, whose lists fill their capacity."""
    from jaxrank import defaults
    from jaxrank.build import Builder
    from jaxrank.layout import layout
    from jaxrank.program import BatchShape, CompiledSteps

    lay = layout(make_schema(case), {f"t{i}": dim for i, (_, dim) in enumerate(case.tables)})
    size = case.config.batch_size
    group = GROUP if size % GROUP == 0 else size
    several = [f.ids for f in case.features if f.ids > 1]
    room = {s.name: group * sum(several[i] for i in s.lists) for s in lay.stacks if s.lists}
    config = defaults.choose_unread(case.config, size, make_schema(case), lambda _: None)
    step_spec = Builder(config, lay.schema).step_spec(lay, mesh, num_steps=1000, room={})
    return CompiledSteps(step_spec, mesh, BatchShape(size, group, room))


def ready(case: Case):
    """Builds the programs, and the batches of an execution on the device."""
    import jax

    from jaxrank import mesh as meshes

    program = build_program(case, meshes.make_mesh(devices=1))
    batch = make_batches(case, program.step_spec.embedding.layout, program.shape.group)
    return program, jax.block_until_ready(jax.device_put(batch))


def make_schema(case: Case):
    """Returns the schema: single ids are columns, several ids are lists that are summed."""
    from jaxrank.features import Categorical, Dense, Ragged, Schema, Table, Task

    single = [f for f in case.features if f.ids == 1]
    several = [f for f in case.features if f.ids > 1]
    return Schema(
        tasks=(Task("click"),),
        dense=tuple(Dense(f"f{i}") for i in range(case.floats)),
        categorical=tuple(Categorical(f"c{i}", f"t{f.table}") for i, f in enumerate(single)),
        ragged=tuple(Ragged(f"l{i}", f"t{f.table}", "sum") for i, f in enumerate(several)),
        tables=tuple(Table(f"t{i}", rows, "integer") for i, (rows, _) in enumerate(case.tables)),
    )


def make_batches(case: Case, layout: Any, group: int):
    """Builds the batches of an execution on the host, with lists that fill their capacity.

    layout: the layout of the schema.
    group: number of examples whose lists are packed together.
    """
    from jaxrank.features import Batch, Lists

    size, drawn = case.config.batch_size, draw_ids(case)
    single = [x[:, :, 0] for x in drawn if x.shape[2] == 1]
    several = [x for x in drawn if x.shape[2] > 1]
    ids, lists = {}, {}
    for s in layout.stacks:
        if s.columns:
            columns = [
                single[column] + np.int32(s.offsets[table])
                for column, table in zip(s.columns, s.column_tables, strict=True)
            ]
            ids[s.name] = np.stack(columns, axis=2)
        if s.lists:
            values = [
                several[i] + np.int32(s.offsets[table])
                for i, table in zip(s.lists, s.list_tables, strict=True)
            ]
            lengths = np.array([x.shape[2] for x in values])
            numbers = np.arange(len(lengths)).repeat(lengths)
            numbers = numbers + np.arange(group)[:, None] * len(lengths)
            shape = (STEPS, size // group, numbers.size)
            lists[s.name] = Lists(
                ids=np.concatenate(values, axis=2).reshape(shape),
                segments=np.broadcast_to(numbers.reshape(-1).astype(np.int32), shape),
                weights=np.ones(shape, np.float32),
            )
    rng = np.random.default_rng(1)
    labels = (rng.random((STEPS, size, 1)) < 0.25).astype(np.float32)
    return Batch(
        dense=rng.normal(size=(STEPS, size, case.floats)).astype(np.float32),
        ids=ids,
        lists=lists,
        labels=labels,
        weights=np.ones_like(labels),
        dropped=np.zeros((STEPS, size // group, len(several)), np.int32),
        logit_correction=np.zeros((STEPS, size, 0), np.float32),
    )


def step(case: Case) -> Iterator[int]:
    program, batch = ready(case)
    state, metrics = program.init(), None
    while True:
        before = metrics
        state, metrics = program.train(state, batch, np.int32(STEPS))
        count = done(before, STEPS)
        if before is not None and (before.skipped.any() or not np.isfinite(before.loss).all()):
            raise RuntimeError(
                f"losses must be finite and no step skipped: found losses {before.loss}, skipped"
                f" {before.skipped}."
            )
        yield count


def done(before: Any, count: int) -> int:
    """Waits for an earlier result, and returns the count."""
    import jax

    jax.block_until_ready(before)
    return count


def tables(case: Case) -> Iterator[int]:
    program, batch = ready(case)
    for _ in programs.tables(program, [batch], waits=False):
        yield STEPS


def tables_xla(case: Case) -> Iterator[int]:
    """Runs the tables with XLA only, without the kernel."""
    from jaxrank.embedding.backends import gpu_kernel

    with unittest.mock.patch.object(gpu_kernel, "is_here", return_value=False):
        yield from tables(case)


def products(case: Case) -> Iterator[int]:
    from jaxrank.embedding.backends.base import round_up

    # Sizes are padded for the matrix units, as in jaxrank.
    sizes = [(round_up(a, 8), round_up(b, 8) if b > 1 else b) for a, b in case.products()]
    for _ in programs.products(sizes, case.config.batch_size, "bfloat16"):
        yield programs.STEPS


def copy(case: Case) -> Iterator[int]:
    """Counts a byte as a step."""
    return programs.copy(COPIED, passes=32)


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
            cross = model.cross_layers if model.cross == "dcn_v2_low_rank" else 0
            linear, rank, width = torch.nn.Linear, model.cross_rank, case.width
            floats = itertools.pairwise((case.floats, *model.dense_mlp_units))
            self.bottom = torch.nn.ModuleList(linear(a, b) for a, b in floats)
            self.down = torch.nn.ModuleList(linear(width, rank, bias=False) for _ in range(cross))
            self.up = torch.nn.ModuleList(linear(rank, width) for _ in range(cross))
            sizes = (width, *model.mlp_units)
            self.tower = torch.nn.ModuleList(
                linear(a, b) for a, b in zip(sizes, model.mlp_units, strict=False)
            )
            self.head = linear(sizes[-1], 1)

        def forward(self, floats, vectors):
            for layer in self.bottom:
                floats = torch.relu(layer(floats))
            x = x0 = torch.cat([floats, *vectors], dim=1)
            for down, up in zip(self.down, self.up, strict=True):
                x = x0 * up(down(x)) + x
            for layer in self.tower:
                x = torch.relu(layer(x))
            return self.head(x)[:, 0]

    layers = Layers().to(device)
    compiled = torch.compile(layers) if device == "cuda" else layers
    dense = torch.optim.Adam(layers.parameters(), lr=1e-3, fused=True)
    kind = case.config.optim.tables.name
    if kind == "rowwise_adagrad":
        sums = [torch.full((rows,), 0.1, device=device) for rows, _ in case.tables]
        optimizers: list[Any] = [dense]
    else:
        sparse: Any = torch.optim.SparseAdam if kind == "lazy_adam" else torch.optim.Adagrad
        sums, optimizers = [], [dense, sparse(weights, lr=0.01)]

    @torch.no_grad()
    def rowwise() -> None:
        """Updates rows with row-wise AdaGrad, which PyTorch does not have."""
        for weight, total in zip(weights, sums, strict=False):
            assert weight.grad is not None
            gradient = weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            total.index_add_(0, rows, values.square().mean(dim=1))
            weight.index_add_(0, rows, values / total[rows].sqrt()[:, None], alpha=-0.01)
            weight.grad = None

    prepared = [
        [torch.from_numpy(x[step].astype(np.int64)).to(device) for x in draw_ids(case)]
        for step in range(STEPS)
    ]
    floats = torch.randn(size, case.floats, device=device)
    labels = (torch.rand(size, device=device) < 0.25).float()
    loss_function = torch.nn.BCEWithLogitsLoss()
    while True:
        for inputs in prepared:
            vectors = [bags[f.table](x) for f, x in zip(case.features, inputs, strict=True)]
            with torch.autocast(device, dtype=torch.bfloat16):
                logits = compiled(floats, vectors)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_function(logits.float(), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
            rowwise()
        if device == "cuda":
            torch.cuda.synchronize()
        yield STEPS


def fbgemm_tables(case: Case) -> Iterator[int]:
    """Runs lookup, gradient and exact update of the tables with fbgemm's TBE, without layers."""
    import torch

    tables, make_input = fbgemm_parts(case)
    inputs = [make_input(step) for step in range(STEPS)]
    width = sum(case.tables[f.table][1] for f in case.features)
    gradient = torch.randn(case.config.batch_size, width, device=inputs[0][0].device) * 1e-3
    while True:
        for values, offsets in inputs:
            tables(values, offsets).backward(gradient)
        if gradient.is_cuda:
            torch.cuda.synchronize()
        yield STEPS


def fbgemm_parts(case: Case):
    """Returns TBE's tables, and a function from a step to its values and offsets on the device.

    On CPU, TBE has none of the optimizers of rows that keep state per element, so all tables use
    row-wise AdaGrad there.
    """
    import torch

    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError as error:
        raise RuntimeError(
            f"fbgemm_gpu must be installed for PyTorch {torch.__version__}: found {error}. Install"
            " fbgemm-gpu, or leave fbgemm_tables out of --programs."
        ) from error

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    location = EmbeddingLocation.DEVICE if has_gpu else EmbeddingLocation.HOST
    processor = ComputeDevice.CUDA if has_gpu else ComputeDevice.CPU
    optimizers = {
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "lazy_adam": EmbOptimType.ADAM,  # of TBE: updates the rows that were read
    }
    name = case.config.optim.tables.name if has_gpu else "rowwise_adagrad"
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, location, processor) for rows, dim in case.tables],
        feature_table_map=[f.table for f in case.features],
        optimizer=optimizers[name],
        learning_rate=RATE,
        eps=1e-8,
        device=device,
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    # Values are ordered by feature, then by example. `offsets` has the start of each list.
    counts = np.concatenate([np.full(case.config.batch_size, f.ids) for f in case.features])
    offsets = torch.from_numpy(np.append(0, counts.cumsum()).astype(np.int64)).to(device)

    def make_input(step: int):
        values = np.concatenate([ids[step].reshape(-1) for ids in draw_ids(case)])
        return torch.from_numpy(values.astype(np.int64)).to(device), offsets

    return tables, make_input


MAKERS: dict[str, Callable[[Case], Iterator[int]]] = {
    "step": step,
    "tables": tables,
    "tables_xla": tables_xla,
    "products": products,
    "copy": copy,
    "torch": torch_step,
    "fbgemm_tables": fbgemm_tables,
}


def table_bytes(case: Case) -> float:
    """Returns the bytes of lookup and update of a step, see the module docstring."""
    size = case.config.batch_size
    slots = {"rowwise_adagrad": 0, "adagrad": 1, "lazy_adam": 2}[case.config.optim.tables.name]
    total = 0
    read: dict[Any, Any] = {}
    for f, ids in zip(case.features, draw_ids(case), strict=True):
        read.setdefault(f.table, []).append(ids[0].reshape(-1))
        total += 4 * case.tables[f.table][1] * size * (f.ids + 2)
    for table, table_ids in read.items():
        dim = case.tables[table][1]
        different = len(np.unique(np.concatenate(table_ids)))
        total += 2 * 4 * different * (dim * (1 + slots) + (slots == 0))
    return float(total)


def program_device(maker: str) -> str:
    """Returns the device of a program. It must be a GPU unless JAX_PLATFORMS=cpu is set."""
    if maker in BY_TORCH:
        try:
            import torch
        except ImportError as error:
            raise RuntimeError(
                f"PyTorch must be installed: found {error}. Install torch, or leave {maker} out of"
                " --programs."
            ) from error

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
        platform, why = "cpu", "torch.cuda.is_available() is false"
    else:
        import jax

        device = jax.devices()[0]
        if device.platform == "gpu":
            return device.device_kind
        platform, why = device.platform, f"JAX has {jax.devices()}"
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        raise SystemExit(f"device must be a GPU, or JAX_PLATFORMS=cpu must be set: {why}.")
    return platform


def measured(maker: str, case: Case, args: argparse.Namespace) -> list[float]:
    """Returns the steps/s of each round, bytes/s for `copy`."""
    running, rates = MAKERS[maker](case), []
    for _ in range(3):
        next(running)
    for _ in range(args.rounds):
        started, steps = time.perf_counter(), 0
        while time.perf_counter() - started < args.seconds:
            steps += next(running)
        rates.append(steps / (time.perf_counter() - started))
    return rates


def child(case: Case, args: argparse.Namespace) -> None:
    """Waits for the start signal, and prints a line for each program."""
    moved = table_bytes(case)
    if set(args.programs) & set(BY_TORCH):
        with contextlib.suppress(ImportError):  # reported by the program
            import torch  # noqa: F401  takes seconds, so imported before it uses the GPU
    else:
        import jaxrank.program  # noqa: F401
    input()
    print(json.dumps(["bytes", [moved], "", 0.0]), flush=True)
    for maker in args.programs:
        try:
            device = program_device(maker)
            rates = measured(maker, case, args)
        except Exception as error:  # for example out of memory: others continue
            words = " ".join(f"{type(error).__name__}: {error}".split())
            print(json.dumps([maker, [], words[:300], 0.0]), flush=True)
        else:
            print(json.dumps([maker, rates, device, peak(maker)]), flush=True)
        gc.collect()
        if maker in BY_TORCH:
            release_memory()


def release_memory() -> None:
    """Returns PyTorch's cached GPU memory, so that the next program finds one large block."""
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def peak(maker: str) -> float:
    """Returns the peak of the GPU memory of this process in GiB, 0 if it is unknown."""
    if maker in BY_TORCH:
        import torch

        return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30


class Process:
    """A process that runs programs of a case. It starts measuring when `results` is called."""

    def __init__(self, name: str, programs: list[str], args: argparse.Namespace):
        # The largest case needs nearly all memory. The rest is for the libraries of the compiler.
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"} | checkout.environment()
        flags = [f"--seconds={args.seconds}", f"--scale={args.scale}", f"--rounds={args.rounds}"]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", "--cases", name, *flags, "--programs", *programs],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def results(self) -> Iterator[tuple[str, list[float], str, float]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("go", file=self._process.stdin, flush=True)
        for text in self._process.stdout:
            if text.startswith("["):
                maker, rates, device, gib = json.loads(text)
                yield maker, rates, device, gib
        self._process.wait()


def line(
    name: str, case: Case, rates: dict[str, float], devices: set[str], gib: dict[str, float]
) -> str:
    size, moved = case.config.batch_size, rates["bytes"]
    flops = 6 * size * sum(a * b for a, b in case.products())
    platforms = " and ".join(sorted(devices))
    shown = [
        f"{name} on {platforms}: {case.rows:,} rows, batch {size:,}, {case.ids} ids per example"
    ]
    ms = {maker: 1e3 / rates[maker] for maker in PROGRAMS if maker in rates and maker != "copy"}
    if "step" in rates:
        took = f", {gib['step']:.1f} GiB" if gib["step"] else ""
        shown.append(f"jaxrank {size * rates['step']:,.0f} examples/s, {ms['step']:.3f} ms{took}")
    shown.append(f"target on one H200: {case.target}")
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
    if "tables" in rates and "tables_xla" in rates:
        times = rates["tables"] / rates["tables_xla"]
        shown.append(f"with XLA only {ms['tables_xla']:.3f} ms: {times:.2f} times as long")
    if "fbgemm_tables" in rates:
        shown.append(f"fbgemm's tables {ms['fbgemm_tables']:.3f} ms")
        if "tables" in rates:
            times = rates["tables"] / rates["fbgemm_tables"]
            shown[-1] += f": jaxrank's are {times:.2f} times as fast"
    if "products" in rates and "copy" in rates:
        floor = ms["products"] + 1e3 * moved / rates["copy"]
        shown.append(
            f"floor {floor:.3f} ms: products {ms['products']:.3f} ms at"
            f" {flops * rates['products'] / 1e12:.1f} TFLOP/s, bytes {floor - ms['products']:.3f}"
        )
        if "step" in rates:
            shown.append(f"the step reaches {floor / ms['step']:.0%} of the floor's speed")
    return "\n  ".join(shown)


def make_case(name: str, scale: float) -> Case:
    case = CASES[name]()
    return case if scale == 1 else case.scaled(scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="per program and round")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of rows and batch sizes")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(make_case(args.cases[0], args.scale), args)
        return
    by_jax = [maker for maker in args.programs if maker not in BY_TORCH]
    by_torch = [maker for maker in args.programs if maker in BY_TORCH]
    wanted = [(name, some) for name in args.cases for some in (by_jax, by_torch) if some]
    following = Process(*wanted[0], args)
    has_all = True  # at least one result per case
    rates: dict[str, float] = {}
    gib: dict[str, float] = {}
    devices: set[str] = set()
    for i, (name, _) in enumerate(wanted):
        process = following
        if i + 1 < len(wanted):
            following = Process(*wanted[i + 1], args)
        for maker, each, device, taken in process.results():
            if not each:
                print(f"{name} {maker}: failed: {device}", file=sys.stderr, flush=True)
                continue
            if maker == "bytes":
                rates["bytes"] = each[0]
                continue
            shown = ", ".join(f"{rate:,.1f}" for rate in each)
            print(f"{name} {maker}: {shown} per second", file=sys.stderr, flush=True)
            rates[maker], gib[maker] = statistics.median(each), taken
            devices.add(device)
        if i + 1 == len(wanted) or wanted[i + 1][0] != name:
            if devices:
                print(line(name, make_case(name, args.scale), rates, devices, gib), flush=True)
            has_all = has_all and bool(devices)
            rates, gib, devices = {}, {}, set()
    if not has_all:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
