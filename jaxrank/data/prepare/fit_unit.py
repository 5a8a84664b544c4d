"""Counts one unit of a preparation, for the encoders that are fitted.

The result stays in the temporary directory of the store. A preparation that is run again reuses it.
"""

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from jaxrank.data import files
from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.encoder import Encoder
from jaxrank.data.encode.fit import FitState
from jaxrank.data.prepare.settings import PrepareSettings, chunks, record_days
from jaxrank.data.prepare.units import WorkUnit
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.store.writer import SCRATCH

# Fitting.


def fit_state_path(settings: PrepareSettings, unit: WorkUnit) -> Any:
    kind = "latest" if settings.wanted.as_of else "learned"
    return files.to_path(settings.directory) / SCRATCH / f"{kind}-{unit.split}-{unit.name}.arrow"


def fit(settings: PrepareSettings, unit: WorkUnit) -> None:
    """Writes the fit state of one unit, unless it exists. `read_fit_state` reads it.

    Raises:
        InputError: a record is invalid.
        RunError: a file has changed since the preparation began.
    """
    path, fingerprint = (
        fit_state_path(settings, unit),
        settings.fingerprint(unit, settings.wanted.names, settings.wanted.days),
    )
    if path.is_file() and _has(path, fingerprint, settings):
        return
    fit_state = FitState(settings.features, settings.wanted)
    rejects = settings.rejects()
    check = _checker(settings.features) if settings.on_error != "error" else None

    def take(chunk: Chunk) -> None:
        if check is not None:  # records that the store will skip must not count
            check(chunk)
        fit_state.add(chunk)

    with unit.unchanged():
        for chunk in chunks(settings, unit, rejects):
            rejects.attempt(chunk, take)
    path.parent.mkdir(parents=True, exist_ok=True)
    fit_state.write(path, fingerprint, settings.pseudonymise)


def _checker(features: FeatureSpec) -> Callable[[Chunk], None]:
    """Returns a function that raises BadRows for records that encoding would reject."""
    scales = {f.name: (0.0, 1.0) for f in features.dense}
    encoder = Encoder(features, {}, scales, Statistics(features), as_of=math.inf)

    def check(chunk: Chunk) -> None:
        encoder.check(chunk)
        if features.by_day:
            record_days(features, chunk)

    return check


def _has(path: Any, fingerprint: str, settings: PrepareSettings) -> bool:
    try:
        return FitState(settings.features, settings.wanted).read(path) == fingerprint
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return False  # written by another version


def read_fit_state(settings: PrepareSettings, unit: WorkUnit) -> FitState:
    fit_state = FitState(settings.features, settings.wanted)
    fit_state.read(fit_state_path(settings, unit))
    return fit_state
