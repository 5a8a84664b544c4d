"""Values from raw text to the vectors that a model reads, compared with plain Python."""

import collections
import csv
import math

import numpy as np
import pytest
import xxhash
from sharded import lookup, new_tables, rows_by_table

from jaxrank import mesh as meshes
from jaxrank.data.batches.pipeline import EvaluationBatches
from jaxrank.data.prepare.passes import prepare
from jaxrank.embedding import Embedding, make_row_optimizer
from jaxrank.features import MAX_GROUP
from jaxrank.layout import layout

MIN_COUNT = 40
FEATURES = dict(
    tasks=[dict(name="click", label="click", weight="w")],
    dense=[dict(columns="age", standardize=True, missing_indicator=True)],
    categorical=[
        dict(columns="item", table="item", min_count=MIN_COUNT),
        dict(columns="site", encoding="hash", rows=20, salt="s:"),
        dict(columns="price", encoding="bucket", boundaries=[0, 1.5, 10]),
        dict(columns="slot", encoding="integer", rows=6),
    ],
    ragged=[
        dict(columns="seen", table="item", weights="seen_w", combiner="mean", min_count=MIN_COUNT),
        dict(columns="liked", table="item", combiner="sqrtn", min_count=MIN_COUNT),
        dict(columns="tags", encoding="hash", rows=9, combiner="sum"),
    ],
)
NAMES = ["click", "w", "age", "item", "site", "price", "slot", "seen", "seen_w", "liked", "tags"]
ROWS = 700


def raw(seed, new):
    """Rows of text, in which every kind of value may be missing."""
    rng = np.random.default_rng(seed)

    def some(value):
        return "" if rng.random() < 0.15 else str(value)

    def items(mean):
        return [f"{new}{i}" for i in rng.zipf(1.4, rng.poisson(mean)) if i < 60]

    rows = []
    for _ in range(ROWS):
        seen = items(3)
        weights = [str(rng.integers(0, 9) / 4) for _ in seen]
        rows.append(
            [some(rng.integers(0, 2)), str(rng.integers(0, 4) / 2), some(rng.integers(18, 80)),
             some((items(5) or ["only"])[0]), some(f"site{rng.integers(0, 9)}"),
             some(rng.normal() * 6), some(rng.integers(0, 6)), "|".join(seen), "|".join(weights),
             "|".join(items(1)), "|".join(f"t{i}" for i in rng.integers(0, 30, rng.poisson(2)))]
        )  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("raw")
    splits = {"train": raw(0, ""), "test": raw(1, "") + raw(2, "new")}
    for name, rows in splits.items():
        with open(path / f"{name}.csv", "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([NAMES, *rows])
    source = dict(kind="csv", files={name: str(path / f"{name}.csv") for name in splits})
    return prepare(FEATURES, source, path / "store", report=lambda _: None), splits


@pytest.fixture(scope="module")
def batches(data):
    """All examples of each split, as one batch with the vectors that were looked up for it."""
    store, splits = data
    lay = layout(store.schema, {table.name: 8 for table in store.schema.tables})
    mesh = meshes.make_mesh(devices=1)
    embedding = Embedding(
        lay,
        mesh,
        row_optimizer=make_row_optimizer("sgd"),
        room={"dim8": 1.0},
        init_std=1.0,
        l2=0.0,
        l2_scope="read",
        clip_norm=0.0,
    )
    tables = new_tables(embedding)
    result = {}
    for name, rows in splits.items():
        size = -(-len(rows) // MAX_GROUP) * MAX_GROUP
        ((batch, count),) = EvaluationBatches(store.split(name), lay, batch_size=size)
        assert count == len(rows)
        result[name] = batch, lookup(embedding, tables, batch)[0]["dim8"]
    return result, rows_by_table(embedding, tables)


def split_rows(data, name):
    return [dict(zip(NAMES, row, strict=True)) for row in data[1][name]]


def parts(text):
    return text.split("|") if text else []


class ByHand:
    """Vectors of raw values, given the tables."""

    def __init__(self, train, tables):
        self.tables = tables
        counts = collections.Counter()
        for row in train:
            counts.update([row["item"]] * bool(row["item"]) + parts(row["seen"]))
            counts.update(parts(row["liked"]))
        known = sorted((v for v in counts if counts[v] >= MIN_COUNT), key=lambda v: (-counts[v], v))
        self.item_rows = {value: 2 + i for i, value in enumerate(known)}

    def item(self, value):
        return self.tables["item"][self.item_rows.get(value, 1) if value else 0]

    def hashed(self, table, rows, value, salt=""):
        row = 2 + xxhash.xxh64_intdigest((salt + value).encode()) % (rows - 2) if value else 0
        return self.tables[table][row]

    def ids(self, row):
        bucket = 2 + sum(float(row["price"]) >= b for b in (0, 1.5, 10)) if row["price"] else 0
        return [
            self.item(row["item"]),
            self.hashed("site", 20, row["site"], "s:"),
            self.tables["price"][bucket],
            self.tables["slot"][int(row["slot"])] if row["slot"] else np.zeros(8),
        ]

    def lists(self, row):
        seen = [self.item(v) for v in parts(row["seen"])]
        weights = [float(w) for w in parts(row["seen_w"])]
        liked = [self.item(v) for v in parts(row["liked"])]
        mean, total = np.zeros(8), sum(weights)
        for vector, weight in zip(seen, weights, strict=True):
            mean += vector * weight / total if total else 0
        return [
            mean,
            sum(liked, np.zeros(8)) / math.sqrt(max(len(liked), 1)),
            sum((self.hashed("tags", 9, v) for v in parts(row["tags"])), np.zeros(8)),
        ]


@pytest.mark.parametrize("split", ["train", "test"])
def test_vectors_are_those_of_the_raw_values(data, batches, split):
    result, tables = batches
    by_hand = ByHand(split_rows(data, "train"), tables)
    rows = split_rows(data, split)
    _, vectors = result[split]
    ids, lists = np.asarray(vectors["ids"]), np.asarray(vectors["lists"])
    np.testing.assert_allclose(ids[: len(rows)], [by_hand.ids(r) for r in rows], atol=1e-6)
    np.testing.assert_allclose(lists[: len(rows)], [by_hand.lists(r) for r in rows], atol=1e-5)
    items = [r["item"] for r in rows if r["item"]]
    unknown = sum(v not in by_hand.item_rows for v in items)
    statistics = data[0].split(split).statistics
    assert statistics["categorical"]["item"]["unknown"] == unknown > 0
    assert statistics["categorical"]["item"]["missing"] == len(rows) - len(items) > 0
    listed = [v for r in rows for v in parts(r["seen"])]
    assert statistics["ragged"]["seen"]["unknown"] == sum(
        v not in by_hand.item_rows for v in listed
    )


def test_labels_weights_and_floats_are_those_of_the_raw_values(data, batches):
    train = [float(r["age"]) for r in split_rows(data, "train") if r["age"]]
    mean, std = np.mean(train), np.std(train)
    for split in ("train", "test"):
        batch, rows = batches[0][split][0], split_rows(data, split)
        n = len(rows)
        labels = [float(r["click"] or 0) for r in rows]
        weights = [float(r["w"]) if r["click"] else 0 for r in rows]
        assert batch.labels[:n, 0].tolist() == labels
        assert batch.weights[:n, 0].tolist() == weights
        assert not batch.weights[n:].any()  # fills the batch
        ages = [(float(r["age"]) - mean) / std if r["age"] else 0 for r in rows]
        np.testing.assert_allclose(batch.dense[:n, 0], ages, atol=1e-5)
        assert batch.dense[:n, 1].tolist() == [float(not r["age"]) for r in rows]
        assert batch.logit_correction.shape == (len(batch.labels), 0)


def test_the_items_of_a_list_and_of_an_id_column_are_the_same_rows(data):
    (shared,) = [t for t in data[0].schema.tables if t.name == "item"]
    features = [
        f for f in (*data[0].schema.categorical, *data[0].schema.ragged) if f.table == "item"
    ]
    assert [f.name for f in features] == ["item", "seen", "liked"]
    assert len(data[0].vocabulary("item")[0]) == shared.rows - 2
