"""Generates ads-like data with known probabilities, for tests, benchmarks and studies.

    f0, f1, ...       float32, null where missing (odd columns)
    c0, c1, ...       int32 in [0, rows), a power law by rank: 0 is the most frequent; the last
                      column has nulls
    l0, l1, ...       list<int32>, empty lists included; l0_weight list<float32> where weighted
    item, category    int32, the candidate, with histories
    history_item, history_category   list<int32>, its past events, the oldest first
    history_time      list<int64>, their times, if there are days
    request           int64, if there are requests
    click             int8
    conversion        int8, of a click; null without a click
    p_click, p_conversion   float64, the probabilities of the labels
    time              int64, seconds since 1970, if there are days; rows are in this order
    conversion_time   int64, if there is a delay; null without a conversion

The logit of a click is an intercept plus effects of floats (linear and not), of ids and of the mean
of each list's ids, and interactions (float by float, id by id, float by id, list by id). The logit
of a conversion has the same parts with other, correlated weights.

Effects of ids are hashes of seed, feature and id, so a table of any size costs no memory. They
shrink with rank, so that the signal is in frequent ids. With 13 floats, 24 id columns of 4 to
100,000 rows and 4 lists, the best loss is 0.77 (clicks) and 0.75 (conversions) of the best
constant's. A DCN-V2 of dimension 16 closed 91% and 94% of that gap in one pass over 2 M rows.

Probabilities are those at the time of the row (see `drift`), of the full traffic before negatives
are downsampled, and of a conversion after any delay.
"""

import functools
import math
import zlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from jaxrank.data.chunk import Chunk, Part, numbered
from jaxrank.data.files import File
from jaxrank.data.rejects import Rejects
from jaxrank.data.synthetic import history, requests
from jaxrank.data.synthetic.arguments import Arguments
from jaxrank.data.synthetic.clock import days_since_start
from jaxrank.data.synthetic.drift import OTHER_SEED, Drift
from jaxrank.data.synthetic.truth import Rows, Truth

_CHUNK_ROWS = 32_768  # drawn from one random stream, so changing it changes the data
_PART_CHUNKS = 16
_CALIBRATION_ROWS = 65_536
_NULL_IDS = 0.02
_MAX_LENGTH = 8  # relative to the mean length
_HOUR = 3600.0  # seconds
# Random streams of a chunk. Existing draws must not change when others are added.
_ROWS, _DELAYS, _NEGATIVES, _REQUESTS = 2, 3, 4, 5


class ListOfIds(NamedTuple):
    """A column of lists: lengths i64[n] and values i32[sum of lengths]."""

    lengths: np.ndarray
    values: np.ndarray


class SyntheticSource:
    """Generated splits. Equal arguments give equal rows, and no two splits share rows.

    Args:
        arguments: the section of the config.
    """

    def __init__(self, arguments: Arguments):
        self._rows = arguments.rows
        self._ids, self._lists = arguments.categorical, arguments.ragged
        self._history, self._history_share = arguments.history, arguments.history_share
        self._clock = arguments.clock
        self._seed = arguments.seed
        self._floats, self._missing = arguments.dense, arguments.missing
        self._exponent, self._signal = arguments.exponent, arguments.signal
        self._crosses = arguments.crosses
        self._rates = arguments.click_rate, arguments.conversion_rate
        self._drift_size, self._delay_hours = arguments.drift, arguments.delay_hours
        self._negative_rate = arguments.negative_rate
        self._request_size = arguments.request_size
        self._request_effect = arguments.request_effect

    @functools.cached_property
    def _truth(self) -> Truth:
        return self._calibrated(self._seed)

    @functools.cached_property
    def _drift(self) -> Drift | None:
        if self._clock is None or not self._drift_size:
            return None
        other = self._calibrated(self._seed + OTHER_SEED)
        return Drift(self._seed, self._drift_size, self._clock.end, other, self._signal)

    def _calibrated(self, seed: int) -> Truth:
        truth = Truth(seed, self._floats, self._ids, len(self._lists))
        sample = self._draw(np.random.default_rng([self._seed, 0, 1]), _CALIBRATION_ROWS)
        share = self._history_share if self._history else 0
        truth.calibrate(sample, self._signal, self._rates, self._crosses, share)
        return truth

    @property
    def splits(self) -> list[str]:
        return list(self._rows)

    @property
    def hint(self) -> str:
        return ""

    @property
    def types(self) -> dict[str, str]:
        return {}

    def columns(self, split: str) -> list[str]:
        """Returns the names of the columns, which are equal for all splits."""
        del split
        names = [f"f{i}" for i in range(self._floats)] + [f"c{i}" for i in range(len(self._ids))]
        for i, entry in enumerate(self._lists):
            names += [f"l{i}", f"l{i}_weight"] if entry.weighted else [f"l{i}"]
        if self._history:
            names += [*history.COLUMNS, *([history.TIMES] if self._clock else [])]
        names += [requests.COLUMN] if self._request_size else []
        names += ["click", "conversion", "p_click", "p_conversion"]
        names += ["time"] if self._clock else []
        return [*names, "conversion_time"] if self._delay_hours else names

    @property
    def files(self) -> list[str]:
        return []

    def check_columns(self, used: Collection[str]) -> None:
        del used  # there are no files

    def marks(self) -> dict[str, File]:
        return {}

    def parts(self, split: str) -> list[Part]:
        """Returns the parts. A longer split begins with the rows of a shorter one, unless they have
        times.
        """
        chunks = len(self.chunk_rows(split))
        starts = range(0, chunks, _PART_CHUNKS)
        return [
            Part(split, f"synthetic:{split}", start, min(start + _PART_CHUNKS, chunks))
            for start in starts
        ]

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        """Yields the rows of a part in order."""
        del rejects
        split = part.split
        for index, count in list(enumerate(self.chunk_rows(split)))[part.start : part.stop]:
            first = index * _CHUNK_ROWS
            random = self._random(split, index)
            rows = self._draw(random, _CHUNK_ROWS)
            times, moved = None, None
            if self._clock:
                times = self._clock.times(split, self._rows[split], first, _CHUNK_ROWS)
            if self._drift and times is not None:
                moved = self._drift.logits(rows, days_since_start(times))
            columns = self._feature_columns(rows)
            if rows.history:
                columns |= rows.history.columns(times)
            probabilities = self._truth.probabilities(rows, moved)
            if self._request_size:
                drawn_by = self._random(split, index, _REQUESTS)
                of_split = (self._rows[split], self._request_size)
                numbers = requests.draw(drawn_by, _CHUNK_ROWS, *of_split)
                columns[requests.COLUMN] = pa.array(numbers)
                effects = (self._seed, self._request_effect)
                probabilities = requests.with_effects(probabilities, numbers, *effects)
            columns |= self._labels(probabilities, random)
            if times is not None:
                columns |= self._times(times, columns["conversion"], split, index)
            batch = pa.RecordBatch.from_pydict(columns).slice(0, count)
            chunk = Chunk(batch, part.file, numbered(first + 1, count))
            if self._negative_rate < 1:
                drawn = self._random(split, index, _NEGATIVES).random(_CHUNK_ROWS)[:count]
                clicks = batch.column("click").to_numpy()
                chunk = chunk.drop_records(
                    np.flatnonzero((clicks == 0) & (drawn >= self._negative_rate))
                )
            yield chunk

    def chunk_rows(self, split: str) -> list[int]:
        """Returns the number of rows of each chunk of a split, before negatives are downsampled."""
        rows = self._rows[split]
        return [min(_CHUNK_ROWS, rows - first) for first in range(0, rows, _CHUNK_ROWS)]

    def chunk_ids(self, split: str, index: int) -> dict[str, ListOfIds]:
        """Returns the ids of one chunk of a split, by column, before negatives are downsampled.

        Gives the ids of `chunks`, but is much faster. A null is -1, and an id column has lists of
        length 1.
        """
        count = self.chunk_rows(split)[index]
        rows = self._draw(self._random(split, index), _CHUNK_ROWS)
        ones = np.ones(count, np.int64)
        columns = {f"c{i}": ListOfIds(ones, rows.ids[:count, i]) for i in range(rows.ids.shape[1])}
        lists = {f"l{i}": entry[:2] for i, entry in enumerate(rows.lists)}
        if past := rows.history:
            columns |= {"item": ListOfIds(ones, past.item[:count])}
            columns |= {"category": ListOfIds(ones, past.category[:count])}
            lists |= {"history_item": (past.lengths, past.items)}
            lists |= {"history_category": (past.lengths, past.event_categories)}
        for name, (lengths, values) in lists.items():
            columns[name] = ListOfIds(lengths[:count], values[: lengths[:count].sum()])
        return columns

    def _random(self, split: str, index: int, stream: int = _ROWS) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(split.encode()), index, stream])

    def _draw(self, random: np.random.Generator, n: int) -> Rows:
        floats = random.standard_normal((n, self._floats), np.float32)
        missing = random.random((n, self._floats), np.float32) < self._missing
        missing[:, ::2] = False
        floats[missing] = 0
        ids = np.empty((n, len(self._ids)), np.int32, order="F")  # read and written by column
        for i, rows in enumerate(self._ids):
            ids[:, i] = _power_law(random.random(n), rows, self._exponent)
        if self._ids:
            ids[random.random(n) < _NULL_IDS, -1] = -1
        lists = []
        for entry in self._lists:
            lengths = random.negative_binomial(2, 2 / (2 + entry.mean_length), n)
            np.minimum(lengths, math.ceil(_MAX_LENGTH * entry.mean_length), out=lengths)
            total = int(lengths.sum())
            values = _power_law(random.random(total), entry.rows, self._exponent)
            weights = random.uniform(0.25, 2, total).astype(np.float32) if entry.weighted else None
            lists.append((lengths, values, weights))
        past = history.draw(random, n, self._history) if self._history else None
        return Rows(floats, missing, ids, lists, past)

    def _feature_columns(self, rows: Rows) -> dict[str, pa.Array]:
        columns: dict[str, pa.Array] = {}
        for i in range(self._floats):
            # Different scales: means -2 to 2, deviations 1 to 3.
            values = rows.floats[:, i] * np.float32(1 + i % 3) + np.float32(i % 5 - 2)
            columns[f"f{i}"] = pa.array(values, mask=rows.missing[:, i])
        for i in range(len(self._ids)):
            values = np.ascontiguousarray(rows.ids[:, i])
            columns[f"c{i}"] = pa.array(values, mask=values < 0)
        for i, (lengths, values, weights) in enumerate(rows.lists):
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
            columns[f"l{i}"] = pa.ListArray.from_arrays(offsets, pa.array(values))
            if weights is not None:
                columns[f"l{i}_weight"] = pa.ListArray.from_arrays(offsets, pa.array(weights))
        return columns

    @staticmethod
    def _labels(probabilities: np.ndarray, random: np.random.Generator) -> dict[str, pa.Array]:
        labels = (random.random(probabilities.shape) < probabilities).astype(np.int8)
        return {
            "click": pa.array(labels[:, 0]),
            "conversion": pa.array(labels[:, 1], mask=labels[:, 0] == 0),
            "p_click": pa.array(np.ascontiguousarray(probabilities[:, 0])),
            "p_conversion": pa.array(np.ascontiguousarray(probabilities[:, 1])),
        }

    def _times(
        self, times: np.ndarray, conversion: pa.Array, split: str, index: int
    ) -> dict[str, pa.Array]:
        columns = {"time": pa.array(times)}
        if self._delay_hours:
            delays = self._random(split, index, _DELAYS).exponential(
                self._delay_hours * _HOUR, len(times)
            )
            none = conversion.fill_null(0).to_numpy() == 0
            columns["conversion_time"] = pa.array(times + delays.astype(np.int64), mask=none)
        return columns


def _power_law(uniform: np.ndarray, rows: int, exponent: float) -> np.ndarray:
    """Maps f64[n] in [0, 1) to i32[n] in [0, rows) with density about (id + 1) ** -exponent.

    The inverse of a continuous distribution on [1, rows + 1), so it needs no table of `rows`
    entries.
    """
    if math.isclose(exponent, 1.0):
        drawn = np.exp(uniform * math.log(rows + 1.0))
    else:
        power = 1.0 - exponent
        drawn = (1.0 + uniform * ((rows + 1.0) ** power - 1.0)) ** (1.0 / power)
    return np.minimum(drawn.astype(np.int64) - 1, rows - 1).astype(np.int32)
