"""Writes a function of JAX as an ONNX model with a symbolic number of examples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx
from jax import export
from jax.extend import source_info_util
from jax.extend.core import Literal

from jaxrank.export.onnx.graph import Graph, Tensor
from jaxrank.export.onnx.primitives import CONVERTERS

# Primitives that call a program, and the parameter with it.
_CALLS = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "checkpoint", "remat2"), "jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "core_call"), "call_jaxpr"),
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


class UnsupportedError(Exception):
    """A primitive of the function has no ONNX form. The message names it and its source line."""


def to_onnx(
    function: Callable[..., Sequence[jax.Array]],
    inputs: Sequence[Tensor],
    outputs: Sequence[str],
    *,
    producer: str = "jaxrank",
) -> onnx.ModelProto:
    """Converts a function of arrays f[batch, ...] that returns arrays f[batch, columns].

    Equations that do not depend on the inputs are computed and become constants.

    Args:
        inputs: of the function, in order, and of the model, by name.
        outputs: names of the outputs.

    Raises:
        UnsupportedError: naming the first primitive without an ONNX form and its source line.
    """
    (batch,) = export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *i.shape), i.dtype) for i in inputs]
    program: Any = jax.make_jaxpr(function)(*shapes)
    graph = Graph(inputs, batch)
    constants = [graph.constant(np.asarray(c)) for c in program.consts]
    names = _convert(graph, program.jaxpr, constants, [i.name for i in inputs])
    avals: list[Any] = [var.aval for var in program.jaxpr.outvars]
    for name, tensor, aval in zip(outputs, names, avals, strict=True):
        graph.output(name, tensor, aval.shape[1], aval.dtype)
    return graph.model(producer)


def _convert(
    graph: Graph, program: Any, constants: Sequence[str], inputs: Sequence[str], line: str = ""
) -> list[str]:
    """Adds the equations of a program, and returns the names of its outputs.

    line: of the source that calls the program.
    """
    names: dict[Any, str] = dict(zip(program.constvars, constants, strict=True))
    names |= dict(zip(program.invars, inputs, strict=True))

    def name_of(var: Any) -> str:
        if isinstance(var, Literal):
            aval: Any = var.aval
            return graph.constant(np.asarray(var.val, aval.dtype))
        return names[var]

    for equation in program.eqns:
        read = [name_of(var) for var in equation.invars]
        written = _converted(graph, equation, read, line)
        names |= dict(zip(equation.outvars, written, strict=True))
    return [name_of(var) for var in program.outvars]


def _converted(graph: Graph, equation: Any, inputs: list[str], line: str) -> list[str]:
    """Returns the names of the outputs of an equation.

    line: of the source that calls its program.
    """
    kind, params = equation.primitive.name, equation.params
    # Equations in functions of JAX have no line of their own.
    line = source_info_util.summarize(equation.source_info) or line
    if kind in _CALLS:
        inner = params[_CALLS[kind]]
        constants = [graph.constant(np.asarray(c)) for c in getattr(inner, "consts", ())]
        return _convert(graph, getattr(inner, "jaxpr", inner), constants, inputs, line)
    values = [graph.value(name) for name in inputs]
    if all(value is not None for value in values) and _is_static(equation):
        return [graph.constant(value) for value in _computed(equation, values, params)]
    try:
        if kind not in CONVERTERS:
            raise NotImplementedError
        return CONVERTERS[kind](graph, equation, inputs)
    except NotImplementedError as error:
        case = f" {error}" if str(error) else ""
        raise UnsupportedError(f"the primitive {kind}{case} has no ONNX form: {line}") from error


def _is_static(equation: Any) -> bool:
    return all(isinstance(d, int) for var in equation.outvars for d in var.aval.shape)


def _computed(
    equation: Any, values: Sequence[np.ndarray | None], params: Mapping[str, Any]
) -> list[np.ndarray]:
    """Computes an equation of constants."""
    arrays = [jax.numpy.asarray(value) for value in values]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        result = equation.primitive.bind(*arrays, **params)
    return list(map(np.asarray, result if equation.primitive.multiple_results else [result]))
