"""Reads the `features` section of a config."""

from collections.abc import Mapping
from typing import Any

from jaxrank.data.spec.features import FeatureSpec
from jaxrank.validate import parse


def feature_spec(section: Mapping[str, Any]) -> FeatureSpec:
    """Reads and checks the section.

    Raises:
        InputError: a field is unknown or missing, or has a wrong type or an invalid value.
    """
    return parse(FeatureSpec, section, "features")


def canonical(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section as plain data with all defaults. Equal sections give equal data."""
    return feature_spec(section).to_state()


def unlabelled(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section as `canonical` gives it, for a store that was prepared without labels."""
    return feature_spec(section).without_labels().to_state()
