"""Examples in which some features belong to other examples."""

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrank.data.examples import Examples
from jaxrank.errors import InputError
from jaxrank.features import Schema, column_of
from jaxrank.validate import nearest


def units(schema: Schema) -> dict[str, tuple[str, ...]]:
    """Returns {name: features that are permuted together}, each feature in one of them.

    All numbers of a column, with the indicators of their missing values, are one unit. So is a
    sequence, whose lists are aligned.
    """
    result: dict[str, tuple[str, ...]] = {}
    named = [(column_of(f.name), f.name) for f in schema.dense]
    named += [(f.name, f.name) for f in schema.categorical]
    named += [(f.sequence or f.name, f.name) for f in schema.ragged]
    for unit, feature in named:
        result[unit] = (*result.get(unit, ()), feature)
    return result


def groups(schema: Schema, requested: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the features that are permuted together, by the name of each group.

    Args:
        requested: NAME=PATTERNS, with commas between patterns of `units`. A unit that none matches
            is a group by itself.

    Raises:
        InputError: a group is not of this form, a pattern matches nothing, or a name or a feature
            belongs to two groups.
    """
    of_units, result, grouped = units(schema), dict[str, tuple[str, ...]](), set[str]()
    for text in requested:
        name, equals, patterns = text.partition("=")
        if not (name and equals and patterns):
            raise InputError(f"--group: must be NAME=FEATURES: found {text!r}.")
        names: dict[str, None] = {}
        for pattern in patterns.split(","):
            matched = fnmatch.filter(of_units, pattern)
            if not matched:
                raise InputError(
                    f"--group: must name features of the model or patterns of them: found"
                    f" {pattern!r}{nearest(pattern, of_units)}."
                )
            names |= dict.fromkeys(matched)
        if name in result:
            raise InputError(f"--group: must have a name for each group: found {name!r} twice.")
        shared = [unit for unit in names if unit in grouped]
        if shared:
            raise InputError(
                f"--group: must put each feature in one group: found {shared[0]!r} of {text!r} in"
                " an earlier one too."
            )
        result[name] = tuple(feature for unit in names for feature in of_units[unit])
        grouped |= names.keys()
    alone = {unit: of for unit, of in of_units.items() if unit not in grouped}
    for name in result:
        if name in alone:
            raise InputError(
                "--group: must have another name than a feature outside all groups: found"
                f" {name!r}."
            )
    return result | alone


def permuted(
    examples: Examples, schema: Schema, features: Collection[str], order: np.ndarray
) -> Examples:
    """Returns examples with the features of other examples.

    Args:
        features: names of those that change.
        order: i64[n], the example that each example gets them from.
    """
    dense = np.array([f.name in features for f in schema.dense], bool)
    ids = np.array([f.name in features for f in schema.id_columns], bool)
    lists = np.array([f.name in features for f in schema.ragged], bool)
    changes: dict[str, Any] = {
        "dense": np.where(dense[None], examples.dense[order], examples.dense),
        "ids": np.where(ids[None], examples.ids[order], examples.ids),
    }
    if lists.any():
        changes |= _permuted_lists(examples, lists, order)
    return dataclasses.replace(examples, **changes)


def _permuted_lists(examples: Examples, lists: np.ndarray, order: np.ndarray) -> Mapping[str, Any]:
    lengths = examples.list_lengths.astype(np.int64)
    count = lengths.shape[1]
    stays = np.arange(len(lengths))
    source = np.where(lists[None], order[:, None], stays[:, None]) * count + np.arange(count)[None]
    starts = np.cumsum(lengths.reshape(-1)) - lengths.reshape(-1)
    chosen = lengths.reshape(-1)[source.reshape(-1)]
    shift = starts[source.reshape(-1)] - (np.cumsum(chosen) - chosen)
    places = np.arange(chosen.sum()) + np.repeat(shift, chosen)
    weights = examples.list_weights
    return {
        "list_lengths": chosen.reshape(lengths.shape).astype(np.int32),
        "list_values": examples.list_values[places],
        "list_weights": None if weights is None else weights[places],
    }
