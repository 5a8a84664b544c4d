"""Layers of an older run as the first values of a new one whose features may differ.

Where an array has an axis along the model's inputs, its slices go to the same features; where the
features are others, those that are new keep their own first values. Which axes these are is found
by asking how the arrays of a model would grow with one more input.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrank.checkpoints.reader import dotted
from jaxrank.layout import Layout
from jaxrank.optim import is_schedule
from jaxrank.step import Trainee, Weights, input_names, layers_state, model_inputs

_SEQUENCE = re.compile(r"(?<=\.sequence_)\d+(?=\.)")
_BOTTOM = re.compile(r"params\.bottom\.layer_(\d+)\.kernel")

Shapes = dict[str, tuple[int, ...]]


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


class _Inputs(NamedTuple):
    """How many inputs there were and are, and the places in both of each that is in both."""

    old_width: int
    new_width: int
    new: np.ndarray
    old: np.ndarray


def _columns(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, np.intp).reshape(-1, 2).T


def _floats(layout: Layout) -> int:
    return len(layout.schema.floats)


class InputMap:
    """Where the inputs of a new model were among those of an older one.

    Args:
        old: of the older run.
        of_old: shapes of its weights.
        trainee: what the new run trains.
    """

    def __init__(self, old: Layout, of_old: Weights, trainee: Trainee):
        new = trainee.embedding.layout
        before, after = input_names(old), input_names(new)
        place = {name: i for i, name in enumerate(before)}
        both = [(i, place[name]) for i, name in enumerate(after) if name in place]
        floats = [(i, j) for i, j in both if after[i][0] == "float"]
        shapes = _shapes(trainee, model_inputs(new))
        bottom, of_bottom = _bottom_width(shapes), _bottom_width(_by_name(of_old))
        self.same = before == after and bottom == of_bottom
        # Of what reads the floats, which stand in front, and of what reads all inputs, which may
        # have the outputs of the floats' layers in their place.
        less, more = (w - _floats(t) if w else 0 for w, t in ((bottom, new), (of_bottom, old)))
        behind = [(i + less, j + more) for i, j in both if after[i][0] != "float"]
        if bottom == of_bottom:
            behind += [(i, i) for i in range(bottom)] if bottom else floats
        self._inputs = _Inputs(len(before) + more, len(after) + less, *_columns(behind))
        self._floats = _Inputs(_floats(old), _floats(new), *_columns(floats))
        self._sequences = [_sequences(layout) for layout in (old, new)]
        self._axes = _input_axes(trainee, shapes)

    def old_name(self, name: str) -> str:
        """The name that an array had; the arrays of sequences are named by their number."""

        def number(found: re.Match[str]) -> str:
            old, new = self._sequences
            feature = new[int(found[0])]
            return str(old.index(feature)) if feature in old else "new"

        return _SEQUENCE.sub(number, name)

    def carried(self, name: str, old: np.ndarray, new: np.ndarray) -> np.ndarray | None:
        """`new` with what `old` has for it; None where the two have nothing to do with each other.

        name: of the array in the new state.
        """
        if self.same:
            return old if old.shape == new.shape else None
        found = self._axes[name]
        if found is None or old.ndim != new.ndim:
            return None
        axes, only_floats = found
        if not axes:
            return old if old.shape == new.shape else None
        inputs = self._floats if only_floats else self._inputs
        to, of = [], []
        for axis, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)):
            # Behind the inputs may stand what a parallel tower puts out.
            rest = (a - inputs.old_width, b - inputs.new_width) if axis in axes else (a, b)
            if rest[0] != rest[1]:
                return None
            tail = np.arange(rest[0])
            is_input = axis in axes
            to.append(np.concatenate([inputs.new, inputs.new_width + tail]) if is_input else tail)
            of.append(np.concatenate([inputs.old, inputs.old_width + tail]) if is_input else tail)
        result = new.copy()
        result[np.ix_(*to)] = old[np.ix_(*of)]
        return result


def _sequences(layout: Layout) -> list[str]:
    return [layout.schema.lists[i].name for s in layout.stacks for i in s.sequences]


def _bottom_width(shapes: Shapes) -> int:
    """Of what layers make of the floats before they meet the vectors; 0: there are none."""
    found = ((_BOTTOM.fullmatch(name), shape) for name, shape in shapes.items())
    widths = {int(name[1]): shape[-1] for name, shape in found if name}
    return widths[max(widths)] if widths else 0


def _input_axes(trainee: Trainee, shapes: Shapes) -> dict[str, tuple[tuple[int, ...], bool] | None]:
    """Which axes of each array are along the inputs, and whether these are the floats only; None
    where it depends on them otherwise, as what reads the dot products of all pairs."""
    floats, vectors, sequences = model_inputs(trainee.embedding.layout)
    with_float = _shapes(trainee, (_wider(floats), vectors, sequences))
    with_column = shapes
    dim = 0
    if vectors or sequences:
        dim = vectors[0].shape[2] if vectors else sequences[0][0].shape[2]
        first = vectors[0] if vectors else jax.ShapeDtypeStruct((1, 0, dim), floats.dtype)
        more = (_wider(first), *vectors[1:])
        with_column = _shapes(trainee, (floats, more, sequences))
    has_bottom = _bottom_width(shapes) > 0
    found: dict[str, tuple[tuple[int, ...], bool] | None] = {}
    for name, shape in shapes.items():
        by_float, by_column = (_growth(shape, s.get(name, ())) for s in (with_float, with_column))
        only_floats = not any(by_column)
        # What reads the outputs of the floats' layers in their place.
        is_behind = has_bottom and not only_floats and not any(by_float)
        grows = by_column if is_behind else by_float
        axes = tuple(axis for axis, more in enumerate(grows) if more)
        of_all = tuple(dim if axis in axes else 0 for axis in range(len(shape)))
        is_plain = set(by_float) <= {0, 1} and (only_floats or by_column == of_all)
        found[name] = (axes, only_floats) if is_plain else None
    return found


def _wider(inputs: Any) -> Any:
    return jax.ShapeDtypeStruct((1, inputs.shape[1] + 1, *inputs.shape[2:]), inputs.dtype)


def _shapes(trainee: Trainee, inputs: Any) -> Shapes:
    def init(inputs: Any) -> Any:
        return layers_state(trainee, jax.random.key(0), inputs)

    return _by_name(jax.eval_shape(init, inputs))


def _by_name(tree: Any) -> Shapes:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {dotted(path): leaf.shape for path, leaf in leaves}


def _growth(shape: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    if len(shape) != len(other):
        return (-1,) * max(1, len(shape))
    return tuple(b - a for a, b in zip(shape, other, strict=True))


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

    def one(path: tuple[Any, ...], value: np.ndarray) -> np.ndarray:
        name = dotted(path)
        was = inputs.old_name(name)
        of_optimizer = name.startswith("opt_state.")
        if of_optimizer and not optimizer:
            return value
        before = read(was) if was in known else None
        found = None if before is None else inputs.carried(name, before, value)
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


def _counters(names: Iterable[str]) -> set[str]:
    """Of an optimizer; where they stand tells which parts it has."""
    return {name for name in names if name.startswith("opt_state.") and name.endswith(".count")}


def _names(tree: Any) -> set[str]:
    return {dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(dict(tree))}
