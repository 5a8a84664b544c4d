"""Derived columns of a request equal the prepared columns, on edge values."""

import dataclasses
import datetime
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from jaxrank_serving.derived.columns import DerivedColumns
from jaxrank_serving.derived.times import _parse_numbers as score_numbers
from jaxrank_serving.errors import BundleError, RequestError
from jaxrank_serving.requests import cells_of_request
from jaxrank_serving.server.inference import metadata
from jaxrank_serving.signature import Column, Derived
from jaxrank_serving.values import Cells, as_text

from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode.derive import derive
from jaxrank.data.encode.times import _parse_numbers as parse_numbers
from jaxrank.data.rejects import Rejects
from jaxrank.data.spec.derived import DerivedSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import resolve
from jaxrank.errors import InputError
from jaxrank.export.signature import Requests, raw_columns, signature

DATES = ["2024-05-01", "1969-12-31", "0001-01-01", "9999-12-31", "2024-02-29", "2023-02-29"]
DATES += ["2024-13-01", "0000-01-01", "24-05-01", "2024-5-1", "20240501", "2024-05-01T", "2024-05"]
CLOCKS = ["", " 12", "T12:30", " 23:59:59", "T01:02:03.5", " 01:02:03.1234567", " 24:00:00", " 1:2"]
CLOCKS += [
    " 12:60",
    " 12:30:60",
    " 12:30:00.",
    " 123000",
    " 1230",
    "t12:30",
    " 12:30:00.1234567890",
]
ZONES = [
    "",
    "Z",
    "+01:00",
    "-0930",
    "+05",
    " UTC",
    "GMT",
    " Z",
    " +01:00",
    "+24:00",
    "+01:60",
    " +5",
]
ZONES += ["-23:59", "UTC ", "z", "+0100 ", " GMT+1"]
NUMBERS = ["0", "1714566600", "1714566600.5", "1714566600.", "+1714566600", "-1", "1e9", "20240501"]
NUMBERS += ["20240229", "20230229", "315532799", "315532800", "4102444799", "4102444800", "240501"]
NUMBERS += ["2024050112", "2405011230", "2012123123", "20130000", "20999999", "171456660012", "nan"]
NUMBERS += ["99999999999999999999", "7e400", "", " 1714566600", "0x10", "690101", "680101", "1_0"]
FORMATS = [
    "",
    "seconds",
    "milliseconds",
    "days",
    "YYYYMMDD",
    "YYMMDD",
    "YYYYMMDDHHMMSS",
    "YYMMDDHH",
]
FLOATS = [None, 0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-300, 1e300, -1e300, 1e150, 2.0**24, 36.0, 3.5e38]
FLOATS += [float("nan"), float("inf")]
WORDS = ["a", "ä", "1:2", "36", "36.0", "", None, "12", "x" * 300, "-1", "1e400", "5.", "+5"]
MOMENTS = [
    datetime.datetime(*parts)
    for parts in [(2024, 3, 31, 0, 59, 59, 999999), (2024, 10, 27, 1), (1900, 1, 1), (2262, 4, 1)]
]


def time_texts():
    r = random.Random(0)
    texts = ["".join(parts) for parts in itertools.product(DATES, CLOCKS, ZONES)]
    texts += NUMBERS
    for _ in range(1500):
        text = list(r.choice(texts) or "5")
        text[r.randrange(len(text))] = r.choice("0123456789-:+TZ. ")
        texts.append("".join(text))
    return texts


COLUMNS = {
    "text": (pa.string(), WORDS),
    "int64": (pa.int64(), [None, 0, 1, -1, 36, 2**53, -(2**63), 2**63 - 1]),
    "float16": (pa.float16(), [None, np.float16(0.5), np.float16(36), np.float16("nan")]),
    "float32": (pa.float32(), [*FLOATS[:7], 2.0**24, 36.0]),
    "float64": (pa.float64(), FLOATS),
    "bool": (pa.bool_(), [None, True, False]),
    "binary": (pa.binary(), [None, b"a", b"", b"\xff"]),
}
TIMES = {
    "text": (pa.string(), time_texts()),
    "int64": (pa.int64(), [None, 0, -1, 1714566600, 20240501, 2405011230, 2**62, 19843]),
    "float32": (pa.float32(), [None, 1714566656.0, 0.5, float("nan")]),
    "float64": (pa.float64(), [None, 1714566600.25, 1e18, float("inf"), float("nan"), 20240501.5]),
    "timestamp[s]": (pa.timestamp("s"), [None, *(m.replace(microsecond=0) for m in MOMENTS)]),
    "timestamp[ms]": (pa.timestamp("ms"), [m.replace(microsecond=123000) for m in MOMENTS]),
    "timestamp[us, tz=Europe/Paris]": (pa.timestamp("us", "Europe/Paris"), [None, *MOMENTS]),
    "timestamp[ns]": (pa.timestamp("ns"), MOMENTS[:3]),
    "date32[day]": (pa.date32(), [None, *(m.date() for m in MOMENTS), datetime.date(1, 1, 1)]),
    "date64[ms]": (pa.date64(), [None, *(m.date() for m in MOMENTS)]),
}
KINDS = {
    "hour": dict(zone="Europe/Berlin"),
    "weekday": dict(zone="America/New_York"),
    "age": dict(unit="days"),
    **{kind: {} for kind in ("cross", "ratio", "difference", "log")},
    "bucket": dict(boundaries=(-1.0, 0.1, 36.0)),
}


def prepared_values(entry, batch, time_format):
    """Returns {row: its value} of the rows that the preparation accepts. None: it refuses the type
    of the column.
    """
    chunk = Chunk(batch, "file", numbered(0, batch.num_rows))
    try:
        _, result = Rejects("skip", limit=10**6).attempt(
            chunk, lambda chunk: derive([entry], chunk, time_format)
        )
    except InputError as error:
        if "found a column of type" not in str(error):
            raise
        return None
    if result is None:
        return {}
    return dict(zip(result.rows.tolist(), result.batch.column("new").to_pylist(), strict=True))


def scored_value(columns, types, row):
    """Returns the value of one row in a list, or None if it is rejected."""
    cells = {
        name: Cells([values[row]], Column(name, kind, False, "any", True, None, False), False)
        for name, (values, kind) in types.items()
    }
    try:
        texts = {name: as_text(column) for name, column in cells.items()}
        return columns.add(texts, 1)["new"].values
    except RequestError:
        return None


def compare(kind, types, time_format="", **fields):
    """Compares all pairs of values of a column with some of a second column of the same type."""
    accepted = rejected = 0
    for name, (type_, values) in types.items():
        array = pa.array(values, type_)
        others = array.take(pa.array(np.arange(len(values)) * 7 % len(values)))
        columns = ["x", "y"] if kind in ("age", "cross", "ratio", "difference") else ["x"]
        batch = pa.RecordBatch.from_pydict({"x": array, "y": others})
        entry = DerivedSpec(name="new", kind=kind, columns=tuple(columns), **fields)
        expected = prepared_values(entry, batch, time_format)
        if expected is None:
            continue
        derived = Derived("new", kind, tuple(columns), entry.zone, entry.unit, entry.boundaries)
        scorer = DerivedColumns([derived], time_format)
        scalar = name.partition(",")[0] + "]" if "tz" in name else name
        cells = {c: (batch.column(c).to_pylist(), scalar) for c in columns}
        for row in range(batch.num_rows):
            actual = scored_value(scorer, cells, row)
            place = (name, [cells[c][0][row] for c in columns], time_format)
            assert (actual is None) == (row not in expected), (place, expected.get(row))
            if actual is None:
                rejected += 1
                continue
            accepted += 1
            np.testing.assert_equal(actual[0], expected[row], err_msg=str(place))
    return accepted, rejected


@pytest.mark.parametrize("kind", KINDS)
def test_derived_columns_are_those_of_the_preparation(kind):
    types = TIMES if kind in ("hour", "weekday", "age") else COLUMNS
    accepted, rejected = compare(kind, types, **KINDS[kind])
    assert accepted > 15
    assert rejected > 1


@pytest.mark.parametrize("time_format", FORMATS)
def test_numbers_are_times_as_their_format_says(time_format):
    numbers = {name: TIMES[name] for name in ("int64", "float64")}
    accepted, _ = compare("hour", numbers | {"text": (pa.string(), NUMBERS)}, time_format)
    assert accepted >= 3


@pytest.mark.parametrize(
    "form", ["%d%m%Y%H", "%m%d%Y%H", "%d%m%y%H%M", "%m%d%y%H%M", "%Y%m%d%H", "%y%m%d%H%M", ""]
)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_dates_of_ten_digits_are_rejected_together_as_in_the_preparation(form, count):
    r = random.Random(form)
    rejected = 0
    for _ in range(100):
        start = datetime.datetime(r.randint(1990, 2026), 1, 1)
        times = [start + datetime.timedelta(hours=r.random() * 8760) for _ in range(count)]
        if r.random() < 0.3:
            times = times[:1] * count
        digits = [int(t.strftime(form) if form else t.timestamp()) for t in times]
        expected = parse_numbers(np.array(digits, np.float64), "")
        actual = score_numbers(np.array(digits, np.float64), "")
        np.testing.assert_array_equal(actual, expected, err_msg=str(digits))
        rejected += bool(np.isnan(actual).any())
    assert rejected > (60 if form and count > 1 else -1)


def test_a_column_is_of_the_context_if_its_inputs_are():
    text = Column("x", "text", False, "any", True, None, False)
    shared, single = Cells(["a"], text, True), Cells(["b", "c"], text, False)
    cross = [Derived("new", "cross", ("x", "y"), "UTC", "hours", ())]
    columns = DerivedColumns(cross, "")
    both = columns.add({"x": shared, "y": shared}, 2)["new"]
    assert both.is_context
    assert len(both.values) == 1
    mixed = columns.add({"x": shared, "y": single}, 2)["new"]
    assert not mixed.is_context
    for i, value in enumerate("bc"):
        other = columns.add({"x": shared, "y": Cells([value], text, True)}, 2)["new"]
        assert mixed.values[i] == other.values[0]
    with pytest.raises(BundleError, match="must have the time zone 'Mars/Olympus'"):
        DerivedColumns([Derived("new", "hour", ("x",), "Mars/Olympus", "hours", ())], "")


def tree(requests, **features):
    names = ("time", "seen", "user")
    section = dict(tasks=[dict(name="t", label="l")], time="time", **features)
    spec = resolve(FeatureSpec.from_state(section), [*names, "l", "age", "half"])
    types = pa.schema([("time", pa.int64()), ("seen", pa.int64()), ("user", pa.string())])
    schema = SimpleNamespace(
        dense=[SimpleNamespace(name=e.name, mean=0, std=1) for e in spec.dense]
    )
    store = SimpleNamespace(spec=SimpleNamespace(source={}, boundaries={}, hash_key=""))
    layout = SimpleNamespace(schema=SimpleNamespace(dense=schema.dense, tables=[]))
    return raw_columns(spec), signature(layout, store, spec, types, requests)


AGE = dict(name="age", kind="age", columns=("time", "seen"))
HALF = dict(name="half", kind="ratio", columns=("age", "seen"))


def test_requests_have_the_inputs_of_derived_columns_and_the_time_is_now():
    dense = [dict(columns="half")]
    columns, described = tree(Requests(), derived=[AGE, HALF], dense=dense)
    assert columns == ["time", "seen"]
    assert [entry["name"] for entry in described["derived"]] == ["age", "half"]
    assert [c["now"] for c in described["columns"]] == [True, False]
    _, described = tree(Requests((), {"time": 0}), derived=[AGE, HALF], dense=dense)
    assert not any(c["now"] for c in described["columns"])
    _, described = tree(Requests(), derived=[AGE], dense=[dict(columns=["age", "seen"])])
    assert [c["name"] for c in described["columns"]] == ["seen", "time"]
    column = Column("time", "int64", False, "any", True, None, True)
    cells, _ = cells_of_request({}, [{}, {}], {"time": column})
    parts = dict(columns=(column,), dense=(), categorical=(), ragged=(), sequences=(), outputs=())
    scorer = SimpleNamespace(signature=SimpleNamespace(**parts))
    (described,) = metadata(SimpleNamespace(name="ads", version="1", scorer=scorer))["inputs"]
    assert described["parameters"] == {"source": "any", "required": False}
    with pytest.raises(RequestError, match="^context or each candidate, time: must be given"):
        cells_of_request({}, [{}], {"time": dataclasses.replace(column, now=False)})
    ages = DerivedColumns([Derived("age", "age", ("time", "time"), "UTC", "hours", ())], "")
    assert ages.add(cells, 2)["age"].values == [0.0]
    assert abs(cells["time"].values[0] - datetime.datetime.now(datetime.UTC)).seconds < 60
