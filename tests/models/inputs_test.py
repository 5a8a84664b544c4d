"""The named inputs of a model, and the dependence of its arrays on them."""

import collections

import jax
import numpy as np
import pytest
import tiny

from jaxrank import models
from jaxrank.build import Builder
from jaxrank.errors import InputError
from jaxrank.features import PAD, Categorical, Dense, Ragged, Schema, Table, Task
from jaxrank.layout import layout
from jaxrank.models import DENSE, SEQUENCES, VECTORS, Inputs
from jaxrank.step import _inputs, input_names, model_inputs

LAYOUT = layout(
    Schema(
        tasks=(Task("click"),),
        dense=(Dense("age"), Dense("price")),
        categorical=(Categorical("user", "user"), Categorical("pair", "pair", length=2)),
        ragged=(
            Ragged("tags", "tags"),
            Ragged("seen", "user", combiner="none", length=3),
            Ragged("bought", "pair", combiner="none", length=2),
        ),
        tables=tuple(Table(name, 9, "integer") for name in ("user", "pair", "tags")),
    ),
    {"user": 4, "pair": 4, "tags": 2},
)
B = 5


def lookup_vectors(seed=0):
    """floats, vectors and ids of a batch, as a step has them."""
    rng = np.random.default_rng(seed)
    floats = rng.normal(size=(B, 2)).astype(np.float32)
    vectors, ids = {}, {}
    for stack in LAYOUT.stacks:
        vectors[stack.name] = {
            "ids": rng.normal(size=(B, stack.places, stack.dim)).astype(np.float32),
            "lists": rng.normal(size=(B, len(stack.lists), stack.dim)).astype(np.float32),
        }
        result = rng.integers(0, 9, (B, stack.places)).astype(np.int32)
        ids[stack.name] = np.where(rng.random(result.shape) < 0.4, PAD, result)
    return floats, vectors, ids


def inputs_of_batch(floats, vectors, ids):
    return _inputs(LAYOUT, floats, vectors, ids, models.Share())


def test_every_feature_is_there_by_its_name():
    floats, vectors, ids = lookup_vectors()
    inputs = inputs_of_batch(floats, vectors, ids)
    read, rows = vectors["dim4"]["ids"], ids["dim4"]
    assert list(inputs.dense) == ["age", "price"]
    assert list(inputs.vectors) == ["tags", "user", "pair"]
    assert list(inputs.sequences) == ["seen", "bought"]
    np.testing.assert_array_equal(inputs.dense["price"], floats[:, 1])
    np.testing.assert_array_equal(inputs.vectors["user"], read[:, 0])
    np.testing.assert_array_equal(inputs.vectors["pair"], read[:, 1:3])
    np.testing.assert_array_equal(inputs.vectors["tags"], vectors["dim2"]["lists"][:, 0])
    for name, places in (("seen", slice(3, 6)), ("bought", slice(6, 8))):
        result, mask = inputs.sequences[name]
        np.testing.assert_array_equal(result, read[:, places])
        np.testing.assert_array_equal(mask, rows[:, places] != PAD)
    with pytest.raises(InputError, match=r"inputs.vectors must have .* 'usr': .*nearest is 'user'"):
        inputs.vectors["usr"]
    assert "usr" not in inputs.vectors


def test_all_features_stand_side_by_side_in_the_order_of_their_names():
    inputs = inputs_of_batch(*lookup_vectors())
    flat, names = np.asarray(inputs.features), input_names(LAYOUT)
    assert flat.shape == (B, len(names)) == (B, inputs.size)
    for i, (kind, feature, place, coordinate) in enumerate(names):
        if kind == "float":
            expected = inputs.dense[feature]
        elif kind == "sequence":
            result, mask = inputs.sequences[feature]
            count = np.maximum(mask.sum(axis=1), 1)
            expected = (result * mask[:, :, None]).sum(axis=1)[:, coordinate] / count
        else:
            result = inputs.vectors[feature]
            expected = (result[:, place] if result.ndim == 3 else result)[:, coordinate]
        np.testing.assert_allclose(flat[:, i], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("read", "operations"),
    [
        (lambda inputs: (), {}),
        (lambda inputs: inputs.all_dense, {}),
        (lambda inputs: inputs.dense["age"], {"slice": 1}),
        (lambda inputs: inputs.vectors["pair"], {"slice": 1}),
        (lambda inputs: inputs.sequences["seen"], {"slice": 2, "ne": 1}),
    ],
    ids=["nothing", "all dense", "dense", "vectors", "sequence"],
)
def test_what_is_not_read_is_not_in_the_program(read, operations):
    batch = lookup_vectors()
    program = jax.make_jaxpr(lambda *batch: jax.tree.leaves(read(inputs_of_batch(*batch))))
    result = collections.Counter(e.primitive.name for e in program(*batch).jaxpr.eqns)
    del result["squeeze"], result["reshape"]
    assert result == operations


def test_inputs_pass_through_programs_and_have_shapes():
    inputs = inputs_of_batch(*lookup_vectors())
    again = jax.jit(lambda inputs: inputs)(inputs)
    assert again.names == inputs.names
    jax.tree.map(np.testing.assert_array_equal, again, inputs)
    shapes = inputs.shapes(1)
    assert shapes.all_dense.shape == (1, 2)
    expected, result = (jax.tree.leaves(x.zeros()) for x in (model_inputs(LAYOUT), shapes))
    assert list(map(np.shape, result)) == list(map(np.shape, expected))
    by_name = Inputs.from_arrays(inputs.dense, inputs.vectors, inputs.sequences)
    np.testing.assert_array_equal(by_name.features, inputs.features)


MODELS = {
    "dcn_v2": {},
    "vector, parallel": dict(cross="dcn", structure="parallel"),
    "low rank": dict(cross="dcn_v2_low_rank", cross_rank=3, mlp_units=()),
    "mix, heads": dict(cross="dcn_mix", cross_rank=3, structure="parallel", task_mlp_units=(3,)),
    "tower": dict(cross="none", norm="layer"),
    "none": dict(cross="none", mlp_units=()),
    "layers of floats": dict(dense_mlp_units=(6, 3), structure="parallel"),
    "mmoe": dict(multitask="mmoe", expert_mlp_units=(4,), mlp_units=()),
    "ple": dict(multitask="ple", expert_mlp_units=(4,), structure="parallel"),
}


def output_shapes(model, inputs):
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), inputs.zeros()))[0]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    name = jax.tree_util.keystr
    return {name(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_the_ranker_reports_each_axis_that_grows_with_its_inputs(config):
    """All others stay as long as they are, however many inputs there are."""
    model = models.build(tasks=2, **({"mlp_units": (5,)} | config))
    base = {"dense": {"a": 1, "b": 1}, "vectors": {"u": 4}, "sequences": {"s": 3}}

    def inputs(dense, vectors, sequences):
        zeros = np.zeros
        return Inputs.from_arrays(
            {name: zeros(1, np.float32) for name in dense},
            {name: zeros((1, dim), np.float32) for name, dim in vectors.items()},
            {
                name: (zeros((1, 2, dim), np.float32), zeros((1, 2), bool))
                for name, dim in sequences.items()
            },
        )

    grown = {
        DENSE: base | {"dense": {"a": 1, "b": 1, "c": 1}},
        VECTORS: base | {"vectors": {"u": 4, "v": 7}},
        SEQUENCES: base | {"sequences": {"s": 3, "t": 2}},
    }
    size = {DENSE: 1, VECTORS: 7, SEQUENCES: 2}
    before = output_shapes(model, inputs(**base))
    axes = model.input_axes(inputs(**base))
    assert set(axes) <= set(before)
    assert axes["sequence_0/query"] == "s"
    lengths = {DENSE: 2, VECTORS: 4, SEQUENCES: 3}
    for name, shape in before.items():
        reading = {} if isinstance(axes.get(name, {}), str) else axes.get(name, {})
        for axis, parts in reading.items():
            alone = sum(part for part in parts if isinstance(part, int))
            assert shape[axis] == alone + sum(lengths.get(part, 0) for part in parts), name
    for group, more in grown.items():
        after = output_shapes(model, inputs(**more))
        for name, shape in before.items():
            reading = {} if isinstance(axes.get(name, {}), str) else axes.get(name, {})
            expected = tuple(
                length + size[group] * (group in reading.get(axis, ()))
                for axis, length in enumerate(shape)
            )
            assert after[name] == expected, (name, group)


def test_what_reads_products_of_pairs_depends_on_the_features_otherwise():
    model = models.build(tasks=1, cross="dlrm", mlp_units=(5,), bottom_mlp_units=(3,))
    axes = model.input_axes(model_inputs(LAYOUT))
    assert axes["tower/layer_0/kernel"] is None
    assert axes["cross/bottom/layer_0/kernel"] == {0: (DENSE,)}


def test_the_config_makes_the_ranker_with_its_options():
    model = Builder(tiny.config(), LAYOUT.schema).model()
    assert model.compiler_options("gpu") == {"xla_gpu_ftz": True}
    assert model.compiler_options("tpu") == {}
