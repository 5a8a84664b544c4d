"""The dense part of a model as a function of named arrays, and its files: ONNX and StableHLO."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxrank.base_rates import neutral
from jaxrank.calibration.maps import Calibration
from jaxrank.calibration.maps import conditional as conditional_logits
from jaxrank.checkpoints.reader import CheckpointReader, dotted
from jaxrank.errors import InputError
from jaxrank.features import Schema
from jaxrank.layout import Layout
from jaxrank.losses import LOG_COUNT_LIMIT
from jaxrank.models import Inputs, Model
from jaxrank.outputs import outputs
from jaxrank.step import Weights, model_inputs

PLATFORMS = ("cpu", "cuda", "tpu")
_MEANINGS = {"binary": "probability", "real": "number", "count": "expected count"}
# Inputs of a model that is calibrated by value; see `jaxrank_serving.signature.Calibration`.
COEFFICIENTS = ("calibration_slopes", "calibration_offsets")


class Array(NamedTuple):
    """An input of the dense part. shape: of one example."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class DensePart(NamedTuple):
    """The dense part with its parameters.

    function: arrays [n, ...] -> (predictions f32[n, outputs], logits f32[n, outputs]).
    inputs: of the function, in order.
    """

    function: Callable[..., list[jax.Array]]
    inputs: list[Array]


def layers(stored: CheckpointReader, shapes: Weights) -> Weights:
    """Reads the weights that predict, without the rows of tables."""
    tasks = shapes.bias.shape[0]
    rates = neutral(tasks)._asdict()  # values for checkpoints of earlier versions

    def read(path: Any, leaf: Any) -> np.ndarray:
        name = dotted(path)
        return stored.read(name) if name in stored else np.asarray(rates[name], np.float32)

    return jax.tree_util.tree_map_with_path(read, shapes._replace(rows={}))


def conditional_tasks(parents: tuple[int, ...]) -> list[int]:
    """Returns the tasks with a parent. Each has a second output, which is conditional on it."""
    return [task for task, parent in enumerate(parents) if parent >= 0]


def dense_part(
    model: Model,
    layout: Layout,
    weights: Weights,
    parents: tuple[int, ...],
    calibration: Calibration | None = None,
) -> DensePart:
    """Returns the dense part. Its outputs are the tasks, and then `conditional_tasks`.

    Args:
        parents: see `outputs.joint_logits`.
        calibration: of the checkpoint. A conditional probability is then that of the task over that
            of its parent, both calibrated.
    """
    single = model_inputs(layout)
    arrays = _arrays(layout)
    by_value = calibration is not None and calibration.by is not None
    if by_value:
        tasks = (len(layout.schema.tasks),)
        arrays += [Array(name, tasks, np.dtype(np.float32)) for name in COEFFICIENTS]
    kinds = [task.kind for task in layout.schema.tasks]
    conditional = conditional_tasks(parents)
    kinds += [kinds[task] for task in conditional]

    def function(*values: jax.Array) -> list[jax.Array]:
        named = dict(zip([a.name for a in arrays], values, strict=True))
        reads: list[tuple[jax.Array, jax.Array | None]] = []
        for stack in layout.stacks:
            if stack.places:
                reads.append((named[f"{stack.name}_ids"], named.get(f"{stack.name}_filled")))
            if stack.lists:
                reads.append((named[f"{stack.name}_lists"], None))
        inputs = Inputs(single.names, named["dense"], reads)
        raw = model.infer(weights.params, weights.model_state, inputs)
        logits = outputs(raw, weights.bias, weights.scale, parents)
        if calibration:
            slopes, offsets = (named.get(name) for name in COEFFICIENTS)
            logits = calibration(logits, jnp, (slopes, offsets) if by_value else None)
        if conditional and calibration:
            parts = [
                conditional_logits(logits[:, task], logits[:, parents[task]], jnp)[:, None]
                for task in conditional
            ]
            logits = jnp.concatenate([logits, *parts], axis=1)
        elif conditional:
            alone = outputs(raw, weights.bias, weights.scale, ())
            parts = [alone[:, task : task + 1] for task in conditional]
            logits = jnp.concatenate([logits, *parts], axis=1)
        return [_predictions(logits, kinds), logits]

    return DensePart(function, arrays)


def _arrays(layout: Layout) -> list[Array]:
    float32 = np.dtype(np.float32)
    arrays = [Array("dense", (len(layout.schema.dense),), float32)]
    for stack in layout.stacks:
        if stack.places:
            arrays.append(Array(f"{stack.name}_ids", (stack.places, stack.dim), float32))
        if stack.sequences:
            arrays.append(Array(f"{stack.name}_filled", (stack.places,), np.dtype(bool)))
        if stack.lists:
            arrays.append(Array(f"{stack.name}_lists", (len(stack.lists), stack.dim), float32))
    return arrays


def _predictions(logits: jax.Array, kinds: list[str]) -> jax.Array:
    """Converts logits f32[n, outputs] to probabilities, numbers and expected counts.

    Ranked scores are converted in the same way, which keeps their order.
    """
    link: dict[str, Callable[[jax.Array], jax.Array]] = {
        "binary": jax.nn.sigmoid,
        "count": lambda x: jnp.exp(jnp.minimum(x, LOG_COUNT_LIMIT)),
        "real": lambda x: x,
    }
    if len(set(kinds)) == 1:
        return link[kinds[0]](logits)
    columns = [link[kind](logits[:, i : i + 1]) for i, kind in enumerate(kinds)]
    return jnp.concatenate(columns, axis=1)


def output_names(
    schema: Schema, parents: tuple[int, ...], ranked: Collection[str] = ()
) -> list[dict[str, str]]:
    """Returns name, task, kind, parent and meaning of each output; see `jaxrank_serving.signature`.

    Args:
        ranked: tasks that are trained by ranking alone.
    """
    tasks = schema.tasks
    named = [{"name": t.name, "task": t.name, "kind": t.kind, "parent": ""} for t in tasks]
    for task in conditional_tasks(parents):
        parent = tasks[parents[task]].name
        name = f"{tasks[task].name}_given_{parent}"
        named.append(
            {"name": name, "task": tasks[task].name, "kind": tasks[task].kind, "parent": parent}
        )
    for output in named:
        is_ranked = output["task"] in ranked or output["parent"] in ranked
        output["meaning"] = meaning(output["kind"], is_ranked=is_ranked)
    return named


def meaning(kind: str, *, is_ranked: bool) -> str:
    """Returns what the prediction of a task is: "score" if it has nothing but an order."""
    return "score" if is_ranked else _MEANINGS[kind]


def to_stablehlo(part: DensePart) -> bytes:
    """Returns the dense part as `jax.export` serialises it, for any number of examples.

    Raises:
        InputError: the model needs a fixed number of examples.
    """
    (batch,) = export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *a.shape), a.dtype) for a in part.inputs]
    try:
        exported = export.export(jax.jit(part.function), platforms=PLATFORMS)(*shapes)
        return bytes(exported.serialize())
    except Exception as error:  # the model may be a user's
        text = " ".join(str(error).split())[:400]
        raise InputError(
            "the model must be traceable for any number of examples, without Python comparisons of"
            f" that number: found {type(error).__name__}: {text}. `--format=files` needs no such"
            " program."
        ) from error
