"""Generated ads-like data with a planted truth, for tests, benchmarks and studies.

    f0, f1, ...       float32, null where missing (odd columns)
    c0, c1, ...       int32 in [0, rows), a power law by rank: 0 is the most frequent; the last
                      column has nulls
    l0, l1, ...       list<int32>, empty lists included; l0_weight list<float32> where weighted
    click             int8
    conversion        int8, of a click; null where there was none
    p_click, p_conversion   float64, the probabilities that the labels were drawn from

The logit of a click is an intercept, effects of floats (linear and not), of ids and of the mean of
each list's ids, and interactions (float by float, id by id, float by id, list by id); that of a
conversion has the same parts with other, correlated weights. Effects of ids are hashes of seed,
feature and id, so a table of any size costs no memory, and shrink with rank, so that what is to be
learned is in ids that are seen often enough. With 13 floats, 24 id columns of 4 to 100,000 rows and
4 lists, the best loss is 0.77 (clicks) and 0.75 (conversions) of the best constant's, and a DCN-V2
of dimension 16 closed 91% and 94% of that gap in one pass over 2 M rows.
"""

import functools
import math
import numbers
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxrank.data.chunk import Chunk, Part, numbered
from jaxrank.data.planted import Rows, Truth
from jaxrank.data.rejects import Rejects
from jaxrank.errors import InputError

_CHUNK_ROWS = 32_768  # drawn from one random stream, so it is part of what the data is
_PART_CHUNKS = 16
_CALIBRATION_ROWS = 65_536
_NULL_IDS = 0.02
_MAX_LENGTH = 8  # times the mean length


class _List(NamedTuple):
    rows: int
    mean_length: float
    weighted: bool = False


class ListOfIds(NamedTuple):
    """A column of lists: lengths i64[n] and values i32[sum of lengths]."""

    lengths: np.ndarray
    values: np.ndarray


class Source:
    """Generated splits; the same rows for the same arguments, and one split never another's.

    Args:
        rows: number of rows of each split.
        seed: of the planted effects and of the rows.
        floats: number of float columns.
        missing: share of missing values in the odd float columns.
        ids: rows of each id column.
        exponent: of the power law of ids.
        lists: `rows`, `mean_length` and perhaps `weighted` of each list column.
        signal: standard deviation of the logits.
        click_rate: average probability of a click.
        conversion_rate: average probability of a conversion of a click.

    Raises:
        InputError: a number out of its range, an unknown key of a list.
    """

    def __init__(
        self,
        *,
        rows: Mapping[str, int],
        seed: int,
        floats: int = 13,
        missing: float = 0.1,
        ids: Sequence[int] = (),
        exponent: float = 1.05,
        lists: Sequence[Mapping[str, Any]] = (),
        signal: float = 1.5,
        click_rate: float = 0.25,
        conversion_rate: float = 0.3,
    ):
        is_rows = isinstance(rows, Mapping) and len(rows) > 0
        _check("rows", rows, is_rows, "a dict of split names and numbers")
        for name, value in (("ids", ids), ("lists", lists)):
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            _check(name, value, is_list, "a list")
        self._rows, self._seed, self._exponent = dict(rows), seed, exponent
        self._floats, self._missing, self._ids = floats, missing, tuple(ids)
        self._lists = [_checked_list(i, entry) for i, entry in enumerate(lists)]
        _check("seed", seed, _is_whole(seed) and seed >= 0, "a whole number, not negative")
        _check("floats", floats, _is_whole(floats) and floats >= 0, "a whole number, not negative")
        _check("missing", missing, _is_number(missing) and 0 <= missing < 1, "in [0, 1)")
        _check("ids", self._ids, all(map(_is_table_size, self._ids)), "in [1, 2**31)")
        for name, number in (("exponent", exponent), ("signal", signal)):
            _check(name, number, _is_number(number) and number >= 0, "a number, not negative")
        for name, rate in (("click_rate", click_rate), ("conversion_rate", conversion_rate)):
            _check(name, rate, _is_number(rate) and 0 < rate < 1, "in (0, 1)")
        for name, count in self._rows.items():
            holds = _is_whole(count) and count >= 0
            _check(f"rows.{name}", count, holds, "a whole number, not negative")
        self._signal, self._rates = signal, (click_rate, conversion_rate)

    @functools.cached_property
    def _truth(self) -> Truth:
        truth = Truth(self._seed, self._floats, self._ids, len(self._lists))
        sample = self._draw(np.random.default_rng([self._seed, 0, 1]), _CALIBRATION_ROWS)
        truth.calibrate(sample, self._signal, self._rates)
        return truth

    @property
    def splits(self) -> list[str]:
        return list(self._rows)

    def columns(self, split: str) -> list[str]:
        """The names of the columns, which are those of every split."""
        del split
        names = [f"f{i}" for i in range(self._floats)] + [f"c{i}" for i in range(len(self._ids))]
        for i, entry in enumerate(self._lists):
            names += [f"l{i}", f"l{i}_weight"] if entry.weighted else [f"l{i}"]
        return [*names, "click", "conversion", "p_click", "p_conversion"]

    @property
    def files(self) -> list[str]:
        return []

    def parts(self, split: str) -> list[Part]:
        """A longer split begins with the rows of a shorter one."""
        chunks = len(self.chunk_rows(split))
        starts = range(0, chunks, _PART_CHUNKS)
        return [
            Part(split, f"synthetic:{split}", start, min(start + _PART_CHUNKS, chunks))
            for start in starts
        ]

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        """The rows of a part, in order."""
        del rejects
        split = part.split
        for index, count in list(enumerate(self.chunk_rows(split)))[part.start : part.stop]:
            random = self._random(split, index)
            rows = self._draw(random, _CHUNK_ROWS)
            batch = self._to_arrow(rows, self._truth.probabilities(rows), random)
            first = 1 + index * _CHUNK_ROWS
            yield Chunk(batch.slice(0, count), part.file, numbered(first, count))

    def chunk_rows(self, split: str) -> list[int]:
        """The rows of each chunk of a split."""
        rows = self._rows[split]
        return [min(_CHUNK_ROWS, rows - first) for first in range(0, rows, _CHUNK_ROWS)]

    def chunk_ids(self, split: str, index: int) -> dict[str, ListOfIds]:
        """The ids of one chunk of a split, by column; those that `chunks` gives, much faster.

        A null is -1, and an id column has lists of length 1.
        """
        count = self.chunk_rows(split)[index]
        rows = self._draw(self._random(split, index), _CHUNK_ROWS)
        one = np.ones(count, np.int64)
        columns = {f"c{i}": ListOfIds(one, rows.ids[:count, i]) for i in range(rows.ids.shape[1])}
        for i, (lengths, values, _) in enumerate(rows.lists):
            lengths = lengths[:count]
            columns[f"l{i}"] = ListOfIds(lengths, values[: lengths.sum()])
        return columns

    def _random(self, split: str, index: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(split.encode()), index, 2])

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
        return Rows(floats, missing, ids, lists)

    def _to_arrow(
        self, rows: Rows, probabilities: np.ndarray, random: np.random.Generator
    ) -> pa.RecordBatch:
        columns: dict[str, pa.Array] = {}
        for i in range(self._floats):
            # Of different sizes, as in life: means -2 to 2, deviations 1 to 3.
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
        labels = (random.random(probabilities.shape) < probabilities).astype(np.int8)
        columns["click"] = pa.array(labels[:, 0])
        columns["conversion"] = pa.array(labels[:, 1], mask=labels[:, 0] == 0)
        columns["p_click"] = pa.array(np.ascontiguousarray(probabilities[:, 0]))
        columns["p_conversion"] = pa.array(np.ascontiguousarray(probabilities[:, 1]))
        return pa.RecordBatch.from_pydict(columns)


def _check(name: str, value: Any, holds: bool, rule: str) -> None:
    if not holds:
        raise InputError(f"source.{name}: must be {rule}: found {value!r}.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and math.isfinite(value)


def _is_table_size(value: Any) -> bool:
    return _is_whole(value) and 0 < value < 2**31


def _checked_list(index: int, entry: Mapping[str, Any]) -> _List:
    _check(f"lists[{index}]", entry, isinstance(entry, Mapping), "a dict")
    unknown = set(entry) - set(_List._fields)
    absent = {"rows", "mean_length"} - set(entry)
    if unknown or absent:
        raise InputError(
            f"source.lists[{index}]: must have rows, mean_length and perhaps weighted: found"
            f" {sorted(entry)}."
        )
    checked = _List(**entry)
    length, weighted = checked.mean_length, checked.weighted
    _check(f"lists[{index}].rows", checked.rows, _is_table_size(checked.rows), "in [1, 2**31)")
    positive = _is_number(length) and length > 0
    _check(f"lists[{index}].mean_length", length, positive, "a positive number")
    _check(f"lists[{index}].weighted", weighted, isinstance(weighted, bool), "True or False")
    return checked


def _power_law(uniform: np.ndarray, rows: int, exponent: float) -> np.ndarray:
    """f64[n] in [0, 1) -> i32[n] in [0, rows): the density is about (id + 1) ** -exponent.

    The inverse of a continuous distribution on [1, rows + 1), so no table of `rows` entries.
    """
    if math.isclose(exponent, 1.0):
        drawn = np.exp(uniform * math.log(rows + 1.0))
    else:
        power = 1.0 - exponent
        drawn = (1.0 + uniform * ((rows + 1.0) ** power - 1.0)) ** (1.0 / power)
    return np.minimum(drawn.astype(np.int64) - 1, rows - 1).astype(np.int32)
