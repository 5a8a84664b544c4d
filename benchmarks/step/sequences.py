"""Compares target attention over padded sequences with forms without empty places.

    python -m benchmarks.step.sequences
    python -m benchmarks.step.sequences --topology=v3-8

*padded* has f32[B, length, dim] and a mask, as models read sequences. *packed* has the events of
all examples one after another, f32[n, dim], and the example of each. n is the largest sum of
lengths of a hundred batches, because shapes are static. *compacted* reads the arrays of *padded*
and packs them itself: `packed_length` of the pool. All have the same layers.

*pool* is the forward and backward pass of the pool. *step* also reads the vectors of the events
from a table and adds their gradients to it. Both forms run in turn. With --topology, both are
compiled for one device of a TPU slice, and times are estimated as in `jaxrank compile --scaling`.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.arguments import positive
from jaxrank.features import PAD
from jaxrank.models.sequences.target_attention import TargetAttention
from jaxrank.runtime import huge_pages

DIM = 32
ROWS = 200_000
UNITS = (36,)
LEARNING_RATE = 0.01


class Histories(NamedTuple):
    """Lengths of the histories of a batch.

    draw: lengths i64[n] of n examples.
    """

    batch_size: int
    max_length: int
    draw: Callable[[np.random.Generator, int], np.ndarray]


CASES = {
    "short": Histories(4096, 16, lambda r, n: r.integers(0, 17, n)),
    "long": Histories(512, 200, lambda r, n: r.integers(150, 201, n)),
    "skewed": Histories(
        512, 200, lambda r, n: np.minimum(r.lognormal(2.3, 1.1, n).astype(np.int64), 200)
    ),
}


class Batches(NamedTuple):
    """One batch in both forms. The rows of places and events without a history are PAD.

    rows: i32[B, max_length], packed_rows: i32[n], examples: i32[n], candidates: i32[B].
    """

    rows: np.ndarray
    packed_rows: np.ndarray
    examples: np.ndarray
    candidates: np.ndarray


def draw(case: Histories, seed: int = 0) -> Batches:
    """Draws a batch, and the room for the events of a hundred."""
    rng = np.random.default_rng(seed)
    room = max(case.draw(rng, case.batch_size).sum() for _ in range(100))
    room = -(-int(room) // 128) * 128
    lengths = case.draw(rng, case.batch_size)
    mask = np.arange(case.max_length) < lengths[:, None]
    rows = np.full(mask.shape, PAD, np.int32)
    rows[mask] = rng.integers(0, ROWS, lengths.sum())
    packed, examples = (np.full(max(room, lengths.sum()), PAD, np.int32) for _ in range(2))
    packed[: lengths.sum()] = rows[mask]
    examples[: lengths.sum()] = np.repeat(np.arange(case.batch_size), lengths)
    return Batches(rows, packed, examples, rng.integers(0, ROWS, case.batch_size, dtype=np.int32))


def padded(params: Any, vectors: jax.Array, mask: jax.Array, candidate: jax.Array) -> Any:
    module = TargetAttention(UNITS, "highest")
    return module.apply({"params": params}, vectors, mask, vectors, candidate)


def packed(params: Any, vectors: jax.Array, examples: jax.Array, candidate: jax.Array) -> Any:
    module = TargetAttention(UNITS, "highest")
    return module.apply({"params": params}, vectors, examples, vectors, candidate, is_packed=True)


class Compacted(NamedTuple):
    """The pool of a model with `packed_length`."""

    length: float

    def __call__(
        self, params: Any, vectors: jax.Array, mask: jax.Array, candidate: jax.Array
    ) -> Any:
        module = TargetAttention(UNITS, "highest", self.length)
        return module.apply({"params": params}, vectors, mask, vectors, candidate)


def pool(
    form: Callable[..., jax.Array], params: Any, vectors: Any, places: Any, candidate: Any
) -> Any:
    """Returns the result and the gradients of the parameters, the vectors and the candidate."""

    def loss(params: Any, vectors: Any, candidate: Any) -> Any:
        result = form(params, vectors, places, candidate)
        return (result**2).sum(), result

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(params, vectors, candidate)


def step(
    form: Callable[..., jax.Array],
    table: jax.Array,
    params: Any,
    rows: jax.Array,
    places: jax.Array,
    candidates: jax.Array,
) -> Any:
    """Returns the table after the step, and the gradients of the parameters."""
    vectors = table.at[rows].get(mode="fill", fill_value=0)
    candidate = table.at[candidates].get(mode="fill", fill_value=0)
    _, (of_params, of_vectors, of_candidate) = pool(form, params, vectors, places, candidate)
    table = table.at[rows].add(-LEARNING_RATE * of_vectors, mode="drop")
    return table.at[candidates].add(-LEARNING_RATE * of_candidate, mode="drop"), of_params


def arguments(batch: Batches) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """Returns parameters and, by form, the function, the rows of its events and their places."""
    mask = batch.rows != PAD
    shapes = (np.zeros((1, 1, DIM), np.float32), np.ones((1, 1), bool))
    module = TargetAttention(UNITS, "highest")
    params = module.init(jax.random.key(0), *shapes, shapes[0], np.zeros((1, DIM), np.float32))
    forms = {
        "padded": (padded, batch.rows, mask),
        "packed": (packed, batch.packed_rows, batch.examples),
        "compacted": (Compacted(len(batch.packed_rows) / len(mask)), batch.rows, mask),
    }
    return params["params"], forms


def check(params: Any, forms: dict[str, tuple[Any, ...]], candidates: np.ndarray) -> None:
    """Raises AssertionError unless all forms have the same results and gradients."""
    table = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype(np.float32)
    tables = [
        step(form, jnp.asarray(table), params, rows, places, jnp.asarray(candidates))
        for form, rows, places in forms.values()
    ]
    for a, *others in zip(*map(jax.tree.leaves, tables), strict=True):
        for b in others:
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * float(np.abs(a).max()))


def measure(case: Histories, rounds: int) -> dict[str, float]:
    """Returns the ratios of the times of the other forms to the padded one, and its times in ms."""
    batch = draw(case)
    params, forms = arguments(batch)
    check(params, forms, batch.candidates)
    rng = np.random.default_rng(2)
    programs: dict[str, dict[str, Callable[[], Any]]] = {"pool": {}, "step": {}}
    for name, (form, rows, places) in forms.items():
        vectors = rng.normal(size=(*rows.shape, DIM)).astype(np.float32)
        vectors[rows == PAD] = 0
        candidate = rng.normal(size=(case.batch_size, DIM)).astype(np.float32)
        of_pool = jax.tree.map(jnp.asarray, (params, vectors, places, candidate))
        compiled = jax.jit(pool, static_argnums=0).lower(form, *of_pool).compile()
        programs["pool"][name] = functools.partial(compiled, *of_pool)
        programs["step"][name] = Steps(form, params, rows, places, batch.candidates)
    result = {"filled": float((batch.rows != PAD).mean())}
    for kind, by_form in programs.items():
        times: dict[str, list[float]] = {name: [] for name in by_form}
        for _ in range(rounds + 2):
            for name, run in by_form.items():
                start = time.perf_counter()
                jax.block_until_ready(run())
                times[name].append(time.perf_counter() - start)
        seconds = {name: np.array(values[2:]) for name, values in times.items()}
        result[f"{kind}: padded, ms"] = float(np.median(seconds["padded"]) * 1e3)
        for name in ("packed", "compacted"):
            ratio = np.median(seconds[name] / seconds["padded"])
            result[f"{kind}: {name} / padded"] = float(ratio)
    return result


class Steps:
    """Steps that update one table in place."""

    def __init__(self, form: Any, params: Any, rows: Any, places: Any, candidates: Any):
        self._table = jnp.asarray(np.random.default_rng(3).normal(size=(ROWS, DIM)), jnp.float32)
        self._others = jax.tree.map(jnp.asarray, (params, rows, places, candidates))
        jitted = jax.jit(step, static_argnums=0, donate_argnums=1)
        self._program = jitted.lower(form, self._table, *self._others).compile()

    def __call__(self) -> Any:
        self._table, gradients = self._program(self._table, *self._others)
        return self._table, gradients


def estimate(case: Histories, name: str) -> dict[str, float]:
    """Returns the estimated times of both forms on one device of a TPU slice."""
    from jaxrank.aot import devices, scaling, topology

    described = topology.topology(name)
    device = devices.devices(described)[0]
    batch = draw(case)
    params, forms = arguments(batch)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    result = {"filled": float((batch.rows != PAD).mean())}
    for form_name, (form, rows, places) in forms.items():
        vectors = jax.ShapeDtypeStruct((*rows.shape, DIM), np.float32, sharding=sharding)
        candidate = jax.ShapeDtypeStruct((case.batch_size, DIM), np.float32, sharding=sharding)
        table = jax.ShapeDtypeStruct((ROWS, DIM), np.float32, sharding=sharding)
        of_params, rows, places, candidates = jax.tree.map(
            shape, (params, rows, places, batch.candidates)
        )
        lowered = {
            "pool": jax.jit(pool, static_argnums=0).lower(
                form, of_params, vectors, places, candidate
            ),
            "step": jax.jit(step, static_argnums=0, donate_argnums=1).lower(
                form, table, of_params, rows, places, candidates
            ),
        }
        for kind, program in lowered.items():
            text = program.compile().as_text() or ""
            cost = scaling.step_time(text, described, case.batch_size, 1)
            result[f"{kind}: {form_name}, ms"] = cost.total * 1e3
            result[f"{kind}: {form_name}, MiB of HBM"] = cost.memory_bytes / 2**20
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--topology", default="", help="a TPU slice such as v3-8: compile for it")
    parser.add_argument("--histories", nargs="+", default=list(CASES), choices=CASES)
    args = parser.parse_args()
    if not args.topology:
        huge_pages.ensure()
    for name in args.histories:
        case = CASES[name]
        result = estimate(case, args.topology) if args.topology else measure(case, args.rounds)
        print(json.dumps({"histories": name, **{k: round(v, 3) for k, v in result.items()}}))


if __name__ == "__main__":
    main()
