"""What a model computes for an example, counted from its program."""

import math
from typing import Any


def of_products(jaxpr: Any) -> int:
    """Floating point operations of all matrix products of a jaxpr, two for each number multiplied
    and added; inner programs are counted once, of several to choose from the last, which of those
    for each platform is that for all others. All else, such as activations and gradients of tables,
    is left out, as is usual."""
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(equation: Any) -> int:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        summed = math.prod(shape[axis] for axis in contracted)
        return 2 * math.prod(equation.outvars[0].aval.shape) * summed
    return sum(map(_of_parameter, equation.params.values()))


def _of_parameter(value: Any) -> int:
    if isinstance(value, tuple | list):
        return _of_parameter(value[-1]) if value else 0
    inner = getattr(value, "jaxpr", value)  # a closed jaxpr has one inside
    return of_products(inner) if hasattr(inner, "eqns") else 0
