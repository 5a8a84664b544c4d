"""Layers of an older run as the first values of a new one whose features may differ.

Where an array has an axis along the model's inputs, its slices go to the same features; where the
features are others, those that are new keep their own first values. Which axes these are the model
tells, by `Model.input_axes`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrank.checkpoints.reader import dotted
from jaxrank.errors import InputError
from jaxrank.layout import Layout
from jaxrank.models import DENSE, SEQUENCES, VECTORS, Model, Parts, Reading
from jaxrank.optim import is_schedule
from jaxrank.step import LOG_VARIANCES, StepSpec, input_names, model_inputs

_KINDS = {DENSE: ("float",), VECTORS: ("id", "list"), SEQUENCES: ("sequence",)}

Label = tuple[Any, ...]  # of a number that a model reads: equal where it means the same


class CarriedLayers(NamedTuple):
    """layers: as they were given, with the arrays that were carried over, on the host.

    whole, by_feature, new: names of the parameters that are as they were, that were taken over
        feature by feature, and that keep their first values.
    optimizer: whether the optimizer's state was carried over too.
    """

    layers: dict[str, Any]
    whole: list[str]
    by_feature: list[str]
    new: list[str]
    optimizer: bool


class _Readings:
    """What the arrays of one run's model read."""

    def __init__(self, model: Model, layout: Layout):
        self.names = input_names(layout)
        self._axes = model.input_axes(model_inputs(layout))

    def of(self, array: str) -> Reading:
        """array: its name, as in `Model.input_axes`; "" for one that is not the model's."""
        if not array:
            return {}
        return None if self._axes is None else self._axes.get(array, {})

    def arrays_of(self, feature: str) -> list[str]:
        """The arrays that are for one feature alone, in the order in which the model tells them."""
        return [name for name, reading in (self._axes or {}).items() if reading == feature]

    def labels(self, parts: Parts) -> list[Label]:
        """What each number along an axis is."""
        return [label for i, part in enumerate(parts) for label in self._labels(i, part)]

    def _labels(self, place: int, part: Any) -> Iterable[Label]:
        if isinstance(part, int):  # the model's own: the same where there are as many of them
            return [("own", place, part, k) for k in range(part)]
        if part in _KINDS:
            return [name for name in self.names if name[0] in _KINDS[part]]
        return [name for name in self.names if name[1] == part]


class InputMap:
    """Where the inputs of a new model were among those of an older one.

    Args:
        old: of the older run.
        of_old: its layout.
        new: what the new run trains.
    """

    def __init__(self, old: Model, of_old: Layout, new: StepSpec):
        self._old, self._new = _Readings(old, of_old), _Readings(new.model, new.embedding.layout)
        self._same = self._old.names == self._new.names
        self._places: dict[tuple[Parts, Parts], tuple[np.ndarray, np.ndarray]] = {}

    def old_array(self, array: str) -> str:
        """The name that an array had; those for one feature are found by the feature. "" for none.

        array: its name, as in `Model.input_axes`.
        """
        feature = self._new.of(array)
        if not isinstance(feature, str):
            return array
        new, old = (run.arrays_of(feature) for run in (self._new, self._old))
        place = new.index(array)
        return old[place] if place < len(old) else ""

    def carried(self, array: str, old: np.ndarray, new: np.ndarray) -> np.ndarray | None:
        """`new` with what `old` has for it; None where the two have nothing to do with each other.

        array: the name of the new one, as in `Model.input_axes`.
        """
        before, after = self._old.of(self.old_array(array)), self._new.of(array)
        if before is None or after is None:
            return old if self._same and old.shape == new.shape else None
        if isinstance(before, str) or isinstance(after, str):
            return old if before == after and old.shape == new.shape else None
        if before.keys() != after.keys() or old.ndim != new.ndim:
            return None
        to, of = [], []
        for axis, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)):
            if axis in after:
                if _tail(before[axis]) != _tail(after[axis]):
                    return None
                places = self._common(array, (before[axis], after[axis]), (a, b))
            elif a == b:
                places = np.arange(a), np.arange(b)
            else:
                return None
            of.append(places[0])
            to.append(places[1])
        stays = old.shape == new.shape and all(map(np.array_equal, of, to))
        if stays and all(map(np.array_equal, of, map(np.arange, old.shape))):
            return old
        result = new.copy()
        result[np.ix_(*to)] = old[np.ix_(*of)]
        return result

    def _common(
        self, array: str, parts: tuple[Parts, Parts], sizes: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The places in the old axis and in the new one of all that stands along both."""
        labels = [run.labels(of) for run, of in zip((self._old, self._new), parts, strict=True)]
        counts = tuple(map(len, labels))
        if counts != sizes:
            raise InputError(
                f"model: input_axes of {array} must tell what stands along an axis of length"
                f" {sizes[0]}, now {sizes[1]}: found {counts[0]}, now {counts[1]} numbers."
            )
        if parts not in self._places:
            place = {label: i for i, label in enumerate(labels[0])}
            both = [(place[x], i) for i, x in enumerate(labels[1]) if x in place]
            old, new = np.array(both, np.intp).reshape(-1, 2).T
            self._places[parts] = old, new
        return self._places[parts]


def _tail(parts: Parts) -> int:
    """How many numbers of the model's own stand behind its inputs."""
    last = parts[-1] if len(parts) > 1 else 0
    return last if isinstance(last, int) else 0


def _array_name(path: tuple[Any, ...], params: set[str]) -> str:
    """The name in `Model.input_axes` of an array of a state, or of the parameter that an array of
    the optimizer belongs to. Empty for those that are not the model's."""
    ends = [jax.tree_util.keystr(path[i:], simple=True, separator="/") for i in range(1, len(path))]
    if dotted(path).startswith("opt_state."):
        ends = [name for name in ends if name in params][:1]
    return ends[0] if ends and ends[0] != LOG_VARIANCES else ""


def carry_layers(
    layers: Mapping[str, Any],
    inputs: InputMap,
    names: Sequence[str],
    read: Callable[[str], np.ndarray],
    *,
    same_optimizer: bool,
) -> CarriedLayers:
    """The layers of a new state with what an older one has for them.

    Args:
        layers: params, model_state and opt_state, if wanted, before the first step, on the host.
        names: of all arrays that the older run has, as `checkpoints.reader.dotted`.
        read: gives one of them.
        same_optimizer: of layers, by the two configs.
    """
    known = set(names)
    optimizer = same_optimizer and _counters(known) == _counters(_names(layers))
    told: dict[str, list[str]] = {"whole": [], "by_feature": [], "new": []}
    params = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(layers["params"])
    }

    def one(path: tuple[Any, ...], value: np.ndarray) -> np.ndarray:
        name = dotted(path)
        array = _array_name(path, params)
        was = _replaced(path, array, inputs.old_array(array))
        of_optimizer = name.startswith("opt_state.")
        if of_optimizer and not optimizer:
            return value
        before = read(was) if was in known else None
        found = None if before is None else inputs.carried(array, before, value)
        if not of_optimizer:
            whole = found is not None and found is before
            kind = "new" if found is None else "whole" if whole else "by_feature"
            told[kind].append(name)
        return value if found is None else found.astype(value.dtype)

    carried = jax.tree_util.tree_map_with_path(one, dict(layers))
    # The rate begins anew: a run's schedule is its own.
    carried = jax.tree.map(
        lambda found, first: first if is_schedule(first) else found,
        carried,
        dict(layers),
        is_leaf=is_schedule,
    )
    return CarriedLayers(carried, **told, optimizer=optimizer)


def _replaced(path: tuple[Any, ...], array: str, old: str) -> str:
    """The dotted name of an array that was called `old`, of which the path ends in `array`."""
    name, end = dotted(path), array.replace("/", ".")
    return name.removesuffix(end) + old.replace("/", ".")


def _counters(names: Iterable[str]) -> set[str]:
    """Of an optimizer; where they stand tells which parts it has."""
    return {name for name in names if name.startswith("opt_state.") and name.endswith(".count")}


def _names(tree: Any) -> set[str]:
    return {dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(dict(tree))}
