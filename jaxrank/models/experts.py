"""Experts that several tasks share, and gates that mix them for each task.

The towers of one layer of the model are stacked and computed together. The program and the number
of products therefore do not grow with the number of experts. Gates have no bias, as in the papers.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.models.inputs import Share
from jaxrank.models.products import StackedDense, product, unrounded
from jaxrank.models.tower import Tower


class Gates(nn.Module):
    """softmax(x W_k) for each of `gates` gates k.

    Parameter: `logits` kernel [gates, in, experts], Glorot normal.
    """

    gates: int
    experts: int
    precision: str = "highest"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x f[B, in], or one input per gate f[B, gates, in], to f[B, gates, experts]."""
        logits = StackedDense(
            self.gates, self.experts, unrounded(self.precision), use_bias=False, name="logits"
        )(x)
        return jax.nn.softmax(logits, axis=-1)


class MultiGate(nn.Module):
    """Mixes the same experts for each task: sum_i g_k(x)_i f_i(x), g_k = softmax(x W_k): MMoE.

    tasks, experts: number of tasks and of experts.
    mlp_units: widths of each expert, which is a `Tower`.
    tower: makes a `Tower` of (widths, copies=, name=).

    Parameters: `experts`, the stacked towers; `gate`, see `Gates`.

    References:
        Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate
        Mixture-of-Experts, KDD 2018.
    """

    tasks: int
    experts: int
    mlp_units: tuple[int, ...]
    tower: Callable[..., Tower]
    precision: str = "highest"

    @nn.compact
    def __call__(self, x: jax.Array, share: Share, *, train: bool) -> jax.Array:
        """Maps x f[B, in] to f[B, tasks, mlp_units[-1]]."""
        experts = self.tower(self.mlp_units, copies=self.experts, name="experts")
        gates = Gates(self.tasks, self.experts, self.precision, name="gate")(x)
        return product(gates, experts(x, share, train=train), self.precision)

    def read_axes(self) -> dict[str, int]:
        """Returns {array: axis along x} of the arrays that read x."""
        return {"experts/layer_0/kernel": 1, "gate/logits/kernel": 1}


class Extraction(nn.Module):
    """One level of PLE, customized gate control: experts of each task and shared experts.

    The gate of a task has the same input as the experts of the task, and mixes these with the
    shared experts. The shared gate has the same input as the shared experts, and mixes all experts.
    The last level has no shared gate.

    Parameters: `task_experts` [tasks * task_experts, ...], task by task, and `shared_experts`,
    stacked towers; `task_gate` over (experts of the task, shared experts) and `shared_gate` over
    (experts of all tasks, shared experts), see `Gates`.
    """

    tasks: int
    experts: int
    task_experts: int
    mlp_units: tuple[int, ...]
    tower: Callable[..., Tower]
    last: bool
    precision: str = "highest"

    @nn.compact
    def __call__(
        self, task_inputs: jax.Array, common: jax.Array, share: Share, *, train: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Maps the inputs of tasks and of shared experts to those of the next level.

        task_inputs: f[B, tasks, in], or f[B, in] for all tasks.
        common: f[B, in].

        Returns:
            f[B, tasks, mlp_units[-1]] and f[B, mlp_units[-1]]. At the last level the second is
            `common`.
        """
        count, precision = self.tasks * self.task_experts, self.precision
        task_experts = self.tower(self.mlp_units, copies=count, name="task_experts")
        shared_experts = self.tower(self.mlp_units, copies=self.experts, name="shared_experts")
        private = task_experts(task_inputs, share, train=train)
        shared = shared_experts(common, share, train=train)

        seen = self.task_experts + self.experts
        gates = Gates(self.tasks, seen, precision, name="task_gate")(task_inputs)
        task_gates, ours = jnp.split(gates, (self.task_experts,), axis=2)
        by_task = private.reshape(private.shape[0], self.tasks, self.task_experts, -1)
        mixed = product(task_gates[:, :, None, :], by_task, precision)[:, :, 0, :]
        mixed = mixed + product(ours, shared, precision)
        if self.last:
            return mixed, common
        gate = Gates(1, count + self.experts, precision, name="shared_gate")(common)
        theirs, ours = jnp.split(gate, (count,), axis=2)
        mix = product(theirs, private, precision) + product(ours, shared, precision)
        return mixed, mix[:, 0, :]


class ProgressiveExtraction(nn.Module):
    """Consecutive levels of `Extraction`: PLE. With one level it is CGC.

    tasks: number of tasks.
    levels: number of levels, at least 1.
    experts, task_experts: number of shared experts, and of experts per task, on each level.
    mlp_units: widths of each expert, which is a `Tower`.
    tower: makes a `Tower` of (widths, copies=, name=).

    Parameters: `level_l`, see `Extraction`.

    References:
        Tang et al., Progressive Layered Extraction, RecSys 2020.
    """

    tasks: int
    levels: int
    experts: int
    task_experts: int
    mlp_units: tuple[int, ...]
    tower: Callable[..., Tower]
    precision: str = "highest"

    @nn.compact
    def __call__(self, x: jax.Array, share: Share, *, train: bool) -> jax.Array:
        """Maps x f[B, in] to f[B, tasks, mlp_units[-1]]."""
        private, common = x, x
        for level in range(self.levels):
            extraction = Extraction(
                self.tasks,
                self.experts,
                self.task_experts,
                self.mlp_units,
                self.tower,
                last=level == self.levels - 1,
                precision=self.precision,
                name=f"level_{level}",
            )
            private, common = extraction(private, common, share, train=train)
        return private

    def read_axes(self) -> dict[str, int]:
        """Returns {array: axis along x} of the arrays that read x."""
        towers = ("task_experts/layer_0", "shared_experts/layer_0")
        gates = ("task_gate/logits", "shared_gate/logits")
        return {f"level_0/{name}/kernel": 1 for name in (*towers, *gates)}
