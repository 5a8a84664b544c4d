"""What is saved beside the arrays of a checkpoint: JSON, with a digest of itself.

It holds the fingerprint of the data, the monitor, scores of days, spikes, the version, the
monitored metric and the checksums of the arrays.
"""

from pathlib import Path
from typing import Any, NamedTuple

from jaxrank.json_files import Seal

_SEAL = Seal(
    "digest",
    of_bytes=False,  # Orbax writes the file
    hint=" This checkpoint is damaged, or of another version of jaxrank.",
)


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
    return _SEAL.add(whole)


def read(checkpoint: Path) -> dict[str, Any]:
    """The record of a checkpoint, without its digest.

    Raises:
        InputError: it is not there, or is damaged.
    """
    return _SEAL.read(checkpoint / "run" / "metadata")
