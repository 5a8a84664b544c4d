"""Times of every kind of column against Python's datetime."""

import datetime
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode import times
from jaxrank.data.encode.columns import column_of
from jaxrank.data.rejects import BadRows
from jaxrank.data.spec import entries
from jaxrank.errors import InputError

UTC = datetime.UTC


def column(values, kind=None):
    array = values if isinstance(values, pa.Array) else pa.array(values, kind)
    batch = pa.RecordBatch.from_pydict({"when": array})
    return column_of(Chunk(batch, "day.csv", numbered(2, len(array))), "when")


def seconds(values, kind=None):
    return times.seconds(column(values, kind)).tolist()


def of_python(text):
    found = datetime.datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


TEXTS = [
    "2024-05-01",
    "1969-12-31",
    "0001-01-01",
    "9999-12-31 23:59:59",
    "2024-02-29 12",
    "2024-05-01 12:30",
    "2024-05-01T12:30:00",
    "2024-05-01 12:30:00.25",
    "2024-05-01T12:30:00Z",
    "2024-05-01T12:30+02:00",
    "2024-05-01 12:30:00.500-0930",
    "2024-05-01T00:30:00+01",
]


def test_text_of_every_form_is_read_as_python_reads_it():
    assert seconds(TEXTS) == [of_python(text) for text in TEXTS]
    for text in TEXTS:  # alone, as the forms of a column are told apart together
        assert seconds([text]) == [of_python(text)]


def test_a_fraction_counts_to_the_microsecond():
    found = seconds(["1970-01-01 00:00:01.123456789", "1970-01-01T00:00:01.123456789Z"])
    assert found == [1.123456, 1.123456]


def test_numbers_are_seconds_also_as_text_and_beside_dates():
    assert seconds([0, -1, 1_714_521_600, None])[:3] == [0, -1, 1_714_521_600]
    assert seconds([0.5, 1e9]) == [0.5, 1e9]
    assert seconds(["0.5", "-3", "1714521600", "2024-05-01"]) == [0.5, -3, 1.7145216e9, 1.7145216e9]


@pytest.mark.parametrize("missing", [None, ""])
def test_a_missing_time_is_nan(missing):
    found = seconds(["2024-05-01", missing, "5"])
    assert np.isnan(found).tolist() == [False, True, False]
    with pytest.raises(BadRows, match=r"day.csv, row 3, column when: must be a time.*an empty"):
        times.seconds(column(["2024-05-01", missing]), missing=False)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1)),
        min_size=1,
        max_size=5,
    )
)
def test_times_of_arrow_are_read_as_python_reads_them(values):
    epoch, microsecond = datetime.datetime(1970, 1, 1), datetime.timedelta(microseconds=1)
    micros = [(v - epoch) // microsecond for v in values]  # whole numbers, so exact
    expected = [x / 10**6 for x in micros]
    for unit, digits in (("us", 6), ("ns", 6), ("ms", 3), ("s", 0)):
        whole = [x // 10 ** (6 - digits) / 10**digits for x in micros]
        for zone in (None, "Asia/Tokyo"):
            array = pa.array(values, pa.timestamp("us")).cast(pa.timestamp(unit), safe=False)
            # A zone says how the same instant is shown.
            array = array.cast(pa.int64()).cast(pa.timestamp(unit, zone))
            found = np.array(seconds(array))
            assert np.abs(found - whole).max() <= 1.5 * 10.0**-digits
            if unit == "us":
                np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    dates = [v.date() for v in values]
    midnights = [datetime.datetime(d.year, d.month, d.day, tzinfo=UTC).timestamp() for d in dates]
    assert seconds(dates, pa.date32()) == midnights
    assert seconds(dates, pa.date64()) == midnights
    assert times.days(np.array(midnights)).tolist() == dates
    assert times.days(np.array(midnights) + 86_399.5).tolist() == dates


@pytest.mark.parametrize(
    "bad", ["yesterday", "2024-13-01", "2024-02-30", "12:30", "2024-05-01 25:00", "nan", "1e9", "-"]
)
def test_all_rows_that_are_no_times_are_refused_together(bad):
    values = ["2024-05-01", bad, None, "2024-05-01T12:00:00Z", bad, "7"]
    message = f"day.csv, row 3, column when: must be a time.*found {re.escape(repr(bad))}"
    with pytest.raises(BadRows, match=message) as refused:
        times.seconds(column(values))
    assert refused.value.rows.tolist() == [1, 4]


def test_bad_times_with_and_without_a_zone_are_refused_together():
    values = ["2024-13-01T00:00:00Z", "x", "2024-05-01", "2024-13-01T00:00:00+01:00"]
    with pytest.raises(BadRows) as refused:
        times.seconds(column(values))
    assert refused.value.rows.tolist() == [0, 1, 3]


def test_milliseconds_are_refused_with_a_hint():
    with pytest.raises(BadRows, match=r"row 3.*found 1714521600000\. Are these milliseconds\?"):
        times.seconds(column([5, 1_714_521_600_000]))
    with pytest.raises(BadRows, match=r"must be a time: seconds.*: found nan\.$"):
        times.seconds(column([5.0, float("nan")]))


def test_a_column_of_a_type_without_times_is_refused():
    with pytest.raises(InputError, match=r"column when: must be a time.*of type list<item: int64>"):
        times.seconds(column([[1]]))


def test_days_are_those_of_utc():
    found = times.days(np.array([-1.0, 0.0, 86_399.0, 86_400.0, np.nan]))
    assert found.astype(str).tolist() == [
        "1969-12-31", "1970-01-01", "1970-01-01", "1970-01-02", "NaT",
    ]  # fmt: skip


def test_one_instant_of_a_config():
    assert entries.instant("2024-05-01", "features.as_of") == 1_714_521_600
    assert entries.instant("2024-05-01T02:00:00+02:00", "features.as_of") == 1_714_521_600
    with pytest.raises(InputError, match=r"features.as_of must be a time .*: found 'today'"):
        entries.instant("today", "features.as_of")
