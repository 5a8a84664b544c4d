"""Compares the C++ code with XLA: rows to the bit, layers up to the rounding of sums."""

import functools
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import examples
import jax
import jax.numpy as jnp
import native_layers
import numpy as np
import pytest
from checkout import HELPERS, ROOT
from native_layers import assert_near, assert_same_bits, floats
from placed_tables import DIMS, SCHEMA, hot_rows
from sharded import lookup, new_tables, partition_specs, update

from jaxrank import mesh as meshes
from jaxrank import native
from jaxrank.embedding import Embedding, duplicates, make_row_optimizer
from jaxrank.embedding.backends import cpu_rows
from jaxrank.embedding.backends.cpu import CpuRowLayout
from jaxrank.embedding.backends.lazy import IndexedVectors
from jaxrank.embedding.backends.xla import RowLayout
from jaxrank.features import PAD
from jaxrank.layout import layout
from jaxrank.models.cross import LowRankCross, MatrixCross
from jaxrank.models.products import layer, product

needs_compiler = pytest.mark.usefixtures("compiled")
needs_layers = pytest.mark.usefixtures("multiplied")
# (ids, width), for work of one part, of several and of many parts. Widths from 1 to 128 that are
# powers of two have unrolled code, and the others share one loop.
SHAPES = [(1, 16), (5_000, 1), (5_000, 8), (5_000, 32), (5_000, 64), (5_000, 100), (5_000, 128)]
ODD, MANY = (31, 3), (100_000, 16)
WAYS = list(itertools.product(["any", "rising"], ["block", "index", "scale"]))


def ids(count, below, seed=1):
    """Draws ids. Some are frequent, and a fifth are PAD."""
    rng = np.random.default_rng(seed)
    values = (below ** rng.random(count)).astype(np.int32) - 1
    return np.where(rng.random(count) < 0.2, PAD, values)


@pytest.fixture
def compiled():
    """Skips the test without a compiler. With one, the code must be available."""
    if not any(map(shutil.which, native.COMPILERS)):
        pytest.skip("this machine has no C++ compiler")
    assert native.missing() == ""


@pytest.fixture
def multiplied(compiled):
    """Skips the test on processors that do not support the layers."""
    kinds = Path("/proc/cpuinfo").read_text().split()
    if not {"avx2", "fma"} <= set(kinds):
        pytest.skip("this processor has neither AVX-512 nor AVX2")
    assert native.has_layers()


@needs_compiler
@pytest.mark.parametrize(("count", "dim"), [ODD, MANY, *SHAPES[1::5]])
def test_rows_are_taken_as_by_xla(count, dim):
    plain, form = RowLayout(dim, 128), CpuRowLayout(dim, 128)
    table, index = floats(700, 128), ids(count, 700)
    assert_same_bits(form.take(table, index), plain.take(table, index))
    numbers = jnp.asarray(table[:, 0])
    assert_same_bits(cpu_rows.take(numbers, index), plain._gather(numbers, index))


@needs_compiler
@pytest.mark.parametrize(
    ("count", "dim", "order", "source_kind"),
    [
        *((*MANY, *way) for way in WAYS[::2]),
        *((*ODD, *way) for way in WAYS[::5]),
        *((*shape, *way) for shape, way in zip(SHAPES, itertools.cycle(WAYS), strict=False)),
    ],
)
def test_vectors_are_added_as_by_xla(count, dim, order, source_kind):
    plain, form = RowLayout(dim, 128), CpuRowLayout(dim, 128)
    at = ids(count, 900)
    at = np.sort(at) if order == "rising" else at
    start = floats(900, dim, seed=2) + np.float32(0)  # like sums, never negative zero
    source = floats(count, dim) if source_kind == "block" else floats(300, 128)
    index = None if source_kind == "block" else jnp.asarray(ids(count, 300, seed=3))
    scale = jnp.asarray(floats(count, seed=4)) if source_kind == "scale" else None
    settings = dict(scale=scale, rising=order == "rising")
    result, expected = (
        f.add(jnp.asarray(start), jnp.asarray(at), jnp.asarray(source), index, **settings)
        for f in (form, plain)
    )
    assert_same_bits(result, expected)
    assert (np.asarray(result) != start).any()


@needs_compiler
@pytest.mark.parametrize(
    ("count", "rows", "dim"),
    [
        (31, 40, 3),
        (5_000, 1, 1),
        (5_000, 40, 128),
        (100_000, 1_000_003, 16),
    ],
)
def test_gradients_of_an_id_are_added_up_as_by_xla(count, rows, dim):
    alone = count // 3
    row = jnp.asarray(ids(count, rows))
    rest = count - alone
    pieces = [
        IndexedVectors(alone, jnp.asarray(floats(alone, dim))),
        IndexedVectors(
            rest,
            jnp.asarray(floats(200, dim, seed=5)),
            jnp.asarray(ids(rest, 200, seed=6)),
            jnp.asarray(floats(rest, seed=7)),
        ),
    ]
    unique, sums = jax.jit(lambda: cpu_rows.sum_by_id(row, pieces, rows, dim))()
    scratch = jnp.zeros(rows, jnp.int32)
    expected, of_expected, _ = duplicates.sum_by_scratch(RowLayout(dim, dim), row, pieces, scratch)
    different = len(np.unique(row[row != PAD]))
    assert (np.asarray(unique[different:]) == PAD).all()
    order, in_order = np.argsort(unique[:different]), np.argsort(expected[:different])
    np.testing.assert_array_equal(unique[order], expected[in_order])
    assert_same_bits(sums[order], of_expected[in_order])


@needs_compiler
@pytest.mark.parametrize(
    ("row_optimizer", "placement", "devices", "replicas", "scope", "settings"),
    [
        ("rowwise_adagrad", "split", 1, 1, "read", {}),
        ("rowwise_adagrad", "mixed", 4, 2, "read", {"lr_multipliers": {"ta": 0.25, "tc": 4.0}}),
        ("rowwise_adagrad", "split", 1, 1, "read", {"l2": 0.01, "clip_norm": 0.01}),
        ("sgd", "mixed", 1, 1, "table", {"l2": 0.01}),
    ],
)
def test_lookup_and_update_are_those_of_xla(
    row_optimizer, placement, devices, replicas, scope, settings
):
    lay = layout(SCHEMA, DIMS, hot_rows(placement, devices))
    settings = dict(
        layout=lay,
        mesh=meshes.make_mesh(devices=devices, replicas=replicas),
        row_optimizer=make_row_optimizer(row_optimizer),
        room={stack.name: 0.1 for stack in lay.stacks},
        l2_scope=scope,
        **{"init_std": 0.01, "l2": 0.0, "clip_norm": 0.0, **settings},
    )
    by_xla = type("ByXla", (Embedding,), {"is_native": False})(**settings)
    by_native = Embedding(**settings)
    assert by_native.is_native
    assert not by_native.init_scratch()
    tables = new_tables(by_native)
    batch = examples.random_batch(lay, 64, seed=0)
    (vectors, _), (expected, _) = (lookup(e, tables, batch) for e in (by_native, by_xla))
    jax.tree.map(assert_same_bits, vectors, expected)
    after, expected = (update(e, tables, batch, vectors) for e in (by_native, by_xla))
    # XLA may round operations differently that it fuses with the sums.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, after, expected)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), after, tables)
    assert all(t.rows for t in moved.values())


@needs_compiler
@pytest.mark.parametrize(
    ("count", "width", "has_rates"),
    [
        (0, 16, False),
        (1, 1, True),
        (31, 4, False),
        (5_000, 1, False),
        (5_000, 128, True),
        (100_000, 16, True),
    ],
)
def test_rowwise_adagrad_is_that_of_float64(count, width, has_rates):
    dim, rows, row_optimizer = (
        width - width // 4,
        max(12_800, count * 128 // 100),
        make_row_optimizer("rowwise_adagrad", eps=1e-3),
    )
    row = np.random.default_rng(0).permutation(rows)[:count].astype(np.int32)
    table = floats(rows, width)
    grads = floats(count + 7, dim, seed=1)
    learning_rate = np.abs(floats(count + 7, 1, seed=2)) if has_rates else np.float32(0.3)
    accumulator = np.abs(floats(rows, seed=3))
    stored = jnp.asarray(table.reshape(-1, 128)), {"accumulator": jnp.asarray(accumulator)}
    padded = jnp.asarray(np.append(row, np.full(7, PAD)))
    change = jax.jit(functools.partial(row_optimizer.native, width=width))
    new, slots = change(*stored, padded, jnp.asarray(grads), jnp.asarray(learning_rate))

    grads = grads[:count].astype(np.float64)
    mean, expected = np.mean(grads**2, axis=1), accumulator.astype(np.float64)
    expected[row] += mean
    np.testing.assert_allclose(slots["accumulator"], expected, rtol=1e-6)
    rates = learning_rate[:count] if has_rates else learning_rate
    table[row, :dim] -= rates * grads / np.sqrt(expected[row] + 1e-3)[:, None]
    np.testing.assert_allclose(np.reshape(new, table.shape), table, rtol=1e-6, atol=1e-6)


@needs_compiler
def test_rowwise_adagrad_changes_nothing_where_a_step_is_left_out():
    lay = layout(SCHEMA, DIMS, hot_rows("split", 1))
    embedding = Embedding(
        lay,
        meshes.make_mesh(devices=1),
        row_optimizer=make_row_optimizer("rowwise_adagrad"),
        init_std=0.01,
        l2=0.0,
        l2_scope="read",
        clip_norm=0.0,
    )
    tables, batch = new_tables(embedding), examples.random_batch(lay, 64, seed=0)
    vectors, _ = lookup(embedding, tables, batch)
    batch = jax.tree.map(jnp.asarray, batch)

    @jax.jit
    def step(applies):
        def change():
            routes = embedding.route(batch)
            learning_rate, count = jnp.float32(0.1), jnp.int32(0)
            return embedding.update(
                tables,
                {},
                routes,
                batch,
                vectors,
                learning_rate=learning_rate,
                step=count,
                applies=applies,
            )[0]

        mapped = jax.shard_map(
            change, mesh=embedding.mesh, in_specs=(), out_specs=embedding_specs, check_vma=False
        )
        return mapped()

    embedding_specs = partition_specs(embedding, tables)
    assert "JaxrankRowwiseAdagrad" in step.lower(jnp.bool_(True)).as_text()
    jax.tree.map(assert_same_bits, step(jnp.bool_(False)), tables)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), step(jnp.bool_(True)), tables)
    assert all(jax.tree.leaves(moved))


def missing_reason():
    """Returns `missing()` of a program that loads the code for the first time."""
    return native._loaded.__wrapped__()[0]


@needs_layers
@pytest.mark.parametrize(("shape", "form", "beside", "precision"), native_layers.CASES, ids=str)
def test_layers_and_their_gradients_are_those_of_float64(shape, form, beside, precision):
    native_layers.check(shape, form, beside, precision)


@needs_layers
@pytest.mark.parametrize("name", ["bias", "x0", "past"])
def test_what_is_bfloat16_beside_what_is_multiplied_is_read_as_the_float32_that_it_is(name):
    x, kernel = floats(600, 70), floats(70, 70, seed=1)
    more = {"bias": None, "x0": jnp.asarray(floats(600, 70, seed=2)), "past": None}
    more[name] = jnp.ones((70,) if name == "bias" else (600, 70), jnp.bfloat16)
    y, _ = jax.jit(lambda: layer(x, kernel, more.pop("bias"), "highest", "cross", **more))()
    arrays = {name: 0 if a is None else np.asarray(a, np.float64) for name, a in more.items()}
    past = x if more["past"] is None else arrays["past"]
    bias = 1.0 if name == "bias" else 0.0
    expected = arrays["x0"] * (x.astype(np.float64) @ kernel + bias) + past
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@needs_layers
@pytest.mark.parametrize(
    ("cross", "reads_x0"),
    [(MatrixCross(3), False), (LowRankCross(2, 40), True)],
    ids=["dcn_v2", "dcn_v2_low_rank"],
)
def test_the_gradient_of_cross_layers_in_a_row_is_that_of_float64(cross, reads_x0):
    """Each number of y and x0 has the same gradient, whether x0 is also read elsewhere or not."""
    x0 = floats(600, 70)

    def total(params, x0):
        y, x0 = cross.apply(params, x0)
        return jnp.sum(y + x0 if reads_x0 else y)

    def gradients(x0):
        params = cross.init(jax.random.key(0), jnp.asarray(floats(600, 70)))
        params = jax.tree.map(lambda p: p.astype(x0.dtype), params)
        program = jax.jit(jax.grad(total, argnums=(0, 1)))
        return program(params, x0), program.lower(params, x0).as_text().count("@JaxrankLayer")

    (of_params, of_x0), calls = gradients(x0)
    assert calls > 0
    with jax.enable_x64(True):
        expected, calls = gradients(jnp.asarray(x0, jnp.float64))
    assert calls == 0
    jax.tree.map(assert_near, (of_params, of_x0), jax.tree.map(np.asarray, expected))


@needs_layers
@pytest.mark.parametrize("without", ["avx512bf16", "avx512f"])
def test_layers_by_processors_that_can_less_are_those_of_float64(without):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HELPERS)))}
    subprocess.run([sys.executable, "-m", "native_layers", without], check=True, env=env)


def _with_gradients(x, kernel, grad, precision="bfloat16", form="plain"):
    def run_layer(x, kernel):
        return layer(x, kernel, None, precision, form)

    y, back = jax.vjp(run_layer, x, kernel)
    return y, *back(grad)


@needs_layers
@pytest.mark.parametrize(
    ("precision", "form"), [("highest", "plain"), ("bfloat16", "plain"), ("bfloat16", "relu")]
)
def test_a_product_is_not_a_number_where_a_factor_is_not(precision, form):
    """All bit patterns of NaN stay NaN. Rounded like numbers, some would become infinite."""
    x, kernel = floats(100, 64), floats(64, 40, seed=1)
    x[3, 5] = np.uint32(0x7FFFFFFF).view(np.float32)
    x[70, 63], x[71, 0] = np.inf, -np.inf
    grad = floats(100, 40, seed=2)
    y, of_x, of_kernel = _with_gradients(x, kernel, grad, precision, form)
    assert np.isnan(y[3]).all()
    signs = np.sign(kernel).astype(np.float32)
    for row, expected in ((70, np.inf * signs[63]), (71, -np.inf * signs[0])):
        np.testing.assert_array_equal(
            y[row], np.maximum(expected, 0) if form == "relu" else expected
        )
    assert np.isfinite(np.delete(y, [3, 70, 71], axis=0)).all()
    assert np.isfinite(of_x).all()
    assert np.isnan(of_kernel[5]).all()
    assert np.isfinite(np.delete(of_kernel, [0, 5, 63], axis=0)).all()


@needs_layers
@pytest.mark.parametrize(("examples", "precision"), [(100, "highest"), (5_000, "bfloat16")])
def test_a_product_of_several_is_that_product_alone(examples, precision):
    """The factors are on one device, or on one device each."""
    inputs = floats(4, examples, 48), floats(4, 48, 40, seed=1), floats(4, examples, 40, seed=2)
    run = functools.partial(_with_gradients, precision=precision)
    rows = jax.P("device")
    mesh = jax.make_mesh((4,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    shared = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    results = run(*inputs), jax.vmap(run)(*inputs), jax.jit(shared)(*inputs)
    alone = [run(*(array[i] for array in inputs)) for i in range(4)]
    for result in results:
        for together, *each in zip(result, *alone, strict=True):
            assert_same_bits(together, np.stack(each))


def test_small_products_and_those_of_one_input_or_of_float64_are_of_xla():
    def is_native(examples, size, width, dtype=np.float32, precision="highest"):
        x, kernel = np.ones((examples, size), dtype), np.ones((size, width), dtype)
        text = jax.jit(lambda: product(x, kernel, precision)).lower().as_text()
        return "@JaxrankLayer" in text

    assert is_native(512, 16, 16) == native.has_layers()
    assert is_native(512, 16, 16, precision="bfloat16") == native.has_layers()
    assert not is_native(511, 16, 16)
    assert not is_native(5_000, 1, 200)
    assert is_native(5_000, 200, 1) == native.has_layers()
    with jax.enable_x64(True):
        assert not is_native(512, 16, 16, np.float64)


def test_without_a_compiler_xla_does_the_work(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_reason() == "no C++ compiler was found"
    monkeypatch.setenv("JAXRANK_NATIVE", "0")
    assert missing_reason() == "JAXRANK_NATIVE is 0"


def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    compiler = tmp_path / "c++-that-fails"
    compiler.write_text("#!/bin/sh\necho 'no such option' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    lines = missing_reason()
    assert lines == f"{compiler} could not compile rows.cc: no such option"
    assert list((tmp_path / "cache" / "jaxrank").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "c++")
    assert str(tmp_path / "cache") in missing_reason()


def test_what_was_compiled_is_used_again(tmp_path, monkeypatch):
    compiler = tmp_path / "empty-c++"  # makes its last argument, because the code is not run
    compiler.write_text('#!/bin/sh\nfor last; do :; done\n: > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outputs = native._library("rows")
    monkeypatch.setenv("CXX", "false")
    assert native._library("rows") == outputs
    assert list((tmp_path / "jaxrank").iterdir()) == [outputs]
