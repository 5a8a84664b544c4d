"""Builds export.json: the model, and the transformation from raw values to its inputs."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import jaxrank
from jaxrank.data.spec.entries import CategoricalSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import resolve_stored
from jaxrank.data.store.reader import Store
from jaxrank.export.dense_part import meaning
from jaxrank.features import Schema
from jaxrank.layout import Layout
from jaxrank.step import input_names


def recipe(
    layout: Layout,
    store: Store,
    *,
    model: Mapping[str, Any],
    features: FeatureSpec,
    config: Mapping[str, Any],
    ranked: Collection[str],
) -> dict[str, Any]:
    """Returns the content of export.json as plain data. docs/exported_files.md documents each key.

    Args:
        layout: of the run's tables.
        store: with the run's vocabularies and boundaries.
        model: the arguments of `models.build`.
        features: of the run.
        config: of the run, as plain data.
        ranked: tasks that are trained by ranking alone.
    """
    schema = layout.schema
    spec = resolve_stored(features, schema, store.schema)
    return {
        "jaxrank_version": jaxrank.__version__,
        "tasks": [
            {
                "name": task.name,
                "kind": task.kind,
                "meaning": meaning(task.kind, is_ranked=task.name in ranked),
            }
            for task in schema.tasks
        ],
        "tables": _tables(layout, spec),
        "keyed_hashes": bool(store.spec.hash_key),
        "dense": _floats(schema, spec),
        "categorical": [_id(entry, store) for entry in spec.categorical],
        "ragged": _lists(schema, spec),
        "inputs": _inputs(layout),
        "model": model,
        "config": config,
    }


def _tables(layout: Layout, spec: FeatureSpec) -> list[dict[str, Any]]:
    dims = {name: stack.dim for stack in layout.stacks for name in stack.tables}
    policies = {table.name: table.on_bad_id for table in spec.tables}
    return [
        {
            "name": table.name,
            "file": f"tables/{table.name}.parquet",
            "rows": table.rows,
            "dim": dims[table.name],
            "encoding": table.encoding,
            "on_bad_id": policies[table.name] if table.encoding == "integer" else None,
        }
        for table in layout.schema.tables
    ]


def _floats(schema: Schema, spec: FeatureSpec) -> list[dict[str, Any]]:
    scales = {f.name: f for f in schema.dense}
    return [
        {
            "name": entry.name,
            "log": entry.log,
            "mean": scales[entry.name].mean,
            "std": scales[entry.name].std,
            "missing_indicator": entry.missing_indicator,
        }
        for entry in spec.dense
    ]


def _id(entry: CategoricalSpec, store: Store) -> dict[str, Any]:
    boundaries = None
    if entry.encoding == "bucket":
        boundaries = entry.edges(store.spec.boundaries).tolist()
    return {
        "name": entry.name,
        "table": entry.table,
        "length": entry.length,
        "separator": entry.separator,
        "salt": entry.salt,
        "boundaries": boundaries,
    }


def _lists(schema: Schema, spec: FeatureSpec) -> list[dict[str, Any]]:
    sequences = {feature.name: feature.sequence for feature in schema.ragged}
    fields = (
        "name",
        "table",
        "separator",
        "salt",
        "weights",
        "combiner",
        "max_length",
        "on_overlong",
    )
    return [
        {field: getattr(entry, field) for field in fields} | {"sequence": sequences[entry.name]}
        for entry in spec.ragged
    ]


def _inputs(layout: Layout) -> list[dict[str, Any]]:
    """Lists the numbers that are concatenated at the model's input, in order."""
    groups = itertools.groupby(input_names(layout), key=lambda name: name[:3])
    return [
        {"kind": kind, "feature": feature, "place": place, "size": len(list(numbers))}
        for (kind, feature, place), numbers in groups
    ]
