"""Generated data: reproducible, of the shape asked for, and labelled by its planted truth."""

import itertools

import numpy as np
import pytest
from raw import every_chunk

from jaxrank.data import synthetic
from jaxrank.data.synthetic import Source
from jaxrank.errors import InputError

_ARGUMENTS = {
    "seed": 3,
    "floats": 6,
    "ids": (7, 1000, 50_000_000),
    "lists": (
        {"rows": 5000, "mean_length": 4},
        {"rows": 100, "mean_length": 2.5, "weighted": True},
    ),
}


@pytest.fixture(scope="module")
def batches():
    source = Source(rows={"train": 200_000}, **_ARGUMENTS)
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
    one, two = (Source(rows=rows, **_ARGUMENTS) for _ in range(2))
    other = Source(rows=rows, **{**_ARGUMENTS, "seed": 4})
    assert _first(one, "train").equals(_first(two, "train"))
    assert not _first(one, "train").equals(_first(one, "test"))
    assert not _first(one, "train").equals(_first(other, "train"))


def test_a_row_does_not_depend_on_how_many_follow():
    long = Source(rows={"train": 70_000}, **_ARGUMENTS)
    short = Source(rows={"train": 40_000}, **_ARGUMENTS)
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
    source = Source(rows={"train": 10}, **_ARGUMENTS)
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
        mine = bucket == b
        expected, found = p[mine].mean(), label[mine].mean()
        error = np.sqrt(expected * (1 - expected) / mine.sum())
        assert abs(found - expected) < 4.5 * error


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
    # Ranks 0 to 9, 10 to 99, 100 to 999: the inverse of the distribution is closed.
    edges = np.array([1, 11, 101, 1001.0])
    shares = np.diff(edges**-0.05 / (1001**-0.05 - 1))
    found = [counts[:10].sum(), counts[10:100].sum(), counts[100:].sum()]
    np.testing.assert_allclose(np.array(found) / len(ids), shares, atol=0.006)
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
    arguments = {"seed": 0, "floats": 0, "ids": (3,), "lists": ()}
    source = Source(rows={"a": 5000, "b": 5000}, **arguments)

    def by_id(split):
        batch = _first(source, split)
        ids = batch.column("c0").to_numpy(zero_copy_only=False)
        p = batch.column("p_click").to_numpy()
        return {i: set(p[ids == i].round(12)) for i in range(3)}

    assert by_id("a") == by_id("b")
    assert all(len(p) == 1 for p in by_id("a").values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"click_rate": 1.0}, r"source\.click_rate: must be in \(0, 1\): found 1\.0"),
        ({"missing": -0.5}, r"source\.missing: must be in \[0, 1\): found -0\.5"),
        ({"ids": (5, 0)}, r"source\.ids: must be in \[1, 2\*\*31\): found \(5, 0\)"),
        ({"rows": {"train": -1}}, r"source\.rows\.train: must be a whole number, not.*: found -1"),
        ({"rows": {}}, r"source\.rows: must be a dict of split names and numbers: found \{\}"),
        ({"rows": 5}, r"source\.rows: must be a dict of split names and numbers: found 5"),
        ({"seed": -1}, r"source\.seed: must be a whole number, not negative: found -1"),
        ({"floats": -1}, r"source\.floats: must be a whole number, not negative: found -1"),
        ({"floats": 1.5}, r"source\.floats: must be a whole number, not negative: found 1\.5"),
        ({"ids": 5}, r"source\.ids: must be a list: found 5"),
        ({"ids": ("x",)}, r"source\.ids: must be in \[1, 2\*\*31\): found \('x',\)"),
        ({"exponent": -1}, r"source\.exponent: must be a number, not negative: found -1"),
        ({"signal": float("nan")}, r"source\.signal: must be a number, not negative: found nan"),
        ({"missing": "0.1"}, r"source\.missing: must be in \[0, 1\): found '0\.1'"),
        ({"lists": [5]}, r"source\.lists\[0\]: must be a dict: found 5"),
        (
            {"lists": [{"rows": 0, "mean_length": 1}]},
            r"source\.lists\[0\]\.rows: must be in \[1, 2\*\*31\): found 0",
        ),
        (
            {"lists": [{"rows": 5, "mean_length": -1}]},
            r"source\.lists\[0\]\.mean_length: must be a positive number: found -1",
        ),
        (
            {"lists": [{"rows": 5, "mean_length": 1, "weighted": "yes"}]},
            r"source\.lists\[0\]\.weighted: must be True or False: found 'yes'",
        ),
        ({"lists": [{"rows": 5}]}, r"source\.lists\[0\]: must have rows, mean_length"),
        ({"lists": [{"rows": 5, "mean_length": 1, "x": 1}]}, r"source\.lists\[0\].*'x'"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        Source(**({"rows": {"train": 1}, "seed": 0} | change))
