"""Settings that all units of a preparation share, and the records of a unit."""

import functools
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

import jaxrank
from jaxrank import json_files
from jaxrank.data import keyed_hash
from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.columns import read_column
from jaxrank.data.encode.derive import derive
from jaxrank.data.encode.fit import FitSpec
from jaxrank.data.encode.times import days, seconds
from jaxrank.data.keyed_hash import Pseudonymise
from jaxrank.data.prepare.units import WorkUnit
from jaxrank.data.rejects import BadRows, Rejects, missing_text
from jaxrank.data.sources.registry import Source, make_source
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.store.manifest import FORMAT_VERSION

TRAIN = "train"  # the split that encoders are fitted on
# Increased when equal data and options give other blocks, so that kept work is not reused.
_ENCODING = 7


class PrepareSettings(NamedTuple):
    """Settings that all units of a preparation share. Pickled to other processes.

    features: resolved.
    source: the config's section.
    directory: temporary directory of the store, a path or URL.
    wanted: the values to fit.
    block_size: examples per block.
    compression: of blocks.
    on_error, max_rejected: see `Rejects`.
    types: of the source.
    hash_key_file: path of the key for raw values. Empty: raw values are stored.
    token: unique to this preparation. Caches between units are dropped when it changes.
    """

    features: FeatureSpec
    source: dict[str, Any]
    directory: str
    wanted: FitSpec
    block_size: int
    compression: str
    on_error: str
    max_rejected: int
    types: dict[str, str]
    hash_key_file: str
    token: str

    def fingerprint(self, unit: WorkUnit, *rest: Any) -> str:
        """Returns a hash of everything that a unit's result depends on."""
        key = (
            keyed_hash.fingerprint(keyed_hash.read_key(self.hash_key_file))
            if self.hash_key_file
            else ""
        )
        source = {k: v for k, v in self.source.items() if k != "files"}
        inputs = [self.features.to_state(), source, self.block_size, self.compression, self.types]
        if not all(file.mark for file in unit.marks):
            inputs.append(self.token)  # changes of such a file cannot be detected
        versions = [jaxrank.__version__, FORMAT_VERSION, _ENCODING]
        return unit.fingerprint(inputs, self.on_error, key, versions, *rest)

    @property
    def pseudonymise(self) -> Pseudonymise | None:
        return (
            keyed_hash.pseudonymise(keyed_hash.read_key(self.hash_key_file))
            if self.hash_key_file
            else None
        )

    def rejects(self) -> Rejects:
        return Rejects(self.on_error, self.max_rejected, self.pseudonymise)


@functools.lru_cache(maxsize=1)
def _source(source: str, used: frozenset[str], token: str) -> Source:
    del token
    return make_source(json.loads(source), used)


def chunks(settings: PrepareSettings, unit: WorkUnit, rejects: Rejects) -> Iterator[Chunk]:
    # A skipped record is recorded with all its columns.
    used = settings.features.named if settings.on_error == "error" else frozenset()
    source = _source(json_files.to_text(settings.source, sort_keys=True), used, settings.token)
    stored = itertools.chain.from_iterable(source.chunks(part, rejects) for part in unit.parts)
    return _derived(settings.features, stored, rejects) if settings.features.derived else stored


def _derived(features: FeatureSpec, stored: Iterable[Chunk], rejects: Rejects) -> Iterator[Chunk]:
    """Yields the chunks with derived columns, without records from which none can be computed."""

    def derive_columns(chunk: Chunk) -> Chunk:
        return derive(features.derived, chunk, features.time_format)

    for chunk in stored:
        _, result = rejects.attempt(chunk, derive_columns)
        if result is not None:
            yield result


def record_days(features: FeatureSpec, chunk: Chunk) -> np.ndarray:
    """Returns the day of each record as text.

    Raises:
        BadRows: the day of a record is unknown.
    """
    times = seconds(read_column(chunk, features.time), time_format=features.time_format)
    if np.isnan(times).any():
        rows = np.flatnonzero(np.isnan(times))
        empty = missing_text(chunk, int(rows[0]), features.time)
        raise BadRows(chunk, rows, features.time, "a time, as by_day is set", empty)
    return days(times)
