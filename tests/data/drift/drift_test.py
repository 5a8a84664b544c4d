"""Tests of the comparison of data against counts of the raw values."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from jaxrank import cli
from jaxrank.data.drift import counts as drift_counts
from jaxrank.data.drift import measures as drift_measures
from jaxrank.data.drift import sides
from jaxrank.data.drift.compare import MEASURES, compare_data
from jaxrank.data.drift.measures import psi
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.features import PAD, Categorical, Schema

ROWS = 3000
KEY = b"0123456789abcdef0123456789abcdef"
FEATURES = dict(
    tasks=[dict(name="click", label="click")],
    derived=[dict(name="hour", kind="hour", columns="time")],
    dense=[
        dict(columns="price", log=True, standardize=True),
        dict(columns="age", standardize=True, missing_indicator=True),
    ],
    categorical=[
        dict(columns="ad", encoding="vocabulary", min_count=2),
        dict(columns="hour", encoding="integer", rows=24),
        dict(columns="city", encoding="hash", rows=1000),
        dict(columns="slot", encoding="integer", rows=9),
    ],
    ragged=[
        dict(columns="tags", encoding="vocabulary", separator=" "),
        dict(columns="seen", encoding="vocabulary", separator=" ", combiner="none", max_length=3)
        | dict(on_overlong="truncate"),
    ],
    sequences=[
        dict(name="history", columns=["seen"], order="newest_first") | dict(time="when", ages=True)
    ],
    time="time",
)


def with_missing(values, missing):
    return [None if m else v for v, m in zip(values, missing, strict=True)]


def raw(day):
    """Returns the raw columns of a day. Ads and prices move, and the second has more missing."""
    r = np.random.default_rng(day)
    ads = r.zipf(1.3, ROWS).clip(max=60) + 20 * day
    price = r.lognormal(day / 2, 1, ROWS).round(2)
    tags = [" ".join(f"t{t}" for t in r.integers(5 + day, size=r.poisson(1 + day))) for _ in ads]
    hours = r.integers(12 * day, 24, ROWS)
    slots = r.integers(1 + 3 * day, 9, ROWS)
    events = r.integers(5, size=ROWS)
    return {
        "time": [f"2024-05-0{1 + day}T{h:02}:00:00" for h in hours],
        "slot": with_missing(slots, r.random(ROWS) < 0.4 * day),
        "seen": [" ".join(f"s{n}" for n in range(e)) for e in events],
        "when": [" ".join(f"2024-04-{29 - n}T00:00:00" for n in range(e)) for e in events],
        "ad": [f"a{a}" for a in ads],
        "city": [f"c{c}" for c in r.integers(30, size=ROWS)],
        "price": with_missing(price, r.random(ROWS) < 0.05 + 0.2 * day),
        "age": with_missing(r.normal(40, 9, ROWS), r.random(ROWS) < 0.3),
        "tags": tags,
        "click": r.integers(2, size=ROWS),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The raw columns and the stores of two days."""
    folder = tmp_path_factory.mktemp("drift")
    days, stores = [raw(0), raw(1)], []
    for day, columns in enumerate(days):
        file = folder / f"{day}.parquet"
        pq.write_table(pa.table(columns), file)
        source = dict(kind="parquet", files=dict(train=str(file)))
        before = dict(vocabularies=stores[-1]) if stores else {}
        path = str(folder / f"store{day}")
        prepare(FEATURES, source, path, block_size=512, report=lambda _: None, **before)
        stores.append(path)
    return days, stores, folder


def compared(*args, **options):
    result = compare_data(*args, **options, report=lambda _: None)
    return result, {m.name: m for m in result.features}


def shares(old, new):
    """Returns the shares of new and of lost ids by the raw values that both stores know."""
    return (
        sum(n for v, n in new.items() if v not in old) / new.total(),
        sum(n for v, n in old.items() if v not in new) / old.total(),
    )


def test_measures_are_those_of_the_raw_values(data):
    days, stores, _ = data
    result, by_name = compared(*stores)
    ads = [Counter(day["ad"]) for day in days]
    # The first store does not know ids that occurred once. The second does if the first had them.
    known = [Counter({a: n for a, n in ads[0].items() if n > 1})]
    known.append(Counter({a: n for a, n in ads[1].items() if n + ads[0][a] > 1}))
    ad = by_name["ad"]
    # An id that waits on the first day and has a row on the second is not new.
    admitted = sum(n for a, n in known[1].items() if ads[0][a] == 1)
    assert admitted
    new, lost = shares(*known)
    assert (ad.new, ad.lost) == pytest.approx((new - admitted / known[1].total(), lost))
    assert ad.new == pytest.approx(shares(ads[0], known[1])[0])
    lacking = [1 - k.total() / ROWS for k in known]
    assert ad.unknown == pytest.approx(lacking)
    lacking[1] += admitted / ROWS
    frequent = sorted(known[0], key=lambda a: (-known[0][a], a))[:20]
    parts = [[k[a] for a in frequent] for k in known]
    others = [sum(n for a, n in k.items() if a in known[0] and a not in frequent) for k in known]
    only_new = [0, sum(n for a, n in known[1].items() if a not in ads[0])]
    rest = zip(others, only_new, (round(s * ROWS) for s in lacking), strict=True)
    tables = [np.array([*p, *r, 0.0]) for p, r in zip(parts, rest, strict=True)]
    assert ad.psi == pytest.approx(psi(*tables))
    tags = [Counter(t for cell in day["tags"] for t in cell.split()) for day in days]
    assert (by_name["tags"].new, by_name["tags"].lost) == pytest.approx(shares(*tags))
    lengths = [np.mean([len(cell.split()) for cell in day["tags"]]) for day in days]
    assert by_name["tags"].mean == pytest.approx(lengths)
    assert by_name["tags"].shift == pytest.approx(lengths[1] / lengths[0] - 1)
    assert by_name["tags"].missing == pytest.approx(
        [np.mean([not cell for cell in day["tags"]]) for day in days]
    )
    for name in ("price", "age"):
        columns = [np.array(day[name], float) for day in days]
        m = by_name[name]
        assert m.missing == pytest.approx([np.isnan(c).mean() for c in columns])
        assert m.mean == pytest.approx([np.nanmean(c) for c in columns])
        assert m.shift == pytest.approx((m.mean[1] - m.mean[0]) / np.nanstd(columns[0]))
        edges = np.nanquantile(columns[0], np.arange(1, 10) / 10)
        tables = [
            [*np.bincount(np.searchsorted(edges, c[~np.isnan(c)]), minlength=10), np.isnan(c).sum()]
            for c in columns
        ]
        assert m.psi == pytest.approx(psi(*map(np.array, tables)), abs=5e-4, rel=0.01)
    assert by_name["hour"].lost == pytest.approx(
        np.mean([int(t[11:13]) < 12 for t in days[0]["time"]])
    )
    slots = [Counter(day["slot"]) for day in days]
    tables = [np.array([c[s] for s in (*range(1, 9), None)]) for c in slots]
    assert by_name["slot"].psi == pytest.approx(psi(*tables))
    assert by_name["slot"].missing == pytest.approx([c[None] / ROWS for c in slots])
    assert by_name["slot"].lost == pytest.approx(sum(slots[0][s] for s in range(1, 4)) / ROWS)
    assert by_name["seen"].psi == pytest.approx(0, abs=0.02)
    assert by_name["history:age"].missing == by_name["seen"].missing
    assert by_name["city"].psi < 0.02
    assert [m.psi for m in result.features] == sorted(
        (m.psi for m in result.features), reverse=True
    )


@pytest.mark.parametrize("has_times", [True, False])
def test_ids_that_lost_their_row_and_occur_are_not_lost(data, tmp_path, has_times):
    """Rows of the first day come again on the second, but three ads, when eight may have a row."""
    days, _, _ = data
    ads = Counter(days[0]["ad"])
    gone = [ad for ad, _ in ads.most_common()[-3:]]
    features = {
        "tasks": [dict(name="click", label="click")],
        "categorical": [dict(columns="ad", encoding="vocabulary")],
        "time": "time" if has_times else "",
    }
    stores = []
    for day, limits in enumerate(({}, dict(max_rows=8))):
        times = [t.replace("05-01", f"05-0{1 + day}") for t in days[0]["time"]]
        file = tmp_path / f"{day}.parquet"
        stays = pa.array([not day or ad not in gone for ad in days[0]["ad"]])
        pq.write_table(pa.table({**days[0], "time": times}).filter(stays), file)
        features["categorical"][0] |= limits
        before = dict(vocabularies=stores[-1]) if stores else {}
        stores.append(str(tmp_path / f"store{day}"))
        source = dict(kind="parquet", files=dict(train=str(file)))
        prepare(features, source, stores[-1], report=lambda _: None, **before)
    _, by_name = compared(*stores)
    ad = by_name["ad"]
    assert ad.unknown[1] > 0.1
    assert (ad.new, ad.lost) == pytest.approx((0, sum(ads[ad] for ad in gone) / ROWS))
    assert ad.psi < 0.01


def test_the_index_of_known_counts():
    p, q = np.array([0.25, 0.75]), np.array([0.5, 0.5])
    index = psi(p * 1e9, q * 1e9)
    assert index == pytest.approx(0.25 * np.log(2) - 0.25 * np.log(2 / 3))
    assert psi(p, p) == 0
    assert np.isfinite(psi(np.array([5, 0]), np.array([0, 5])))


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv"])
def test_a_log_of_the_same_requests_has_no_skew_and_a_changed_one_has(data, kind, monkeypatch):
    days, stores, folder = data
    columns = {name: values for name, values in days[0].items() if name != "click"}
    log = folder / f"{kind}-log"  # a directory
    (log / "day=1").mkdir(parents=True)
    file = log / "day=1" / f"log.{kind}"

    def write(changed):
        table = pa.table(columns | changed)
        if kind == "parquet":
            pq.write_table(table, file)
        else:
            options = pyarrow.csv.WriteOptions(delimiter="\t" if kind == "tsv" else ",")
            pyarrow.csv.write_csv(table, file, options)

    write({})
    result, by_name = compared(stores[0], str(log))
    for m in by_name.values():
        assert m.psi == pytest.approx(0, abs=1e-9), m
        assert m.new in (0, None)
        assert m.missing[0] == m.missing[1]
    assert not result.exceeded
    price = [None if p is None else 100 * p for p in days[0]["price"]]
    hour = [int(time[11:13]) for time in days[0]["time"]]
    write({"hour": hour})
    assert compared(stores[0], str(log))[1]["hour"].psi == 0
    hour = [(h + 1) % 24 for h in hour]  # as a server in another zone computes it
    write({"price": price, "ad": [a.upper() for a in days[0]["ad"]], "hour": hour})
    limits = dict(psi=0.2, unknown=0.05, mean=0.5, new=0.0, length=0.0)
    result, by_name = compared(stores[0], str(file), thresholds=limits)
    assert result.exceeded == {"price": ["psi", "mean"], "ad": ["psi", "unknown", "new"]}
    assert [m.name for m in result.features][:2] == ["ad", "price"]
    assert by_name["ad"].unknown[1] == by_name["ad"].new == 1
    assert by_name["hour"].psi > 0
    # Half of the ids of the log are new. The others have a row or wait for one.
    write({"ad": [a.upper() if i % 2 else a for i, a in enumerate(days[0]["ad"])]})
    ad = compared(stores[0], str(file))[1]["ad"]
    once = [i for i, a in enumerate(days[0]["ad"]) if days[0]["ad"].count(a) == 1]
    assert ad.new == 0.5
    assert ad.unknown[1] == 0.5 + sum(i % 2 == 0 for i in once) / ROWS
    # Without a record of waiting ids they cannot be distinguished from new ones.
    store = dataclasses.replace(open_store(stores[0]), histories={})
    monkeypatch.setattr(sides, "open_store", lambda path: store)
    without = compared(stores[0], str(file))[1]["ad"]
    assert (without.new, without.unknown) == (0, ad.unknown)


def test_a_threshold_ends_with_status_1_and_the_worst_first(data, capsys):
    _, stores, _ = data
    cli.run(["compare-data", *stores, "--max-psi=100", "--json"])
    out, err = capsys.readouterr()
    assert json.loads(out)["features"][0]["exceeds"] == []
    with pytest.raises(cli.FailedCheckError, match=r"more than a threshold: tags \(length\)"):
        cli.run(["compare-data", *stores, "--max-length=0.5", "--json"])
    out, err = capsys.readouterr()
    first = json.loads(out)["features"][0]
    assert (first["name"], first["exceeds"]) == ("tags", ["length"])
    table = [line.split()[0] for line in err.splitlines()[4:]]
    assert table[:2] == ["feature", "tags"]
    assert "EXCEEDS length" in err


def test_what_cannot_be_compared_is_named(data, tmp_path):
    days, stores, folder = data
    pq.write_table(pa.table({"ad": ["a1"], "price": [1.0]}), tmp_path / "log.parquet")
    key = tmp_path / "key"
    key.write_bytes(KEY)
    changed = {**FEATURES, "categorical": [dict(columns="city", encoding="hash", rows=500)]}
    none = {name: [] for name in ("dense", "ragged", "sequences", "derived")}
    source = dict(
        kind="parquet", files=dict(a=str(folder / "0.parquet"), b=str(folder / "1.parquet"))
    )
    prepare(changed | none, source, tmp_path / "other", report=lambda _: None)
    _, by_name = compared(stores[0], str(tmp_path / "other"), new_split="a")
    assert by_name["city"].psi is None
    assert by_name["city"].note.startswith("its number or salt of hashed rows differ")
    assert by_name["price"].note == f"absent in {tmp_path / 'other' / 'a'}"
    renamed = [dict(columns="city", table="towns", encoding="hash", rows=1000)]
    renamed += [
        dict(columns="ad", encoding="hash", rows=90),
        dict(columns="slot", encoding="bucket", buckets=3),
    ]
    null = {**days[0], "price": pa.nulls(ROWS, pa.float64())}
    pq.write_table(pa.table(null), folder / "null.parquet")
    source = dict(kind="parquet", files=dict(train=str(folder / "null.parquet")))
    features = FEATURES | dict(categorical=renamed, derived=[])
    prepare(features, source, tmp_path / "null", report=lambda _: None)
    limits = dict.fromkeys(MEASURES, 10.0)
    result, by_name = compared(stores[0], str(tmp_path / "null"), thresholds=limits)
    assert result.exceeded == {
        "ad": ["psi", "new", "lost", "unknown"],
        "slot": ["psi", "new", "lost"],
        "hour": ["absent"],
        "price": ["mean"],
    }
    assert by_name["price"].note == "all its numbers are missing on one side"
    assert (by_name["city"].psi, by_name["city"].undefined) == (0, ())
    for args, options, message in (
        (
            (stores[0], str(tmp_path / "log.parquet")),
            {},
            r"log.parquet: must have the column 'age'",
        ),
        ((stores[0], str(tmp_path / "no")), {}, "no such store"),
        ((stores[0], str(tmp_path / "other")), {}, r"--new-split: must name .* \['a', 'b'\]"),
        (stores, dict(old_split="valid"), r"--old-split: must be a split of .*found 'valid'"),
        (stores, dict(thresholds=dict(psi=-1.0)), "--max-psi: must be .* found -1.0"),
        (stores, dict(hash_key_file=str(key)), "--hash-key-file: must be used with a log"),
        (
            (stores[0], str(folder / "1.parquet")),
            dict(hash_key_file=str(key)),
            "--hash-key-file: must be the key that .* found .*key",
        ),
    ):
        with pytest.raises(InputError, match=message):
            compared(*args, **options)


def test_vocabularies_of_any_size_that_differ_are_compared_by_value(data, monkeypatch):
    """As if they had more than 4,194,304 rows, which are mapped a part at a time."""
    _, stores, _ = data
    limits = dict(psi=0.5, new=0.1, lost=0.1)
    result, expected = compared(*stores, thresholds=limits)
    assert result.exceeded["ad"] == ["psi", "new", "lost"]
    monkeypatch.setattr(drift_counts, "_MAX_COUNTED_ROWS", 8)
    monkeypatch.setattr(drift_measures, "_INDEXED_VALUES", 7)
    large, by_name = compared(*stores, thresholds=limits)
    for name in ("ad", "tags", "seen"):
        assert by_name[name] == expected[name]
        assert large.exceeded.get(name) == result.exceeded.get(name)


def test_rows_of_large_hashed_tables_share_counts(data, monkeypatch):
    _, stores, _ = data
    monkeypatch.setattr(drift_counts, "_MAX_COUNTED_ROWS", 8)
    _, by_name = compared(*stores)
    city = by_name["city"]
    assert city.psi < 0.02
    assert city.note.startswith("its table has more than 8 rows, which share counts: its changes")
    _, by_name = compared(stores[0], stores[0])
    assert (by_name["city"].psi, by_name["city"].new) == (0, 0)


def test_large_tables_are_counted_in_bounded_memory():
    schema = Schema((), (), (Categorical("id", "id"),), (), ())
    counts = drift_counts.Counts(schema)
    rows = np.array([1, 2**31 - 2, 1, PAD], np.int32)
    counts._add_ids("id", rows)
    assert len(counts.ids["id"]) <= drift_counts._MAX_COUNTED_ROWS
    assert counts.ids["id"].sum() == 3
    assert counts.ids["id"][1] == 2
