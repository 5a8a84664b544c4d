"""Counts the floating point operations of a model from its program."""

import math
from typing import Any


def product_flops(jaxpr: Any) -> int:
    """Returns the floating point operations of all matrix products of a jaxpr.

    A multiplication and addition counts as two operations. Inner programs are counted once. Of
    several branches the last one is counted, which among programs per platform is the default. As
    usual, everything else, such as activations and gradients of tables, is left out.
    """
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(equation: Any) -> int:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        summed = math.prod(shape[axis] for axis in contracted)
        return 2 * math.prod(equation.outvars[0].aval.shape) * summed
    return sum(map(_parameter_flops, equation.params.values()))


def _parameter_flops(value: Any) -> int:
    if isinstance(value, tuple | list):
        return _parameter_flops(value[-1]) if value else 0
    inner = getattr(value, "jaxpr", value)  # a closed jaxpr contains the open one
    return product_flops(inner) if hasattr(inner, "eqns") else 0
