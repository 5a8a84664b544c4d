"""Learns from one unit of a preparation.

The result is left in the directory where the store is made. A preparation that is run again reads
it there, so nothing is done twice.
"""

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from jaxrank.data import files
from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.encoder import Encoder
from jaxrank.data.encode.fit import Findings
from jaxrank.data.prepare.settings import Work, chunks, record_days
from jaxrank.data.prepare.units import Unit
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.store.writer import SCRATCH

# Learning.


def lessons_path(work: Work, unit: Unit) -> Any:
    kind = "latest" if work.wanted.as_of else "learned"
    return files.path_of(work.directory) / SCRATCH / f"{kind}-{unit.split}-{unit.name}.arrow"


def learn(work: Work, unit: Unit) -> None:
    """Leaves what one unit teaches, unless it is there; `read_lessons` reads it.

    Raises:
        InputError: a record cannot be used.
        RunError: a file has changed since the preparation began.
    """
    path, fingerprint = lessons_path(work, unit), work.fingerprint(unit, work.wanted.names)
    if path.is_file() and _has(path, fingerprint, work):
        return
    findings = Findings(work.features, work.wanted)
    rejects = work.rejects()
    check = _checker(work.features) if work.on_error != "error" else None

    def take(chunk: Chunk) -> None:
        if check is not None:  # what will be left out of the store teaches nothing
            check(chunk)
        findings.add(chunk)

    with unit.unchanged():
        for chunk in chunks(work, unit, rejects):
            rejects.attempt(chunk, take)
    path.parent.mkdir(parents=True, exist_ok=True)
    findings.write(path, fingerprint, work.conceal)


def _checker(features: FeatureSpec) -> Callable[[Chunk], None]:
    """Raises BadRows for what will not be encoded, before anything is learned."""
    scales = {f.name: (0.0, 1.0) for f in features.floats}
    encoder = Encoder(features, {}, scales, Statistics(features), as_of=math.inf)

    def check(chunk: Chunk) -> None:
        encoder.check(chunk)
        if features.by_day:
            record_days(features, chunk)

    return check


def _has(path: Any, fingerprint: str, work: Work) -> bool:
    try:
        return Findings(work.features, work.wanted).read(path) == fingerprint
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return False  # of another version


def read_lessons(work: Work, unit: Unit) -> Findings:
    findings = Findings(work.features, work.wanted)
    findings.read(lessons_path(work, unit))
    return findings
