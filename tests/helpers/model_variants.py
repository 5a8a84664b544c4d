"""A small model of every registered kind and form, with parameters that are random numbers."""

import jax
import numpy as np
import own_model  # noqa: F401  registers a model
from rankers import make_inputs, random_input

from jaxrank import models

MULTITASK = dict(experts=3, expert_mlp_units=(5,), mlp_units=(6,), task_mlp_units=(3,))
VARIANTS = {
    "dcn_v2": dict(structure="parallel", mlp_units=(5, 4), dense_mlp_units=(7,)),
    "dcn": dict(cross="dcn", mlp_units=(5,), norm="layer", activation="gelu"),
    "dcn_v2_low_rank": dict(cross="dcn_v2_low_rank", cross_rank=3, mlp_units=(), tables=(2, 4)),
    "dcn_mix": dict(cross="dcn_mix", cross_rank=3, mlp_units=(5,), activation="silu"),
    "dlrm": dict(cross="dlrm", bottom_mlp_units=(3,), norm="batch", mlp_units=(5,)),
    "dice": dict(cross="none", mlp_units=(5,), activation="dice"),
    "none": dict(cross="none", mlp_units=(5,), activation="tanh", dropout=0.5),
    "mmoe": dict(multitask="mmoe", **MULTITASK),
    "ple": dict(multitask="ple", task_experts=2, norm="batch", **MULTITASK),
    "mixed_bfloat16": dict(precision="mixed_bfloat16", mlp_units=(5,)),
    "factorization_machine": dict(name="factorization_machine", cross_scale=0.5),
    "gdcn": dict(name="gdcn", mlp_units=(5,), dropout=0.5),
    "qnn": dict(name="qnn", layers=1, products=3, cross_layers=1, norm="batch"),
    "deepfm": dict(name="deepfm", mlp_units=(5,)),
    "final_mlp": dict(
        name="final_mlp",
        first_mlp_units=(4,),
        second_mlp_units=(6,),
        heads=2,
        first_context=("v0_0", "f0"),
    ),
    "own": dict(name="own", ids=("v0_0", "v1_0")),
}


def inputs_of_variant(dtype, dims=(4, 4)):
    """Returns inputs with floats, vectors and a sequence, one of them empty."""
    floats, vectors = random_input(dtype=dtype, dims=dims)
    r = np.random.default_rng(1)
    sequence = r.normal(size=(len(floats), 3, dims[1])).astype(dtype)
    filled = np.arange(3) < np.arange(len(floats))[:, None] % 4
    return make_inputs(floats, vectors, ((sequence, filled),))


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
        values = r.normal(size=leaf.shape, scale=0.5)
        return np.abs(values) + 0.1 if path[-1].key == "var" else values

    return model, jax.tree_util.tree_map_with_path(noise, shapes), dims
