"""Reads the fitted encoders of an earlier store, to encode the data of a later day equally."""

import numpy as np
import pyarrow as pa

from jaxrank.data.encode.fit import FittedEncoders
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics.vocabulary import Vocabulary
from jaxrank.data.store.reader import Store
from jaxrank.errors import InputError


def earlier_fitted(
    features: FeatureSpec, store: Store, key: str, *, scales: bool = True
) -> FittedEncoders:
    """Returns the fitted encoders of an earlier store that these features need.

    Args:
        key: fingerprint of the key for raw values, or "" if there is none.
        scales: if False, means, deviations and bucket boundaries are not among them.

    Raises:
        InputError: the store was made with another key, or encodes a feature differently.
    """
    if store.spec.hash_key != key:
        raise InputError(
            f"{store.path}: must have been prepared with the same --hash-key-file, or both without"
            " one, so that its vocabularies can be reused: found another key."
        )
    encodings = {table.name: table.encoding for table in store.schema.tables}
    vocabularies, histories = {}, {}
    for table in features.tables:
        encoding = encodings.get(table.name, table.encoding)
        if encoding != table.encoding:
            raise InputError(
                f"{store.path}: the table {table.name!r} must have encoding={table.encoding!r} as"
                f" in the config: found {encoding!r}."
            )
        if table.encoding == "vocabulary" and table.name in encodings:
            values, counts = store.vocabulary(table.name)
            vocabularies[table.name] = Vocabulary(pa.array(values, pa.string()), counts)
            if history := store.history(table.name):
                histories[table.name] = history
    return FittedEncoders(
        vocabularies,
        _earlier_transforms(features, store) if scales else {},
        _earlier_boundaries(features, store) if scales else {},
        earlier_rows={name: vocabulary.rows for name, vocabulary in vocabularies.items()},
        histories=histories,
    )


def _earlier_boundaries(features: FeatureSpec, store: Store) -> dict[str, np.ndarray]:
    fitted = store.spec.boundaries
    boundaries = {}
    for entry in features.categorical:
        if not entry.buckets or entry.name not in fitted:
            continue
        buckets = store.spec.buckets[entry.name]
        if buckets != entry.buckets:
            raise InputError(
                f"{store.path}: the feature {entry.name!r} must have buckets={entry.buckets} as in"
                f" the config, so that its boundaries can be reused: found buckets={buckets}. Set"
                " `buckets` as it was."
            )
        boundaries[entry.name] = np.asarray(fitted[entry.name], np.float64)
    return boundaries


def _earlier_transforms(features: FeatureSpec, store: Store) -> dict[str, tuple[float, float]]:
    fitted = store.spec.transforms
    log_of = {f.name: f.log for f in store.schema.dense}
    transforms = {}
    for entry in features.dense:
        if not entry.standardize or entry.name not in fitted:
            continue
        if entry.log != log_of[entry.name]:
            raise InputError(
                f"{store.path}: the dense feature {entry.name!r} must have log={entry.log} as in"
                " the config, so that its mean and standard deviation can be reused: found"
                f" log={log_of[entry.name]}. Set `log` as it was."
            )
        mean, std = fitted[entry.name]
        transforms[entry.name] = (mean, std)
    return transforms
