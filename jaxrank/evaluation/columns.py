"""Reads one value per example from a store: kept columns, features, days and hours."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank import json_files
from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode.columns import inexact, read_column
from jaxrank.data.encode.raw_numbers import raw_numbers
from jaxrank.data.encode.times import DAY as DAY_SECONDS
from jaxrank.data.encode.times import seconds
from jaxrank.data.examples import Examples
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics.quantiles import QuantileSketch
from jaxrank.data.store.reader import Store
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.features import (
    MISSING_ROW,
    PAD,
    RESERVED_ROWS,
    UNKNOWN_ROW,
    Dense,
    Schema,
    Table,
)
from jaxrank.validate import nearest

DAY, HOUR = "day", "hour"  # of `features.time` (UTC), unless a column has that name
UNKNOWN = "(unknown)"  # a value that is not in the vocabulary of the store
_BUCKETS = 10  # of a dense feature
_MAX_BUCKETS = 1000
_MAX_LISTED_NAMES = 6  # names of columns or features in a message
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_IN_BUCKETS = re.compile(r"(.+)/(\d+)")


class Column(NamedTuple):
    """One value per example.

    values: the different values. None is a missing one.
    code: i64[n], the index in `values` of each example, in stored order.
    is_ordered: the values are rising numbers or times, and a missing one is last.
    """

    name: str
    values: list[Any]
    code: np.ndarray
    is_ordered: bool = False


# Maps a block to the array that a column collects of it, and all of them to the column.
_Take = Callable[[Examples], Any]
_Finish = Callable[[list[Any]], Column]


def read_columns(store: Store, split: Split, names: Sequence[str], flag: str) -> list[Column]:
    """Reads columns in one pass over a split.

    Args:
        store: as it is stored, not as a model reads it.
        split: of that store.
        names: each a kept column, a feature, "day", "hour", or a name of numbers with a number of
            buckets, such as "price/20". A dense feature without one has 10 buckets. A ragged
            feature is read as its number of ids.
        flag: the flag or field that names them, for messages.

    Raises:
        InputError: a column is absent, or holds lists.
    """
    kept = _kept(split)
    readers = [_reader(store, split, kept, name, flag) for name in names]
    parts: list[list[Any]] = [[] for _ in readers]
    for block in split.blocks():
        for (take, _), taken in zip(readers, parts, strict=True):
            taken.append(take(block))
    return [finish(taken) for (_, finish), taken in zip(readers, parts, strict=True)]


def check_column(store: Store, split: Split, name: str, flag: str) -> None:
    """Raises InputError if `read_columns` could not read the first block of a column."""
    take, finish = _reader(store, split, _kept(split), name, flag)
    first = next(split.blocks(), None)
    if first is not None:
        finish([take(first)])


def column_names(store: Store, split: Split, by: str, flag: str) -> list[str]:
    """Returns the columns that a text such as "hour,device" names. A column of that name wins."""
    if "," not in by or by in _columns(store, split):
        return [by]
    names = [name.strip() for name in by.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise InputError(
            f"{flag}: must name columns, each once, separated by commas: found {by!r}."
        )
    return names


def _columns(store: Store, split: Split) -> list[str]:
    return list(dict.fromkeys([*_kept(split), *_features(store.schema)]))


def _features(schema: Schema) -> list[str]:
    names = [f.name for f in schema.dense] + [f.name for f in schema.categorical]
    return list(dict.fromkeys([*names, *(f.name for f in schema.ragged)]))


def _kept(split: Split) -> list[str]:
    """Returns the columns that a split keeps. Reads its first block."""
    first = next(split.blocks(), None)
    return [] if first is None or first.kept is None else first.kept.schema.names


def _reader(
    store: Store, split: Split, kept: Sequence[str], name: str, flag: str
) -> tuple[_Take, _Finish]:
    if name in kept:
        return _take_kept(name), lambda parts: _distinct(name, parts, flag)
    by_name = _feature_reader(store, name, _BUCKETS)
    if by_name is not None:
        return by_name
    times = store.spec.features.get("time", "")
    if name == DAY and split.days:
        return lambda block: block.rows, lambda rows: _days(split)
    if name in (DAY, HOUR) and times in kept:
        form = store.spec.features.get("time_format", "")
        return _take_times(times, form, str(split.path)), _finish_times(name)
    matched = _IN_BUCKETS.fullmatch(name)
    if matched and 2 <= int(matched[2]) <= _MAX_BUCKETS:
        inner, buckets = matched[1], int(matched[2])
        if inner in kept:
            finish = _finish_numbers(name, buckets)
            return _take_kept(inner), lambda parts: finish(
                [_numbers(p, flag, inner) for p in parts]
            )
        reader = _feature_reader(store, inner, buckets, name)
        has_numbers = inner not in {f.name for f in store.schema.categorical}
        if reader is not None and (has_numbers or inner in {f.name for f in store.schema.dense}):
            return reader
    has_times = times in kept
    raise _no_column(kept, store.schema, name, flag, bool(split.days) or has_times, has_times)


def check_column_name(schema: Schema, spec: FeatureSpec, name: str, flag: str) -> None:
    """Raises InputError if no column or feature has a name, before there is a store to read."""
    kept, features = spec.kept_columns, _features(schema)
    matched = _IN_BUCKETS.fullmatch(name)
    of_numbers = [*kept, *features]
    if name in of_numbers or (matched and matched[1] in of_numbers):
        return
    if name not in (DAY, HOUR) or not spec.time:
        raise _no_column(kept, schema, name, flag, bool(spec.time), bool(spec.time))


def _no_column(
    kept: Sequence[str], schema: Schema, name: str, flag: str, has_day: bool, has_hour: bool
) -> InputError:
    features = _features(schema)
    forms = [f"a stored column ({_listed(kept)})", f"a feature ({_listed(features)})"]
    forms += [DAY] * has_day + [HOUR] * has_hour
    return InputError(
        f"{flag}: must be {', '.join(forms)}, or numbers in 2 to {_MAX_BUCKETS:,} buckets, such as"
        f" price/20: found {name!r}{nearest(name, {*kept, *features}, 3)}."
    )


def _listed(names: Sequence[str]) -> str:
    """Returns the first names as text."""
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return (", ".join(names[:_MAX_LISTED_NAMES]) + more) or "there are none"


def _feature_reader(
    store: Store, name: str, buckets: int, title: str = ""
) -> tuple[_Take, _Finish] | None:
    """Returns the reader of a feature, or None if there is no such feature."""
    schema = store.schema
    title = title or name
    for i, dense in enumerate(schema.dense):
        if dense.name == name:
            return _dense_reader(store, i, dense, title, buckets)
    columns = [i for i, f in enumerate(schema.id_columns) if f.name == name]
    if columns:
        table = store.table(schema.id_columns[columns[0]].table)
        assert table is not None
        return (
            lambda block: block.ids[:, columns],
            lambda parts: _ids(title, np.concatenate(parts), store, table),
        )
    lists = [f.name for f in schema.ragged]
    if name not in lists:
        return None
    at = lists.index(name)
    return lambda block: block.list_lengths[:, at].astype(np.float64), _finish_numbers(
        title, buckets
    )


def _dense_reader(
    store: Store, index: int, feature: Dense, title: str, buckets: int
) -> tuple[_Take, _Finish]:
    at = store.schema.indicator(feature.name)

    def take(block: Examples) -> np.ndarray:
        values = raw_numbers(block.dense[:, index], feature)
        return values if at is None else np.where(block.dense[:, at] > 0, np.nan, values)

    return take, _finish_numbers(title, buckets)


def _take_kept(name: str) -> _Take:
    def take(block: Examples) -> pa.Array:
        assert block.kept is not None
        return block.kept.column(name)

    return take


def _numbers(values: pa.Array, flag: str, name: str) -> np.ndarray:
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    try:
        return values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise InputError(
            f"{flag}: column {name!r} must hold numbers for buckets: found {values.type} ({error})."
        ) from error


def _finish_numbers(title: str, buckets: int) -> _Finish:
    return lambda parts: bucketize(title, np.concatenate(parts), buckets)


def bucketize(name: str, numbers: np.ndarray, buckets: int) -> Column:
    """Divides numbers f64[n], NaN where missing, into buckets of about equally many examples.

    Values are written as "1 to 3", which includes the lower end only, or as a number if the bucket
    holds nothing else.
    """
    present = ~np.isnan(numbers)
    # The boundaries of a sketch are numbers of this type.
    single = np.clip(np.nan_to_num(numbers), -_MAX_FLOAT32, _MAX_FLOAT32).astype(np.float32)
    distinct = np.unique(single[present])
    if len(distinct) <= buckets:
        edges = distinct[1:]
    else:
        sketch = QuantileSketch()
        sketch.add(numbers)
        edges = sketch.boundaries(buckets).astype(np.float32)
    code = np.searchsorted(edges, single, side="right").astype(np.int64)
    code[~present] = len(edges) + 1
    values: list[Any] = []
    for i in range(len(edges) + 1):
        inside = distinct[np.searchsorted(edges, distinct, side="right") == i]
        low, high = (f"{e:.6g}" if e is not None else "" for e in _ends(edges, i))
        only = f"{inside[0]:.6g}" if len(inside) == 1 else ""
        values.append(only or (f"{low} to {high}" if low and high else low and f"{low} and more"))
        values[-1] = values[-1] or (f"less than {high}" if high else "all")
    return Column(name, [*values, None], code, is_ordered=True)


def _ends(edges: np.ndarray, bucket: int) -> tuple[float | None, float | None]:
    low = float(edges[bucket - 1]) if bucket else None
    return low, float(edges[bucket]) if bucket < len(edges) else None


def _days(split: Split) -> Column:
    values: list[Any] = [day for day, _ in split.days]
    blocks = np.repeat(np.arange(len(values)), [count for _, count in split.days])
    return Column(DAY, values, np.repeat(blocks, split.block_rows), is_ordered=True)


def _take_times(times: str, form: str, path: str) -> _Take:
    def take(block: Examples) -> np.ndarray:
        assert block.kept is not None
        batch = pa.RecordBatch.from_pydict({times: block.kept.column(times)})
        chunk = Chunk(batch, path, numbered(1, batch.num_rows))
        return seconds(read_column(chunk, times), time_format=form)

    return take


def _finish_times(name: str) -> _Finish:
    def finish(parts: list[np.ndarray]) -> Column:
        times = np.concatenate(parts)
        present = ~np.isnan(times)
        days = np.floor(np.nan_to_num(times) / DAY_SECONDS)
        whole = days if name == DAY else (np.nan_to_num(times) - days * DAY_SECONDS) // 3600
        distinct, code = np.unique(whole[present].astype(np.int64), return_inverse=True)
        values = [str(np.datetime64(d, "D")) if name == DAY else d for d in distinct.tolist()]
        result = np.full(len(times), len(values), np.int64)
        result[present] = code
        return Column(name, [*values, None], result, is_ordered=True)

    return finish


def _ids(name: str, rows: np.ndarray, store: Store, table: Table) -> Column:
    """Returns the raw values of rows i32[n, length]. Several values per example are joined.

    If all are missing or not in the vocabulary, the value is that of one such value.
    """
    distinct, code = np.unique(rows, axis=0, return_inverse=True)
    values_of = _values(np.unique(distinct), store, table)
    if distinct.shape[1] == 1:
        values = [values_of[row] for row in distinct[:, 0].tolist()]
    else:
        joined = [_joined([values_of[row] for row in rows]) for rows in distinct.tolist()]
        values = list(dict.fromkeys(joined))
        place = {value: i for i, value in enumerate(values)}
        code = np.array([place[value] for value in joined], np.int64)[code]
    is_bucket = distinct.shape[1] == 1 and table.encoding == "bucket"
    is_time = table.encoding == "integer" and table.name in _numbers_of_times(store)
    if is_bucket and distinct[:1] == MISSING_ROW:  # a missing one is last
        values, code = [*values[1:], values[0]], (code - 1) % len(values)
    return Column(name, values, code.reshape(-1).astype(np.int64), is_bucket or is_time)


def _numbers_of_times(store: Store) -> set[str]:
    """Returns the names of derived hours and weekdays."""
    entries = store.spec.features.get("derived", ())
    return {entry["name"] for entry in entries if entry["kind"] in ("hour", "weekday")}


def _joined(values: Sequence[Any]) -> str | None:
    if all(value is None for value in values):
        return None
    if all(value in (None, UNKNOWN) for value in values):
        return UNKNOWN
    return ", ".join(map(str, values))


def _values(rows: np.ndarray, store: Store, table: Table) -> dict[int, Any]:
    """Returns the raw value of each row of a table."""
    if table.encoding == "integer":
        return {row: None if row == PAD else row for row in rows.tolist()}
    named: dict[int, Any] = {}
    if table.encoding == "vocabulary":
        known = rows[rows >= RESERVED_ROWS]
        texts = store.values(table.name).take(pa.array(known - RESERVED_ROWS)).to_pylist()
        named = dict(zip(known.tolist(), texts, strict=True))
    elif table.encoding == "bucket":
        edges = np.array(_edges(store, table.name), np.float64)
        for row in rows[rows >= RESERVED_ROWS].tolist():
            low, high = _ends(edges, row - RESERVED_ROWS)
            text = f"less than {high:.6g}" if low is None else f"{low:.6g} and more"
            named[row] = text if low is None or high is None else f"{low:.6g} to {high:.6g}"
    else:
        named = {row: f"row {row}" for row in rows.tolist()}
    return named | {MISSING_ROW: None, UNKNOWN_ROW: UNKNOWN}


def _edges(store: Store, table: str) -> Sequence[float]:
    """Returns the boundaries of a feature in buckets, which has a table of its own."""
    name = next(f.name for f in store.schema.categorical if f.table == table)
    if name in store.spec.boundaries:
        return store.spec.boundaries[name]
    for entry in store.spec.features["categorical"]:
        if name in entry["columns"] and entry.get("boundaries"):
            return list(entry["boundaries"])
    return range(int(store.table(table).rows) - RESERVED_ROWS - 1)  # type: ignore[union-attr]


def _distinct(name: str, parts: list[pa.Array], flag: str) -> Column:
    kind = parts[0].type
    encoded = coded(parts, name, flag)
    _check_exact(encoded.dictionary, name, flag)
    values = json_files.plain(encoded.dictionary.to_pylist(), non_finite="text")
    code = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    if not pa.types.is_temporal(kind):
        return Column(name, values, code)
    order = sorted(range(len(values)), key=lambda i: (values[i] is None, str(values[i])))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return Column(name, [values[i] for i in order], place[code], is_ordered=True)


def _check_exact(values: pa.Array, name: str, flag: str) -> None:
    """Rejects values of a float column that stand for several whole numbers.

    Raises:
        InputError: naming the first one.
    """
    if not pa.types.is_floating(values.type):
        return
    numbers = values.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float64)
    rounded = np.flatnonzero(inexact(np.abs(numbers), values.type))
    if len(rounded):
        raise InputError(
            f"{flag}: column {name!r} must hold values with all their digits, and {values.type} has"
            f" rounded {numbers[rounded[0]]:.0f}. Write the column as int64 or as text"
            + (f", or divide it into buckets: --by={name}/20." if flag == "--by" else ".")
        )


def coded(parts: list[pa.Array], column: str, flag: str) -> pa.DictionaryArray:
    """Encodes a column with a dictionary of its distinct values, including the missing value.

    Values of types that JSON does not have are converted to text.
    """
    kind = parts[0].type
    if pa.types.is_dictionary(kind):
        parts = [part.dictionary_decode() for part in parts]
        kind = parts[0].type
    plain = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string)
    try:
        column_values = pa.chunked_array(parts)
        if pa.types.is_floating(kind):
            wide = pa.float32() if pa.types.is_float16(kind) else kind
            column_values = pc.add(
                column_values.cast(wide), pa.scalar(0, wide)
            )  # -0.0 becomes 0.0, and all NaN become one value
            column_values = pc.if_else(
                pc.is_nan(column_values), pa.scalar(math.nan, wide), column_values
            )
        elif not any(test(kind) for test in plain):
            column_values = column_values.cast(pa.string())
        return pc.dictionary_encode(column_values, null_encoding="encode").combine_chunks()
    except pa.ArrowException as error:
        raise InputError(
            f"{flag}: column {column!r} must hold one value per example, which can be text: found"
            f" {kind} ({error}). Name another column."
        ) from error
