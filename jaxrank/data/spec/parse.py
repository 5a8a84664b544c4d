"""Reads the `features` section of a config."""

from collections.abc import Mapping
from typing import Any

from jaxrank.data.spec.checks import check_ids, check_list, check_tasks, check_times
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.errors import InputError
from jaxrank.validate import parse


def feature_spec(section: Mapping[str, Any]) -> FeatureSpec:
    """Reads and checks the section.

    Raises:
        InputError: a field is unknown or missing, or has a wrong type or an invalid value.
    """
    spec = parse(FeatureSpec, section, "features")
    check_tasks(spec)
    check_times(spec)
    for kind in ("floats", "ids", "lists"):
        for i, entry in enumerate(getattr(spec, kind)):
            if not entry.columns:
                place = f"features.{kind}[{i}].columns"
                raise InputError(f"{place}: must name a column: found none.")
    for i, ids in enumerate(spec.ids):
        check_ids(ids, f"features.ids[{i}]")
    for i, a_list in enumerate(spec.lists):
        check_list(a_list, f"features.lists[{i}]")
    return spec


def canonical(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section as plain data with all defaults. Equal sections give equal data."""
    return feature_spec(section).to_state()


def unlabelled(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section as `canonical` gives it, for a store that was prepared without labels."""
    return feature_spec(section).without_labels().to_state()
