"""Models of the boards against the formulas of their papers in float64 NumPy."""

import jax
import numpy as np
import pytest
from rankers import built, joined, make_inputs, matrix_cross, relu, tower

from jaxrank import models
from jaxrank.errors import InputError


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def dense(params, x):
    return x @ params["kernel"] + params.get("bias", 0)


def head(params, *parts):
    return dense(params["head"], np.concatenate(parts, axis=1))


def gdcn(params, floats, vectors, structure):
    x0 = x = joined(floats, vectors)
    for layer in range(2):
        gate = sigmoid(dense(params["cross"][f"gate_{layer}"], x))
        x = x0 * dense(params["cross"][f"layer_{layer}"], x) * gate + x
    if "tower" not in params:
        return head(params, x)
    if structure == "stacked":
        return head(params, tower(params["tower"], x))
    return head(params, x, tower(params["tower"], x0))


def qnn(params, floats, vectors, norm="none"):
    x0 = x = joined(floats, vectors)
    for layer in range(2):
        factors = tower(params[f"quadratic_{layer}"], x, norm=norm)
        x = x * sum(np.split(factors, 3, axis=1)) + x
    parts = [x]
    if "cross" in params:
        rows = [row + matrix_cross(params["cross"], 0, row, row) for row in x0]
        parts.append(np.array(rows))
    if "tower" in params:
        parts.append(tower(params["tower"], x0))
    return head(params, *parts)


def deepfm(params, floats, vectors):
    machine, logits = params["fm"], []
    for example, numbers in enumerate(floats):
        each = [row for v in vectors for row in v[example]]
        factors = [row[2:] for row in each]
        factors += [n * u for n, u in zip(numbers, machine["factors"], strict=True)]
        pairs = sum(a * b for i, a in enumerate(factors) for b in factors[:i])
        weights = sum(row[:2] for row in each) + numbers @ machine["linear"]
        logits.append(machine["bias"] + weights + pairs @ (1 + machine["mix"]))
    deep = tower(params["tower"], joined(floats, vectors))
    return np.array(logits) + head(params, deep)


def final_mlp(params, floats, vectors, heads=1, contexts=None):
    x0, outputs = joined(floats, vectors), []
    for stream in ("first", "second"):
        gate = 1
        if f"{stream}_gate" in params:
            gate = params[f"{stream}_gate"]
            if contexts:
                hidden = relu(dense(gate["layer_0"], contexts[stream](floats, vectors)))
                gate = dense(params[f"{stream}_gate_output"], hidden)
            gate = 2 * sigmoid(gate)
        outputs.append(tower(params[f"{stream}_tower"], x0 * gate))
    kernel, rows = params["bilinear"]["kernel"], []
    for u, v in zip(*outputs, strict=True):
        u, v = u.reshape(heads, -1), v.reshape(heads, -1)
        each = kernel.reshape(heads, u.shape[1], 2, v.shape[1])
        rows.append(np.einsum("hi,hitj,hj->t", u, each, v))
    return head(params, *outputs) + np.array(rows)


CONTEXTS = {
    "first": lambda floats, vectors: np.concatenate([vectors[1][:, 0], floats[:, 1:2]], axis=1),
    "second": lambda floats, vectors: vectors[0][:, 1],
}
CASES = {
    "gdcn": [
        (dict(structure="parallel", mlp_units=(5, 4)), dict(structure="parallel")),
        (dict(structure="stacked", mlp_units=(5,)), dict(structure="stacked")),
        (dict(mlp_units=()), dict(structure="parallel")),
    ],
    "qnn": [
        (dict(), dict()),
        (dict(norm="batch", cross_layers=1), dict(norm="batch")),
        (dict(cross_layers=1, mlp_units=(5, 4)), dict()),
    ],
    "deepfm": [(dict(mlp_units=(5, 4)), dict())],
    "final_mlp": [
        (dict(), dict()),
        (dict(gates=False, heads=2), dict(heads=2)),
        (
            dict(gate_units=3, first_context=("v1_0", "f1"), second_context=("v0_1",)),
            dict(contexts=CONTEXTS),
        ),
    ],
}
SIZES = {
    "gdcn": dict(cross_layers=2),
    "qnn": dict(layers=2, products=3),
    "deepfm": {},
    "final_mlp": dict(first_mlp_units=(5, 4), second_mlp_units=(6,)),
}
REFERENCES = dict(gdcn=gdcn, qnn=qnn, deepfm=deepfm, final_mlp=final_mlp)


@pytest.mark.parametrize(
    ("name", "fields", "settings"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_logits_are_those_of_the_written_out_formula(name, fields, settings):
    dims = (4, 4) if name == "deepfm" else (2, 4)
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(name=name, dims=dims, **SIZES[name], **fields)
        logits, _ = model.apply(params, state, make_inputs(floats, vectors), train=True)
        assert logits.dtype == np.float64
    expected = REFERENCES[name](params, floats, vectors, **settings)
    np.testing.assert_allclose(logits, expected, rtol=1e-10, atol=1e-11)


def test_heads_that_do_not_divide_the_streams_are_rejected():
    with pytest.raises(InputError, match="found 3 heads, widths 4 and 6"):
        built(name="final_mlp", heads=3, **SIZES["final_mlp"])


@pytest.mark.parametrize("name", CASES)
def test_input_axes_name_every_number_along_an_axis(name):
    parts = {models.DENSE: 3, models.VECTORS: 12, models.SEQUENCES: 0, "f1": 1}
    lengths = {**parts, "v0_1": 4, "v1_0": 4}
    for fields, _ in CASES[name]:
        of_name = {"name": name, "dims": (4, 4), **SIZES[name], **fields}
        model, params, state, floats, vectors = built(**of_name)
        paths = jax.tree_util.tree_leaves_with_path({"params": params, **state})
        arrays = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in paths}
        axes = model.input_axes(make_inputs(floats, vectors))
        sizes = {
            (array, axis): sum(lengths.get(part, part) for part in parts)
            for array, reading in axes.items()
            for axis, parts in reading.items()
        }
        shapes = {
            (array, axis): arrays.get(f"params/{array}", arrays.get(array)).shape[axis]
            for array, axis in sizes
        }
        assert sizes == shapes


@pytest.mark.parametrize(
    "settings", [dict(activation="prelu"), dict(activation="dice", norm="batch")]
)
def test_input_axes_of_qnn_name_every_array_that_grows_with_the_features(settings):
    shapes = []
    for dims in ((4, 4), (4, 6)):
        model, params, state, floats, vectors = built(name="qnn", dims=dims, layers=1, **settings)
        paths = jax.tree_util.tree_leaves_with_path({**params, **state})
        shapes.append(
            {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in paths}
        )
    changed = {name for name, shape in shapes[0].items() if shapes[1][name] != shape}
    assert changed == model.input_axes(make_inputs(floats, vectors)).keys()
