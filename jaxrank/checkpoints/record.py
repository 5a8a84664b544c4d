"""What is saved beside the arrays of a checkpoint: JSON, with a digest of itself.

It holds the fingerprint of the data, the monitor, scores of days, spikes, the version, the
monitored metric and the checksums of the arrays. Nothing but the digest would find a bit that
flipped on a disk.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from jaxrank.errors import InputError


class Metric(NamedTuple):
    """The monitored metric of a checkpoint, None if it was not evaluated; what it measures."""

    value: float | None
    measures: str
    higher_is_better: bool


def metric_of(record: dict[str, Any]) -> Metric:
    return Metric(record["metric"], record["measures"], record["higher_is_better"])


def sealed(record: dict[str, Any], metric: Metric) -> dict[str, Any]:
    """The record as it is saved, with the metric and the digest of all of it."""
    whole = record | {
        "metric": metric.value,
        "measures": metric.measures,
        "higher_is_better": metric.higher_is_better,
    }
    return whole | {"digest": _digest(whole)}


def read(checkpoint: Path) -> dict[str, Any]:
    """The record of a checkpoint, without its digest.

    Raises:
        InputError: it is not there, or is damaged.
    """
    file = checkpoint / "run" / "metadata"
    try:
        record = json.loads(file.read_text())
        expected = record.pop("digest")
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(
            f"{file}: must be a JSON object with a digest: {type(error).__name__}: {error}."
            " This checkpoint is damaged, or of another version of jaxrank."
        ) from error
    if expected != _digest(record):
        raise InputError(
            f"{file}: must have the digest that it had when it was saved, {expected}: found"
            f" {_digest(record)}. This checkpoint is damaged."
        )
    return record


def _digest(record: dict[str, Any]) -> str:
    return xxhash.xxh3_64(json.dumps(record, sort_keys=True).encode()).hexdigest()
