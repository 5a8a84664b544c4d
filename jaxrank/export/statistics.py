"""Statistics of a run's data and scores, for comparison with requests."""

import json
import math
from pathlib import Path
from typing import Any

from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.store.reader import Store
from jaxrank.errors import InputError
from jaxrank.export.write import Source
from jaxrank.run_schedule import NEXT_DAY

_VALID = b'"kind": "valid"'
METRICS = ("auc", "logloss", "squared_error", "deviance")  # that a signature has


def statistics(source: Source, spec: FeatureSpec) -> dict[str, Any]:
    """Returns the part `statistics` of a signature, from what preparation and training recorded.

    They are of the validation split, or of the training split if there is none. Values that were
    not recorded are None. Scores and metrics of a calibrated checkpoint are not: they are those
    before `jaxrank calibrate`.

    Args:
        spec: resolved.
    """
    data = source.run.builder.data
    name = data.valid if data.valid not in ("", NEXT_DAY) else data.train
    recorded = _split_statistics(source.store, name)
    scores: dict[str, float] = {}
    if name == data.valid and source.calibration is None:
        scores = _evaluation(source.run.directory / "metrics.jsonl", source.step)
    tasks = []
    for task in source.run.schema.tasks:
        labels = recorded.get("traffic", {}).get(task.name, {})
        mean = labels.get("mean")
        calibration = scores.get(f"{task.name}/calibration")
        is_known = None not in (mean, calibration)
        metrics = {metric: scores.get(f"{task.name}/{metric}") for metric in METRICS}
        tasks.append(
            {
                "task": task.name,
                "label_mean": mean,
                "score_mean": calibration * mean if is_known else None,
                "metrics": {metric: v for metric, v in metrics.items() if v is not None},
            }
        )
    rows = recorded.get("rows")
    features = []
    for kind in ("dense", "categorical", "ragged"):
        for feature in getattr(spec, kind):
            counted = recorded.get(kind, {}).get(feature.name, {})
            values = rows if kind == "dense" else counted.get("ids")
            is_list = kind == "ragged"
            features.append(
                {
                    "name": feature.name,
                    "missing": 0.0 if is_list else _share(counted.get("missing"), values),
                    "unknown": 0.0 if kind == "dense" else _share(counted.get("unknown"), values),
                    "mean_length": counted.get("mean") if is_list else 1.0,
                }
            )
    return {
        "split": name,
        "rows": rows,
        "scored_rows": rows if scores else None,
        "tasks": tasks,
        "features": features,
    }


def _split_statistics(store: Store, name: str) -> dict[str, Any]:
    try:
        split = store.split(name, "data")
    except InputError:  # a later store may have other splits
        return {}
    return split.statistics if split.has_statistics else {}


def _share(count: float | None, values: float | None) -> float | None:
    return None if count is None or not values else count / values


def _evaluation(path: Path, step: int) -> dict[str, float]:
    """Returns the finite metrics of the last evaluation of a checkpoint, {} without one."""
    metrics: dict[str, float] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        if _VALID not in line[:80]:
            continue
        try:
            record = json.loads(line)
        except ValueError:  # a run that is killed leaves an incomplete line
            continue
        if record["step"] == step:
            numbers = {k: v for k, v in record.items() if isinstance(v, float)}
            metrics = {k: v for k, v in numbers.items() if math.isfinite(v)}
    return metrics
