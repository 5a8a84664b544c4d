"""Pools of sequences against the formulas of their papers, event by event in NumPy."""

import jax
import numpy as np
import pytest
from rankers import BATCH, apply_model

from jaxrank import models
from jaxrank.errors import InputError
from jaxrank.models.inputs import Columns, Names, Span
from jaxrank.models.sequences import target_attention as target_attention_module

LENGTH, DIMS = 4, (2, 4)
POOLS = {
    "target_attention": dict(candidate={"s1": "v1", "s0": "v0"}, mlp_units=(5, 3)),
    "mean": {},
    "learned_query": {},
    "transformer": dict(layers=2, heads=2),
}


def inputs(seed=0, batch=BATCH):
    """Draws two features of a sequence, one of them of the second read, and two candidates."""
    r = np.random.default_rng(seed)
    lengths = np.arange(batch) % (LENGTH + 1)
    mask = np.arange(LENGTH) < lengths[:, None]
    names = Names(
        (),
        (Columns(0, ("v0",)), Columns(1, ("v1",))),
        (Span("s0", 0, 1, LENGTH, "history"), Span("s1", 1, 1, LENGTH, "history")),
    )
    filled = np.concatenate([np.ones((batch, 1), bool), mask], axis=1)
    reads = []
    for dim in DIMS:
        vectors = r.normal(size=(batch, 1 + LENGTH, dim))
        vectors[~filled] = 0  # as tables read PAD
        reads.append((vectors, filled))
    return models.Inputs(names, np.zeros((batch, 0)), reads)


def built(pool, **fields):
    """Returns a model whose logit is a weighted sum of its inputs, and random parameters."""
    settings = dict(pool=pool, **POOLS[pool]) | fields
    model = models.build(tasks=1, cross="none", mlp_units=(), sequences={"history": settings})
    r = np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs())[0]
    return model, jax.tree.map(lambda p: r.normal(size=p.shape, scale=0.5), shapes)


def layer(params, x):
    return x @ params["kernel"] + params.get("bias", 0)


def norm(params, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * params["scale"] + params["bias"]


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def target_attention(params, events, candidate):
    """DIN: a sum of events, each times the output of a tower of event, candidate and product."""
    order = [*range(DIMS[0], sum(DIMS)), *range(DIMS[0])]  # `candidate` names s1 first
    total = np.zeros(sum(DIMS))
    for event in events:
        read = np.concatenate([event, (event * candidate)[order]])
        hidden = layer(params["event"], read) + layer(params["candidate"], candidate[order])
        hidden = np.maximum(layer(params["layer_1"], np.maximum(hidden, 0)), 0)
        total += layer(params["score"], hidden) * event
    return total


def mean(params, events, candidate):
    return events.mean(0) if len(events) else np.zeros(sum(DIMS))


def learned_query(params, events, candidate):
    if not len(events):
        return np.zeros(sum(DIMS))
    return softmax(events @ params["query"] / sum(DIMS) ** 0.5) @ events


def transformer(params, events, candidate):
    """Every event of every block, from the oldest to the newest, without a mask."""
    if not len(events):
        return np.zeros(sum(DIMS))
    x = events + params["position"][: len(events)]
    for i in range(2):
        block, size = params[f"block_{i}"], sum(DIMS) // 2
        read, states = norm(block["norm_attention"], x), []
        query, key, value = (layer(block[name], read) for name in ("query", "key", "value"))
        for event in range(len(x)):
            older = slice(event, None)
            heads = []
            for head in (slice(0, size), slice(size, None)):
                scores = key[older, head] @ query[event, head] / size**0.5
                heads.append(softmax(scores) @ value[older, head])
            states.append(x[event] + layer(block["out"], np.concatenate(heads)))
        x = np.array(states)
        wide = np.maximum(layer(block["wide"], norm(block["norm_wide"], x)), 0)
        x = x + layer(block["narrow"], wide)
    return norm(params["norm"], x)[0]


FORMULAS = {f.__name__: f for f in (target_attention, mean, learned_query, transformer)}


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_is_the_written_out_formula_and_ignores_empty_places(pool):
    with jax.enable_x64(True):
        model, params = built(pool)
        logits, _ = apply_model(model, params, {}, inputs(), train=False)
        plain = jax.jit(model.infer)(params, {}, inputs())
    events = np.concatenate([v for v, _ in inputs().all_sequences], axis=2)
    candidates = np.concatenate([v[:, 0] for v in inputs().all_vectors], axis=1)
    lengths = inputs().all_sequences[0][1].sum(axis=1)
    rows = [
        np.concatenate([c, FORMULAS[pool](params.get("sequence_history"), e[:length], c)])
        for e, c, length in zip(events, candidates, lengths, strict=True)
    ]
    expected = layer(params["head"], np.array(rows))
    np.testing.assert_allclose(logits, expected, rtol=1e-10)
    np.testing.assert_allclose(plain, expected, rtol=1e-10)


@pytest.mark.parametrize("room", [2.0, 1.5], ids=["fits", "overflows"])
def test_a_pool_without_empty_places_has_the_results_and_gradients_of_all_places(room, monkeypatch):
    """The 10 events of 6 examples have room for 12 or for 9."""
    monkeypatch.setattr(target_attention_module, "_ALIGNMENT", 1)
    branches = []
    for form in ("_packed_form", "_padded_form"):
        monkeypatch.setattr(target_attention_module, form, recorded(form, branches))

    def loss(params, reads, fields):
        model, _ = built("target_attention", **fields)
        logits, _ = model.apply(params, {}, models.Inputs(names, dense, reads), train=True)
        return (logits**2).sum(), logits

    with jax.enable_x64(True):
        _, params = built("target_attention")
        (dense, reads), (names, *_) = inputs().tree_flatten()[0][:2], inputs().tree_flatten()[1]
        vectors, masks = zip(*reads, strict=True)

        def both(fields):
            def of_vectors(params, vectors):
                return loss(params, list(zip(vectors, masks, strict=True)), fields)

            return jax.jit(jax.value_and_grad(of_vectors, (0, 1), has_aux=True))(params, vectors)

        expected, result = both({}), both(dict(packed_length=room))
        jax.block_until_ready(result)
    ((_, a), b), ((_, c), d) = expected, result
    np.testing.assert_allclose(a, c, rtol=1e-10)
    for x, y in zip(jax.tree.leaves(b), jax.tree.leaves(d), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    forward, backward = "packed" if room == 2 else "padded", 2
    assert [name for name in branches if forward in name] == [f"_{forward}_form"] * backward
    assert len(branches) == backward


def recorded(name, branches):
    """Returns a form that records each run of its program."""
    form = getattr(target_attention_module, name)

    def run(static, *args):
        jax.debug.callback(lambda: branches.append(name))
        return form(static, *args)

    return run


@pytest.mark.parametrize("pool", POOLS)
def test_arrays_that_read_the_features_are_those_that_change_with_a_dimension(pool):
    model, _ = built(pool)
    axes = model.input_axes(inputs())
    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs())[0]
    pools = {"sequence_history": shapes.get("sequence_history", {})}
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(pools)
    }
    sizes = dict(zip(("v0", "v1", "s0", "s1"), 2 * DIMS, strict=True))
    for name, reading in axes.items():
        if name.startswith("sequence_"):
            assert name in named
            if isinstance(reading, dict):
                for axis, parts in reading.items():
                    assert named[name][axis] == sum(sizes[part] for part in parts)
    if pool == "transformer":
        assert set(axes) - {"head/kernel"} == set(named)
        assert {axes[name] for name in named} == {("s0", "s1")}


def test_flops_count_the_products_of_every_event():
    model, _ = built("target_attention")
    first = (2 * sum(DIMS)) * 5 + 5 * 3 + 3  # per event, and per example below
    head = 2 * sum(DIMS)
    assert model.flops(inputs()) == 2 * (LENGTH * first + sum(DIMS) * 5 + head)


BAD = [
    ("target_attention", dict(candidate={}), r"history.candidate: must be a feature of the events"),
    ("target_attention", dict(candidate={"s9": "v0"}), "'s9' must be a feature of the sequence, s"),
    ("target_attention", dict(candidate={"s0": "v1"}), r"one vector of dimension 2.*found \[4\]"),
    ("target_attention", dict(candidate={"s0": "v7"}), "inputs.vectors must have a feature 'v7'"),
    ("transformer", dict(heads=4), "heads must divide the sum of the dimensions .* 6: found 4"),
    ("mean", dict(heads=4), "heads is read only where"),
]


@pytest.mark.parametrize(("pool", "fields", "message"), BAD)
def test_a_pool_that_does_not_fit_its_features_is_rejected(pool, fields, message):
    with pytest.raises(InputError, match=message):
        built(pool, **fields)


def test_a_sequence_that_is_not_there_is_rejected():
    model = models.build(tasks=1, sequences={"s0": dict(pool="mean")})
    with pytest.raises(InputError, match=r"'s0' must be a sequence.*: found history"):
        jax.eval_shape(model.init, jax.random.key(0), inputs())
