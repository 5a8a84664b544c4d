"""The ONNX form of primitives that select and arrange elements; see `primitives`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrank.export.onnx.graph import Converter, Graph


def _reshape(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    if equation.params.get("dimensions") is not None:
        raise NotImplementedError("with an order of dimensions")
    return [graph.reshape(inputs[0], equation.outvars[0].aval.shape)]


def _transpose(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    return [graph.add("Transpose", inputs[0], perm=list(equation.params["permutation"]))]


def _concatenate(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    axis = equation.params["dimension"]
    parts = zip(inputs, equation.invars, strict=True)
    filled = [name for name, var in parts if var.aval.shape[axis] != 0]
    return [graph.add("Concat", *(filled or inputs), axis=axis)]


def _split(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    sizes = equation.params["sizes"]
    if len(sizes) == 1:
        return inputs
    lengths = graph.constant(list(sizes), np.int64)
    axis = equation.params["axis"]
    return graph.add("Split", inputs[0], lengths, outputs=len(sizes), axis=axis)


def _slice(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    params, shape = equation.params, equation.invars[0].aval.shape
    strides = params["strides"] or (1,) * len(shape)
    spans = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return [_sliced(graph, inputs[0], list(spans), shape)]


def _sliced(graph: Graph, name: str, spans: Sequence[tuple[Any, Any, int]], shape: Any) -> str:
    """Slices a tensor: start, stop and stride of each axis."""
    axes = [i for i, span in enumerate(spans) if span != (0, shape[i], 1)]
    if not axes:
        return name
    chosen = [spans[axis] for axis in axes]
    if not all(isinstance(number, int) for span in chosen for number in span):
        raise NotImplementedError("of the axis of examples")
    starts, stops, strides = ([span[i] for span in chosen] for i in range(3))
    parts = (graph.constant(list(part), np.int64) for part in (starts, stops, axes, strides))
    return graph.add("Slice", name, *parts)


def _dynamic_slice(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    starts = [graph.value(name) for name in inputs[1:]]
    if any(start is None for start in starts):
        raise NotImplementedError("at a computed place")
    shape, sizes = equation.invars[0].aval.shape, equation.params["slice_sizes"]
    spans = []
    for start, size, most in zip(starts, sizes, shape, strict=True):
        first = 0 if size == most else min(max(int(start), 0), most - size)  # type: ignore[arg-type]
        spans.append((first, first + size if first else size, 1))
    return [_sliced(graph, inputs[0], spans, shape)]


def _reverse(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    axes = list(equation.params["dimensions"])
    least = np.iinfo(np.int64).min
    numbers = ([-1] * len(axes), [least] * len(axes), axes, [-1] * len(axes))
    return [graph.add("Slice", inputs[0], *(graph.constant(n, np.int64) for n in numbers))]


def _pad(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    config = equation.params["padding_config"]
    if any(low < 0 or high < 0 or inside for low, high, inside in config):
        raise NotImplementedError(f"with padding_config={config}")
    widths = [low for low, _, _ in config] + [high for _, high, _ in config]
    return [graph.add("Pad", inputs[0], graph.constant(widths, np.int64), inputs[1])]


def _broadcast_in_dim(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    if len(inputs) > 1:
        raise NotImplementedError("to a computed shape")
    shape, before = equation.params["shape"], equation.invars[0].aval.shape
    placed = [1] * len(shape)
    for i, axis in enumerate(equation.params["broadcast_dimensions"]):
        placed[axis] = before[i]
    name = inputs[0] if tuple(placed) == tuple(before) else graph.reshape(inputs[0], placed)
    return [name if tuple(placed) == tuple(shape) else graph.broadcast(name, shape)]


def _gather(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    """Converts x[:, 1:3], which is a gather if the number of examples is symbolic, or x[:, [2, 0]].

    Both have whole slices along all axes but those that are indexed.
    """
    numbers, indices = equation.params["dimension_numbers"], graph.value(inputs[1])
    shape, sizes = equation.invars[0].aval.shape, equation.params["slice_sizes"]
    index_shape = equation.invars[1].aval.shape
    if numbers.operand_batching_dims:
        raise NotImplementedError("of other elements in each example")
    if len(index_shape) == 1 and indices is not None:
        starts = dict(zip(numbers.start_index_map, indices.tolist(), strict=True))
        spans = []
        for axis, size in enumerate(sizes):
            first = min(max(starts.get(axis, 0), 0), shape[axis] - size) if axis in starts else 0
            spans.append((first, first + size, 1))
        part = _sliced(graph, inputs[0], spans, shape)
        out = equation.outvars[0].aval.shape
        return [graph.reshape(part, out) if numbers.collapsed_slice_dims else part]
    axis = numbers.start_index_map[0]
    others = [size for i, size in enumerate(shape) if i != axis]
    count = len(index_shape) - 1
    is_covered = (
        len(numbers.start_index_map) == 1
        and numbers.collapsed_slice_dims == (axis,)
        and [size for i, size in enumerate(sizes) if i != axis] == others
        and numbers.offset_dims == (*range(axis), *range(axis + count, len(shape) - 1 + count))
        and isinstance(shape[axis], int)
    )
    if not is_covered:
        raise NotImplementedError("of other elements than whole slices along one axis")
    places = _places(graph, equation, inputs[1], shape[axis])
    return [graph.add("Gather", inputs[0], graph.reshape(places, index_shape[:-1]), axis=axis)]


def _places(graph: Graph, equation: Any, name: str, size: int) -> str:
    """Returns the indices of a gather along an axis, which are in range."""
    indices = graph.value(name)
    if indices is not None:
        if indices.min(initial=0) < 0 or indices.max(initial=0) >= size:
            raise NotImplementedError(f"at indices outside 0 to {size - 1}")
        return name
    if equation.params["mode"] != jax.lax.GatherScatterMode.CLIP:
        raise NotImplementedError("at computed places without mode='clip'")
    dtype = equation.invars[1].aval.dtype
    positive = graph.add("Max", name, graph.constant(0, dtype))
    return graph.add("Min", positive, graph.constant(size - 1, dtype))


def _stack(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    axis = equation.params["axis"]
    place = graph.constant([axis], np.int64)
    return [graph.add("Concat", *(graph.add("Unsqueeze", x, place) for x in inputs), axis=axis)]


CONVERTERS: dict[str, Converter] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "expand_dims": _reshape,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "split": _split,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
}
