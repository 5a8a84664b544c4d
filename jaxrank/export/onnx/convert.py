"""Writes a function of JAX as an ONNX model with a symbolic number of examples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
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
    """The function has no ONNX form. The message names the primitive and its source line."""


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
        UnsupportedError: naming the first primitive without an ONNX form, or without one that ONNX
            Runtime runs, and its source line.
    """
    (batch,) = export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *i.shape), i.dtype) for i in inputs]
    program: Any = jax.make_jaxpr(function)(*shapes)
    graph = Graph(inputs, batch)
    names = _convert(graph, program.jaxpr, program.consts, [i.name for i in inputs])
    avals: list[Any] = [var.aval for var in program.jaxpr.outvars]
    for name, tensor, aval in zip(outputs, names, avals, strict=True):
        graph.output(name, tensor, aval.shape[1], aval.dtype)
    return _checked(graph, producer)


def run(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Returns the outputs of a model, by ONNX Runtime."""
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = {i.name for i in session.get_inputs()}
    return session.run(None, {name: array for name, array in arrays.items() if name in names})


def _checked(graph: Graph, producer: str) -> onnx.ModelProto:
    """Returns a valid model that ONNX Runtime can run.

    Both checks name a node by its primitive and source line. The returned model has no such names,
    because they hold paths of this machine.
    """
    try:
        model = graph.model(producer)
        onnx.checker.check_model(model, full_check=True)
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:  # both have types of their own, without a common base
        text = " ".join(str(error).split())
        raise UnsupportedError(f"ONNX Runtime cannot run the model: {text:.400}") from error
    for node in model.graph.node:
        node.ClearField("name")
    return model


def _convert(
    graph: Graph, program: Any, constants: Sequence[Any], inputs: Sequence[str], line: str = ""
) -> list[str]:
    """Adds the equations of a program, and returns the names of its outputs.

    constants: values of the program's `constvars`.
    line: of the source that calls the program.
    """
    names: dict[Any, str] = dict(zip(program.invars, inputs, strict=True))
    values = dict(zip(program.constvars, constants, strict=True))

    def tensor_name(var: Any) -> str:
        if isinstance(var, Literal):
            aval: Any = var.aval
            return graph.constant(np.asarray(var.val, aval.dtype))
        if var in values:
            return graph.constant(np.asarray(values[var]))
        return names[var]

    for equation in program.eqns:
        kind = equation.primitive.name
        # Equations in functions of JAX have no line of their own.
        source_line = source_info_util.summarize(equation.source_info) or line
        graph.origin = f"{kind}: {source_line}"
        try:
            read = [tensor_name(var) for var in equation.invars]
            written = _converted(graph, equation, read, source_line)
        except UnsupportedError:
            raise  # names an equation of an inner program
        except NotImplementedError as error:
            case = f" {error}" if str(error) else ""
            raise UnsupportedError(
                f"the primitive {kind}{case} has no ONNX form: {source_line}"
            ) from error
        except Exception as error:  # a case that its converter does not foresee
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise UnsupportedError(
                f"the primitive {kind} has no ONNX form: {source_line}: {text:.200}"
            ) from error
        names |= dict(zip(equation.outvars, written, strict=True))
    return [tensor_name(var) for var in program.outvars]


def _converted(graph: Graph, equation: Any, inputs: list[str], line: str) -> list[str]:
    """Returns the names of the outputs of an equation.

    line: of its source.

    Raises:
        NotImplementedError: it has no ONNX form. The message, if any, is the case.
    """
    kind, params = equation.primitive.name, equation.params
    if kind in _CALLS:
        inner = params[_CALLS[kind]]
        consts = getattr(inner, "consts", ())
        return _convert(graph, getattr(inner, "jaxpr", inner), consts, inputs, line)
    values = [graph.value(name) for name in inputs]
    if kind != "dim_as_value" and _is_static(equation) and all(v is not None for v in values):
        return [graph.constant(value) for value in _computed(equation, values, params)]
    if kind not in CONVERTERS:
        raise NotImplementedError
    return CONVERTERS[kind](graph, equation, inputs)


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
