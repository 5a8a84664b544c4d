"""Compares statistics of a split, whole and merged from parts, with plain loops; their report."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode.encoder import Encoder
from jaxrank.data.rejects import BadRows
from jaxrank.data.spec.entries import CategoricalSpec, DenseSpec, RaggedSpec, TaskSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics import report
from jaxrank.data.statistics import split as statistics_module
from jaxrank.data.statistics.hyperloglog import HyperLogLog
from jaxrank.data.statistics.list_lengths import ListLengths
from jaxrank.data.statistics.new_values import NewValues, is_new
from jaxrank.data.statistics.split import Moments, Statistics
from jaxrank.errors import InputError
from jaxrank.features import MAX_GROUP, MISSING_ROW, PAD, UNKNOWN_ROW

FEATURES = FeatureSpec(
    tasks=(TaskSpec("click", label=""), TaskSpec("buy", label="")),
    dense=(DenseSpec(("x",)), DenseSpec(("y",))),
    categorical=(
        CategoricalSpec(("word",)),
        CategoricalSpec(("pair",), encoding="integer", length=2),
    ),
    ragged=(RaggedSpec(("tags",)), RaggedSpec(("seen",), encoding="integer")),
)


def examples(random, rows):
    """Returns labels, floats, ids by feature, lengths, and the list ids by feature and example."""
    labels = random.choice([0.0, 1.0, np.nan], (rows, 2))
    floats = random.normal(1e3, 2.0, (rows, 2))
    floats[random.random(floats.shape) < 0.3] = np.nan
    ids = [
        random.integers(0, 40, (rows, 1)),
        random.choice([0, 1, 7, 4095, 4096, 10**6, int(PAD)], (rows, 2)),
    ]
    lengths = np.minimum(random.geometric(0.2, (rows, 2)) - 1, 9)
    lists = [[random.integers(0, 30, n) for n in column] for column in lengths.T]
    return labels, floats, ids, lengths, lists


def count(statistics, data, start, stop):
    """Counts the examples from `start` to `stop` as the encoder does."""
    labels, floats, ids, lengths, lists = data
    part = slice(start, stop)
    statistics.add(labels[part].astype(np.float32), floats[part], lengths[part].astype(np.int32))
    for i, missing in enumerate((MISSING_ROW, PAD)):
        rows = ids[i][part].astype(np.int32)
        statistics.add_rows("categorical", i, rows)
        statistics.id_missing[i] += (rows == missing).sum()
        statistics.id_unknown[i] += (rows == UNKNOWN_ROW).sum() * (i == 0)
        if i == 0:
            result = NewValues(int((rows != missing).sum()), int(is_new(rows, 30).sum()), ["one"])
            statistics.new["categorical"].setdefault("word", NewValues()).merge(result)
        pieces = lists[i][part]
        rows = np.concatenate([np.zeros(0, np.int32), *pieces]).astype(np.int32)
        statistics.add_rows("ragged", i, rows)
        statistics.list_unknown[i] += (rows == UNKNOWN_ROW).sum() * (i == 0)
        if i == 0:
            result = NewValues(rows.size, int(is_new(rows, 20).sum()), ["two"])
            statistics.new["ragged"].setdefault("tags", NewValues()).merge(result)
    for attribute in ("pending", "id_out_of_range", "list_out_of_range"):
        getattr(statistics, attribute)[1] += stop - start
    statistics.list_truncated[0] += 3 * (stop - start)
    statistics.list_truncated_lists[0] += stop - start


def expected(data, rows):
    """Computes the readable numbers with Python loops."""
    labels, floats, ids, lengths, lists = (list(part) for part in data)
    tree = {"rows": rows, "tasks": {}, "dense": {}, "categorical": {}, "ragged": {}}
    for i, name in enumerate(("click", "buy")):
        known = [row[i] for row in labels if not math.isnan(row[i])]
        result = {"known": len(known), "positives": known.count(1), "pending": rows * i}
        tree["tasks"][name] = result
    for i, name in enumerate(("x", "y")):
        values = [row[i] for row in floats if not math.isnan(row[i])]
        result = dict(missing=rows - len(values), mean=None, std=None, min=None, max=None)
        if values:
            mean = math.fsum(values) / len(values)
            std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
            result |= dict(mean=mean, std=std, min=min(values), max=max(values))
        tree["dense"][name] = result
    for i, name in enumerate(("word", "pair")):
        flat = [int(v) for row in ids[i] for v in row]
        missing = flat.count(int(PAD) if i else MISSING_ROW)
        unknown = 0 if i else flat.count(UNKNOWN_ROW)
        values = set(flat) - ({int(PAD)} if i else {MISSING_ROW, UNKNOWN_ROW})
        tree["categorical"][name] = dict(
            ids=len(flat), missing=missing, unknown=unknown, out_of_range=rows * i,
            unknown_share=unknown / max(len(flat) - missing, 1), distinct=len(values),
        )  # fmt: skip
        if i == 0:
            new = sum(v == UNKNOWN_ROW or v >= 30 for v in flat)
            tree["categorical"][name] |= dict(new=new, new_share=new / max(len(flat) - missing, 1))
    for i, name in enumerate(("tags", "seen")):
        flat = [int(v) for row in lists[i] for v in row]
        unknown = 0 if i else flat.count(UNKNOWN_ROW)
        values = set(flat) - (set() if i else {MISSING_ROW, UNKNOWN_ROW})
        sizes = sorted(len(row) for row in lists[i])
        tree["ragged"][name] = dict(
            ids=len(flat), mean=len(flat) / max(rows, 1), max=max(sizes, default=0),
            empty=sizes.count(0), unknown=unknown, unknown_share=unknown / max(len(flat), 1),
            out_of_range=rows * i, distinct=len(values),
            truncated_ids=3 * rows * (1 - i), truncated_lists=rows * (1 - i),
            truncated_share=float(1 - i) if rows else 0.0,
            **{f"p{p}": sizes[-(-rows * p // 100) - 1] if rows else 0 for p in (50, 95, 99)},
        )  # fmt: skip
        if i == 0:
            new = sum(v == UNKNOWN_ROW or v >= 20 for v in flat)
            tree["ragged"][name] |= dict(new=new, new_share=new / max(len(flat), 1))
    return tree


def assert_close(actual, wanted, where=""):
    """Asserts equality up to the last digits of floats."""
    if isinstance(wanted, dict):
        assert set(actual) == set(wanted), where
        for key in wanted:
            assert_close(actual[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, list):
        assert len(actual) == len(wanted), where
        for i, pair in enumerate(zip(actual, wanted, strict=True)):
            assert_close(*pair, f"{where}[{i}]")
    elif isinstance(wanted, float):
        assert actual == pytest.approx(wanted, rel=1e-9, abs=1e-9), where
    else:
        assert actual == wanted, where
        assert type(actual) is type(wanted), where


def cut_pieces(random, rows, most):
    """Splits 0 to `rows` into at most `most` pieces, some possibly empty."""
    inner = random.integers(0, rows + 1, random.integers(0, most))
    ends = [0, *np.sort(inner).tolist(), rows]
    return list(zip(ends[:-1], ends[1:], strict=True))


def round_trip_json(tree):
    return json.loads(json.dumps(tree, allow_nan=False))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), rows=st.integers(0, 40), parts=st.integers(1, 6))
@example(seed=1, rows=1500, parts=6)
def test_statistics_equal_plain_loops_however_the_examples_are_cut(seed, rows, parts):
    random = np.random.default_rng(seed)
    data = examples(random, rows)
    whole, states = Statistics(FEATURES), []
    for start, stop in cut_pieces(random, rows, parts):
        part = Statistics(FEATURES)
        for first, last in cut_pieces(random, stop - start, 3):
            count(part, data, start + first, start + last)
        states.append(round_trip_json(part.to_state()))
        whole.merge(Statistics.from_state(FEATURES, states[-1]))
    result = whole.summary()
    wanted = expected(data, rows)
    assert_close({key: result[key] for key in wanted}, wanted)
    assert_close(statistics_module.merged(states), result)
    at_once = Statistics(FEATURES)
    count(at_once, data, 0, rows)
    assert_close(result, at_once.summary())


def test_what_was_merged_is_what_json_gives_back():
    random = np.random.default_rng(3)
    data = examples(random, 700)
    whole = Statistics(FEATURES)
    for start, stop in cut_pieces(random, 700, 9):
        count(whole, data, start, stop)
    tree = round_trip_json(whole.summary())
    assert tree == whole.summary()  # of plain numbers, lists and texts
    again = Statistics.from_state(FEATURES, tree)
    assert again.summary() == tree
    state = round_trip_json(whole.to_state())
    assert Statistics.from_state(FEATURES, state).summary() == tree
    assert statistics_module.merged([tree]) == tree
    count(whole, data, 5, 20)
    count(again, data, 5, 20)
    assert_close(again.summary(), whole.summary())


def test_statistics_of_other_features_are_not_merged():
    other = FeatureSpec(
        tasks=FEATURES.tasks, categorical=FEATURES.categorical, ragged=FEATURES.ragged
    )
    pair = [Statistics(features).summary() for features in (FEATURES, other)]
    with pytest.raises(InputError, match=r"same dense: found \['x', 'y'\] and \[\]"):
        statistics_module.merged(pair)


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree: tree.pop("mergeable"),
        lambda tree: tree["mergeable"]["categorical"].update(seen={}),
        lambda tree: tree["mergeable"]["categorical"]["seen"].update(data="AAAA"),
        lambda tree: tree["mergeable"]["categorical"].update(few=[[7]]),
        lambda tree: tree["mergeable"]["ragged"]["registers"].update(data="eJwDAAAAAAE="),
        lambda tree: tree["list_lengths"].update(covariance=[1.0]),
        lambda tree: tree["list_lengths"].update(max_per_example=[]),
        lambda tree: tree["ragged"]["tags"].pop("ids"),
        lambda tree: tree.update(dense=3),
    ],
)
def test_damaged_statistics_are_rejected_with_their_place(damage):
    good = Statistics(FEATURES)
    count(good, examples(np.random.default_rng(0), 9), 0, 9)
    bad = round_trip_json(good.summary())
    damage(bad)
    with pytest.raises(InputError, match=r"statistics 1: must be what `prepare` wrote"):
        statistics_module.merged([good.summary(), bad])


# Lists.


def lengths_in_parts(lengths, cuts):
    whole = ListLengths(lengths.shape[1])
    for part in np.split(lengths.astype(np.int32), cuts):
        piece = ListLengths(lengths.shape[1])
        piece.add(part)
        whole.merge(piece)
    return whole


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    rows=st.sampled_from([0, 1, 511, 512, 513, 700, 1300, 2100]),
    parts=st.sampled_from([1, 2, 3, 8, 40]),
)
def test_the_largest_run_is_found_wherever_it_begins_and_the_parts_end(seed, rows, parts):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 3, (rows, 3))
    for i in range(3):  # a hill somewhere in each list
        start = random.integers(0, rows + 1)
        lengths[start : start + random.integers(1, 600), i] += 50
    cuts = np.sort(random.integers(0, rows + 1, parts - 1))
    whole = lengths_in_parts(lengths, cuts)
    runs = [lengths[i : i + MAX_GROUP].sum(axis=0).tolist() for i in range(max(rows, 1))]
    assert whole.max_total_per_run.tolist() == np.max(runs, axis=0).tolist()
    assert whole.max_per_example.tolist() == lengths.max(axis=0, initial=0).tolist()


@pytest.mark.parametrize("cut", [1, 2, 510, 511, 512, 513])
def test_a_run_that_is_split_anywhere_is_whole_again(cut):
    once = np.zeros((1030, 1), np.int32)
    once[3 : 3 + MAX_GROUP] = 1
    assert lengths_in_parts(once, [3 + cut]).max_total_per_run.tolist() == [MAX_GROUP]
    assert lengths_in_parts(once, range(1, 1030)).max_total_per_run.tolist() == [MAX_GROUP]


def test_pieces_of_a_chunk_change_nothing(monkeypatch):
    lengths = np.random.default_rng(2).poisson(4, (1500, 3)).astype(np.int32)
    whole = lengths_in_parts(lengths, [])
    monkeypatch.setattr("jaxrank.data.statistics.list_lengths._PIECE", 300)
    assert_close(lengths_in_parts(lengths, []).summary(), whole.summary())


def test_covariances_and_percentiles_equal_those_of_numpy():
    random = np.random.default_rng(5)
    shared = random.negative_binomial(2, 0.1, (3000, 1))
    lengths = shared * [1, 2, 0] + random.integers(0, 4096 - 2 * shared.max(), (3000, 3)) // 40
    whole = lengths_in_parts(lengths, [1, 700, 2999])
    result = whole.summary()
    np.testing.assert_allclose(result["covariance"], np.cov(lengths.T, bias=True), rtol=1e-12)
    np.testing.assert_allclose(result["mean"], lengths.mean(axis=0), rtol=1e-15)
    for percent in (1, 50, 95, 99, 100):
        wanted = np.percentile(lengths, percent, axis=0, method="inverted_cdf")
        assert whole.percentile(percent).tolist() == wanted.tolist()


def test_percentiles_of_long_lists_are_the_upper_edges_of_their_bins():
    lengths = np.array([[0], [4095], [4096], [8191], [8192], [100_000], [2**31 - 2]])
    whole = lengths_in_parts(lengths, [2, 3])
    result = [int(whole.percentile(percent)[0]) for percent in (14, 28, 42, 57, 71, 85, 100)]
    assert result == [0, 4095, 8191, 8191, 16383, 131_071, 2**31 - 2]
    assert lengths_in_parts(lengths[:6], []).percentile(99).tolist() == [100_000]  # the longest


@pytest.mark.parametrize("lists", [0, 3])
def test_lengths_are_restored_from_their_state(lists):
    random = np.random.default_rng(7)
    whole = lengths_in_parts(random.poisson(4, (1100, lists)), [300])
    state = round_trip_json(whole.to_state())
    again = ListLengths.from_state(state)
    assert again.to_state() == state
    more = lengths_in_parts(random.poisson(9, (700, lists)), [])
    for lengths in (whole, again):
        lengths.merge(more)
    assert again.to_state() == whole.to_state()
    assert again.summary() == whole.summary()


def test_the_state_of_a_thousand_lists_is_small():
    random = np.random.default_rng(6)
    features = FeatureSpec(
        tasks=FEATURES.tasks, ragged=tuple(RaggedSpec((f"l{i}",)) for i in range(1000))
    )
    statistics = Statistics(features)
    lengths = random.poisson(8, (700, 1000)).astype(np.int32)
    statistics.add(np.zeros((700, 2), np.float32), np.zeros((700, 0)), lengths)
    for i, total in enumerate(lengths.sum(axis=0)):
        statistics.add_rows("ragged", i, random.integers(0, 10**6, total).astype(np.int32))
    tree = statistics.to_state()
    assert len(json.dumps(tree)) < 9 << 20
    again = Statistics.from_state(features, round_trip_json(tree))
    assert again.to_state() == tree
    assert again.summary() == statistics.summary()


# Floats.


def test_moments_keep_their_digits_where_the_mean_is_large_and_drifts():
    values = np.random.default_rng(7).normal(size=(4000, 2)) + 1e7 * np.arange(4000)[:, None] ** 0.1
    moments = Moments(2)
    for part in np.split(values, [1, 100, 3000]):
        piece = Moments(2)
        for chunk in np.split(part, [len(part) // 3]):
            piece.add(chunk)
        moments.merge(Moments.from_state(round_trip_json(piece.to_state())))
    for i in range(2):
        mean = math.fsum(values[:, i]) / 4000
        std = math.sqrt(math.fsum((values[:, i] - mean) ** 2) / 4000)
        assert moments.mean[i] == pytest.approx(mean, rel=1e-14)
        assert moments.std[i] == pytest.approx(std, rel=1e-12)


def test_a_part_without_values_changes_no_moments():
    moments = Moments(1)
    moments.add(np.full((3, 1), 1e200))
    before = moments.to_state()
    moments.add(np.full((4, 1), np.nan))
    moments.add(np.zeros((0, 1)))
    moments.merge(Moments(1))
    assert moments.to_state() == before == [dict(count=3, mean=1e200, std=0, min=1e200, max=1e200)]


# Distinct rows.


def distinct(*parts):
    result = HyperLogLog(1)
    for part in parts:
        result.add(0, np.asarray(part, np.int32))
    return result


@pytest.mark.parametrize("count", [0, 1, 2, 10, 200, 256])
def test_few_rows_are_counted_exactly(count):
    random = np.random.default_rng(count)
    small = random.permutation(4096)[: 16 * count]
    large = random.permutation(np.unique(random.integers(4096, PAD, 2 * count)))[:count]
    for rows in (small, large, np.concatenate([small, large])):
        assert distinct(rows, rows[::-1], [PAD] * 9).counts().tolist() == [len(rows)]


@pytest.mark.parametrize("count", [1, 2, 10, 1000, 5000, 10_000, 20_000, 100_000, 200_000])
@pytest.mark.parametrize("kind", ["random", "in a row", "far apart"])
def test_many_rows_are_counted_within_five_in_a_hundred(count, kind):
    if kind == "random":
        drawn = np.random.default_rng(count).integers(4096, PAD, 2 * count + 9)
        rows = np.random.default_rng(0).permutation(np.unique(drawn))[:count]
    else:
        rows = 10**6 + np.arange(count) * (1 if kind == "in a row" else 2048)
    rows = rows[rows < PAD]
    result = int(distinct(rows, rows[:7]).counts()[0])
    assert abs(result - len(rows)) <= 0.05 * len(rows)


def test_what_is_kept_of_distinct_rows_depends_on_the_rows_alone():
    random = np.random.default_rng(8)
    rows = np.minimum(random.zipf(1.2, 50_000), 2**31 - 2)
    whole = distinct(rows)
    parts = [distinct(*np.array_split(part, 3)) for part in np.split(rows, [10, 30_000])]
    merged = distinct()
    assert len(set(rows[:10])) == parts[0].counts()
    for part in parts[::-1]:
        merged.merge(HyperLogLog.from_state(round_trip_json(part.to_state())))
    assert merged.to_state() == whole.to_state()
    assert distinct(random.permutation(rows), rows[:999]).to_state() == whole.to_state()
    assert distinct(rows[rows != 3]).to_state() != whole.to_state()


def test_each_column_counts_its_own_rows():
    result = HyperLogLog(3)
    result.add(0, np.arange(100, dtype=np.int32))
    result.add(2, np.arange(5000, 5010, dtype=np.int32).reshape(5, 2)[:, 1:])  # not contiguous
    assert result.counts().tolist() == [100, 0, 5]
    result.forget(0, 2)
    assert result.counts().tolist() == [98, 0, 5]


def test_no_more_rows_are_reported_than_there_are_ids():
    features = FeatureSpec(
        tasks=FEATURES.tasks, categorical=(CategoricalSpec(("key",), encoding="integer"),)
    )
    for seed in range(8):
        statistics = Statistics(features)
        rows = 10**6 * seed + np.arange(20_000, 60_000, dtype=np.int32)[:, None]
        statistics.add_rows("categorical", 0, rows)
        result = statistics.summary()["categorical"]["key"]
        assert 38_000 <= result["distinct"] <= result["ids"] == 40_000


# Counts of the encoder.


def make_lists(cells, **fields):
    features = FeatureSpec(
        tasks=(TaskSpec("click", label="label"),),
        ragged=(RaggedSpec(("l",), table="t", encoding="integer", rows=10, **fields),),
    )
    batch = pa.RecordBatch.from_pydict({"label": [1] * len(cells), "l": cells})
    encoder = Encoder(features, {}, {}, Statistics(features))
    return encoder, Chunk(batch, "file", numbered(1, len(cells)))


def test_lists_that_are_cut_are_counted_with_the_ids_that_they_lose():
    cells = [[1, 2, 3, 4], [5], [], [6, 7, 8], [1, 9]]
    encoder, chunk = make_lists(cells, max_length=2, on_overlong="truncate")
    encoder.encode(chunk)
    encoder.encode(chunk)
    result = encoder.statistics.summary()["ragged"]["l"]
    assert (result["truncated_lists"], result["truncated_ids"]) == (4, 6)
    assert result["truncated_share"] == 4 / 10
    assert (result["ids"], result["distinct"]) == (14, 6)  # 1, 2, 5, 6, 7, 9


def test_a_chunk_that_is_rejected_does_not_count():
    encoder, chunk = make_lists([[1, 2], [3, 99], [4]])
    with pytest.raises(BadRows) as rejected:
        encoder.encode(chunk)
    encoder.encode(chunk.drop_records(rejected.value.rows))
    alone, other = make_lists([[1, 2], [4]])
    alone.encode(other)
    assert encoder.statistics.summary() == alone.statistics.summary()


# Report.


def report_lines(features, new=None, **change):
    statistics = Statistics(features)
    n = 200
    lengths = np.zeros((n, len(features.ragged)), np.int32)
    lengths[:3] = 40
    floats = np.ones((n, len(features.dense)))
    floats[:25] = np.nan
    statistics.add(np.ones((n, len(features.tasks)), np.float32), floats, lengths)
    for i in range(len(features.categorical)):
        statistics.add_rows("categorical", i, np.full((n, 1), 7, np.int32))
    for attribute, (index, value) in change.items():
        getattr(statistics, attribute)[index] = value
    for kind, result in (new or {}).items():
        statistics.new[kind] = result
    return report.lines(statistics.summary())


def test_a_report_of_few_features_has_a_table_for_each_kind():
    features = FeatureSpec(
        tasks=(TaskSpec("click", label=""), TaskSpec("buy", label="")),
        dense=(DenseSpec(("x",)), DenseSpec(("a_long_name",))),
        categorical=(CategoricalSpec(("word",)), CategoricalSpec(("key",))),
        ragged=(RaggedSpec(("tags",)),),
    )
    lines = report_lines(
        features, id_unknown=(1, 50), id_missing=(1, 100), list_out_of_range=(0, 1234),
        list_truncated_lists=(0, 5), pending=(1, 1500),
    )  # fmt: skip
    assert lines == [
        "click: 200 labels, 100.00% positive",
        "buy: 200 labels, 100.00% positive, 1,500 pending",
        "dense        missing  mean  std  min  max",
        "x             12.50%     1    0    1    1",
        "a_long_name   12.50%     1    0    1    1",
        "categorical  missing  unknown  distinct (approx.)",
        "word           0.00%    0.00%                   1",
        "key           50.00%   50.00%                   1",
        "ragged  mean  p50  p95  p99  max   empty  unknown  distinct (approx.)  truncated",
        "tags    0.60    0    0   40   40  98.50%    0.00%                   0      2.50%",
        "tags: 1,234 ids are out of range of their table",
    ]


def test_a_report_of_many_features_names_the_worst():
    features = FeatureSpec(
        tasks=(TaskSpec("click", label=""),),
        dense=tuple(DenseSpec((f"x{i}",)) for i in range(5)),
        categorical=tuple(CategoricalSpec((f"c{i}",)) for i in range(500)),
        ragged=tuple(RaggedSpec((f"l{i}",)) for i in range(500)),
    )
    lines = report_lines(
        features, id_unknown=([8, 3, 4, 5], [20, 40, 30, 10]), list_truncated_lists=(77, 100),
        list_truncated=(77, 1000),
    )  # fmt: skip
    assert len(lines) < 12
    assert (
        "5 dense features: 12.50% missing, most in x0 (12.50%), x1 (12.50%), x2 (12.50%)" in lines
    )
    assert "500 categorical features: 0.00% missing" in lines
    worst = "c3 (20.00%), c4 (15.00%), c8 (10.00%)"
    assert f"500 categorical features: 0.10% unknown, most in {worst}" in lines
    assert (
        "500 ragged features: 300.00 ids per example, longest list 40 ids (l0), 1,000 ids truncated"
        in lines
    )
    assert "500 ragged features: 0.10% truncated, most in l77 (50.00%)" in lines


def test_values_that_an_earlier_store_does_not_have_are_reported_of_each_feature_that_it_has():
    features = FeatureSpec(
        tasks=FEATURES.tasks,
        categorical=(CategoricalSpec(("word",)), CategoricalSpec(("key",))),
        ragged=(RaggedSpec(("tags",)), RaggedSpec(("seen",))),
    )
    new = dict(categorical={"key": NewValues(200, 150)}, ragged={"tags": NewValues(120, 3)})
    assert report_lines(features, new=new)[2:] == [
        "categorical  missing  unknown     new  distinct (approx.)",
        "word           0.00%    0.00%       -                   1",
        "key            0.00%    0.00%  75.00%                   1",
        "ragged  mean  p50  p95  p99  max   empty  unknown    new  distinct (approx.)  truncated",
        "tags    0.60    0    0   40   40  98.50%    0.00%  2.50%                   0      0.00%",
        "seen    0.60    0    0   40   40  98.50%    0.00%      -                   0      0.00%",
    ]
    many = FeatureSpec(
        tasks=FEATURES.tasks, categorical=tuple(CategoricalSpec((f"c{i}",)) for i in range(30))
    )
    lines = report_lines(
        many, new=dict(categorical={"c7": NewValues(200, 50), "c9": NewValues(200, 150)})
    )
    assert "2 categorical features: 50.00% new, most in c9 (75.00%), c7 (25.00%)" in lines


def test_a_float_without_values_is_reported():
    features = FeatureSpec(tasks=FEATURES.tasks, dense=(DenseSpec(("x",)),))
    statistics = Statistics(features)
    statistics.add(np.ones((4, 2), np.float32), np.full((4, 1), np.nan), np.zeros((4, 0), np.int32))
    line = report.lines(round_trip_json(statistics.summary()))[-1]
    assert line.split() == ["x", "100.00%", "-", "-", "-", "-"]
