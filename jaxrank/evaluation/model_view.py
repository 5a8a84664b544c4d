"""Reads a store as a model that was trained on another one: by names and by raw values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrank.data.store.reader import Store
from jaxrank.data.store.same_values import rows_in_model
from jaxrank.data.store.view import View
from jaxrank.errors import InputError
from jaxrank.features import Schema, Task


def view_for_model(model: Schema, store: Store, open_own: Callable[[], Store]) -> Store:
    """Returns a store whose splits have the features and the table rows of a model.

    Features are matched by name, and rows of vocabularies by raw value. The store may have more
    features, and values that the model does not have are unknown to it. Negatives may be sampled
    at another rate, because a model predicts all traffic.

    Args:
        model: the schema of the model.
        open_own: opens the store that the model was trained on. It is called only if a vocabulary
            is not an extension of the model's.

    Raises:
        InputError: the store lacks a feature, or encodes it differently, or a vocabulary is missing
            or corrupt.
    """
    check_features(model, store)
    rows: dict[str, np.ndarray] = {}
    for table in model.tables:
        mapped = rows_in_model(table, store, open_own)
        if mapped is not None:
            rows[table.name] = mapped
    features = [(s.dense, s.categorical, s.ragged) for s in (model, store.schema)]
    if not rows and features[0] == features[1]:
        return store
    return store.viewed(View(store.schema, model, rows))


def check_features(model: Schema, store: Store) -> None:
    """Checks that a store has the tasks and features of a model, encoded as they were for it.

    Vocabularies may have other values.

    Raises:
        InputError: names the first difference.
    """
    _check_tasks(model, store)
    for field in ("dense", "categorical", "ragged"):
        _check_section(model, store, field)
    for table in model.tables:
        stored = store.table(table.name)
        encodings = {table.encoding, stored.encoding if stored else ""}
        if stored != table and encodings != {"vocabulary"}:
            raise _differs(store, "tables", table.name, table, stored)


def _check_tasks(model: Schema, store: Store) -> None:
    old, new = ([_predicted_task(task) for task in s.tasks] for s in (model, store.schema))
    for before, after in zip(old, new, strict=False):
        if before != after and before.name == after.name:
            raise _differs(store, "tasks", before.name, before, after)
    names = [[task.name for task in tasks] for tasks in (old, new)]
    for name in names[0]:
        if name not in names[1]:
            raise _differs(store, "tasks", name, old[names[0].index(name)], None)
    for name in names[1]:
        if name not in names[0]:
            raise _differs(store, "tasks", name, None, new[names[1].index(name)])
    if names[0] != names[1]:
        raise _order(store, "tasks", names[0], names[1])


def _check_section(model: Schema, store: Store, field: str) -> None:
    old, new = ({f.name: f for f in getattr(s, field)} for s in (model, store.schema))
    for name, feature in old.items():
        if new.get(name) != feature:
            raise _differs(store, field, name, feature, new.get(name))
    shared = [name for name in new if name in old]
    if shared != list(old):
        raise _order(store, field, list(old), shared)


def _predicted_task(task: Task) -> Task:
    return dataclasses.replace(task, shifted=False)


def _differs(store: Store, field: str, name: str, old: Any, new: Any) -> InputError:
    return InputError(
        f"{store.path}: {field} must be those that the model was trained on: {name!r} was"
        f" {old or 'absent'}, found {new or 'absent'}. Prepare the data with the features of the"
        " training store, and `--vocabularies` naming it."
    )


def _order(store: Store, field: str, old: list[str], new: list[str]) -> InputError:
    return InputError(
        f"{store.path}: {field} must be in the order {old}: found {new}. Prepare the data again"
        f" with features.{field} in that order."
    )
