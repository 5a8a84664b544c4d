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
