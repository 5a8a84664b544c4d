"""The plain form of every model: as exact as the trained program, and exported for any batch."""

import jax
import numpy as np
import own_model  # noqa: F401  registers a model
import pytest
from jax import export
from rankers import equations, inputs_of, random_input

from jaxrank import models
from jaxrank.models import registry

MULTITASK = dict(experts=3, expert_mlp_units=(5,), mlp_units=(6,), task_mlp_units=(3,))
VARIANTS = {
    "dcn_v2": dict(structure="parallel", mlp_units=(5, 4), dense_mlp_units=(7,)),
    "dcn": dict(cross="dcn", mlp_units=(5,), norm="layer", activation="gelu"),
    "dcn_v2_low_rank": dict(cross="dcn_v2_low_rank", cross_rank=3, mlp_units=(), tables=(2, 4)),
    "dcn_mix": dict(cross="dcn_mix", cross_rank=3, mlp_units=(5,), activation="silu"),
    "dlrm": dict(cross="dlrm", bottom_mlp_units=(3,), norm="batch", mlp_units=(5,)),
    "none": dict(cross="none", mlp_units=(5,), activation="tanh", dropout=0.5),
    "mmoe": dict(multitask="mmoe", **MULTITASK),
    "ple": dict(multitask="ple", task_experts=2, norm="batch", **MULTITASK),
    "mixed_bfloat16": dict(precision="mixed_bfloat16", mlp_units=(5,)),
    "factorization_machine": dict(name="factorization_machine", cross_scale=0.3),
    "own": dict(name="own", ids=("v0_0", "v1_0")),
}


def inputs_of_variant(dtype, dims=(4, 4)):
    """Returns inputs with floats, vectors and a sequence, one of them empty."""
    floats, vectors = random_input(dtype=dtype, dims=dims)
    r = np.random.default_rng(1)
    sequence = r.normal(size=(len(floats), 3, dims[1])).astype(dtype)
    filled = np.arange(3) < np.arange(len(floats))[:, None] % 4
    return inputs_of(floats, vectors, ((sequence, filled),))


def built(name, **changes):
    """Returns a model, its variables as float64 noise, and a function that makes its inputs."""
    fields = dict(VARIANTS[name])
    fields |= {field: value for field, value in changes.items() if field in fields}
    dims = fields.pop("tables", (4, 4))
    model = models.build(tasks=2, **fields)
    inputs = inputs_of_variant(np.float32, dims)
    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)
    r = np.random.default_rng(2)

    def noise(path, leaf):
        values = r.normal(size=leaf.shape, scale=0.3)
        return np.abs(values) + 0.1 if path[-1].key == "var" else values

    return model, jax.tree_util.tree_map_with_path(noise, shapes), dims


def test_every_registered_model_has_a_variant():
    names = {fields.get("name", registry.RANKER) for fields in VARIANTS.values()}
    assert names >= {registry.RANKER, registry.FACTORIZATION_MACHINE, "own"}


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
    assert expected.std(axis=0).min() > 0.01
    single = jax.tree.map(np.float32, variables), inputs_of_variant(np.float32, dims)
    trained, plain = map(np.asarray, jax.jit(trained_and_plain)(*single))
    error = np.abs(plain - expected).max()
    assert error <= 2 * np.abs(trained - expected).max() + 1e-7
    assert error <= 3e-6 * max(1, np.abs(expected).max())


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
