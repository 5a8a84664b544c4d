"""Earlier names of config fields, of their values, and of keys of stored files.

An earlier name in a config is an error that gives the new one: see `validate.no_such_field` and
`validate.check_choice`. Files that were written under earlier names are read by the functions
below, which change nothing in files that have the new ones.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

_KINDS = {"floats": "dense", "ids": "categorical", "lists": "ragged"}
_RATES = {"base_rate": "base_learning_rate", "factors": "lr_multipliers"}

# The fields of each section of the config.
FIELDS: Mapping[str, Mapping[str, str]] = {
    "": {"steps_per_call": "steps_per_execution"},
    "source": _KINDS,
    "features": _KINDS,
    "model": {
        "hidden": "mlp_units",
        "bottom_hidden": "bottom_mlp_units",
        "floats_hidden": "dense_mlp_units",
        "head_hidden": "task_mlp_units",
        "expert_hidden": "expert_mlp_units",
    },
    "optim.dense": _RATES,
    "optim.tables": _RATES,
    "eval": {
        "stop_patience": "early_stopping_patience",
        "rate_patience": "reduce_lr_patience",
        "rate_factor": "reduce_lr_factor",
    },
    "watch": {"most_skipped": "max_skipped_steps"},
}
VALUES: Mapping[str, Mapping[str, str]] = {
    "model.cross": {
        "matrix": "dcn_v2",
        "vector": "dcn",
        "low_rank": "dcn_v2_low_rank",
        "mix": "dcn_mix",
        "dot": "dlrm",
    },
}
# Columns of a store's blocks.
COLUMNS = {"floats": "dense", "shifts": "logit_correction"}

_PLACEMENT = {"whole": "replicated_tables", "merged": "hot_rows"}
_TASK = {"too_young": "pending"}
_METRICS = {"rate": "learning_rate", "table_rate": "table_learning_rate"}


def now(section: str, name: str) -> str:
    """Returns the new name of a field that the section had; empty if it had none such."""
    return FIELDS.get(re.sub(r"\[\d+\]", "", section), {}).get(name, "")


def now_anywhere(name: str) -> str:
    """Returns the new name of a field that any section had; empty if none had it."""
    return next((names[name] for names in FIELDS.values() if name in names), "")


def config(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plain config of a run under the new names. The order of fields stays.

    Fields of other models than `ranker`, and of other sources than `synthetic`, were not renamed.
    """
    tree = _renamed(tree, FIELDS[""])
    tree = _change_part(tree, "features", features)
    tree = _change_part(tree, "eval", lambda part: _renamed(part, FIELDS["eval"]))
    tree = _change_part(tree, "watch", lambda part: _renamed(part, FIELDS["watch"]))
    tree = _change_part(tree, "source", source)
    tree = _change_part(tree, "model", _model)
    return _change_part(tree, "optim", _optim)


def features(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plain section `features`, or a schema, under the new names."""
    return _renamed(tree, _KINDS)


def source(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plain section `source` under the new names."""
    return _renamed(tree, _KINDS if tree.get("kind") == "synthetic" else {})


def statistics(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the statistics of a split under the new names."""
    tree = _renamed(tree, _KINDS)
    tree = _change_part(tree, "mergeable", features)

    def tasks(part: Mapping[str, Any]) -> dict[str, Any]:
        return {k: _renamed(v, _TASK) if isinstance(v, Mapping) else v for k, v in part.items()}

    return _change_part(tree, "tasks", tasks)


def manifest(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest of a store under the new names."""

    def spec(part: Mapping[str, Any]) -> dict[str, Any]:
        return _change_part(_change_part(part, "features", features), "source", source)

    def splits(part: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _change_part(part, name, split)[name] for name in part}

    def split(part: Mapping[str, Any]) -> dict[str, Any]:
        return _change_part(part, "statistics", statistics)

    tree = _change_part(_change_part(tree, "schema", features), "spec", spec)
    return _change_part(tree, "splits", splits)


def placement(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the placement of a run under the new names."""
    return {name: _renamed(stack, _PLACEMENT) for name, stack in tree.items()}


def record(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record of metrics.jsonl under the new names."""
    return _renamed(tree, _METRICS)


def _model(tree: Mapping[str, Any]) -> dict[str, Any]:
    if tree.get("name") not in (None, "", "ranker"):
        return dict(tree)
    tree = _renamed(tree, FIELDS["model"])
    if isinstance(cross := tree.get("cross"), str):
        tree["cross"] = VALUES["model.cross"].get(cross, cross)
    return tree


def _optim(tree: Mapping[str, Any]) -> dict[str, Any]:
    for section in ("dense", "tables"):
        tree = _change_part(tree, section, lambda part: _renamed(part, _RATES))
    return dict(tree)


def _renamed(tree: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in tree.items()}


def _change_part(
    tree: Mapping[str, Any], key: str, change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The tree with its part `key` changed, if that is a tree too."""
    part = tree.get(key)
    return {**tree, key: change(part)} if isinstance(part, Mapping) else dict(tree)
