"""A model reads some of the features of a store, in rows of its own tables."""

import dataclasses
import pickle

import numpy as np
import pytest

from jaxrank.data.examples import Examples
from jaxrank.data.spec.skip import drop_features
from jaxrank.data.store.reader import open_store
from jaxrank.data.store.view import View
from jaxrank.errors import InputError
from jaxrank.features import PAD


def names(schema):
    return [f.name for part in (schema.dense, schema.categorical, schema.ragged) for f in part]


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ((), "f0 f0:missing f1 f1:missing f2 f2:missing c0 c1 l0 l1"),
        (("f1",), "f0 f0:missing f2 f2:missing c0 c1 l0 l1"),
        (("f1:missing",), "f0 f0:missing f1 f2 f2:missing c0 c1 l0 l1"),
        (("f*", "c1", "l1"), "c0 l0"),
        (("l?",), "f0 f0:missing f1 f1:missing f2 f2:missing c0 c1"),
    ],
)
def test_a_store_without_features_has_the_columns_of_the_others(store, skip, left):
    whole = open_store(store)
    part = whole.selected(drop_features(whole.schema, skip))
    assert names(part.schema) == left.split()
    used = {f.table for f in (*part.schema.categorical, *part.schema.ragged)}
    assert {t.name for t in part.schema.tables} == used
    split, stored = pickle.loads(pickle.dumps(part.split("train"))), whole.split("train")
    block, full = split.read_block(0), stored.read_block(0)
    assert split.fingerprint == stored.fingerprint
    dense = [i for i, f in enumerate(whole.schema.dense) if f in part.schema.dense]
    assert np.array_equal(block.dense, full.dense[:, dense])
    ids = [i for i, f in enumerate(whole.schema.id_columns) if f in part.schema.id_columns]
    assert np.array_equal(block.ids, full.ids[:, ids])
    kept = [i for i, f in enumerate(whole.schema.ragged) if f in part.schema.ragged]
    values, lengths = full.list_values, full.list_lengths.reshape(-1).tolist()
    lists = np.split(values, np.cumsum(lengths)[:-1])
    expected = [lists[n * 2 + i] for n in range(full.rows) for i in kept]
    assert block.list_values.tolist() == [row for rows in expected for row in rows.tolist()]
    assert (block.list_weights is None) == (1 not in kept)
    assert np.array_equal(split.list_lengths(0), full.list_lengths[:, kept])
    means = stored.statistics["list_lengths"]["mean"]
    assert split.statistics["list_lengths"]["mean"] == [means[i] for i in kept]
    assert list(split.statistics["ragged"]) == [f"l{i}" for i in kept]


def test_a_store_without_lists_has_statistics_without_lists(store):
    schema = dataclasses.replace(open_store(store).schema, ragged=())
    stored = {"rows": 7, "list_lengths": {"mean": [], "covariance": []}}  # as JSON has it
    view = View(schema, drop_features(schema, ("c1",)))
    assert view.statistics(stored)["list_lengths"] == {"mean": [], "covariance": []}


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (
            ("c2",),
            "features.skip: 'c2' must match a feature of the data; the nearest are .*'c1', 'c0'",
        ),
        (("*",), r"must leave a feature to train on: found \['\*'\], which match all 10 features"),
    ],
)
def test_names_that_match_nothing_and_nothing_left_are_refused(store, skip, message):
    with pytest.raises(InputError, match=message):
        drop_features(open_store(store).schema, skip)


def test_rows_of_ids_and_lists_are_mapped_by_table(store):
    schema = open_store(store).schema
    wanted = dataclasses.replace(schema, categorical=schema.categorical[::-1], dense=())
    rows = np.arange(300, dtype=np.int32)[::-1].copy()
    view = View(schema, wanted, {"c0": rows, "l1": rows[:30] + 1000})
    result = view.examples(
        Examples(
            dense=np.zeros((2, 6), np.float32),
            ids=np.array([[5, 6], [PAD, 7]], np.int32),
            list_lengths=np.array([[1, 2], [0, 1]], np.int32),
            list_values=np.array([9, 0, 1, PAD], np.int32),
            list_weights=np.ones(4, np.float32),
            labels=np.zeros((2, 2), np.float32),
        )
    )
    assert result.ids.tolist() == [[6, 294], [7, PAD]]
    assert result.list_values.tolist() == [9, 1299, 1298, PAD]
    with pytest.raises(InputError, match="0 to 9: found 294"):
        View(schema, schema, {"c0": rows[:10]}).examples(
            dataclasses.replace(result, ids=result.ids[:, ::-1])
        )
