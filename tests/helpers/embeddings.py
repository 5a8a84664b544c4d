"""Embeddings of small tables on any mesh, random gradients, and row optimizers in float64."""

import examples
import numpy as np
from sharded import embedding_class

from jaxrank import mesh as meshes
from jaxrank.embedding import make_row_optimizer
from jaxrank.layout import ReplicatedRows

# Placements of the three tables, by stack.
HOT = {
    "split": {},
    "whole": {"dim8": ReplicatedRows(replicated_tables=("tb", "ta", "tc"))},
    "mixed": {"dim8": ReplicatedRows(replicated_tables=("tb",))},
    "hot": {
        "dim8": ReplicatedRows(
            replicated_tables=("tb",), hot_rows=("tc", "ta", "ta", "tc", "ta"), replicated=3
        )
    },
    "dealt": {"dim8": ReplicatedRows(hot_rows=("ta", "tc", "ta"))},
}


def make(
    dims=None,
    devices=1,
    replicas=1,
    row_optimizer="sgd",
    rows=50,
    hot="split",
    room=1.0,
    platform="cpu",
    **settings,
):
    lay = examples.small_layout(dims, rows, HOT[hot])
    mesh = meshes.make_mesh(devices=devices, replicas=replicas)
    rooms = {stack.name: room for stack in lay.stacks}
    row_optimizer = (
        make_row_optimizer(row_optimizer) if isinstance(row_optimizer, str) else row_optimizer
    )
    return embedding_class(platform)(
        lay, mesh, row_optimizer=row_optimizer, room=rooms, **{"init_std": 1.0} | settings
    )


def random_grads(embedding, batch, seed=1):
    """Draws a gradient for each vector that a lookup of the batch returns."""
    rng = np.random.default_rng(seed)
    result = {}
    for stack in sorted(embedding.layout.stacks, key=lambda stack: stack.name):
        places = {}
        if stack.name in batch.ids:
            places["ids"] = batch.ids[stack.name].shape[1]
        if stack.name in batch.lists:
            places["lists"] = len(stack.lists)
        result[stack.name] = {
            kind: rng.normal(size=(len(batch.labels), count, stack.dim)).astype(np.float32)
            for kind, count in places.items()
        }
    return result


def reference_row_optimizer(name, rows, slots, g, learning_rate, step):
    """Applies a row optimizer in float64, row by row."""
    if name == "rowwise_adagrad":
        a = slots["accumulator"] + np.mean(g**2)
        return rows - learning_rate * g / np.sqrt(a + 1e-7), {"accumulator": a}
    if name == "lazy_adam":
        m = 0.9 * slots["m"] + 0.1 * g
        v = 0.999 * slots["v"] + 0.001 * g**2
        corrected = (m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1)))
        return rows - learning_rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-8), {
            "m": m,
            "v": v,
        }
    assert name == "ftrl"
    # As in the paper, z accumulates with the strength of the previous step, from rate and n.
    n, before, z = slots["n"], slots["s"].copy(), slots["z"].copy()
    fresh = n == 0
    before[fresh] = 1.0 / learning_rate
    z[fresh] = -rows[fresh] * (before[fresh] + 0.02) - 0.01 * np.sign(rows[fresh])
    new_n = n + g**2
    strength = (1.0 + np.sqrt(new_n)) / learning_rate
    z = z + g - (strength - before) * rows
    solved = -(z - np.sign(z) * 0.01) / (strength + 0.02)
    return np.where(np.abs(z) > 0.01, solved, 0.0), {"z": z, "n": new_n, "s": strength}
