"""The ONNX form of each primitive of JAX that a model's inference path uses.

A converter gets the graph, the equation and the names of its inputs, and returns the names of
its outputs. It raises NotImplementedError for a case that it does not cover.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrank.export.onnx import elements
from jaxrank.export.onnx.graph import Converter, Graph, element_type

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


def _constant_one(graph: Graph, equation: Any) -> str:
    return graph.constant(1, equation.invars[0].aval.dtype)


def _logistic(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    # ONNX Runtime's Sigmoid has a constant value below -18.
    exp = graph.add("Exp", graph.add("Neg", inputs[0]))
    return [graph.add("Reciprocal", graph.add("Add", exp, _constant_one(graph, equation)))]


def _log1p(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    # log(1 + x) loses the digits of a small x. The rounding of u = 1 + x cancels in
    # log(u) x / (u - 1): Kahan.
    (x,), unit = inputs, _constant_one(graph, equation)
    u = graph.add("Add", x, unit)
    is_one = graph.add("Equal", u, unit)
    divisor = graph.add("Where", is_one, unit, graph.add("Sub", u, unit))
    is_infinite = graph.add("IsInf", u)
    scaled = graph.add("Mul", graph.add("Log", u), graph.add("Div", x, divisor))
    return [graph.add("Where", graph.add("Or", is_one, is_infinite), x, scaled)]


def _expm1(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    # Near 0 by tanh: exp(x) - 1 = 2 t / (1 - t), t = tanh(x / 2).
    (x,), unit, dtype = inputs, _constant_one(graph, equation), equation.invars[0].aval.dtype
    half = graph.constant(0.5, dtype)
    t = graph.add("Tanh", graph.add("Mul", x, half))
    near_zero = graph.add("Div", graph.add("Add", t, t), graph.add("Sub", unit, t))
    is_near = graph.add("Less", graph.add("Abs", x), half)
    return [graph.add("Where", is_near, near_zero, graph.add("Sub", graph.add("Exp", x), unit))]


def _erfc(graph: Graph, equation: Any, inputs: list[str]) -> list[str]:
    return [graph.add("Sub", _constant_one(graph, equation), graph.add("Erf", inputs[0]))]


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
    **elements.CONVERTERS,
    **{name: _same(kind) for name, kind in _SAME.items()},
    **{name: _logical(kind) for name, kind in _LOGICAL.items()},
    **{name: _reduction(kind) for name, kind in _REDUCTIONS.items()},
    "reduce_and": _any_or_all("ReduceMin"),
    "reduce_or": _any_or_all("ReduceMax"),
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "clamp": _clamp,
    "convert_element_type": _cast,
    "cumsum": _cumsum,
    "dot_general": _dot_general,
    "erfc": _erfc,
    "exp2": _exp2,
    "expm1": _expm1,
    "integer_pow": _integer_pow,
    "is_finite": _is_finite,
    "log1p": _log1p,
    "logistic": _logistic,
    "ne": _ne,
    "optimization_barrier": _same_values,
    "rem": _rem,
    "round": _round,
    "rsqrt": _rsqrt,
    "select_n": _select_n,
    "square": _square,
    "stop_gradient": _same_values,
    "top_k": _top_k,
}
