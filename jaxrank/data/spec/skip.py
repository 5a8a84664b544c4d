"""Leaves features out of a schema, as the field `features.skip` names them."""

import dataclasses
import fnmatch
from collections.abc import Collection, Sequence
from typing import TypeVar

from jaxrank.data.spec.features import FeatureSpec
from jaxrank.errors import InputError
from jaxrank.features import INDICATOR, Categorical, Dense, Ragged, Schema, column_of
from jaxrank.validate import nearest

Feature = TypeVar("Feature", Dense, Categorical, Ragged)
_MAX_NAMES = 20  # of features in an error


def drop_features(schema: Schema, skip: Sequence[str]) -> Schema:
    """Returns a schema without the features that names or patterns of `skip` match.

    The indicator of missing values goes with its feature, all numbers of a vector go with the name
    of its column, and a table goes with its last feature.

    Raises:
        InputError: a name matches no feature, or no feature is left.
    """
    if not skip:
        return schema
    names = {f: _names(f) for f in _features(schema)}
    known = {name for alternatives in names.values() for name in alternatives}
    left_out: set[str] = set()
    for pattern in skip:
        left_out |= matches("features.skip", pattern, known)

    def kept(features: tuple[Feature, ...]) -> tuple[Feature, ...]:
        return tuple(f for f in features if not left_out & names[f])

    left = dataclasses.replace(
        schema,
        dense=kept(schema.dense),
        categorical=kept(schema.categorical),
        ragged=kept(schema.ragged),
    )
    if not (left.dense or left.categorical or left.ragged):
        raise InputError(
            f"features.skip: must leave a feature to train on: found {list(skip)}, which match all"
            f" {len(names)} features of the data."
        )
    read = {f.table for f in left.categorical} | {f.table for f in left.ragged}
    return dataclasses.replace(left, tables=tuple(t for t in schema.tables if t.name in read))


def matches(field: str, pattern: str, known: Collection[str]) -> set[str]:
    """Returns the known names that a name or pattern matches. A name that is known wins.

    Args:
        field: for the error.

    Raises:
        InputError: no name matches.
    """
    matching = {pattern} & set(known) or set(fnmatch.filter(known, pattern))
    if not matching:
        shown = ", ".join(sorted(known)[:_MAX_NAMES]) + ", ..." * (len(known) > _MAX_NAMES)
        near = nearest(pattern, known, 3) or f": found none among {shown}"
        raise InputError(f"{field}: {pattern!r} must match a feature of the data{near}.")
    return matching


def columns(schema: Schema) -> list[str]:
    """Returns the name under which each feature can be left out with all its numbers, each once."""
    return list(dict.fromkeys(min(_names(f), key=len) for f in _features(schema)))


def restricted(spec: FeatureSpec, schema: Schema) -> FeatureSpec:
    """Returns a resolved spec with the entries whose features a schema has."""
    dense, categorical, ragged = (
        {f.name for f in features} for features in (schema.dense, schema.categorical, schema.ragged)
    )
    return dataclasses.replace(
        spec,
        dense=tuple(entry for entry in spec.dense if entry.name in dense),
        categorical=tuple(entry for entry in spec.categorical if entry.name in categorical),
        ragged=tuple(entry for entry in spec.ragged if entry.name in ragged),
    )


def _features(schema: Schema) -> list[Dense | Categorical | Ragged]:
    return [*schema.dense, *schema.categorical, *schema.ragged]


def _names(feature: Dense | Categorical | Ragged) -> frozenset[str]:
    """Returns the names under which a feature can be left out."""
    name = feature.name
    names = {name}
    if isinstance(feature, Dense):
        names |= {name.removesuffix(INDICATOR), column_of(name)}
    return frozenset(names)
