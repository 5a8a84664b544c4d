"""Generated data is reproducible, has the requested shape, and follows its true probabilities."""

import itertools

import numpy as np
import pytest
from raw import every_chunk

from jaxrank.data.sources.registry import synthetic_source
from jaxrank.data.synthetic import source as synthetic
from jaxrank.errors import InputError

_ARGUMENTS = {
    "seed": 3,
    "dense": 6,
    "categorical": (7, 1000, 50_000_000),
    "ragged": (
        {"rows": 5000, "mean_length": 4},
        {"rows": 100, "mean_length": 2.5, "weighted": True},
    ),
}


def generated(**arguments):
    return synthetic_source({"kind": "synthetic"} | arguments)


@pytest.fixture(scope="module")
def batches():
    source = generated(rows={"train": 200_000}, **_ARGUMENTS)
    return [chunk.batch for chunk in every_chunk(source, "train")]


@pytest.fixture(scope="module")
def column(batches):
    def read(name):
        arrays = [b.column(name).to_numpy(zero_copy_only=False) for b in batches]
        return np.concatenate(arrays)

    return read


def _first(source, split):
    return next(iter(every_chunk(source, split))).batch


def test_the_same_arguments_give_the_same_rows_and_others_do_not():
    rows = {"train": 3000, "test": 3000}
    first, second = (generated(rows=rows, **_ARGUMENTS) for _ in range(2))
    other = generated(rows=rows, **{**_ARGUMENTS, "seed": 4})
    assert _first(first, "train").equals(_first(second, "train"))
    assert not _first(first, "train").equals(_first(first, "test"))
    assert not _first(first, "train").equals(_first(other, "train"))


def test_a_row_does_not_depend_on_how_many_follow():
    long = generated(rows={"train": 70_000}, **_ARGUMENTS)
    short = generated(rows={"train": 40_000}, **_ARGUMENTS)
    chunks = list(every_chunk(short, "train"))
    assert [c.batch.num_rows for c in chunks] == [32_768, 7232]
    assert [c.rows[0] for c in chunks] == [1, 32_769]
    assert {c.file for c in chunks} == {"synthetic:train"}
    for a, b in itertools.islice(zip(every_chunk(long, "train"), chunks, strict=False), 2):
        assert a.batch.slice(0, b.batch.num_rows).equals(b.batch)


def test_no_chunk_repeats_another(batches):
    values = np.concatenate([b.column("f0").to_numpy()[:1000] for b in batches])
    assert len(values) == 7000
    assert len(np.unique(values)) > 6900


def test_columns_are_those_that_are_named_and_nothing_is_missing_elsewhere(batches):
    source = generated(rows={"train": 10}, **_ARGUMENTS)
    assert source.splits == ["train"]
    names = "f0 f1 f2 f3 f4 f5 c0 c1 c2 l0 l1 l1_weight click conversion p_click p_conversion"
    assert source.columns("train") == names.split()
    assert batches[0].schema.names == names.split()
    types = {field.name: str(field.type) for field in batches[0].schema}
    assert types["f0"] == "float"
    assert types["c0"] == "int32"
    assert types["l0"] == "list<item: int32>"
    assert types["l1_weight"] == "list<item: float>"
    assert types["click"] == types["conversion"] == "int8"
    assert types["p_click"] == types["p_conversion"] == "double"
    nulls = {name for name in names.split() if sum(b.column(name).null_count for b in batches)}
    assert nulls == {"f1", "f3", "f5", "c2", "conversion"}
    missing = np.mean([b.column("f1").null_count / b.num_rows for b in batches])
    assert missing == pytest.approx(0.1, abs=0.01)


def test_lists_have_the_length_asked_for_and_are_sometimes_empty(batches):
    lengths = np.concatenate([np.diff(b.column("l0").offsets) for b in batches])
    assert lengths.mean() == pytest.approx(4, rel=0.03)
    assert 0.05 < (lengths == 0).mean() < 0.2
    for batch in batches:
        values, weights = batch.column("l1"), batch.column("l1_weight")
        assert values.offsets.equals(weights.offsets)
        assert weights.flatten().to_numpy().min() > 0
        assert 0 <= values.flatten().to_numpy().min() <= values.flatten().to_numpy().max() < 100


def test_rates_are_those_asked_for_and_a_conversion_is_known_for_clicks_only(column):
    click, conversion = column("click"), column("conversion")
    assert click.mean() == pytest.approx(0.25, abs=0.01)
    assert np.nanmean(conversion) == pytest.approx(0.3, abs=0.015)
    np.testing.assert_array_equal(np.isnan(conversion), click == 0)
    assert not np.isnan(column("p_conversion")).any()


@pytest.mark.parametrize("task", ["click", "conversion"])
def test_labels_are_drawn_with_their_planted_probabilities(column, task):
    label, p = column(task), column(f"p_{task}")
    known = ~np.isnan(label)
    label, p = label[known], p[known]
    edges = np.quantile(p, np.linspace(0, 1, 11))
    bucket = np.clip(np.searchsorted(edges, p, side="right") - 1, 0, 9)
    for b in range(10):
        local = bucket == b
        expected, result = p[local].mean(), label[local].mean()
        error = np.sqrt(expected * (1 - expected) / local.sum())
        assert abs(result - expected) < 4.5 * error


@pytest.mark.parametrize("task", ["click", "conversion"])
def test_there_is_much_to_learn(column, task):
    label, p = column(task), column(f"p_{task}")
    known = ~np.isnan(label)
    label, p = label[known], p[known]

    def loss(q):
        return -np.mean(np.where(label == 1, np.log(q), np.log(1 - q)))

    best, constant = loss(p), loss(np.full_like(p, label.mean()))
    assert 0.7 < best / constant < 0.9


def test_clicks_and_conversions_are_related_but_not_the_same(column):
    logits = [np.log(p / (1 - p)) for p in (column("p_click"), column("p_conversion"))]
    assert 0.2 < np.corrcoef(logits)[0, 1] < 0.9


def test_ids_follow_a_power_law(column):
    ids = column("c1").astype(np.int64)
    counts = np.bincount(ids, minlength=1000)
    assert len(counts) == 1000
    # Ranks 0 to 9, 10 to 99, 100 to 999. The inverse of the distribution has a closed form.
    edges = np.array([1, 11, 101, 1001.0])
    shares = np.diff(edges**-0.05 / (1001**-0.05 - 1))
    result = [counts[:10].sum(), counts[10:100].sum(), counts[100:].sum()]
    np.testing.assert_allclose(np.array(result) / len(ids), shares, atol=0.006)
    assert 0 < column("c2")[~np.isnan(column("c2"))].max() < 50_000_000


@pytest.mark.parametrize(
    ("exponent", "share"), [(0.0, 0.1), (1.0, np.log(2) / np.log(11)), (2.0, 0.55)]
)
def test_ranks_are_in_range_and_the_first_has_the_share_of_its_power_law(exponent, share):
    uniform = np.linspace(0, 1, 100_000, endpoint=False)
    counts = np.bincount(synthetic._power_law(uniform, 10, exponent), minlength=10)
    assert len(counts) == 10
    assert (np.diff(counts) <= 1).all()
    assert counts[0] / 100_000 == pytest.approx(share, abs=1e-4)


def test_splits_share_the_planted_effects():
    arguments = {"seed": 0, "dense": 0, "categorical": (3,), "ragged": ()}
    source = generated(rows={"a": 5000, "b": 5000}, **arguments)

    def id_probabilities(split):
        batch = _first(source, split)
        ids = batch.column("c0").to_numpy(zero_copy_only=False)
        p = batch.column("p_click").to_numpy()
        return {i: set(p[ids == i].round(12)) for i in range(3)}

    assert id_probabilities("a") == id_probabilities("b")
    assert all(len(p) == 1 for p in id_probabilities("a").values())


# Days, drift, delays, and downsampled negatives.

_START = 1_704_067_200  # 2024-01-01
_DAY = 86_400


def _columns(source, split, *names):
    batches = [chunk.batch for chunk in every_chunk(source, split)]
    return [
        np.concatenate([b.column(n).to_numpy(zero_copy_only=False) for b in batches]) for n in names
    ]


def test_rows_are_in_order_of_time_and_spread_evenly_over_the_days_of_their_split():
    source = generated(
        rows={"train": 70_000, "valid": 1000, "test": 500},
        seed=1,
        dense=1,
        days={"train": 7, "valid": 1, "test": 1},
        first_day={"valid": 7, "test": 8},
    )
    assert source.columns("train")[-2:] == ["p_conversion", "time"]
    for split, first, days in (("train", 0, 7), ("valid", 7, 1), ("test", 8, 1)):
        (time,) = _columns(source, split, "time")
        assert time.dtype == np.int64
        assert (np.diff(time) >= 0).all()
        assert time[0] == _START + first * _DAY
        rows = len(time)
        exact = [_START + first * _DAY + k * days * _DAY // rows for k in (1, rows // 2, rows - 1)]
        assert time[[1, rows // 2, rows - 1]].tolist() == exact
        by_day = np.bincount((time - _START) // _DAY - first)
        assert by_day.tolist() == [rows // days] * days


def test_every_split_has_the_same_days_unless_it_is_said():
    source = generated(rows={"a": 100, "b": 10}, seed=1, dense=1, days=3, first_day={"b": 2})
    result = [_columns(source, split, "time")[0] // _DAY - _START // _DAY for split in "ab"]
    assert [sorted(set(days.tolist())) for days in result] == [[0, 1, 2], [2, 3, 4]]


def test_times_and_delays_change_nothing_else():
    plain = generated(rows={"train": 40_000}, **_ARGUMENTS)
    timed = generated(rows={"train": 40_000}, **_ARGUMENTS, days=2, delay_hours=5)
    assert timed.columns("train") == [*plain.columns("train"), "time", "conversion_time"]
    for a, b in zip(every_chunk(plain, "train"), every_chunk(timed, "train"), strict=True):
        assert b.batch.schema.names == timed.columns("train")
        assert b.batch.select(plain.columns("train")).equals(a.batch)


def test_a_conversion_comes_an_exponential_time_after_its_click():
    source = generated(rows={"train": 100_000}, seed=2, dense=2, days=2, delay_hours=5)
    converted, at, click_at = _columns(source, "train", "conversion", "conversion_time", "time")
    np.testing.assert_array_equal(np.isnan(at), converted != 1)
    delays = (at - click_at)[converted == 1] / 3600
    n = len(delays)
    assert n > 5000
    assert delays.min() >= 0
    assert delays.mean() == pytest.approx(5, abs=4 * 5 / np.sqrt(n))
    for hours in (1, 5, 20):
        assert (delays > hours).mean() == pytest.approx(np.exp(-hours / 5), abs=4 / np.sqrt(n))


def test_the_intercept_moves_by_the_drift_over_a_day():
    signal, drift, days = 1.5, 0.2, 2000
    source = generated(
        rows={"train": days * 8}, seed=5, dense=0, signal=signal, days=days, drift=drift
    )
    p, time = _columns(source, "train", "p_click", "time")
    logit = np.log(p / (1 - p))
    midnights = logit[(time - _START) % _DAY == 0]
    assert len(midnights) == days
    assert p[0] == pytest.approx(0.25, abs=1e-6)  # the requested mean holds on the first day
    steps = np.diff(midnights)
    assert steps.std() == pytest.approx(drift * signal, rel=4 / np.sqrt(2 * days))
    assert abs(np.corrcoef(steps[1:], steps[:-1])[0, 1]) < 4 / np.sqrt(days)
    noons = logit[(time - _START) % _DAY == _DAY // 2]  # halfway between midnights
    np.testing.assert_allclose(noons[:-1], (midnights[1:] + midnights[:-1]) / 2, atol=1e-9)


def test_effects_move_by_the_drift_over_a_day():
    """Compares the effect of each id on the logit, without the drift common to all ids."""
    signal, drift, days = 1.5, 0.2, 200
    source = generated(
        rows={"train": days * 500}, seed=6, dense=0, categorical=(5,), exponent=0, signal=signal,
        days=days, drift=drift,
    )  # fmt: skip
    p, ids, time = _columns(source, "train", "p_click", "c0", "time")
    logit, day = np.log(p / (1 - p)), (time - _START) / _DAY
    at = np.arange(days)
    paths = np.stack([np.interp(at, day[ids == i], logit[ids == i]) for i in range(5)])
    alone = paths - paths.mean(axis=0)
    steps = np.diff(alone, axis=1)
    # The nulls of the column have no effect and reduce the deviation of all ids.
    spread = np.sqrt((steps**2).mean())
    assert spread == pytest.approx(drift * signal, rel=0.25)
    # All ids move along one direction, and far by the end.
    singular = np.linalg.svd(steps, compute_uv=False)
    assert singular[1] < 0.1 * singular[0]
    assert np.abs(alone[:, -1] - alone[:, 0]).max() > 3 * drift * signal


def test_labels_are_drawn_with_the_probabilities_of_their_time():
    source = generated(rows={"train": 120_000}, seed=7, dense=3, days=30, drift=0.3)
    click, p, time = _columns(source, "train", "click", "p_click", "time")
    means = []
    for day in range(0, 30, 3):
        local = (time - _START) // _DAY // 3 == day // 3
        error = np.sqrt((p * (1 - p))[local].sum())
        assert abs((click - p)[local].sum()) < 4 * error
        means.append(p[local].mean())
    assert np.ptp(means) > 0.1  # the click rate drifts


def test_drift_is_the_same_at_the_same_time_in_every_split_and_for_any_number_of_days():
    def paths(split, **days):
        source = generated(rows={"a": 4000, "b": 4000}, seed=3, dense=0, drift=0.5, **days)
        p, time = _columns(source, split, "p_conversion", "time")
        return np.interp(_START + _DAY * np.arange(4, 8, 0.25), time, p)

    whole = paths("a", days=10)
    np.testing.assert_allclose(paths("b", days=10), whole, rtol=1e-3)
    np.testing.assert_allclose(paths("b", days=20, first_day={"b": 2}), whole, rtol=1e-3)


def test_a_share_of_the_negatives_is_kept_and_the_rest_stays_as_it_is():
    plain = generated(rows={"train": 50_000}, **_ARGUMENTS, days=2)
    source = generated(rows={"train": 50_000}, **_ARGUMENTS, days=2, negative_rate=0.2)
    dropped = kept = 0
    for a, b in zip(every_chunk(plain, "train"), every_chunk(source, "train"), strict=True):
        first = int(a.rows[0])
        assert a.batch.take(b.rows - first).equals(b.batch)  # p_click is that of the full traffic
        gone = np.setdiff1d(a.rows, b.rows) - first
        clicks = a.batch.column("click").to_numpy()
        assert not clicks[gone].any()
        dropped += len(gone)
        kept += len(b.rows) - clicks.sum()
    share = kept / (kept + dropped)
    assert share == pytest.approx(0.2, abs=4 * np.sqrt(0.16 / (kept + dropped)))
    ids = source.chunk_ids("train", 0)["c1"].values  # of the full traffic
    np.testing.assert_array_equal(ids, next(iter(every_chunk(plain, "train"))).batch.column("c1"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"click_rate": 1.0}, r"source\.click_rate: must be above 0 and below 1: found 1\.0"),
        ({"missing": -0.5}, r"source\.missing: must be at least 0 and below 1: found -0\.5"),
        (
            {"categorical": (5, 0)},
            r"source\.categorical\[1\]: must be at least 1 and at most 2147483647: found 0",
        ),
        ({"rows": {"train": -1}}, r"source\.rows\.train: must be at least 0: found -1"),
        ({"rows": {}}, r"source\.rows: must be a dict with an entry: found \{\}"),
        ({"rows": 5}, r"source\.rows: must be a dict: found 5"),
        ({"seed": -1}, r"source\.seed: must be at least 0: found -1"),
        ({"dense": -1}, r"source\.dense: must be at least 0: found -1"),
        ({"dense": 1.5}, r"source\.dense: must be a whole number: found 1\.5"),
        ({"categorical": 5}, r"source\.categorical: must be a list: found 5"),
        ({"categorical": ("x",)}, r"source\.categorical\[0\]: must be a whole number: found 'x'"),
        ({"exponent": -1}, r"source\.exponent: must be at least 0: found -1"),
        ({"signal": float("nan")}, r"source\.signal: must be a finite number: found nan"),
        ({"missing": "0.1"}, r"source\.missing: must be a number: found '0\.1'"),
        ({"ragged": [5]}, r"source\.ragged\[0\]: must be a dict: found 5"),
        (
            {"ragged": [{"rows": 0, "mean_length": 1}]},
            r"source\.ragged\[0\]\.rows: must be at least 1 and at most 2147483647: found 0",
        ),
        (
            {"ragged": [{"rows": 5, "mean_length": -1}]},
            r"source\.ragged\[0\]\.mean_length: must be above 0: found -1",
        ),
        (
            {"ragged": [{"rows": 5, "mean_length": 1, "weighted": "yes"}]},
            r"source\.ragged\[0\]\.weighted: must be True or False: found 'yes'",
        ),
        ({"negative_rate": 0}, r"source\.negative_rate: must be above 0 and at most 1: found 0"),
        ({"drift": -1}, r"source\.drift: must be at least 0: found -1"),
        ({"drift": 0.1}, r"source\.drift: must be 0 without days: found 0\.1"),
        ({"delay_hours": 2}, r"source\.delay_hours: must be 0 without days: found 2"),
        ({"days": -1}, r"source\.days: must be at least 0: found -1"),
        ({"days": {"x": 1}}, r"source\.days: must be a number, or one for each of \['train'\]"),
        ({"first_day": {"train": 1}}, r"source\.first_day: must be empty without days"),
        (
            {"days": 1, "first_day": {"x": 1}},
            r"source\.first_day: must be a dict of splits among \['train'\]: found \{'x': 1\}",
        ),
        (
            {"rows": {"a": 1, "b": 1}, "days": {"a": 1, "b": 0}},
            r"source\.days: must be 0 for all splits or for none",
        ),
        ({"ragged": [{"rows": 5}]}, r"source\.ragged\[0\]\.mean_length is missing"),
        (
            {"ragged": [{"rows": 5, "mean_length": 1, "x": 1}]},
            r"source\.ragged\[0\]\.x: must be a field",
        ),
    ],
)
def test_numbers_out_of_range_are_rejected(change, message):
    with pytest.raises(InputError, match=message):
        generated(**({"rows": {"train": 1}, "seed": 0} | change))


_HISTORY = {"history_items": 60, "history_categories": 6, "history_length": 5}


def test_histories_are_aligned_and_of_the_past_and_leave_other_columns_as_they_are():
    source = generated(rows={"train": 3000}, days=2, **_ARGUMENTS, **_HISTORY)
    batch, plain = _first(source, "train"), generated(rows={"train": 3000}, days=2, **_ARGUMENTS)
    assert batch.schema.names == source.columns("train")
    for name in ("f1", "c2", "l1", "time"):
        assert batch.column(name).equals(_first(plain, "train").column(name))
    rows = batch.to_pydict()
    assert max(map(len, rows["history_item"])) == 5
    assert set(rows["item"]) == set(range(60))
    for i in range(3000):
        items, times = rows["history_item"][i], rows["history_time"][i]
        assert rows["history_category"][i] == [item % 6 for item in items]
        assert rows["category"][i] == rows["item"][i] % 6
        assert times == sorted(times)
        assert len(times) == len(items)
        assert all(time < rows["time"][i] for time in times)
    ids = source.chunk_ids("train", 0)
    for name in ("item", "category", "history_item", "history_category"):
        column = batch.column(name)
        values = column.flatten() if name.startswith("history") else column
        assert ids[name].values.tolist() == values.to_pylist()


def test_the_similarity_to_the_history_explains_the_share_of_the_logits_that_is_asked_for():
    source = generated(rows={"train": 30_000}, history_share=0.6, **_ARGUMENTS, **_HISTORY)
    rows = _first(source, "train").to_pydict()
    pairs = zip(rows["category"], rows["history_category"], strict=True)
    similarity = np.log1p([past.count(category) for category, past in pairs])
    p = np.array(rows["p_click"])
    correlation = np.corrcoef(similarity, np.log(p / (1 - p)))[0, 1]
    np.testing.assert_allclose(correlation**2, 0.6, atol=0.03)


def test_too_few_items_for_their_categories_are_rejected():
    with pytest.raises(InputError, match=r"history_items: must be 0, or at least .*=6: found 5"):
        generated(rows={"train": 10}, seed=1, history_items=5, history_categories=6)
