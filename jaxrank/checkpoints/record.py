"""The record of a checkpoint: JSON beside the arrays, sealed with its own digest.

It holds the fingerprint of the data, the state of early stopping, metrics of days, the state of the
loss spike detector, the version, the monitored metric and the checksums of the arrays.
"""

from pathlib import Path
from typing import Any, NamedTuple

from jaxrank.json_files import Seal

# What to do about a damaged checkpoint, with a leading space.
OTHER_CHECKPOINT = (
    " Resume from an older checkpoint with --allow-older-checkpoint, or read another one with"
    " --checkpoint=STEP."
)
_SEAL = Seal(
    "digest",
    of_bytes=False,  # Orbax writes the file
    hint=" This checkpoint is damaged, or was written by another version of jaxrank."
    f"{OTHER_CHECKPOINT}",
)


class Metric(NamedTuple):
    """The monitored metric of a checkpoint.

    Attributes:
        value: None if the checkpoint was not evaluated.
        measures: names the metric and the data. Only values with the same name are comparable.
        higher_is_better: the direction of the metric.
    """

    value: float | None
    measures: str
    higher_is_better: bool


def stored_metric(record: dict[str, Any]) -> Metric:
    return Metric(record["metric"], record["measures"], record["higher_is_better"])


def sealed(record: dict[str, Any], metric: Metric) -> dict[str, Any]:
    """Returns the record in its stored form, with the metric and a digest of the whole."""
    whole = record | {
        "metric": metric.value,
        "measures": metric.measures,
        "higher_is_better": metric.higher_is_better,
    }
    return _SEAL.add(whole)


def read(checkpoint: Path) -> dict[str, Any]:
    """Reads the record of a checkpoint, without its digest.

    Raises:
        InputError: the record is absent or damaged.
    """
    return _SEAL.read(checkpoint / "run" / "metadata")
