"""The plain form of every model: as exact as the trained program, and exported for any batch."""

import jax
import numpy as np
import pytest
from jax import export
from model_variants import VARIANTS, built, inputs_of_variant
from rankers import equations

from jaxrank import extensions, models
from jaxrank.models import registry


def test_every_registered_model_has_a_variant():
    names = {fields.get("name", registry.RANKER) for fields in VARIANTS.values()}
    package = {name for name in registry.names() if ("model", name) not in extensions.origins()}
    assert names == package | {"own"}


@pytest.mark.parametrize("name", VARIANTS)
def test_plain_layers_are_as_exact_as_the_trained_program(name):
    model, variables, dims = built(name)
    exact_model, _, _ = built(name, precision="highest")

    def exact(variables, inputs):
        return exact_model.apply(*variables, inputs, train=False)[0]

    def trained_and_plain(variables, inputs):
        return model.apply(*variables, inputs, train=False)[0], model.infer(*variables, inputs)

    with jax.enable_x64(True):
        expected = np.asarray(jax.jit(exact)(variables, inputs_of_variant(np.float64, dims)))
    assert expected.dtype == np.float64
    assert expected.std(axis=0).min() > 1e-3
    single = jax.tree.map(np.float32, variables), inputs_of_variant(np.float32, dims)
    trained, plain = map(np.asarray, jax.jit(trained_and_plain)(*single))
    error = np.abs(plain - expected).max()
    assert error <= 2 * np.abs(trained - expected).max() + 1e-7
    assert error <= 1e-5 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("name", VARIANTS)
def test_plain_layers_are_exported_for_any_number_of_examples(name):
    model, variables, dims = built(name)
    single = jax.tree.map(np.float32, variables)
    (batch,) = export.symbolic_shape("batch")
    inputs = inputs_of_variant(np.float32, dims).shapes(batch)

    def infer(dense, reads):
        return model.infer(*single, models.Inputs(inputs.names, dense, reads))

    arrays = inputs.all_dense, inputs.all_reads
    names = {e.primitive.name for e in equations(jax.make_jaxpr(infer)(*arrays).jaxpr)}
    assert not names & {"platform_index", "custom_vjp_call", "ffi_call", "cond"}
    exported = export.export(jax.jit(infer), platforms=("cpu", "cuda", "tpu"))(*arrays)
    assert exported.out_avals[0].shape == (batch, 2)
