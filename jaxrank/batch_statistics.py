"""Re-estimates the statistics of batch normalisation from training batches.

Running statistics lag behind: they average over layers that have changed since. The statistics of
the weights that predict are therefore computed again, over the batches of the most recent steps.
During this pass each batch normalises its own activations, as in training.

References:
    Wu and Johnson, Rethinking "Batch" in BatchNorm, 2021: PreciseBN.
"""

import math
from typing import Any

import jax
import numpy as np

from jaxrank import mesh as meshes
from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.program import CompiledSteps
from jaxrank.step import TrainState, prediction_weights

_EXAMPLES = 16_384  # per statistic: its error is under 1% of the standard deviation
_MIN_BATCHES = 8


def steps_read(batch_size: int, step: int) -> range:
    """Returns the steps whose batches are read after `step` steps: the last ones."""
    count = max(_MIN_BATCHES, math.ceil(_EXAMPLES / batch_size))
    return range(max(0, step - count), step)


def reestimated(
    program: CompiledSteps, batches: TrainBatches, step: int, state: TrainState
) -> TrainState:
    """Returns the state with re-estimated statistics for the weights that predict.

    The statistics depend on the weights, the seed and the step alone. Batches with a statistic that
    is not finite are ignored, as their steps are skipped. A state without batch normalisation is
    returned unchanged.

    Args:
        batches: batches of single steps that no other code reads.
        step: number of steps done.
    """
    weights = prediction_weights(state)
    steps = steps_read(program.shape.batch_size, step)
    batch_moments: list[tuple[Any, float]] = []
    if weights.model_state and program.has_moments:
        batches.seek(steps.start)
        for number in steps:
            batch = jax.tree.map(lambda x: x[0], next(batches))
            placed = meshes.put_batch(batch, program.mesh)
            batch_moments.append(jax.device_get(program.moments(weights, placed, np.int32(number))))
        batches.close()
    batch_moments = [each for each in batch_moments if each[1] and _is_finite(each[0])]
    if not batch_moments:
        return state
    combined = _combined(
        [moments for moments, _ in batch_moments], [count for _, count in batch_moments]
    )
    model_state = _replaced(weights.model_state, combined)
    if state.average:
        return state._replace(average=state.average._replace(model_state=model_state))
    return state._replace(model_state=model_state)


def _is_finite(tree: Any) -> bool:
    return all(np.isfinite(array).all() for array in jax.tree.leaves(tree))


def _combined(trees: list[Any], counts: list[float]) -> Any:
    """Returns the statistics of all batches together, from trees of `mean` and `var` per batch."""
    if "mean" not in trees[0]:
        return {name: _combined([tree[name] for tree in trees], counts) for name in trees[0]}
    fractions = np.asarray(counts, np.float64) / sum(counts)

    def average(arrays: Any) -> np.ndarray:
        return np.tensordot(fractions, np.asarray(arrays, np.float64), axes=1)

    means = np.asarray([tree["mean"] for tree in trees], np.float64)
    mean = average(means)
    var = average([tree["var"] for tree in trees]) + average((means - mean) ** 2)
    return {"mean": mean, "var": var}


def _replaced(tree: Any, new: Any) -> Any:
    """Returns a tree on devices in which the host arrays of `new` replace arrays."""
    if isinstance(new, np.ndarray):
        values = new.astype(tree.dtype)
        return jax.make_array_from_callback(tree.shape, tree.sharding, lambda index: values[index])
    return {**tree, **{name: _replaced(tree[name], part) for name, part in new.items()}}
