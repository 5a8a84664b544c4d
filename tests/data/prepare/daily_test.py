"""A chain of stores: vocabularies over the days, and stores of the version before."""

import json
from pathlib import Path

import numpy as np
import preparations
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparations import TASK, content, lasting_content

from jaxrank.data.prepare import encode_unit
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.prepare.runners import Local
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError

small_units = pytest.fixture(preparations.small_units)

FORMAT_4 = Path(__file__).parents[2] / "golden/format_4"
LIMITS = dict(min_count=2, max_rows=4, keep_days=2)
FEATURES = dict(
    tasks=[TASK],
    dense=[dict(columns="x", standardize=True)],
    categorical=[dict(columns="item", table="item", **LIMITS)],
    ragged=[dict(columns="seen", table="item", **LIMITS)],
    time="time",
)
# Items of a day, and lists of items that users have seen.
DAYS = {
    "2024-05-01": (["a", "b", "a", "c"], [["b"], [], ["d", "d"], ["e"]]),
    "2024-05-02": (["e", "f", "f", "g"], [["d"], ["a"], [], []]),
    "2024-05-03": (["g", "f", None, "h"], [["e", "h"], [], [], ["h"]]),
}
ROWS = {
    "2024-05-01": ["a", "b", "d"],  # c and e wait
    "2024-05-02": ["a", "d", "e", "f"],  # b is evicted and waits, with c and g
    "2024-05-03": ["e", "f", "h", "g"],
}


def write(folder, *days):
    parts = []
    for day in days:
        items, seen = DAYS[day]
        columns = {
            "label": [0, 1, 0, 1],
            "x": np.arange(4.0) * int(day[-1]),
            "item": items,
            "seen": seen,
            "time": [f"{day} 12:00"] * 4,
        }
        parts.append(pa.table(columns, schema=pa.schema([
            ("label", pa.int8()), ("x", pa.float64()), ("item", pa.string()),
            ("seen", pa.list_(pa.string())), ("time", pa.string()),
        ])))  # fmt: skip
    path = folder / f"{'-'.join(days)}.parquet"
    pq.write_table(pa.concat_tables(parts), path)
    return str(path)


def run(folder, name, *days, features=FEATURES, **options):
    source = dict(kind="parquet", files=dict(train=write(folder, *days)))
    options = dict(report=lambda _: None) | options
    return prepare(features, source, folder / name, **options)


def chain(folder, days, **options):
    earlier = ""
    for number, day in enumerate(days):
        store = run(folder, f"{number}", day, vocabularies=earlier, **options)
        earlier = str(store.path)
        yield store


def test_rows_are_those_of_ids_over_all_features_and_days(tmp_path):
    lines = []
    stores = dict(zip(ROWS, chain(tmp_path, ROWS, report=lines.append), strict=True))
    for day, store in stores.items():
        assert store.vocabulary("item")[0] == ROWS[day]
    assert store.schema.dense[0].std == stores["2024-05-01"].schema.dense[0].std
    changes = store.histories["item"]["changes"]
    assert changes == dict(
        kept=2, new=2, evicted=2, waiting=2, dropped=0, lookups=6, lost=0, lost_share=0
    )
    assert any(
        line == "table item: 2 rows kept, 2 new, 1 evicted; 3 ids wait; 16.67% of 6 lookups lost"
        for line in lines
    )
    assert "table item: 3 rows" in lines  # of the first day
    assert sum(line.startswith("table item: ") for line in lines) == len(ROWS)
    ids = store.split("train").read_block(0).ids[:, 0].tolist()
    assert ids == [5, 3, 0, 4]  # g, f, missing, h


@pytest.mark.parametrize("key", [False, True])
def test_a_day_that_is_prepared_again_gives_the_same_vocabulary(tmp_path, key):
    """Alone, among days that are new, after later days, and with keyed hashes."""
    options, lines = {}, []
    if key:
        (tmp_path / "key").write_bytes(bytes(range(32)))
        options["hash_key_file"] = str(tmp_path / "key")
    *_, last = chain(tmp_path, ROWS, **options)
    expected = content(last.path / "vocabulary")
    for name, days in (("same", ["2024-05-03"]), ("late", ["2024-05-01"]), ("all", list(DAYS))):
        again = run(tmp_path, name, *days, vocabularies=str(last.path), **options)
        assert content(again.path / "vocabulary") == expected
    tighter = FEATURES | dict(
        categorical=[dict(columns="item", table="item", **LIMITS | dict(max_rows=3))],
        ragged=[dict(columns="seen", table="item", **LIMITS | dict(max_rows=3))],
    )
    options |= dict(vocabularies=str(last.path), report=lines.append)
    again = run(tmp_path, "tighter", "2024-05-03", features=tighter, **options)
    assert content(again.path / "vocabulary") == expected
    assert any(
        line.startswith("table item: 4 ids have rows, more than max_rows = 3") for line in lines
    )
    options |= dict(vocabularies=str(tmp_path / "1"))
    window = run(tmp_path, "window", *list(DAYS)[1:], **options)
    assert content(window.path / "vocabulary") == expected


def test_a_day_that_was_incomplete_is_prepared_with_the_store_before_it(tmp_path):
    """Its first rows count twice with the incomplete store, and `prepare` names the day."""
    lines = []
    first = run(tmp_path, "first", "2024-05-01")
    expected = run(tmp_path, "whole", "2024-05-02", vocabularies=str(first.path))
    part = pq.read_table(write(tmp_path, "2024-05-02")).slice(0, 2)
    pq.write_table(part, tmp_path / "part.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "part.parquet")))
    options = dict(vocabularies=str(first.path), report=lines.append)
    incomplete = prepare(FEATURES, source, tmp_path / "incomplete", **options)
    again = run(tmp_path, "again", "2024-05-02", **options)
    assert content(again.path / "vocabulary") == content(expected.path / "vocabulary")
    assert not [line for line in lines if "added up" in line]
    twice = run(tmp_path, "twice", "2024-05-02", **options | dict(vocabularies=incomplete.path))
    (line,) = (line for line in lines if "added up" in line)
    assert line.startswith("2024-05-02: the earlier store has counts of this day too")
    values, counts = twice.vocabulary("item")
    assert dict(zip(values, counts, strict=True))["f"] == 3  # the day has two


def test_scales_are_fitted_again_where_that_is_asked_for(tmp_path):
    first = run(tmp_path, "first", "2024-05-01")
    second = run(tmp_path, "second", "2024-05-02", vocabularies=str(first.path), refit_scales=True)
    assert second.schema.dense[0].mean == 2 * first.schema.dense[0].mean
    with pytest.raises(InputError, match="--refit-scales: must have --vocabularies"):
        run(tmp_path, "none", "2024-05-02", refit_scales=True)


@pytest.mark.parametrize(
    ("entry", "others", "message"),
    [
        (dict(encoding="hash", rows=9, keep_days=2), {}, r"keep_days.*encoding.*hash"),
        (dict(encoding="integer", rows=9, max_waiting=2), {}, r"max_waiting.*encoding.*integer"),
        (dict(keep_days=2), dict(time=""), r"features.time: must be .*categorical\[0\].keep_days"),
        (dict(keep_days=-1), {}, r"keep_days: must be at least 0"),
        (dict(keep_days=2), {}, r"share the table 'item', so keep_days must be the same"),
    ],
)
def test_limits_that_are_not_read_are_refused(tmp_path, entry, others, message):
    features = FEATURES | others
    features["categorical"] = [dict(columns="item") | entry]
    features["ragged"] = [dict(columns="seen", table="item")]
    if "encoding" in entry:
        features["ragged"] = []
    with pytest.raises(InputError, match=message):
        run(tmp_path, "store", "2024-05-01", features=features)


def test_a_chain_that_counts_by_day_goes_on_without_limits_but_not_without_times(tmp_path):
    first = run(tmp_path, "first", "2024-05-01")
    entries = dict(
        categorical=[dict(columns="item", table="item")],
        ragged=[dict(columns="seen", table="item")],
    )
    earlier = dict(vocabularies=str(first.path))
    again = run(tmp_path, "again", "2024-05-01", features=FEATURES | entries, **earlier)
    assert content(again.path / "vocabulary") == content(first.path / "vocabulary")
    message = f"features.time: must name .* the store {first.path} counts .* found none. Set"
    with pytest.raises(InputError, match=message):
        run(tmp_path, "none", "2024-05-02", features=FEATURES | entries | dict(time=""), **earlier)


WITHOUT_LIMITS = FEATURES | dict(
    dense=[],  # a scale that is fitted once would distinguish the passes
    categorical=[dict(columns="item", table="item")],
    ragged=[dict(columns="seen", table="item")],
)


@pytest.mark.parametrize("is_first_in_chain", [True, False])
def test_kept_work_that_counts_in_another_way_is_not_used(
    tmp_path, small_units, monkeypatch, is_first_in_chain
):
    """A chain counts by day and a store alone does not, without limits."""
    earlier = str(run(tmp_path, "earlier", "2024-05-01").path)
    ways = [dict(vocabularies=earlier), {}]
    first, second = ways if is_first_in_chain else reversed(ways)
    source = dict(kind="parquet", files=dict(train=write(tmp_path, *list(ROWS)[1:])))

    def prepared(name, way):
        options = dict(runner=Local(1), report=lambda _: None) | way
        return prepare(WITHOUT_LIMITS, source, tmp_path / name, **options)

    expected = prepared("expected", second)

    def stopped(*_):
        raise InputError("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(encode_unit, "encode", stopped)
        with pytest.raises(InputError, match="stopped"):
            prepared("store", first)
    store = prepared("store", second)
    assert lasting_content(store.path) == lasting_content(expected.path)


def test_a_record_whose_time_is_invalid_is_skipped_in_both_passes(tmp_path):
    table = pq.read_table(write(tmp_path, "2024-05-01"))
    times = pa.array(["2024-05-01 12:00", "noon", "2024-05-01 12:00", None])
    at = table.schema.get_field_index("time")
    pq.write_table(table.set_column(at, "time", times), tmp_path / "day.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "day.parquet")))
    store = prepare(FEATURES, source, tmp_path / "store", on_error="skip", report=lambda _: None)
    assert store.split("train").rows == 3
    (line,) = (tmp_path / "store" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["column"] == "time"


@pytest.mark.parametrize("damage", ["waiting", "last_day"])
def test_a_damaged_history_is_named(tmp_path, damage):
    store = run(tmp_path, "store", "2024-05-01")
    path = store.path / "vocabulary" / ("item.waiting" if damage == "waiting" else "item.arrow")
    path = Path(str(path))
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    days = pa.array(table["last_day"].to_numpy() + 1)
    table = table.set_column(2, table.schema.field(2), days)
    with pa.ipc.new_file(str(path), table.schema) as sink:
        sink.write_table(table)
    with pytest.raises(InputError, match=f"{path.name}: is corrupt: its checksum"):
        run(tmp_path, "later", "2024-05-02", vocabularies=str(store.path))


def test_a_store_of_the_version_before_is_read_and_continued(tmp_path):
    """`golden/format_4` was written before vocabularies had a history."""
    assert json.loads((FORMAT_4 / "manifest.json").read_text())["format_version"] == 4
    old = open_store(FORMAT_4)
    assert old.history("user") is None
    train = preparations.write_csv(tmp_path / "train.csv", preparations.make_rows(30))
    features = preparations.FEATURES | dict(categorical=[dict(columns="user", min_count=2)])
    same = preparations.run(tmp_path / "same", [train], features)
    assert same.split("train").fingerprint == old.split("train").fingerprint
    assert same.schema == old.schema
    later = preparations.run(tmp_path / "later", [train], features, vocabularies=str(FORMAT_4))
    values, counts = old.vocabulary("user")
    assert later.vocabulary("user")[0] == values
    assert later.vocabulary("user")[1].tolist() == (2 * counts).tolist()
    assert later.history("user").last_days.tolist() == [0] * len(values)
