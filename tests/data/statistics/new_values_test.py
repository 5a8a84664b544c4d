"""Reports about ids that are new to an earlier store, and the spelling of values of each type."""

import csv
import datetime
import decimal
import json
import re
from pathlib import Path

import numpy as np
import preparations
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from preparations import TASK, content, counted, lasting_content
from tfrecords import example, feature, framed

from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode.encoder import Encoder
from jaxrank.data.prepare.beam import Beam
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.prepare.runners import Local
from jaxrank.data.spec.entries import CategoricalSpec, RaggedSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics import new_values
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.statistics.vocabulary import Vocabulary
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError

small_units = pytest.fixture(preparations.small_units)

COLUMNS = ["label", "mobile", "user"]
FEATURES = dict(tasks=[TASK], categorical=[dict(columns=["mobile", "user"])])
UNKNOWN = (
    "A model that was trained on that store reads them as unknown. Check that the column is written"
    " as before."
)


def records(count):
    return [[i % 2, i % 3 == 0, f"u{i % 7}"] for i in range(count)]


def write_parquet(path, rows, columns=COLUMNS):
    pq.write_table(pa.table(dict(zip(columns, zip(*rows, strict=True), strict=True))), path)
    return dict(kind="parquet", files=dict(train=str(path)))


def write_csv(path, rows, columns=COLUMNS):
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])
    return str(path)


def csv_source(**files):
    return dict(kind="csv", files=files)


def warned(source, output, earlier, features=FEATURES, **options):
    """Returns the lines about new values that a preparation reports, and its store."""
    lines: list[str] = []
    store = prepare(
        features, source, output, vocabularies=str(earlier), report=lines.append, **options
    )
    return [line for line in lines if "not in the vocabulary" in line], store


@pytest.fixture
def day1(tmp_path):
    source = write_parquet(tmp_path / "day1.parquet", records(300))
    return prepare(FEATURES, source, tmp_path / "day1", report=lambda _: None).path


# A column with a different format.


@pytest.mark.parametrize("split", ["train", "scored"])
def test_booleans_that_come_from_csv_after_parquet_are_reported_once(tmp_path, day1, split):
    later = csv_source(**{split: write_csv(tmp_path / "a.csv", records(240))})
    lines, store = warned(later, tmp_path / "day2", day1)
    assert lines == [
        f"feature mobile: 100.00% of 240 values in {split} are not in the vocabulary of {day1}:"
        f" found 'True', 'False'; it has '0', '1'. {UNKNOWN}"
    ]
    result = open_store(store.path).split(split).statistics["categorical"]
    assert (result["mobile"]["new"], result["mobile"]["new_share"]) == (240, 1.0)
    assert (result["user"]["new"], result["user"]["new_share"]) == (0, 0.0)
    assert result["mobile"]["unknown"] == (0 if split == "train" else 240)


def test_whole_numbers_with_a_point_are_reported(tmp_path):
    rows = [[1, i % 50, i % 5] for i in range(200)]
    earlier = prepare(
        FEATURES, write_parquet(tmp_path / "a.parquet", rows), tmp_path / "day1",
        report=lambda _: None,
    )  # fmt: skip
    later = [[1, float(m) if m % 3 else "", u] for _, m, u in rows]
    lines, _ = warned(
        csv_source(train=write_csv(tmp_path / "a.csv", later)), tmp_path / "day2", earlier.path
    )
    (line,) = lines
    filled = sum(m != "" for _, m, _ in later)
    assert line.startswith(f"feature mobile: 100.00% of {filled} values in train are not in ")
    assert "found '1.0', '2.0', '4.0'; it has '0', '1', '10'." in line


@pytest.mark.parametrize(("known", "warnings"), [(102, 0), (101, 1), (100, 1)])
def test_half_of_the_values_must_be_new(tmp_path, day1, known, warnings):
    rows = [[0, str(int(i % 2)), "u1" if i < known else f"new{i}"] for i in range(202)]
    path = write_csv(tmp_path / "a.csv", rows)
    lines, store = warned(csv_source(train=path), tmp_path / "day2", day1)
    assert len(lines) == warnings
    assert store.split("train").statistics["categorical"]["user"]["new"] == 202 - known
    if warnings:
        assert f"feature user: {(202 - known) / 202:.2%} of 202 values" in lines[0]


@pytest.mark.parametrize(("filled", "warnings"), [(99, 0), (100, 1)])
def test_few_values_are_not_reported_and_missing_ones_do_not_count(
    tmp_path, day1, filled, warnings
):
    rows = [[0, True if i < filled else "", "u1"] for i in range(300)]
    path = write_csv(tmp_path / "a.csv", rows)
    lines, _ = warned(csv_source(train=path), tmp_path / "day2", day1)
    assert len(lines) == warnings
    assert all(f"100.00% of {filled} values" in line for line in lines)


def test_a_feature_that_the_earlier_store_does_not_have_is_not_reported(tmp_path, day1):
    columns = [*COLUMNS, "more"]
    rows = [[0, 1, "u1", f"m{i}"] for i in range(200)]
    features = dict(tasks=[TASK], categorical=[dict(columns=columns[1:])])
    path = write_csv(tmp_path / "a.csv", rows, columns)
    lines, store = warned(csv_source(train=path), tmp_path / "day2", day1, features)
    assert lines == []
    result = store.split("train").statistics["categorical"]
    assert "new" not in result["more"]
    assert result["user"]["new"] == 0
    first = open_store(day1).split("train").statistics["categorical"]
    assert not any("new" in column or "new_share" in column for column in first.values())


def test_splits_are_judged_each_by_itself(tmp_path, day1):
    as_it_was = [[label, int(mobile), user] for label, mobile, user in records(2000)]
    files = {
        "train": write_csv(tmp_path / "train.csv", as_it_was),
        "valid": write_csv(tmp_path / "valid.csv", records(150)),
        "test": write_csv(tmp_path / "test.csv", records(100)),
    }
    (line,), _ = warned(csv_source(**files), tmp_path / "day2", day1)
    assert "feature mobile: 100.00% of 250 values in valid, test are not in" in line


def test_a_day_that_is_written_otherwise_is_reported(tmp_path, day1):
    columns = [*COLUMNS, "time"]
    features = FEATURES | dict(time="time", by_day=True)
    rows = [
        [row[0], row[1] if day in (2, 3, 4, 6) else int(row[1]), row[2], f"2024-05-0{day}"]
        for day in range(1, 7)
        for row in records(120)
    ]
    path = write_csv(tmp_path / "a.csv", rows, columns)
    (line,), store = warned(csv_source(train=path), tmp_path / "day2", day1, features)
    assert (
        "feature mobile: 100.00% of 480 values in train/2024-05-02, train/2024-05-03,"
        " train/2024-05-04 and 1 more are not in"
    ) in line
    assert store.split("train").statistics["categorical"]["mobile"]["new"] == 480
    assert store.split("train/2024-05-01").statistics["categorical"]["mobile"]["new"] == 0


def test_of_many_features_not_all_are_reported(tmp_path):
    columns = ["label", *(f"c{i}" for i in range(25))]
    features = dict(tasks=[TASK], categorical=[dict(columns="c*")])
    rows = [[0] + [i % 2 == 0] * 25 for i in range(100)]
    first = write_parquet(tmp_path / "a.parquet", rows, columns)
    earlier = prepare(features, first, tmp_path / "day1", report=lambda _: None).path
    reported: list[str] = []
    later = csv_source(train=write_csv(tmp_path / "a.csv", rows, columns))
    prepare(features, later, tmp_path / "day2", vocabularies=str(earlier), report=reported.append)
    lines = [line for line in reported if "not in the vocabulary" in line]
    assert [line.split(":")[0] for line in lines] == [f"feature c{i}" for i in range(20)]
    assert reported[-1] == "and 5 more features"
    assert (
        "  25 categorical features: 100.00% new, most in c0 (100.00%), c1 (100.00%), c2 (100.00%)"
        in reported
    )


def test_values_are_shown_cut(tmp_path, day1):
    rows = [[0, 1, f"{'x' * 100}{i}\n" if i else "a\tb"] for i in range(100)]
    source = write_parquet(tmp_path / "a.parquet", rows)
    (line,), _ = warned(source, tmp_path / "day2", day1)
    assert rf"found 'a\tb', '{'x' * 40}...', '{'x' * 40}...'; it has 'u0'" in line


def test_an_earlier_vocabulary_without_values_is_reported(tmp_path):
    empty = write_parquet(tmp_path / "a.parquet", [[0, None, "u"]] * 9)
    earlier = prepare(FEATURES, empty, tmp_path / "day1", report=lambda _: None).path
    source = write_parquet(tmp_path / "b.parquet", [[0, True, "u"]] * 100)
    (line,), _ = warned(source, tmp_path / "day2", earlier)
    assert "found '1'; it has none." in line


# In parts, under a key, and resumed.

WIDE = ["label", "user", "pair", "tags", "item"]
WIDE_FEATURES = dict(
    tasks=[TASK],
    categorical=[
        dict(columns="user", min_count=3),
        dict(columns="pair", length=2, separator=" "),
        dict(columns="item", table="item"),
    ],
    ragged=[
        dict(columns="tags", separator="|", table="item", max_length=3, on_overlong="truncate")
    ],
)


def wide(count, seed, letter):
    draw = np.random.default_rng(seed)

    def value():
        return f"{letter if draw.random() < 0.7 else 'a'}{draw.integers(0, 12)}"

    return [
        [
            int(draw.integers(2)),
            value() if draw.random() < 0.9 else "",
            f"{value()} {value()}" if draw.random() < 0.8 else "",
            "|".join(value() for _ in range(draw.integers(0, 6))),
            value(),
        ]
        for _ in range(count)
    ]


def wide_days(tmp_path):
    """Returns a store of a first day, the source of a second day in 3 files, and its records."""
    first = wide(200, 1, "a")
    path = write_csv(tmp_path / "first.csv", first, WIDE)
    store = prepare(WIDE_FEATURES, csv_source(train=path), tmp_path / "day1", report=lambda _: None)
    rows = wide(300, 2, "b")
    paths = [
        write_csv(tmp_path / f"{i}.csv", rows[100 * i : 100 * i + 100], WIDE) for i in range(3)
    ]
    return store, csv_source(train=paths), rows


def count_new(rows, store):
    """Computes new and new_share of each feature with Python loops."""
    known = {name: set(store.vocabulary(name)[0]) for name in ("user", "pair", "item")}
    cells = {name: [row[i] for row in rows] for i, name in enumerate(WIDE)}
    values = {
        "user": (cells["user"], "user"),
        "pair": ([v for cell in cells["pair"] for v in cell.split()], "pair"),
        "item": (cells["item"], "item"),
        "tags": ([v for cell in cells["tags"] for v in cell.split("|")[:3]], "item"),
    }
    result = {}
    for name, (texts, table) in values.items():
        there = [text for text in texts if text]
        new = sum(text not in known[table] for text in there)
        result[name] = (new, new / len(there), len(there))
    return result


def test_what_is_counted_is_what_python_counts_in_any_number_of_processes(tmp_path, small_units):
    earlier, source, rows = wide_days(tmp_path)
    lines, store = warned(source, tmp_path / "one", earlier.path, WIDE_FEATURES, runner=Local(1))
    lines_of_two, _ = warned(source, tmp_path / "two", earlier.path, WIDE_FEATURES, runner=Local(2))
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert lines == lines_of_two
    statistics = store.split("train").statistics
    columns = statistics["categorical"] | statistics["ragged"]
    wanted = count_new(rows, earlier)
    assert {name: (c["new"], c["new_share"]) for name, c in columns.items()} == {
        name: (new, share) for name, (new, share, _) in wanted.items()
    }
    assert [line.split(" are not")[0] for line in lines] == [
        f"feature {name}: {share:.2%} of {there} values in train"
        for name, (_, share, there) in wanted.items()
    ]
    assert all(0.5 < share < 1 for _, share, _ in wanted.values())


def test_beam_reports_what_this_machine_does(tmp_path, small_units):
    earlier, source, _ = wide_days(tmp_path)
    local, _ = warned(source, tmp_path / "local", earlier.path, WIDE_FEATURES, runner=Local(1))
    beam, _ = warned(
        source, tmp_path / "beam", earlier.path, WIDE_FEATURES, runner=Beam("DirectRunner")
    )
    assert beam == local
    assert len(beam) == 4
    assert content(tmp_path / "beam") == content(tmp_path / "local")


def test_a_preparation_that_is_resumed_reports_what_the_whole_has(
    tmp_path, small_units, monkeypatch
):
    earlier, source, _ = wide_days(tmp_path)
    args = (earlier.path, WIDE_FEATURES)
    expected, _ = warned(source, tmp_path / "expected", *args, runner=Local(1))
    last = Path(source["files"]["train"][2])
    good = last.read_text()
    last.write_text(re.sub(r"\n\d(?=,[^\n]*\n$)", r"\n7", good))  # its last label
    with pytest.raises(InputError, match="column label"):
        warned(source, tmp_path / "store", *args, runner=Local(1))
    last.write_text(good)
    read = counted(monkeypatch)
    lines, _ = warned(source, tmp_path / "store", *args, runner=Local(1))
    assert read == [2, 2]
    assert lines == expected
    assert lasting_content(tmp_path / "store") == lasting_content(tmp_path / "expected")


def test_what_was_done_beside_another_earlier_store_is_done_again(tmp_path, small_units):
    earlier, source, _ = wide_days(tmp_path)
    bad = Path(source["files"]["train"][2])
    good = bad.read_text()
    bad.write_text(good + "9,u,a b,,i\n")
    with pytest.raises(InputError, match="column label"):
        prepare(WIDE_FEATURES, source, tmp_path / "store", report=lambda _: None, runner=Local(1))
    bad.write_text(good)
    args = (earlier.path, WIDE_FEATURES)
    lines, _ = warned(source, tmp_path / "store", *args, runner=Local(1))
    assert lines == warned(source, tmp_path / "expected", *args, runner=Local(1))[0]
    assert len(lines) == 4


def test_values_of_records_that_are_skipped_are_neither_counted_nor_shown(tmp_path, day1):
    rows = [["7", "yes", "u1"], *records(100)]
    path = write_csv(tmp_path / "a.csv", rows)
    (line,), _ = warned(csv_source(train=path), tmp_path / "day2", day1, on_error="skip")
    assert "100.00% of 100 values in train" in line
    assert "found 'True', 'False';" in line


def test_under_a_key_no_raw_value_is_reported_or_kept(tmp_path, small_units):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    rows = [[0, "secret-a" if i % 2 else "secret-b", f"secret{i % 7}"] for i in range(200)]
    first = csv_source(train=write_csv(tmp_path / "first.csv", rows))
    earlier = prepare(
        FEATURES, first, tmp_path / "day1", hash_key_file=str(key), report=lambda _: None
    ).path
    other = [[label, mobile.upper(), user] for label, mobile, user in rows]
    paths = [write_csv(tmp_path / f"{i}.csv", other) for i in range(2)]
    good = Path(paths[1]).read_text()
    Path(paths[1]).write_text(good + "9,b,c\n")
    args = (tmp_path / "day2", earlier)
    options = dict(hash_key_file=str(key), runner=Local(1))
    with pytest.raises(InputError, match="column label"):
        warned(csv_source(train=paths), *args, **options)
    partial = b"".join(content(tmp_path / ".day2.partial").values())
    assert b"new_values" in partial
    assert b"secret" not in partial.lower()
    Path(paths[1]).write_text(good)
    lines, store = warned(csv_source(train=paths), *args, **options)
    assert lines == [
        "feature mobile: 100.00% of 400 values in train are not in the vocabulary of"
        f" {earlier}. {UNKNOWN}"
    ]
    assert b"secret" not in b"".join(content(store.path).values()).lower()


def test_a_store_holds_no_more_than_counts_of_new_values(tmp_path, day1):
    path = write_csv(tmp_path / "a.csv", [[0, 1, f"new{i}"] for i in range(200)])
    lines, store = warned(csv_source(scored=path), tmp_path / "day2", day1)
    assert "found 'new0', 'new1', 'new2'" in lines[0]
    assert b"new0" not in b"".join(content(store.path).values())


# Spelling of values.


def spelled(tmp_path, values):
    """Returns the vocabulary of a Parquet column, and the number of its missing values."""
    rows = pa.table({"label": np.zeros(len(values)), "v": values})
    pq.write_table(rows, tmp_path / "v.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "v.parquet")))
    features = dict(tasks=[TASK], categorical=[dict(columns="v")])
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    return store.vocabulary("v")[0], store.split("train").statistics["categorical"]["v"]["missing"]


@pytest.mark.parametrize(
    ("values", "expected", "missing"),
    [
        (pa.array([-5, 36, None], pa.int8()), ["-5", "36"], 1),
        (pa.array([-(2**63)], pa.int64()), ["-9223372036854775808"], 0),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"], 0),
        (pa.array([True, False, None]), ["0", "1"], 1),
        (pa.array(np.array([36], np.float16)), ["36"], 0),
        (pa.array([36.0, None], pa.float32()), ["36"], 1),
        (pa.array([36.0, -0.0, 2.0**53 - 1, None]), ["0", "36", "9007199254740991"], 1),
        (pa.array(["36.0", "True", " a", "007", "", None]), [" a", "007", "36.0", "True"], 2),
        (pa.array(["a", ""], pa.large_string()), ["a"], 1),
        (pa.array(["a", ""], pa.string_view()), ["a"], 1),
        (pa.array(["é".encode(), b"", None]), ["é"], 2),
        (pa.array(["a", "", None]).dictionary_encode(), ["a"], 2),
        (pa.array([36, None]).dictionary_encode(), ["36"], 1),
        (pa.nulls(2), [], 2),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_a_value_of_parquet_is_spelled_as_the_page_on_data_says(
    tmp_path, values, expected, missing
):
    assert spelled(tmp_path, values) == (expected, missing)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([0.5]), "text or whole numbers: found 0.5"),
        (pa.array([np.nan], pa.float64()), "text or whole numbers: found nan. If NaN .*write null"),
        (pa.array([1e18]), "a whole number below 9,007,199,254,740,992, as double rounds others"),
        (pa.array([1e20]), r"text or whole numbers: found 1e\+20"),
        (pa.array([b"\xff"]), r"text in UTF-8: found b'\\xff'"),
        (pa.array([b"ab"], pa.binary(2)), "text or whole .* a column of type fixed_size_binary"),
        (pa.array([b"ab"], pa.large_binary()), "text or whole .* a column of type large_binary"),
        (pa.array([b"ab"], pa.binary_view()), "text or whole .* a column of type binary_view"),
        (pa.array([decimal.Decimal(3)]), "text or whole .* a column of type decimal128"),
        (pa.array([datetime.date(2024, 5, 1)]), "text or whole .* a column of type date32"),
        (pa.array([datetime.datetime(2024, 5, 1)]), "text or whole .* of type timestamp"),
        (pa.array([datetime.time(1)]), "text or whole .* a column of type time64"),
        (pa.array([datetime.timedelta(1)]), "text or whole .* a column of type duration"),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_a_value_of_parquet_that_has_no_spelling_is_rejected(tmp_path, values, message):
    with pytest.raises(InputError, match=f"column v: must be {message}"):
        spelled(tmp_path, values)


def test_text_of_csv_is_a_value_as_it_is_written(tmp_path):
    cells = ["True", "true", "1", "1.0", "36.0", " 36", "007", '""', "", "2024-05-01"]
    (tmp_path / "a.csv").write_text("label,v\n" + "".join(f"0,{cell}\n" for cell in cells))
    features = dict(tasks=[TASK], categorical=[dict(columns="v")])
    source = csv_source(train=str(tmp_path / "a.csv"))
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    expected = sorted(cell for cell in cells if cell not in ("", '""'))
    assert store.vocabulary("v")[0] == expected
    assert store.split("train").statistics["categorical"]["v"]["missing"] == 2


@pytest.mark.parametrize(
    ("directories", "expected"),
    [
        (["0101", "36"], ["101", "36"]),
        (["0101", "36", "x"], ["0101", "36", "x"]),
        (["true", "1.0"], ["1.0", "true"]),
        (["__HIVE_DEFAULT_PARTITION__", "036"], ["36"]),
    ],
)
def test_the_value_of_a_directory_is_a_whole_number_where_all_are(tmp_path, directories, expected):
    for name in directories:
        (tmp_path / "raw" / f"v={name}").mkdir(parents=True)
        pq.write_table(pa.table({"label": [0]}), tmp_path / "raw" / f"v={name}" / "0.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "raw")))
    features = dict(tasks=[TASK], categorical=[dict(columns="v")])
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    assert store.vocabulary("v")[0] == expected
    missing = store.split("train").statistics["categorical"]["v"]["missing"]
    assert missing == len(directories) - len(expected)


def test_a_value_of_tfrecord_is_spelled_as_one_of_parquet(tmp_path):
    values = dict(i=("int64", -5), f=("float32", 36.0), b=("bytes", b"36.0"), none=("bytes", b""))
    record = example(
        {"label": feature("int64", [1])}
        | {name: feature(kind, [value]) for name, (kind, value) in values.items()}
    )
    (tmp_path / "a.tfrecord").write_bytes(framed(record))
    source = dict(kind="tfrecord", files=dict(train=str(tmp_path / "a.tfrecord")))
    features = dict(tasks=[TASK], categorical=[dict(columns=list(values))])
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    assert [store.vocabulary(name)[0] for name in values] == [["-5"], ["36"], ["36.0"], []]


def test_what_is_hashed_is_what_a_vocabulary_would_have(tmp_path):
    columns = {"label": [0, 1], "mobile": [True, False], "age": [36.0, 7.0]}
    pq.write_table(pa.table(columns), tmp_path / "v.parquet")
    features = dict(
        tasks=[TASK], categorical=[dict(columns=["mobile", "age"], encoding="hash", rows=10_000)]
    )
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "v.parquet")))
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    result = store.split("train").read_block(0).ids.tolist()
    assert result == [
        [2 + xxhash.xxh64_intdigest(text.encode()) % 9_998 for text in row]
        for row in (("1", "36"), ("0", "7"))
    ]


def test_an_empty_id_within_a_list_is_rejected(tmp_path):
    pq.write_table(pa.table({"label": [0], "v": [["a", ""]]}), tmp_path / "v.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "v.parquet")))
    features = dict(tasks=[TASK], ragged=[dict(columns="v")])
    with pytest.raises(InputError, match="column v: must be a list without empty ids"):
        prepare(features, source, tmp_path / "store", report=lambda _: None)


def test_ids_in_lists_are_spelled_as_others(tmp_path):
    values = [[True, False, True], [], None]
    pq.write_table(pa.table({"label": [0, 1, 0], "v": values}), tmp_path / "v.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "v.parquet")))
    features = dict(tasks=[TASK], ragged=[dict(columns="v")])
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    assert store.vocabulary("v")[0] == ["1", "0"]


def test_an_encoder_counts_what_its_statistics_give_back():
    """Compares the non-missing ids of each feature before and after they are written to a file."""
    features = FeatureSpec(
        tasks=(),
        categorical=(
            CategoricalSpec(("user",), table="t"),
            CategoricalSpec(("pair",), table="t", length=2, separator=" "),
        ),
        ragged=(RaggedSpec(("tags",), table="t", separator="|"),),
    )
    encoder = Encoder(
        features, {"t": Vocabulary(pa.array(["a", "b"]), np.ones(2, np.int64))}, {},
        Statistics(features), earlier_rows={"t": 3},
    )  # fmt: skip
    columns = {
        "user": ["a", "b", None, "c"],
        "pair": ["a a", None, "b c", "c a"],
        "tags": ["a|b", "", "c", None],
    }
    batch = pa.RecordBatch.from_pydict(columns)
    encoder.encode(Chunk(batch, "a.csv", numbered(1, batch.num_rows)))
    wanted = {
        "categorical": {
            "user": new_values.NewValues(3, 2, ["b", "c"]),
            "pair": new_values.NewValues(6, 3, ["b", "c"]),
        },
        "ragged": {"tags": new_values.NewValues(3, 2, ["b", "c"])},
    }
    assert encoder.statistics.new == wanted
    state = json.loads(json.dumps(encoder.statistics.to_state()))
    assert Statistics.from_state(features, state).new == wanted


def test_new_values_of_parts_add_up():
    parts = [new_values.NewValues(10, 3, ["a", "b"]), new_values.NewValues(5, 5, ["b", "c", "d"])]
    whole = new_values.NewValues()
    for part in parts:
        whole.merge(part)
    assert whole == new_values.NewValues(15, 8, ["a", "b", "c"])
    assert new_values.NewValues().share == 0
