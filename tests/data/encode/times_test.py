"""Times in every kind of column, compared with Python's datetime."""

import datetime
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode import times
from jaxrank.data.encode.columns import read_column
from jaxrank.data.rejects import BadRows
from jaxrank.data.spec import entries
from jaxrank.errors import InputError

UTC = datetime.UTC


def column(values, kind=None):
    array = values if isinstance(values, pa.Array) else pa.array(values, kind)
    batch = pa.RecordBatch.from_pydict({"when": array})
    return read_column(Chunk(batch, "day.csv", numbered(2, len(array))), "when")


def seconds(values, kind=None, time_format=""):
    return times.seconds(column(values, kind), time_format=time_format).tolist()


def utc_seconds(text):
    result = datetime.datetime.fromisoformat(text)
    return (result if result.tzinfo else result.replace(tzinfo=UTC)).timestamp()


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
    assert seconds(TEXTS) == [utc_seconds(text) for text in TEXTS]
    for text in TEXTS:  # alone, because a column is parsed as a whole
        assert seconds([text]) == [utc_seconds(text)]


def test_a_fraction_counts_to_the_microsecond():
    result = seconds(["1970-01-01 00:00:01.123456789", "1970-01-01T00:00:01.123456789Z"])
    assert result == [1.123456, 1.123456]


def test_numbers_are_seconds_also_as_text_and_beside_dates():
    assert seconds([0, -1, 1_714_521_600, None], None, "seconds")[:3] == [0, -1, 1_714_521_600]
    assert seconds([1e9 + 0.5, 1e9]) == [1e9 + 0.5, 1e9]
    texts = ["0.5", "-3", "1714521600", "2024-05-01"]
    assert seconds(texts, None, "seconds") == [0.5, -3, 1.7145216e9, 1.7145216e9]


DATE_DIGITS = [
    ("YYYYMM", "202405", "2024-05-01"),
    ("YYYYMMDD", "20110503", "2011-05-03"),
    ("YYYYMMDDHH", "2024050123", "2024-05-01 23:00"),
    ("YYYYMMDDHHMM", "202405012359", "2024-05-01 23:59"),
    ("YYYYMMDDHHMMSS", "20240501235958", "2024-05-01 23:59:58"),
    ("YYMMDD", "141021", "2014-10-21"),
    ("YYMMDD", "090501", "2009-05-01"),
    ("YYMMDDHH", "14102100", "2014-10-21"),
    ("YYMMDDHH", "09102107", "2009-10-21 07:00"),
    ("YYMMDDHHMM", "2410210730", "2024-10-21 07:30"),
    ("YYMMDDHHMMSS", "241021073001", "2024-10-21 07:30:01"),
]


@pytest.mark.parametrize(("form", "digits", "meant"), DATE_DIGITS)
def test_dates_as_digits_are_read_as_declared_and_else_rejected_with_their_form(
    form, digits, meant
):
    for values in ([digits], [int(digits)], [float(digits)]):
        assert seconds(values, None, form) == [utc_seconds(meant)]
        with pytest.raises(BadRows, match=f"found .*Set .*features.time_format='{form}'"):
            seconds(values)


@pytest.mark.parametrize(
    ("form", "digits"),
    [
        ("YYMMDDHHMM", ["1505121230", "1505131245"]),
        ("YYMMDDHHMM", ["0905121230", "1912312359", "1912312359"]),
        ("YYYYMMDDHH", ["1999123123", "1999123023", "1998010100"]),
    ],
)
def test_dates_that_could_be_seconds_are_rejected_where_all_numbers_are_dates(form, digits):
    for values in (digits, list(map(int, digits)), [*digits, None]):
        with pytest.raises(BadRows, match=f"row 2, .*features.time_format='{form}'"):
            seconds(values)
        assert seconds(values, None, form)[0] == utc_seconds(
            str(datetime.datetime.strptime(digits[0], FORMATS[form]))
        )
    numbers = [*map(int, digits), 1_505_121_261]  # of a minute 61
    assert seconds(numbers) == numbers


@pytest.mark.parametrize(
    ("form", "digits"),
    [
        ("DDMMYYYYHH", ["1505202413", "1505202414", "1605202400", "1705202423"]),
        ("DDMMYYYYHH", ["3105202413", "0405202414"]),
        ("MMDDYYYYHH", ["0515202413", "0516202414", "0517202400"]),
        ("MMDDYYYYHH", ["1115202413", "1217202400"]),
        ("DDMMYYHHMM", ["1505241230", "1605241231", "1705241232", "1805240000"]),
        ("MMDDYYHHMM", ["1225241230", "1226241231", "1227241232"]),
    ],
)
def test_dates_that_begin_with_the_day_or_the_month_are_rejected(form, digits):
    # A column of numbers has no leading zeros.
    for values in (digits, list(map(int, digits)), [*digits, None]):
        message = rf"row 2, .*dates as .*{form}.* as text such as 2024-05-01 12:00"
        with pytest.raises(BadRows, match=message):
            seconds(values)
    assert seconds(digits, None, "seconds") == list(map(float, digits))
    numbers = [1_714_521_600, *(x for x in map(int, digits) if x < 2e9)]
    assert seconds(numbers) == numbers


def test_seconds_are_not_dates_by_chance():
    r = np.random.default_rng(0)
    minute = 1_712_121_200  # 2024-04-03, also 2017-12-12 12:00 as digits
    for values in ([minute], [minute] * 9, range(minute, minute + 60), range(minute, minute + 300)):
        assert seconds(list(values)) == list(values)
    for count in (1, 2, 3, 10, 1000):
        starts = r.integers(1_000_000_000, 2_000_000_000, 100)
        for width in (10**3, 10**6, 10**9):
            for start in starts:
                values = np.minimum(start + r.integers(0, width, count), 1_999_999_999)
                assert seconds(values) == values.tolist()


FORMATS = {"YYMMDDHHMM": "%y%m%d%H%M", "YYYYMMDDHH": "%Y%m%d%H"}


def test_a_date_of_eight_digits_is_read_where_no_other_form_has_it():
    assert seconds(["20240501", "20131231"]) == [
        utc_seconds("2024-05-01"),
        utc_seconds("2013-12-31"),
    ]
    assert seconds([20240229, 1714521600]) == [utc_seconds("2024-02-29"), 1714521600]
    for bad in (20240230, 20241301, 19991231, 86_400, 19_723, 2024):
        with pytest.raises(BadRows, match=f"row 3, column when: must be a time.*found {bad}"):
            seconds([20240501, bad])
    with pytest.raises(BadRows, match="must be a time: YYMMDDHH, as features.time_format says"):
        seconds(["14102124"], None, "YYMMDDHH")


@pytest.mark.parametrize(
    ("number", "form"), [(1_714_521_600.0, ""), (20_240_501.0, ""), (2e7, "seconds")]
)
def test_times_that_float32_has_rounded_are_rejected(number, form):
    with pytest.raises(BadRows, match=r"row 2, column when: must be a time with all its .* float"):
        seconds([number], pa.float32(), form)
    assert seconds([19_723.5], pa.float32(), "days") == [utc_seconds("2024-01-01 12:00")]


def test_zones_may_be_spelled_as_databases_export_them():
    texts = ["2024-05-01 12:00:00 UTC", "2024-05-01 12:00:00.5 UTC", "2024-05-01 14:00:00 +02:00"]
    noon = utc_seconds("2024-05-01 12:00")
    assert seconds(texts) == [noon, noon + 0.5, noon]


@pytest.mark.parametrize(
    ("number", "unit", "divisor"),
    [
        (1_714_521_600_000, "milliseconds", "1000"),
        (1_714_521_600_000_000, "microseconds", "1,000,000"),
        (1_714_521_600_000_000_000, "nanoseconds", "1,000,000,000"),
    ],
)
def test_units_below_the_second_are_named(number, unit, divisor):
    assert seconds([number], None, unit) == [1_714_521_600]
    hint = f"Are these {unit}? Divide them by {divisor}, or set features.time_format='{unit}'."
    with pytest.raises(BadRows, match=re.escape(hint)):
        seconds([number])


def test_days_since_1970_are_read_as_declared():
    assert seconds([19_723], None, "days") == [utc_seconds("2024-01-01")]


@pytest.mark.parametrize(
    ("unit", "number"),
    [
        ("milliseconds", 1_714_521_600),
        ("microseconds", 1_714_521_600_000),
        ("nanoseconds", 1_714_521_600),
        ("minutes", 1_714_521_600),
        ("hours", 24_050_112),
        ("days", 1_714_521),
        ("days", 20),
    ],
)
def test_numbers_of_another_unit_than_the_declared_are_rejected(unit, number):
    message = f"row 2, column when: must be a time: {unit} of 1980 to 2099, .*found '?{number}"
    for values in ([number], [str(number)]):
        with pytest.raises(BadRows, match=message):
            seconds(values, None, unit)
    (last,) = seconds([4_102_444_799_999], None, "milliseconds")
    assert last == 4_102_444_799.999


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.date64()])
def test_a_time_beyond_the_years_of_python_is_rejected(kind):
    values = pa.array([0, 10**18], pa.int64()).cast(kind)
    with pytest.raises(BadRows, match=r"row 3, column when: must be a time.*: found 10{18}\."):
        seconds(values)


@pytest.mark.parametrize("missing", [None, ""])
def test_a_missing_time_is_nan(missing):
    result = seconds(["2024-05-01", missing, "1714521600"])
    assert np.isnan(result).tolist() == [False, True, False]
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
    micros = [(v - epoch) // microsecond for v in values]  # integers, so exact
    expected = [x / 10**6 for x in micros]
    for unit, digits in (("us", 6), ("ns", 6), ("ms", 3), ("s", 0)):
        whole = [x // 10 ** (6 - digits) / 10**digits for x in micros]
        for zone in (None, "Asia/Tokyo"):
            array = pa.array(values, pa.timestamp("us")).cast(pa.timestamp(unit), safe=False)
            # A time zone changes the representation of an instant, not the instant.
            array = array.cast(pa.int64()).cast(pa.timestamp(unit, zone))
            result = np.array(seconds(array))
            assert np.abs(result - whole).max() <= 1.5 * 10.0**-digits
            if unit == "us":
                np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6)
    dates = [v.date() for v in values]
    midnights = [datetime.datetime(d.year, d.month, d.day, tzinfo=UTC).timestamp() for d in dates]
    assert seconds(dates, pa.date32()) == midnights
    assert seconds(dates, pa.date64()) == midnights
    assert times.days(np.array(midnights)).tolist() == dates
    assert times.days(np.array(midnights) + 86_399.5).tolist() == dates


@pytest.mark.parametrize(
    "bad", ["yesterday", "2024-13-01", "2024-02-30", "12:30", "2024-05-01 25:00", "nan", "1e9", "-"]
)
def test_all_rows_that_are_no_times_are_rejected_together(bad):
    values = ["2024-05-01", bad, None, "2024-05-01T12:00:00Z", bad, "1714521600"]
    message = f"day.csv, row 3, column when: must be a time.*found {re.escape(repr(bad))}"
    with pytest.raises(BadRows, match=message) as rejected:
        times.seconds(column(values))
    assert rejected.value.rows.tolist() == [1, 4]


def test_bad_times_with_and_without_a_zone_are_rejected_together():
    values = ["2024-13-01T00:00:00Z", "x", "2024-05-01", "2024-13-01T00:00:00+01:00"]
    with pytest.raises(BadRows) as rejected:
        times.seconds(column(values))
    assert rejected.value.rows.tolist() == [0, 1, 3]


def test_a_time_that_is_nan_is_rejected():
    match = r"must be a time: seconds.*: found nan\. If NaN stands for a missing value"
    with pytest.raises(BadRows, match=match):
        times.seconds(column([1e9, float("nan")]))


def test_a_column_of_a_type_without_times_is_rejected():
    with pytest.raises(InputError, match=r"column when: must be a time.*of type list<item: int64>"):
        times.seconds(column([[1]]))


def test_days_are_those_of_utc():
    result = times.days(np.array([-1.0, 0.0, 86_399.0, 86_400.0, np.nan]))
    assert result.astype(str).tolist() == [
        "1969-12-31", "1970-01-01", "1970-01-01", "1970-01-02", "NaT",
    ]  # fmt: skip


def test_one_instant_of_a_config():
    assert entries.instant("2024-05-01", "features.as_of") == 1_714_521_600
    assert entries.instant("2024-05-01T02:00:00+02:00", "features.as_of") == 1_714_521_600
    assert entries.instant("20240501", "features.as_of") == 1_714_521_600
    assert entries.instant("2024-05-01 UTC", "features.as_of") == 1_714_521_600
    assert entries.instant("2024-05-01 00:00:00 GMT", "features.as_of") == 1_714_521_600
    with pytest.raises(
        InputError,
        match=r"must be a time .*: found '24050112', of the year 2405.*"
        r"Is this YYMMDDHH\? Write '2024-05-01 12:00:00'",
    ):
        entries.instant("24050112", "features.as_of")
    with pytest.raises(InputError, match=r"Is this YYMMDDHH\? Write '2024-06-15 12:00:00'"):
        entries.instant("24061512", "features.as_of")
    with pytest.raises(InputError, match=r"Is this YYYYMMDDHHMM\? Write '2024-06-15 12:30:00'"):
        entries.instant("202406151230", "features.as_of")
    with pytest.raises(InputError, match=r"features.as_of: must be a time .*: found 'today'"):
        entries.instant("today", "features.as_of")
