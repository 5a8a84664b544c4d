"""Initialises the layers of a run from an older run whose features may differ.

If an array has an axis along the model's inputs, each slice is copied to the same feature. Slices
of new features keep their initial values. `Model.input_axes` defines these axes.
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

Label = tuple[Any, ...]  # of a number that a model reads: equal labels have the same meaning


class CarriedLayers(NamedTuple):
    """The layers of a new run after copying those of an older one.

    layers: the initial layers with the copied arrays, on the host.
    whole: names of the parameters that were copied completely.
    by_feature: names of the parameters that were copied feature by feature.
    new: names of the parameters that keep their initial values.
    optimizer: True if the state of the optimizer was copied too.
    """

    layers: dict[str, Any]
    whole: list[str]
    by_feature: list[str]
    new: list[str]
    optimizer: bool


class _Readings:
    """The inputs that each array of a model reads."""

    def __init__(self, model: Model, layout: Layout):
        self.names = input_names(layout)
        self._axes = model.input_axes(model_inputs(layout))

    def reading(self, array: str) -> Reading:
        """Returns the inputs that an array reads.

        array: its name in `Model.input_axes`, "" if it does not belong to the model.
        """
        if not array:
            return {}
        return None if self._axes is None else self._axes.get(array, {})

    def feature_arrays(self, features: str | tuple[str, ...]) -> list[str]:
        """Returns the arrays that belong to one feature, or to several together."""
        return [name for name, reading in (self._axes or {}).items() if reading == features]

    def labels(self, parts: Parts) -> list[Label]:
        """Returns the label of each number along an axis. Parts may occur several times."""
        return [
            (*label, parts[:i].count(part))
            for i, part in enumerate(parts)
            for label in self._labels(i, part)
        ]

    def _labels(self, place: int, part: Any) -> Iterable[Label]:
        if isinstance(
            part, int
        ):  # numbers of the model itself: the same if their count is the same
            return [("own", place, part, k) for k in range(part)]
        if part in _KINDS:
            return [name for name in self.names if name[0] in _KINDS[part]]
        return [name for name in self.names if name[1] == part]


class InputMap:
    """Maps the inputs of a new model to those of an older one.

    Args:
        old: model of the older run.
        of_old: layout of the older run.
        new: the static part of the new run's step.
    """

    def __init__(self, old: Model, of_old: Layout, new: StepSpec):
        self._old, self._new = _Readings(old, of_old), _Readings(new.model, new.embedding.layout)
        self._same = self._old.names == self._new.names
        self._places: dict[tuple[Parts, Parts], tuple[np.ndarray, np.ndarray]] = {}

    def old_array(self, array: str) -> str:
        """Returns the name of an array in the older model, "" if it had none.

        An array that belongs to features is matched by these and by its name. The module may be
        another one, such as `sequence_1/query` for `sequence_0/query`.

        array: its name in `Model.input_axes` of the new model.
        """
        features = self._new.reading(array)
        if not isinstance(features, str | tuple):
            return array
        new, old = (run.feature_arrays(features) for run in (self._new, self._old))
        if array in old:
            return array
        end = _name_in_module(array)
        matches = [[name for name in names if _name_in_module(name) == end] for names in (new, old)]
        return matches[1][0] if list(map(len, matches)) == [1, 1] else ""

    def carried(self, array: str, old: np.ndarray, new: np.ndarray) -> np.ndarray | None:
        """Returns `new` with the values of `old` for the same inputs, or None if they do not match.

        array: the name of `new` in `Model.input_axes`.
        """
        before, after = self._old.reading(self.old_array(array)), self._new.reading(array)
        if before is None or after is None:
            return old if self._same and old.shape == new.shape else None
        if isinstance(before, str | tuple) or isinstance(after, str | tuple):
            return old if before == after and old.shape == new.shape else None
        if before.keys() != after.keys() or old.ndim != new.ndim:
            return None
        old_places, new_places = [], []
        for axis, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)):
            if axis in after:
                if _tail(before[axis]) != _tail(after[axis]):
                    return None
                places = self._common(array, (before[axis], after[axis]), (a, b))
            elif a == b:
                places = np.arange(a), np.arange(b)
            else:
                return None
            old_places.append(places[0])
            new_places.append(places[1])
        stays = old.shape == new.shape and all(map(np.array_equal, old_places, new_places))
        if stays and all(map(np.array_equal, old_places, map(np.arange, old.shape))):
            return old
        result = new.copy()
        result[np.ix_(*new_places)] = old[np.ix_(*old_places)]
        return result

    def _common(
        self, array: str, parts: tuple[Parts, Parts], sizes: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions on the old and on the new axis of the labels that both have."""
        labels = [run.labels(axis) for run, axis in zip((self._old, self._new), parts, strict=True)]
        counts = tuple(map(len, labels))
        if counts != sizes:
            raise InputError(
                f"model: input_axes of {array} must name every number along an axis of length"
                f" {sizes[0]} before and {sizes[1]} now: found {counts[0]} before and {counts[1]}"
                " now. Correct Model.input_axes."
            )
        if parts not in self._places:
            place = {label: i for i, label in enumerate(labels[0])}
            both = [(place[x], i) for i, x in enumerate(labels[1]) if x in place]
            old, new = np.array(both, np.intp).reshape(-1, 2).T
            self._places[parts] = old, new
        return self._places[parts]


def _name_in_module(array: str) -> str:
    """Returns the name of an array without its first module."""
    return array.partition("/")[2]


def _tail(parts: Parts) -> int:
    """Returns the number of values of the model itself at the end of an axis."""
    last = parts[-1] if len(parts) > 1 else 0
    return last if isinstance(last, int) else 0


def _array_name(path: tuple[Any, ...], params: set[str]) -> str:
    """Returns the name in `Model.input_axes` of an array of a state.

    For an array of the optimizer this is the name of its parameter. It is "" for arrays that do not
    belong to the model.
    """
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
    """Copies matching layers of an older run into the layers of a new state.

    Args:
        layers: params, model_state and optionally opt_state before the first step, on the host.
        inputs: maps the inputs of the new model to those of the older one.
        names: of all arrays of the older run, in the form of `checkpoints.reader.dotted`.
        read: reads one of these arrays.
        same_optimizer: True if both configs name the same optimizer for layers.
    """
    known = set(names)
    optimizer = same_optimizer and _counters(known) == _counters(_names(layers))
    by_kind: dict[str, list[str]] = {"whole": [], "by_feature": [], "new": []}
    params = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(layers["params"])
    }

    def carry_array(path: tuple[Any, ...], value: np.ndarray) -> np.ndarray:
        name = dotted(path)
        array = _array_name(path, params)
        old_array = _replaced(path, array, inputs.old_array(array))
        of_optimizer = name.startswith("opt_state.")
        if of_optimizer and not optimizer:
            return value
        before = read(old_array) if old_array in known else None
        carried_value = None if before is None else inputs.carried(array, before, value)
        if not of_optimizer:
            whole = carried_value is not None and carried_value is before
            kind = "new" if carried_value is None else "whole" if whole else "by_feature"
            by_kind[kind].append(name)
        return value if carried_value is None else carried_value.astype(value.dtype)

    carried = jax.tree_util.tree_map_with_path(carry_array, dict(layers))
    # Each run has its own schedule, so the learning rate restarts.
    carried = jax.tree.map(
        lambda carried_value, first: first if is_schedule(first) else carried_value,
        carried,
        dict(layers),
        is_leaf=is_schedule,
    )
    return CarriedLayers(carried, **by_kind, optimizer=optimizer)


def _replaced(path: tuple[Any, ...], array: str, old: str) -> str:
    """Returns the dotted name of a path with `array` at its end replaced by `old`."""
    name, end = dotted(path), array.replace("/", ".")
    return name.removesuffix(end) + old.replace("/", ".")


def _counters(names: Iterable[str]) -> set[str]:
    """Returns the names of an optimizer's step counters, which identify its parts."""
    return {name for name in names if name.startswith("opt_state.") and name.endswith(".count")}


def _names(tree: Any) -> set[str]:
    return {dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(dict(tree))}
