"""Reference models in NumPy from the formulas of their papers, and models on several devices."""

import functools

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrank import mesh as meshes
from jaxrank import models
from jaxrank.models.inputs import Columns, Names, Span

BATCH = 6


def relu(x):
    return np.maximum(x, 0)


def random_input(seed=0, batch=BATCH, dtype=np.float32, dims=(2, 4)):
    """Draws floats [B, 3] and vectors [B, 2, dims[0]], [B, 1, dims[1]]: width 11."""
    r = np.random.default_rng(seed)
    floats = r.normal(size=(batch, 3)).astype(dtype)
    vectors = (r.normal(size=(batch, 2, dims[0])), r.normal(size=(batch, 1, dims[1])))
    return floats, tuple(v.astype(dtype) for v in vectors)


def make_inputs(floats, vectors, sequences=(), share=None):
    """Builds the inputs of a model from arrays. Names of features are numbered."""
    names = Names(
        tuple(f"f{i}" for i in range(floats.shape[1])),
        tuple(
            Columns(i, tuple(f"v{i}_{j}" for j in range(v.shape[1]))) for i, v in enumerate(vectors)
        ),
        tuple(Span(f"s{i}", len(vectors) + i, 0, v.shape[1]) for i, (v, _) in enumerate(sequences)),
    )
    reads = [*((v, None) for v in vectors), *sequences]
    return models.Inputs(names, floats, reads, share or models.Share())


def built(dtype=np.float64, dims=(2, 4), **config):
    """Builds a model of two tasks, random parameters, its first state, and its inputs.

    No parameter is zero, so that each of them affects the output. No initializer runs, because
    each one would be compiled for each shape.
    """
    r = np.random.default_rng(1)
    model = models.build(tasks=2, **config)
    floats, vectors = random_input(dtype=dtype, dims=dims)
    shapes = jax.eval_shape(model.init, jax.random.key(0), make_inputs(floats, vectors))
    params = jax.tree.map(lambda p: r.normal(size=p.shape, scale=0.5).astype(dtype), shapes[0])
    state = jax.tree_util.tree_map_with_path(
        lambda path, s: np.full(s.shape, path[-1].key == "var", s.dtype), shapes[1]
    )
    return model, params, state, floats, vectors


def init_model(model, inputs):
    """Calls `model.init` as one program, which compiles faster than its operations one by one."""
    return jax.jit(model.init)(jax.random.key(0), inputs)


def apply_model(model, params, state, inputs, **options):
    """Calls `model.apply` as one program."""
    return jax.jit(functools.partial(model.apply, **options))(params, state, inputs)


def joined(floats, vectors):
    return np.concatenate([floats, *(v.reshape(len(v), -1) for v in vectors)], axis=1)


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def vector_cross(params, layer, x0, x):
    kernel = params[f"layer_{layer}"]["kernel"][:, 0]
    return x0 * sum(kernel * x) + params[f"bias_{layer}"]


def matrix_cross(params, layer, x0, x):
    dense = params[f"layer_{layer}"]
    return x0 * (dense["kernel"].T @ x + dense["bias"])


def low_rank_cross(params, layer, x0, x):
    v, u_transposed = params[f"down_{layer}"]["kernel"], params[f"up_{layer}"]["kernel"]
    return x0 * (u_transposed.T @ (v.T @ x) + params[f"up_{layer}"]["bias"])


def mix_cross(params, layer, x0, x):
    gates = softmax(params[f"gate_{layer}"]["kernel"].T @ x)
    rank = params[f"core_{layer}"]["kernel"].shape[1]
    total = 0
    for i, gate in enumerate(gates):
        v, c = params[f"down_{layer}"]["kernel"][i], params[f"core_{layer}"]["kernel"][i].T
        u = params[f"up_{layer}"]["kernel"][i * rank : (i + 1) * rank].T
        low = np.tanh(c @ np.tanh(v.T @ x))
        total = total + gate * x0 * (u @ low + params[f"up_{layer}"]["bias"])
    return total


CROSSES = {
    "dcn": vector_cross,
    "dcn_v2": matrix_cross,
    "dcn_v2_low_rank": low_rank_cross,
    "dcn_mix": mix_cross,
}


def cross_network(kind, params, x0):
    """Computes two cross layers, example by example."""
    rows = []
    for first in x0:
        x = first
        for layer in range(2):
            x = CROSSES[kind](params, layer, first, x) + x
        rows.append(x)
    return np.array(rows)


def dot_interaction(params, floats, vectors, **tower_settings):
    bottom = tower(params["bottom"], floats, **tower_settings)
    rows = []
    for example in range(len(floats)):
        every = [bottom[example], *(row for v in vectors for row in v[example])]
        dots = [sum(every[i] * every[j]) for i in range(len(every)) for j in range(i)]
        rows.append([*bottom[example], *dots])
    return np.array(rows)


def tower(params, x, norm="none", stats=None, act=relu):
    for layer in range(sum(name.startswith("layer") for name in params)):
        x = x @ params[f"layer_{layer}"]["kernel"] + params[f"layer_{layer}"].get("bias", 0)
        if norm != "none":
            axis = 0 if norm == "batch" else 1
            mean, var = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
            if stats is not None:
                mean, var = (stats[f"norm_{layer}"][k][None] for k in ("mean", "var"))
            x = (x - mean) / np.sqrt(var + 1e-5)
            x = x * params[f"norm_{layer}"]["scale"] + params[f"norm_{layer}"]["bias"]
        x = act(x)
    return x


def expert(stacked, number, x, **tower_settings):
    """Computes one tower of a stack for x [B, in]."""
    return tower(jax.tree.map(lambda p: p[number], stacked), x, **tower_settings)


def mixed(kernel, x, outputs):
    """Computes the sum of outputs [B, width], weighted per example by softmax(x W)."""
    rows = []
    for example, row in enumerate(x):
        gates = softmax(kernel.T @ row)
        assert len(gates) == len(outputs)
        rows.append(sum(g * out[example] for g, out in zip(gates, outputs, strict=True)))
    return np.array(rows)


def mmoe(params, x, **tower_settings):
    """A list of [B, width], one a task."""
    kernels = params["gate"]["logits"]["kernel"]
    outputs = [expert(params["experts"], i, x, **tower_settings) for i in range(kernels.shape[2])]
    return [mixed(kernel, x, outputs) for kernel in kernels]


def ple(params, x, **tower_settings):
    """A list of [B, width], one a task."""
    tasks = len(params["level_0"]["task_gate"]["logits"]["kernel"])
    alone, common = [x] * tasks, x
    for level in range(len(params)):
        at = params[f"level_{level}"]
        numbers = {k: len(at[k]["layer_0"]["kernel"]) for k in ("task_experts", "shared_experts")}
        each = numbers["task_experts"] // tasks
        private = [
            [
                expert(at["task_experts"], task * each + i, alone[task], **tower_settings)
                for i in range(each)
            ]
            for task in range(tasks)
        ]
        shared = [
            expert(at["shared_experts"], i, common, **tower_settings)
            for i in range(numbers["shared_experts"])
        ]
        if "shared_gate" in at:
            (kernel,) = at["shared_gate"]["logits"]["kernel"]
            common = mixed(kernel, common, [*sum(private, []), *shared])
        kernels = at["task_gate"]["logits"]["kernel"]
        alone = [
            mixed(kernels[task], alone[task], [*private[task], *shared]) for task in range(tasks)
        ]
    return alone


def ranker(
    params,
    floats,
    vectors,
    *,
    cross="dcn_v2",
    structure="stacked",
    multitask="shared_bottom",
    **tower_settings,
):
    """Computes logits [B, 2] of a model with these fields in training mode."""
    if "bottom" in params:
        floats = tower(params["bottom"], floats, **tower_settings)
    x0 = joined(floats, vectors)
    if cross == "dlrm":
        crossed = dot_interaction(params["cross"], floats, vectors, **tower_settings)
    else:
        crossed = x0 if cross == "none" else cross_network(cross, params["cross"], x0)
    if "tower" not in params:
        trunk = crossed
    elif structure == "stacked" or cross == "none":
        trunk = tower(params["tower"], crossed, **tower_settings)
    else:
        trunk = np.concatenate([crossed, tower(params["tower"], x0, **tower_settings)], axis=1)
    if "head" in params:
        return trunk @ params["head"]["kernel"] + params["head"]["bias"]
    reads = [trunk, trunk]
    if multitask != "shared_bottom":
        kind = {"mmoe": mmoe, "ple": ple}[multitask]
        reads = kind(params[multitask], trunk, **tower_settings)
    logits = []
    for task, x in enumerate(reads):
        alone = tower(params.get(f"task_{task}", {}), x, **tower_settings)
        logits.append(alone @ params[f"head_{task}"]["kernel"] + params[f"head_{task}"]["bias"])
    return np.concatenate(logits, axis=1)


def slopes_agree(config, dims=(2, 4)):
    """Asserts that the gradient is the slope of the NumPy formula.

    The slope is measured along random directions in all parameters and inputs at once. The
    activation is tanh, because it is smooth.
    """
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(**config, activation="tanh", dims=dims)
        at = (params, floats, vectors)
        mix = np.random.default_rng(3).normal(size=(BATCH, 2))

        def weighted_output(at):
            params, floats, vectors = at
            return (
                mix * model.apply(params, state, make_inputs(floats, vectors), train=True)[0]
            ).sum()

        gradient = jax.tree.leaves(jax.device_get(jax.jit(jax.grad(weighted_output))(at)))

    shape = {k: config[k] for k in ("cross", "structure", "multitask", "norm") if k in config}

    def numpy_out(at):
        return (mix * ranker(*at, act=np.tanh, **shape)).sum()

    for seed in range(3):
        r = np.random.default_rng(seed)
        way = jax.tree.map(lambda a, r=r: r.normal(size=a.shape), at)
        step = 1e-5
        up, down = (
            numpy_out(jax.tree.map(lambda a, d, s=shift: a + s * d, at, way))
            for shift in (step, -step)
        )
        slope = sum((g * d).sum() for g, d in zip(gradient, jax.tree.leaves(way), strict=True))
        np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-6)


def apply_sharded(devices, model, params, state, floats, vectors, key):
    """Calls `model.apply` in training mode with the batch sharded over several devices."""
    mesh = meshes.make_mesh(devices=devices, replicas=2 if devices > 1 else 1)

    def apply_shard(params, state, floats, vectors, key):
        share = models.Share(
            first=meshes.device_index(mesh) * len(floats),
            mean=lambda x: meshes.total(mesh, x) / mesh.size,
        )
        return model.apply(
            params, state, make_inputs(floats, vectors, share=share), train=True, key=key
        )

    by_example, everywhere = PartitionSpec(meshes.EXAMPLES), PartitionSpec()
    run = jax.shard_map(
        apply_shard,
        mesh=mesh,
        in_specs=(everywhere, everywhere, by_example, by_example, everywhere),
        out_specs=(by_example, everywhere),
        check_vma=False,
    )
    return jax.device_get(jax.jit(run)(params, state, floats, vectors, key))


def equations(jaxpr):
    """Yields all equations of a jaxpr and of its nested programs."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def gradient_program(model, params, state, floats, vectors):
    """Returns the equations of the gradient of a sum of logits by parameters and inputs."""

    def loss(params, floats, vectors):
        return model.apply(params, state, make_inputs(floats, vectors), train=True)[0].sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    return list(equations(jax.make_jaxpr(gradient)(params, floats, vectors).jaxpr))
