"""Ranking model: maps features to one raw logit per task."""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.errors import InputError
from jaxrank.models.cross import Crossed, LowRankCross, MatrixCross, MixCross, VectorCross
from jaxrank.models.dot import DotInteraction
from jaxrank.models.experts import MultiGate, ProgressiveExtraction
from jaxrank.models.inputs import DENSE, SEQUENCES, VECTORS, Inputs, Parts, Reading, Share
from jaxrank.models.products import PRECISIONS, Dense, compiler_options, kept, unrounded
from jaxrank.models.registry import RANKER, register
from jaxrank.models.sequences.pools import SequencePool, pooled_sequences, sequence_axes
from jaxrank.models.tower import ALL_ACTIVATIONS, BATCH_NORM_MOMENTUM, NORMS, Tower
from jaxrank.validate import field

CROSSES = ("dcn_v2", "dcn", "dcn_v2_low_rank", "dcn_mix", "dlrm", "none")
STRUCTURES = ("stacked", "parallel")
MULTITASKS = ("shared_bottom", "mmoe", "ple")


@register(RANKER)
class Ranker(nn.Module):
    """A cross network and a tower over all features, followed by layers of each task.

    x0 concatenates the dense features (after the layers of `dense_mlp_units`, if any), all vectors
    and the pooled sequences (`sequences`) of an example. Without a cross network cross(x0) is x0.
    "dlrm" reads the same features, with vectors and pooled sequences as vectors.
    stacked: trunk = tower(cross(x0)).
    parallel: trunk = concat(cross(x0), tower(x0)); an absent part adds nothing.
    With neither cross network nor tower the trunk is x0, and the model is logistic regression on
    it.

    Kernels start Glorot normal, the query of a pool and all biases at zero.

    The fields below describe themselves. "dcn" is DCN, "dlrm" `DotInteraction`, "mmoe" `MultiGate`
    and "ple" `ProgressiveExtraction`. `structure` has no effect without a cross network. With a
    shared bottom (Caruana 1997) and no `task_mlp_units`, one dense layer `head` of width `tasks`
    reads the trunk. For `activation`, `norm` and `dropout` see `Tower`.

    For `precision` see `product`. With "highest", "default" and "bfloat16", parameters,
    normalisation, activations, the sums of a cross layer and the loss are float32. With
    "mixed_bfloat16", x0, arrays between layers, their gradients, and the products and sums of a
    cross layer are bfloat16 too.

    References:
        Wang et al., Deep & Cross Network for Ad Click Predictions, ADKDD 2017.
        Wang et al., DCN V2: Improved Deep & Cross Network, WWW 2021.
    """

    tasks: int
    cross: str = field(
        "dcn_v2",
        choices=CROSSES,
        help="cross network. dcn_v2: DCN-V2; dcn_v2_low_rank: DCN-V2 with low-rank matrices;"
        " dcn_mix: DCN-Mix; dcn: DCN; dlrm: dot products as in DLRM; none: no cross network",
    )
    structure: str = field(
        "stacked", choices=STRUCTURES, help="tower after the cross layers, or parallel to them"
    )
    cross_layers: int = field(
        2,
        at_least=1,
        at_most=256,
        read_when=("cross", ("dcn_v2", "dcn", "dcn_v2_low_rank", "dcn_mix")),
        unit="layers",
        help="layers of the cross network",
        hint="For no cross network set model.cross to 'none'.",
    )
    cross_rank: int = field(
        64,
        at_least=1,
        read_when=("cross", ("dcn_v2_low_rank", "dcn_mix")),
        help="rank of the matrices of dcn_v2_low_rank, and of each expert of dcn_mix",
    )
    cross_experts: int = field(
        4,
        at_least=1,
        at_most=256,
        read_when=("cross", ("dcn_mix",)),
        unit="experts",
        help="number of experts per layer of dcn_mix",
    )
    bottom_mlp_units: tuple[int, ...] = field(
        (128,),
        at_least=1,
        at_most=1 << 20,
        read_when=("cross", ("dlrm",)),
        unit="units",
        help="widths of the layers between the dense features and the vectors' dimension",
        hint="Without 'dlrm' the layers of the dense features are model.dense_mlp_units.",
    )
    dense_mlp_units: tuple[int, ...] = field(
        (),
        at_least=1,
        at_most=1 << 20,
        read_when=("cross", tuple(cross for cross in CROSSES if cross != "dlrm")),
        unit="units",
        help="widths of the layers between the dense features and the cross network",
        hint="With 'dlrm' the layers of the dense features are model.bottom_mlp_units.",
    )
    mlp_units: tuple[int, ...] = field(
        (256, 128),
        at_least=1,
        at_most=1 << 20,
        unit="units",
        help="widths of the tower; empty: no tower",
    )
    activation: str = field(
        "relu",
        choices=ALL_ACTIVATIONS,
        help="activation of towers and experts; gelu by tanh; prelu and dice have trained slopes",
    )
    norm: str = field(
        "none",
        choices=NORMS,
        help="normalisation in towers and experts; batch: over the global batch",
    )
    batch_norm_momentum: float = field(
        BATCH_NORM_MOMENTUM,
        at_least=0,
        below=1,
        read_when=("norm", ("batch",)),
        or_when=("activation", ("dice",)),
        help="fraction that running statistics of batch norm and of dice keep at each step",
    )
    dropout: float = field(
        0.0, at_least=0, below=1, help="fraction of the units of towers dropped in training"
    )
    dropouts: tuple[float, ...] = field(
        (), at_least=0, below=1, help="dropout of each layer of mlp_units; empty: dropout for all"
    )
    multitask: str = field(
        "shared_bottom",
        choices=MULTITASKS,
        help="shared_bottom: all tasks read the tower; mmoe or ple: experts after it",
    )
    experts: int = field(
        4,
        at_least=1,
        at_most=256,
        read_when=("multitask", ("mmoe", "ple")),
        unit="experts",
        help="number of experts of mmoe, or of shared experts per level of ple",
    )
    task_experts: int = field(
        2,
        at_least=1,
        at_most=256,
        read_when=("multitask", ("ple",)),
        unit="experts",
        help="number of experts of each task per level of ple",
    )
    levels: int = field(
        2,
        at_least=1,
        read_when=("multitask", ("ple",)),
        unit="levels",
        help="levels of ple; 1 is CGC",
    )
    expert_mlp_units: tuple[int, ...] = field(
        (128,),
        at_least=1,
        at_most=1 << 20,
        non_empty=True,
        read_when=("multitask", ("mmoe", "ple")),
        unit="units",
        help="widths of an expert of mmoe or ple",
        hint="Experts without a layer would all be equal.",
    )
    sequences: Mapping[str, SequencePool] = field(
        {},
        help="sequence, or ragged feature of combiner none -> its pool; without an entry: a learned"
        " query per feature",
    )
    task_mlp_units: tuple[int, ...] = field(
        (),
        at_least=1,
        at_most=1 << 20,
        unit="units",
        help="widths of the tower of each task; empty: none",
    )
    precision: str = field(
        "highest",
        choices=PRECISIONS,
        help="precision of matrix products. highest: float32 on every device; bfloat16: with"
        " float32 sums; mixed_bfloat16: also bfloat16 between layers, for accelerators",
    )

    @staticmethod
    def check_fields(fields: Any, where: str) -> None:
        """Rejects rates of dropout that are not one per layer; see `models.fields`."""
        if len(fields.dropouts) not in (0, len(fields.mlp_units)):
            raise InputError(
                f"{where}.dropouts: must have one number per layer of {where}.mlp_units, or none:"
                f" found {fields.dropouts}, mlp_units={fields.mlp_units}."
            )

    @nn.compact
    def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
        """Returns raw logits f[B, tasks]."""
        floats, vectors, share = inputs.all_dense, inputs.all_vectors, inputs.share
        pooled = pooled_sequences(self.sequences, inputs, self.precision)
        if self.dense_mlp_units:
            if not floats.shape[1]:
                raise InputError(
                    "model.dense_mlp_units: must be () without dense features: found"
                    f" {self.dense_mlp_units} and no dense features. Leave it at ()."
                )
            floats = self._tower(self.dense_mlp_units, name="bottom")(floats, share, train=train)
        flat = [v.reshape(v.shape[0], -1) for v in vectors]
        x0 = kept(jnp.concatenate([floats, *flat, *pooled], axis=1), self.precision)
        if self.cross == "dlrm":
            every = (*vectors, *(p[:, None, :] for p in pooled))
            dot = DotInteraction(self.bottom_mlp_units, self._tower, self.precision, name="cross")
            crossed = dot(floats, every, share, train=train)
        else:
            crossed, x0 = self._cross(x0)
        trunk: tuple[jax.Array, ...] = (crossed,)
        if self.mlp_units:
            is_parallel = self._is_parallel
            tower = self._tower(self.mlp_units, dropout=self._dropouts, name="tower")
            deep = tower(x0 if is_parallel else crossed, share, train=train)
            trunk = (crossed, deep) if is_parallel else (deep,)
        return self._logits(trunk, share, train)

    def compiler_options(self, platform: str) -> dict[str, str | bool]:
        """Returns XLA options; see `products.compiler_options`."""
        return compiler_options(self.precision, platform)

    def input_axes(self, inputs: Inputs) -> Mapping[str, Reading]:
        """Returns how each array depends on the features; see `Model`."""
        axes = sequence_axes(self.sequences, inputs.names.sequences)
        x0: Parts = (DENSE, VECTORS, SEQUENCES)
        if self.dense_mlp_units:
            axes["bottom/layer_0/kernel"] = {0: (DENSE,)}
            x0 = (self.dense_mlp_units[-1], VECTORS, SEQUENCES)
        crossed: Parts | None = x0
        if self.cross == "dlrm":
            axes["cross/bottom/layer_0/kernel"] = {0: (DENSE,)}
            crossed = None  # products of all pairs
        elif self.cross != "none":
            read = self._cross_network(parent=None).read_axes()
            axes |= {
                f"cross/{name}": dict.fromkeys(array_axes, x0) for name, array_axes in read.items()
            }
        trunk = crossed
        if self.mlp_units:
            reads = x0 if self._is_parallel else crossed
            axes["tower/layer_0/kernel"] = None if reads is None else {0: reads}
            if not self._is_parallel:
                return axes
            trunk = None if crossed is None else (*crossed, self.mlp_units[-1])
        for name, axis in self._trunk_axes().items():
            axes[name] = None if trunk is None else {axis: trunk}
        return axes

    def _trunk_axes(self) -> dict[str, int]:
        """Returns {array: axis along the trunk} of the arrays that read the trunk."""
        if self.multitask != "shared_bottom":
            return {
                f"{self.multitask}/{name}": axis
                for name, axis in self._experts(parent=None).read_axes().items()
            }
        if not self.task_mlp_units:
            return {"head/kernel": 0}
        return {f"task_{task}/layer_0/kernel": 0 for task in range(self.tasks)}

    @property
    def _is_parallel(self) -> bool:
        return self.structure == "parallel" and self.cross != "none"

    def _cross(self, x0: jax.Array) -> Crossed:
        return (x0, x0) if self.cross == "none" else self._cross_network(name="cross")(x0)

    def _cross_network(self, **scope: Any) -> Any:
        layers, precision = self.cross_layers, self.precision
        if self.cross == "dcn_v2":
            return MatrixCross(layers, precision, **scope)
        if self.cross == "dcn":
            return VectorCross(layers, precision, **scope)
        if self.cross == "dcn_v2_low_rank":
            return LowRankCross(layers, self.cross_rank, precision, **scope)
        return MixCross(layers, self.cross_rank, self.cross_experts, precision, **scope)

    def _logits(self, parts: tuple[jax.Array, ...], share: Share, train: bool) -> jax.Array:
        """Returns the logits f[B, tasks] from the parts of the trunk."""
        if self.multitask == "shared_bottom" and not self.task_mlp_units:
            return Dense(self.tasks, unrounded(self.precision), name="head")(*parts)
        trunk = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        if self.multitask == "shared_bottom":
            reads = [trunk] * self.tasks
        else:
            mixed = self._experts(name=self.multitask)(trunk, share, train=train)
            reads = [mixed[:, task] for task in range(self.tasks)]
        logits = []
        for task, x in enumerate(reads):
            if self.task_mlp_units:
                x = self._tower(self.task_mlp_units, name=f"task_{task}")(x, share, train=train)
            logits.append(Dense(1, unrounded(self.precision), name=f"head_{task}")(x))
        return jnp.concatenate(logits, axis=1)

    def _experts(self, **scope: Any) -> MultiGate | ProgressiveExtraction:
        settings: dict[str, Any] = dict(
            tasks=self.tasks,
            experts=self.experts,
            mlp_units=self.expert_mlp_units,
            tower=self._tower,
            precision=self.precision,
            **scope,
        )
        if self.multitask == "mmoe":
            return MultiGate(**settings)
        return ProgressiveExtraction(levels=self.levels, task_experts=self.task_experts, **settings)

    @property
    def _dropouts(self) -> float | tuple[float, ...]:
        return tuple(self.dropouts) or self.dropout

    @property
    def _tower(self) -> functools.partial[Tower]:
        """Makes a tower of (widths, copies=, name=)."""
        return functools.partial(
            Tower,
            activation=self.activation,
            norm=self.norm,
            dropout=self.dropout,
            batch_norm_momentum=self.batch_norm_momentum,
            precision=self.precision,
        )
