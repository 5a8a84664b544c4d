"""Encodes one unit of a preparation and writes its blocks.

The blocks and their description stay in the temporary directory of the store. A preparation that is
run again reuses them.
"""

import functools
import json
from typing import Any, NamedTuple

import numpy as np

from jaxrank import json_files
from jaxrank.data import files
from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.columns import read_column
from jaxrank.data.encode.encoder import Encoder
from jaxrank.data.encode.fit import FittedEncoders
from jaxrank.data.encode.times import seconds
from jaxrank.data.examples import Examples, cut, join
from jaxrank.data.prepare.scatter import Scatter
from jaxrank.data.prepare.settings import TRAIN, PrepareSettings, chunks, record_days
from jaxrank.data.prepare.units import WorkUnit
from jaxrank.data.rejects import Rejects
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.statistics.vocabulary import Vocabulary, read_file
from jaxrank.data.store.writer import SCRATCH, SplitWriter


@functools.lru_cache(maxsize=2)
def _read_fitted(directory: str, text: str) -> FittedEncoders:
    """Restores the fitted encoders from the JSON text of their state and the vocabularies in the
    store.
    """
    state = json.loads(text)
    path = files.to_path(directory) / "vocabulary"
    vocabularies = {}
    for name in state["vocabularies"]:
        content = read_file(path / f"{name}.arrow")
        values = content["value"].combine_chunks()
        vocabularies[name] = Vocabulary(values, content["count"].to_numpy())
    return FittedEncoders.from_state(state, vocabularies)


class Written(NamedTuple):
    """The result of a unit.

    splits: by directory, which is the split or a day of it: the manifest entries of its files, and
        the statistics to merge.
    rejected: lines of JSON, one per skipped record.
    fingerprint: see `PrepareSettings.fingerprint`.
    """

    splits: dict[str, dict[str, Any]]
    rejected: list[str]
    fingerprint: str


def blocks_directory(settings: PrepareSettings) -> Any:
    """Returns the directory of the blocks: the store, or a temporary one before they are gathered.

    See `gather_unit`.
    """
    directory = files.to_path(settings.directory)
    return directory / SCRATCH / "scattered" if settings.features.group else directory


def result_path(settings: PrepareSettings, unit: WorkUnit) -> Any:
    return files.to_path(settings.directory) / SCRATCH / f"written-{unit.split}-{unit.name}.json"


def encode(settings: PrepareSettings, unit: WorkUnit, fitted: str, buckets: int = 1) -> None:
    """Writes the blocks of one unit, unless they exist. `read_result` describes them.

    Args:
        fitted: JSON text of the state of a `FittedEncoders`.
        buckets: number of sets of requests; see `gather_unit`. Not used without requests.

    Raises:
        InputError: a record is invalid.
        RunError: a file has changed since the preparation began.
    """
    path = result_path(settings, unit)
    fingerprint = settings.fingerprint(unit, fitted, buckets, settings.wanted.days)
    if path.is_file():
        if _is_written(settings, path, fingerprint):
            return
        files.remove(path)  # its files are about to be overwritten
    writers = _Writers(settings, unit, _read_fitted(settings.directory, fitted), buckets)
    rejects = settings.rejects()
    with unit.unchanged():
        for chunk in chunks(settings, unit, rejects):
            writers.take(chunk, rejects)
    written = Written(writers.finish(), rejects.lines, fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, json_files.to_text(written).encode())


def _is_written(settings: PrepareSettings, path: Any, fingerprint: str) -> bool:
    try:
        tree = json_files.read(path)
        return tree["fingerprint"] == fingerprint and all(
            (blocks_directory(settings) / directory / file["name"]).stat().st_size == file["bytes"]
            for directory, entry in tree["splits"].items()
            for file in entry["files"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False  # written by another version, or incomplete


def read_result(settings: PrepareSettings, unit: WorkUnit) -> Written:
    return Written(**json_files.read(result_path(settings, unit)))


class _Writers:
    """The block writers of a unit, by directory."""

    def __init__(
        self, settings: PrepareSettings, unit: WorkUnit, fitted: FittedEncoders, buckets: int
    ):
        self._settings, self._unit, self._fitted = settings, unit, fitted
        self._buckets = buckets
        self._by_directory: dict[str, tuple[Encoder, _Blocks | Scatter]] = {}

    def take(self, chunk: Chunk, rejects: Rejects) -> None:
        for directory, piece in self._split_days(chunk, rejects):
            encoder, blocks = self._encoder(directory)
            _, examples = rejects.attempt(piece, encoder.encode)
            if examples is not None:
                blocks.add(examples)

    def _split_days(self, chunk: Chunk, rejects: Rejects) -> list[tuple[str, Chunk]]:
        """Returns the directories of a chunk's records, each with its records."""
        split = self._unit.split
        if not self._settings.features.by_day:
            if split == TRAIN and self._settings.wanted.days:  # fitting left invalid times out
                chunk, _ = rejects.attempt(chunk, self._read_times)
            return [(split, chunk)]
        dated = functools.partial(record_days, self._settings.features)
        chunk, dates = rejects.attempt(chunk, dated)
        parts = []
        for day in [] if dates is None else np.unique(dates):
            others = np.flatnonzero(dates != day)
            parts.append((f"{split}/{day}", chunk.drop_records(others) if len(others) else chunk))
        return parts

    def _read_times(self, chunk: Chunk) -> None:
        features = self._settings.features
        seconds(read_column(chunk, features.time), time_format=features.time_format)

    def _encoder(self, directory: str) -> "tuple[Encoder, _Blocks | Scatter]":
        if directory not in self._by_directory:
            settings, fitted = self._settings, self._fitted
            encoder = Encoder(
                settings.features,
                fitted.vocabularies,
                fitted.transforms,
                Statistics(settings.features),
                as_of=fitted.as_of,
                boundaries=fitted.boundaries,
                pseudonymise=settings.pseudonymise,
                earlier_rows=fitted.earlier_rows,
                types=settings.types,
            )
            path = blocks_directory(settings) / directory
            writer = SplitWriter(path, self._unit.name, settings.compression)
            blocks: _Blocks | Scatter = _Blocks(writer, settings.block_size)
            if settings.features.group:
                alone = f"{self._unit.split} {self._unit.index}"
                blocks = Scatter(writer, settings.features.group, self._buckets, alone)
            self._by_directory[directory] = (encoder, blocks)
        return self._by_directory[directory]

    def finish(self) -> dict[str, dict[str, Any]]:
        results = {}
        for directory, (encoder, blocks) in self._by_directory.items():
            state = encoder.statistics.to_state()
            results[directory] = {"files": blocks.finish(), "statistics": state}
        return results


class _Blocks:
    """Regroups examples into blocks of `size` examples. The last block may have fewer."""

    def __init__(self, writer: SplitWriter, size: int):
        self._writer, self._size = writer, size
        self._pending: list[Examples] = []
        self._rows = 0

    def add(self, piece: Examples) -> None:
        start = 0
        while self._rows + piece.rows - start >= self._size:
            stop = start + self._size - self._rows
            self._write([*self._pending, cut(piece, start, stop)])
            start = stop
        if start < piece.rows:
            self._pending.append(cut(piece, start, piece.rows))
            self._rows += piece.rows - start

    def _write(self, pieces: list[Examples]) -> None:
        self._writer.write(join(pieces))
        self._pending, self._rows = [], 0

    def finish(self) -> list[dict[str, Any]]:
        if self._pending:
            self._write(self._pending)
        self._writer.close()
        return self._writer.files
