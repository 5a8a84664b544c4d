"""Properties of the programs of a model that run elsewhere: exports, and absent accelerators."""

import functools
import importlib.util
from typing import Any

import jax
import numpy as np
from jax import export

from jaxrank.aot import devices as absent
from jaxrank.aot.topology import topology
from jaxrank.base_rates import neutral
from jaxrank.errors import InputError
from jaxrank.export import dense_part as dense_parts
from jaxrank.export.comparison.parity import MAX_DIFFERENCE
from jaxrank.export.comparison.reference import rounds_factors
from jaxrank.features import PAD
from jaxrank.model_check.case import STEPS, Case
from jaxrank.selftest.check import NOT_APPLICABLE, PASS, Verdict, passes
from jaxrank.step import Weights

_EXAMPLES = 64
_ROUNDED = 2e-2  # with layers that are rounded to bfloat16, which exports are not
_ADVICE = "Compare the model with train=False in plain float32 operations of jax.numpy."


class Exports:
    """The dense part of the case with random parameters, as `export` writes it."""

    def __init__(self, case: Case):
        self._case = case

    @functools.cached_property
    def _part(self) -> dense_parts.DensePart:
        params, state = self._variables
        rates = neutral(self._case.tasks)
        weights = Weights(params, state, rates.bias, rates.scale, {})
        return dense_parts.dense_part(self._case.builder.model(), self._case.layout, weights, ())

    @functools.cached_property
    def _variables(self) -> tuple[Any, Any]:
        return self._case.variables()

    @functools.cached_property
    def _expected(self) -> np.ndarray:
        """The outputs of the model as it is trained and evaluated."""
        apply = functools.partial(self._case.model.apply, train=False)
        inputs = self._case.inputs(_EXAMPLES)
        return np.asarray(jax.jit(lambda *arrays: apply(*arrays)[0])(*self._variables, inputs))

    @functools.cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        """The inputs by name."""
        inputs = self._case.inputs(_EXAMPLES)
        values = [inputs.all_dense]
        for vectors, ids in inputs.all_reads:
            values += [vectors] if ids is None else [vectors, ids != PAD]
        names = [array.name for array in self._part.inputs]
        return dict(zip(names, map(np.asarray, values), strict=True))

    def stablehlo(self) -> Verdict:
        """Fails if the program that `export` writes differs from the model."""
        program = export.deserialize(bytearray(dense_parts.to_stablehlo(self._part)))
        return self._compare("StableHLO", np.asarray(program.call(*self._arrays.values())[1]))

    def onnx(self) -> Verdict:
        """Fails if the ONNX model differs. A model without one is exported all the same."""
        for package in ("onnx", "onnxruntime"):
            if importlib.util.find_spec(package) is None:
                return Verdict(NOT_APPLICABLE, f"the package {package} is not installed")
        from jaxrank.export.onnx.convert import UnsupportedError, run, to_onnx
        from jaxrank.export.onnx.graph import Tensor

        inputs = [Tensor(*array) for array in self._part.inputs]
        try:
            model = to_onnx(self._part.function, inputs, ["predictions", "logits"])
        except UnsupportedError as error:
            return Verdict(NOT_APPLICABLE, f"a bundle needs JAX to score: {error}")
        return self._compare("ONNX", run(model, self._arrays)[1])

    def _compare(self, name: str, outputs: np.ndarray) -> Verdict:
        is_rounded = rounds_factors(self._case.builder.model_fields)
        tolerance = _ROUNDED if is_rounded else MAX_DIFFERENCE
        scale = max(float(np.abs(self._expected).max()), 1.0)
        difference = float(np.abs(outputs - self._expected).max()) / scale
        return passes(
            difference <= tolerance,
            f"{name} and the model differ by {difference:.1e} (at most {tolerance:.0e})",
            _ADVICE,
        )


def compiles(case: Case, name: str) -> Verdict:
    """Fails if the steps of training and evaluation do not compile for an absent accelerator."""
    target = topology(name)
    try:
        devices = absent.devices(target)
    except InputError as error:
        return Verdict(NOT_APPLICABLE, str(error))
    program = case.program(devices)
    batches = program.shape.struct(case.layout, leading=(STEPS,))
    count = jax.ShapeDtypeStruct((), "int32")
    program.train.lower(program.state_shape, batches, count).compile()
    batch = program.shape.struct(case.layout)
    program.predictor.predict.lower(program.predictor.weights_shape, batch).compile()
    return Verdict(PASS, f"training and evaluation compile for {name}")
