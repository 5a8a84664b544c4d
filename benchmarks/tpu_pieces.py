"""What the TPU compiler makes of the pieces of a lookup and an update, for a TPU that is not here.

    python benchmarks/tpu_pieces.py --topology=v3-8 --ids=1107200 --width=8

Of each piece: seconds to compile, bytes of temporaries, and the cycles that the compiler expects,
each loop as often as it runs; of a sort, those of one pass. Pieces named "plain" are what jaxrank
does not do, to compare.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from counts import positive
from jax.sharding import SingleDeviceSharding

from jaxrank.aot import devices
from jaxrank.aot.costs import costs
from jaxrank.aot.topology import topology
from jaxrank.embedding.backends.lazy import PerId
from jaxrank.embedding.backends.tpu import ByLine
from jaxrank.embedding.duplicates import running_count, sum_by_sort
from jaxrank.embedding.storage import LANES

ROWS = 4_194_304  # of the table

Piece = tuple[str, Callable[..., Any], tuple[Any, ...]]


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def read_by_slices(table: jax.Array, row: jax.Array, width: int) -> jax.Array:
    lines = table.at[row * width // LANES].get(mode="fill", fill_value=0)
    part = row % (LANES // width)
    found = lines[:, :width]
    for i in range(1, LANES // width):
        here = lines[:, i * width : (i + 1) * width]
        found = jnp.where((part == i)[:, None], here, found)
    return found


def pieces(ids: int, width: int) -> Iterator[Piece]:
    form = ByLine(width, width)
    table, rows = array(jnp.float32, ROWS * width // LANES, LANES), array(jnp.int32, ids)
    block, flags = array(jnp.float32, form.length(ids), LANES), array(jnp.bool_, ids)

    def write(table: jax.Array, row: jax.Array, sums: jax.Array) -> jax.Array:
        return form.change(table, row, sums, lambda found, sums, row: sums)

    def sum_of_duplicates(row: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
        return sum_by_sort(form, row, [PerId(ids, grads)])

    yield "read", form.take, (table, rows)
    yield "plain read, by slices", lambda t, i: read_by_slices(t, i, width), (table, rows)
    yield "write", write, (table, rows, block)
    yield "count", running_count, (flags,)
    yield "plain count, by cumsum", lambda f: jnp.cumsum(f, dtype=jnp.int32), (flags,)
    yield "sort", lambda a, b: jax.lax.sort_key_val(a, b), (rows, rows)
    yield "sum of duplicates", sum_of_duplicates, (rows, block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v3-8")
    parser.add_argument("--ids", type=positive, default=1_107_200)
    parser.add_argument("--width", type=positive, default=8)
    args = parser.parse_args()
    sharding = SingleDeviceSharding(devices.devices(topology(args.topology))[0])
    print(f"{'':<24}{'seconds':>10}{'MiB':>10}{'cycles':>16}")
    for name, function, shapes in pieces(args.ids, args.width):
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes]
        began = time.monotonic()
        done: Any = jax.jit(function).lower(*placed).compile()
        seconds = time.monotonic() - began
        temporaries = done.memory_analysis().temp_size_in_bytes / 2**20
        cycles = round(sum(cost.cycles for cost in costs(done.as_text())))
        print(f"{name:<24}{seconds:>10.1f}{temporaries:>10,.0f}{cycles:>16,}", flush=True)


if __name__ == "__main__":
    main()
