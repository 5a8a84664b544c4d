"""Target attention: weights of events by their similarity to the candidate."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.models.inputs import flat_events
from jaxrank.models.products import Dense, is_plain, param_dtype, unrounded

_ALIGNMENT = 128  # events; the width of a vector register row on TPU


class TargetAttention(nn.Module):
    """sum_l a_l v_l with weights a_l = tower(v_l, c, k_l * c) of events v_l and the candidate c.

    k_l are the parts of v_l that are compared with the candidate. The weights are not normalised,
    so that the number of similar events has an effect. The first layer is linear in v_l and c, so
    their difference, which the paper also reads, would add nothing. Empty places have weight 0.

    packed_length: events per example for which the tower has room. If the examples have more
        together, it is computed for all places, as without room. 0: always for all places.

    References:
        Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018.
    """

    mlp_units: tuple[int, ...]
    precision: str
    packed_length: float = 0.0

    @nn.compact
    def __call__(
        self,
        vectors: jax.Array,
        mask: jax.Array,
        keys: jax.Array,
        candidate: jax.Array,
        is_packed: bool = False,
    ) -> jax.Array:
        """Maps vectors f[B, L, dim], mask bool[B, L], keys f[B, L, n] and a candidate f[B, n] to
        f[B, dim].

        Args:
            is_packed: of packed events, vectors are f[m, dim] and keys f[m, n]. In place of the
                mask are their examples i32[m], ascending, and B where there is no event.
        """
        if is_packed:
            return self._packed(vectors, mask, keys, candidate)
        length, first = vectors.shape[1], self.mlp_units[0]
        # Plain layers have a symbolic number of examples.
        if self.packed_length and not is_plain() and not self.is_initializing():
            room = _ALIGNMENT * math.ceil(len(mask) * self.packed_length / _ALIGNMENT)
            if room < mask.size:
                module = TargetAttention(self.mlp_units, self.precision, parent=None)
                params = self.variables["params"]
                return _either((module, room), params, vectors, mask, keys, candidate)
        hidden = self._event(vectors, keys * candidate[:, None, :])
        hidden = hidden.reshape(-1, length, first) + self._candidate(candidate)[:, None, :]
        scores = self._scores(flat_events(hidden))
        weights = jnp.where(mask, scores.reshape(-1, length), 0)
        return (vectors * weights[:, :, None].astype(vectors.dtype)).sum(axis=1)

    def _packed(
        self, vectors: jax.Array, examples: jax.Array, keys: jax.Array, candidate: jax.Array
    ) -> jax.Array:
        def of_events(x: jax.Array) -> jax.Array:
            return x.at[examples].get(mode="fill", fill_value=0, indices_are_sorted=True)

        hidden = self._event(vectors, keys * of_events(candidate))
        scores = self._scores(hidden + of_events(self._candidate(candidate)))
        weighted = vectors * scores.astype(vectors.dtype)
        return jax.ops.segment_sum(
            weighted, examples, len(candidate), indices_are_sorted=True, mode="drop"
        )

    def _event(self, vectors: jax.Array, products: jax.Array) -> jax.Array:
        dense = Dense(self.mlp_units[0], self.precision, name="event")
        return dense(flat_events(vectors), flat_events(products))

    def _candidate(self, candidate: jax.Array) -> jax.Array:
        dense = Dense(self.mlp_units[0], self.precision, use_bias=False, name="candidate")
        return dense(candidate)

    def _scores(self, hidden: jax.Array) -> jax.Array:
        """Maps the sum of both first layers f[m, units] to f[m, 1]."""
        hidden = nn.relu(hidden)
        hidden = hidden.astype(param_dtype(hidden))
        for i, width in enumerate(self.mlp_units[1:]):
            hidden = Dense(width, self.precision, form="relu", name=f"layer_{i + 1}")(hidden)
        return Dense(1, unrounded(self.precision), name="score")(hidden)


def _padded_form(static: Any, *args: Any) -> jax.Array:
    module, _ = static
    params, *inputs = args
    return module.apply({"params": params}, *inputs)


def _packed_form(static: Any, *args: Any) -> jax.Array:
    module, room = static
    params, vectors, mask, keys, candidate = args
    (places,) = jnp.nonzero(mask.reshape(-1), size=room, fill_value=mask.size)

    def events(x: jax.Array) -> jax.Array:
        return (
            flat_events(x)
            .at[places]
            .get(mode="fill", fill_value=0, indices_are_sorted=True, unique_indices=False)
        )

    examples = places // mask.shape[1]  # the number of examples behind the last event
    inputs = events(vectors), examples, events(keys), candidate
    return module.apply({"params": params}, *inputs, is_packed=True)


def _choose(mask: jax.Array, room: int, packed: Any, padded: Any, *args: Any) -> Any:
    """Calls `packed` if all events have room, else `padded`, with the same arguments."""
    return jax.lax.cond(mask.sum() <= room, packed, padded, *args)


# The gradient computes the layers again: as the gradient of a condition, both forms would keep
# their arrays, and zeros would fill the arrays of the padded form.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _either(static: Any, *args: Any) -> jax.Array:
    forms = (functools.partial(form, static) for form in (_packed_form, _padded_form))
    return _choose(args[2], static[1], *forms, *args)


def _forward(static: Any, *args: Any) -> tuple[jax.Array, Any]:
    return _either(static, *args), args


def _backward(static: Any, args: Any, grad: jax.Array) -> Any:
    params, vectors, mask, keys, candidate = args

    def pull(form: Any, grad: jax.Array, *args: Any) -> Any:
        def apply(params: Any, vectors: Any, keys: Any, candidate: Any) -> jax.Array:
            return form(static, params, vectors, mask, keys, candidate)

        return jax.vjp(apply, *args)[1](grad)

    forms = (functools.partial(pull, form) for form in (_packed_form, _padded_form))
    grads = _choose(mask, static[1], *forms, grad, params, vectors, keys, candidate)
    of_params, of_vectors, of_keys, of_candidate = grads
    return of_params, of_vectors, None, of_keys, of_candidate


_either.defvjp(_forward, _backward)
