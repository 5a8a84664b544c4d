"""The ONNX form of each primitive of JAX that a model's inference path uses.

A converter gets the graph, the equation and the names of its inputs, and returns the names of
its outputs. It raises NotImplementedError for a case that it does not cover.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrank.export.onnx.graph import Graph, element_type

Converter = Callable[[Graph, Any, list[str]], list[str]]

# Elementwise operations with the same meaning in ONNX.
_SAME = {
    **{"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "max": "Max", "min": "Min"},
    **{"pow": "Pow", "eq": "Equal", "lt": "Less", "gt": "Greater", "ge": "GreaterOrEqual"},
    **{"le": "LessOrEqual", "exp": "Exp", "log": "Log", "tanh": "Tanh", "neg": "Neg", "abs": "Abs"},
    **{"sqrt": "Sqrt", "erf": "Erf", "sign": "Sign", "floor": "Floor", "ceil": "Ceil"},
    **{"sin": "Sin", "cos": "Cos", "copy": "Identity", "copy_p": "Identity"},
}
_LOGICAL = {"and": "And", "or": "Or", "xor": "Xor", "not": "Not"}
_REDUCTIONS = {
    **{"reduce_sum": "ReduceSum", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin"},
    "reduce_prod": "ReduceProd",
}


def _elementwise(graph: Graph, kind: str, inputs: Sequence[str]) -> str:
    """Adds an elementwise operation, which broadcasts its inputs by itself where it can."""
    if any(name not in graph.compact and graph.value(name) is None for name in inputs):
        inputs = [graph.compact.get(name, name) for name in inputs]
    return graph.add(kind, *inputs)


def _same(kind: str) -> Converter:
    return lambda graph, equation, inputs: [_elementwise(graph, kind, inputs)]


def _logical(kind: str) -> Converter:
    def convert(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
        if equation.invars[0].aval.dtype != bool:
            raise NotImplementedError(f"of {equation.invars[0].aval.dtype}")
        return [_elementwise(graph, kind, inputs)]

    return convert


def _reduction(kind: str) -> Converter:
    def convert(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
        axes = graph.constant(list(equation.params["axes"]), np.int64)
        return [graph.add(kind, inputs[0], axes, keepdims=0)]

    return convert


def _any_or_all(kind: str) -> Converter:
    def convert(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
        axes = graph.constant(list(equation.params["axes"]), np.int64)
        number = graph.add("Cast", inputs[0], to=element_type(np.int32))
        result = graph.add(kind, number, axes, keepdims=0)
        return [graph.add("Cast", result, to=element_type(bool))]

    return convert


def _one(graph: Graph, equation: Any) -> str:
    return graph.constant(1, equation.invars[0].aval.dtype)


def _logistic(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    # ONNX Runtime's Sigmoid has a constant value below -18.
    exp = graph.add("Exp", graph.add("Neg", inputs[0]))
    return [graph.add("Reciprocal", graph.add("Add", exp, _one(graph, equation)))]


def _log1p(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    # log(1 + x) loses the digits of a small x. The rounding of u = 1 + x cancels in
    # log(u) x / (u - 1): Kahan.
    (x,), unit = inputs, _one(graph, equation)
    u = graph.add("Add", x, unit)
    is_one = graph.add("Equal", u, unit)
    divisor = graph.add("Where", is_one, unit, graph.add("Sub", u, unit))
    is_infinite = graph.add("IsInf", u)
    scaled = graph.add("Mul", graph.add("Log", u), graph.add("Div", x, divisor))
    return [graph.add("Where", graph.add("Or", is_one, is_infinite), x, scaled)]


def _expm1(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    # Near 0 by tanh: exp(x) - 1 = 2 t / (1 - t), t = tanh(x / 2).
    (x,), unit, dtype = inputs, _one(graph, equation), equation.invars[0].aval.dtype
    half = graph.constant(0.5, dtype)
    t = graph.add("Tanh", graph.add("Mul", x, half))
    near = graph.add("Div", graph.add("Add", t, t), graph.add("Sub", unit, t))
    is_near = graph.add("Less", graph.add("Abs", x), half)
    return [graph.add("Where", is_near, near, graph.add("Sub", graph.add("Exp", x), unit))]


def _erfc(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    return [graph.add("Sub", _one(graph, equation), graph.add("Erf", inputs[0]))]


def _exp2(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    return [graph.add("Pow", graph.constant(2, equation.invars[0].aval.dtype), inputs[0])]


def _round(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    if equation.params["rounding_method"] != jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        raise NotImplementedError("away from zero")
    return [graph.add("Round", inputs[0])]


def _square(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    return [graph.add("Mul", inputs[0], inputs[0])]


def _rsqrt(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    return [graph.add("Reciprocal", graph.add("Sqrt", inputs[0]))]


def _integer_pow(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    power = equation.params["y"]
    if power == 2:
        return _square(graph, equation, inputs)
    if power == -1:
        return [graph.add("Reciprocal", inputs[0])]
    return [graph.add("Pow", inputs[0], graph.constant(power, equation.invars[0].aval.dtype))]


def _rem(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    return [graph.add("Mod", *inputs, fmod=1)]


def _ne(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    return [graph.add("Not", _elementwise(graph, "Equal", inputs))]


def _is_finite(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    bad = graph.add("Or", graph.add("IsNaN", inputs[0]), graph.add("IsInf", inputs[0]))
    return [graph.add("Not", bad)]


def _select_n(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    if len(inputs) != 3 or equation.invars[0].aval.dtype != bool:
        raise NotImplementedError("by a number")
    return [_elementwise(graph, "Where", [inputs[0], inputs[2], inputs[1]])]


def _clamp(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    low, x, high = inputs
    return [graph.add("Min", graph.add("Max", x, low), high)]


def _cast(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    return [graph.add("Cast", inputs[0], to=element_type(equation.params["new_dtype"]))]


def _same_values(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    return inputs


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


def _dot_general(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    """Transposes and reshapes both factors for MatMul: [batch..., free, contracted] and back."""
    contracted, batch = equation.params["dimension_numbers"]
    factors = []
    for side, (name, var) in enumerate(zip(inputs, equation.invars, strict=True)):
        shape = var.aval.shape
        free = [i for i in range(len(shape)) if i not in (*contracted[side], *batch[side])]
        groups = (free, contracted[side]) if side == 0 else (contracted[side], free)
        order = [*batch[side], *groups[0], *groups[1]]
        if order != list(range(len(shape))):
            name = graph.add("Transpose", name, perm=order)
        if len(groups[0]) != 1 or len(groups[1]) != 1:
            sizes = [math.prod(shape[i] for i in group) for group in groups]
            name = graph.reshape(name, [*(shape[i] for i in batch[side]), *sizes])
        factors.append(name)
    product = graph.add("MatMul", *factors)
    out = equation.outvars[0].aval
    if len(out.shape) != len(batch[0]) + 2:
        product = graph.reshape(product, out.shape)
    if out.dtype != equation.invars[0].aval.dtype:
        product = graph.add("Cast", product, to=element_type(out.dtype))
    return [product]


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
            raise NotImplementedError(f"at places outside of 0 to {size - 1}")
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


def _cumsum(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    axis = graph.constant(equation.params["axis"], np.int64)
    return [graph.add("CumSum", inputs[0], axis, reverse=int(equation.params["reverse"]))]


def _arg(kind: str) -> Converter:
    def convert(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
        (axis,) = equation.params["axes"]
        index = graph.add(kind, inputs[0], axis=axis, keepdims=0)
        return [graph.add("Cast", index, to=element_type(equation.params["index_dtype"]))]

    return convert


def _top_k(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    count = graph.constant([equation.params["k"]], np.int64)
    values, indices = graph.add("TopK", inputs[0], count, outputs=2, axis=-1)
    return [values, graph.add("Cast", indices, to=element_type(np.int32))]


CONVERTERS: dict[str, Converter] = {
    **{name: _same(kind) for name, kind in _SAME.items()},
    **{name: _logical(kind) for name, kind in _LOGICAL.items()},
    **{name: _reduction(kind) for name, kind in _REDUCTIONS.items()},
    "reduce_and": _any_or_all("ReduceMin"),
    "reduce_or": _any_or_all("ReduceMax"),
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "broadcast_in_dim": _broadcast_in_dim,
    "clamp": _clamp,
    "concatenate": _concatenate,
    "convert_element_type": _cast,
    "cumsum": _cumsum,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "erfc": _erfc,
    "exp2": _exp2,
    "expand_dims": _reshape,
    "expm1": _expm1,
    "gather": _gather,
    "integer_pow": _integer_pow,
    "is_finite": _is_finite,
    "log1p": _log1p,
    "logistic": _logistic,
    "ne": _ne,
    "optimization_barrier": _same_values,
    "pad": _pad,
    "rem": _rem,
    "reshape": _reshape,
    "rev": _reverse,
    "round": _round,
    "rsqrt": _rsqrt,
    "select_n": _select_n,
    "slice": _slice,
    "split": _split,
    "square": _square,
    "squeeze": _reshape,
    "stack": _stack,
    "stop_gradient": _same_values,
    "top_k": _top_k,
    "transpose": _transpose,
}
