"""Models that each break a property that `check-model` checks, and one that breaks none."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxrank.models import Inputs, register
from jaxrank.validate import field


class Base(nn.Module):
    """A linear model of all features."""

    tasks: int

    @nn.compact
    def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
        return nn.Dense(self.outputs())(self.changed(inputs.features, train))

    def outputs(self) -> int:
        return self.tasks

    def changed(self, x: jax.Array, train: bool) -> jax.Array:
        return x


@register("reads_its_neighbour")
class ReadsItsNeighbour(Base):
    def changed(self, x, train):
        return x - jnp.roll(x, 1, axis=0)


@register("reads_the_mean_of_the_batch")
class ReadsTheMeanOfTheBatch(Base):
    def changed(self, x, train):
        return x - x.mean(axis=0, keepdims=True)


@register("drops_units_by_device")
class DropsUnitsByDevice(Base):
    def changed(self, x, train):
        return nn.Dropout(0.5, deterministic=not train)(x)


@register("asks_for_float64")
class AsksForFloat64(Base):
    def changed(self, x, train):
        return x.astype(jnp.float64)


@register("rounds_its_output")
class RoundsItsOutput(Base):
    @nn.compact
    def __call__(self, inputs, train):
        return nn.Dense(self.tasks)(inputs.features).astype(jnp.bfloat16)


@register("branches_on_a_value")
class BranchesOnAValue(Base):
    def changed(self, x, train):
        return x if x.sum() > 0 else -x


@register("draws_with_numpy")
class DrawsWithNumPy(Base):
    def changed(self, x, train):
        return x + np.float32(np.random.default_rng().normal())


@register("always_drops_units")
class AlwaysDropsUnits(Base):
    def changed(self, x, train):
        return nn.Dropout(0.5, deterministic=False)(x)


@register("never_drops_units")
class NeverDropsUnits(Base):
    dropout: float = 0.5

    def changed(self, x, train):
        return nn.Dropout(self.dropout, deterministic=True)(x)


@register("never_updates_statistics")
class NeverUpdatesStatistics(Base):
    def changed(self, x, train):
        return nn.BatchNorm(use_running_average=True)(x)


@register("has_one_output_too_many")
class HasOneOutputTooMany(Base):
    def outputs(self):
        return self.tasks + 1


@register("gives_names_other_meanings")
class GivesNamesOtherMeanings(Base):
    dropout: str = "of lists"
    precision: str = field("bfloat16", choices=("bfloat16", "int8"), help="of another device")
