"""What a model computes for an example, counted from its program."""

import math
from collections.abc import Iterator
from typing import Any


def of_products(jaxpr: Any) -> int:
    """Floating point operations of all matrix products of a jaxpr, two for each number multiplied
    and added; inner programs are counted once. All else, such as activations and gradients of
    tables, is left out, as is usual."""
    return sum(map(_of_equation, _equations(jaxpr)))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)  # a closed jaxpr has one inside
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _of_equation(equation: Any) -> int:
    if equation.primitive.name != "dot_general":
        return 0
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[a] for a in contracted)
