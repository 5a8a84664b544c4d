"""A vector belongs to the row that its value has in prepared data, under each encoding."""

import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxrank.data.prepare.passes import prepare
from jaxrank.data.vectors import read, rows
from jaxrank.data.vectors.read import open_vectors
from jaxrank.data.vectors.rows import TableVectors
from jaxrank.errors import InputError

RAW = [3, 5, 8, 5, 9, 3, 5, 8]  # 9 is unknown to the vocabulary, and out of range
FEATURES = {
    "vocabulary": dict(min_count=2),
    "hash": dict(encoding="hash", rows=1000, salt="s"),
    "integer": dict(encoding="integer", rows=9, on_bad_id="oov"),
}


def prepared(folder, features, **options):
    """Prepares a column for each feature, with ids that are numbers."""
    columns = {column: RAW for f in features for column in f["columns"]}
    pyarrow.parquet.write_table(pa.table(columns | {"click": [0, 1] * 4}), folder / "raw")
    spec = dict(tasks=[dict(name="click", label="click")], categorical=features)
    source = dict(kind="parquet", files=dict(train=str(folder / "raw")))
    return prepare(spec, source, folder / "store", report=str, **options)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    features = [dict(columns=[name], **fields) for name, fields in FEATURES.items()]
    return prepared(tmp_path_factory.mktemp("rows"), features)


def table_vectors(folder, store, table, values):
    """Returns vectors whose only number is the value, or the place of a value that is a text."""
    numbers = [float(v) if str(v).isdigit() else i for i, v in enumerate(values)]
    columns = {"id": values, "v": [[number] for number in numbers]}
    pyarrow.parquet.write_table(pa.table(columns), folder / "vectors")
    opened = open_vectors(str(folder / "vectors"), "field")
    return TableVectors(opened, store.table(table), store)


def by_row(vectors):
    batches = [
        zip(rows.tolist(), values[:, 0].tolist(), strict=True) for rows, values in vectors.batches()
    ]
    return {row: number for batch in batches for row, number in batch}


@pytest.mark.parametrize("values", [[8, 5, 77, 9, 3], ["8", "5", "77", "9", "3"]], ids=str)
@pytest.mark.parametrize("table", FEATURES)
def test_a_vector_is_of_the_row_of_its_value(table, values, store, tmp_path):
    vectors = table_vectors(tmp_path, store, table, values)
    numbers = by_row(vectors)
    encoded = store.split("train").read_block(0).ids[:, list(FEATURES).index(table)].tolist()
    assert len(set(encoded)) == 4
    shared = table != "hash"  # the row of 9 has other ids too
    for value, row in zip(RAW, encoded, strict=True):
        assert numbers.get(row) == (None if shared and value == 9 else value)
    assert len(numbers) == vectors.has_vector.sum() == (3 if shared else 5)
    assert vectors.num_values == {"vocabulary": 3, "hash": 998, "integer": 9}[table]


def test_the_lookup_of_a_vocabulary_is_built_once_and_has_no_equal_hashes(
    store, tmp_path, monkeypatch
):
    """With seed 0 two values have one hash."""
    hashed, hashes = [], rows._hashes

    def counted(values, seed):
        hashed.append((len(values), seed))
        result = hashes(values, seed)
        return result if seed else result % 2

    monkeypatch.setattr(rows, "_hashes", counted)
    monkeypatch.setattr(read, "_ROWS", 2)
    vectors = table_vectors(tmp_path, store, "vocabulary", ["8", "5", "77", "9", "3"])
    assert sorted(by_row(vectors).values()) == [3, 5, 8]
    assert hashed == [(3, 0), (3, 1), (2, 1), (2, 1), (1, 1)]


def test_of_values_with_one_hash_the_first_has_its_vector(tmp_path):
    store = prepared(tmp_path, [dict(columns=["id"], encoding="hash", rows=4)])
    vectors = table_vectors(tmp_path, store, "id", [5, 3, 8, 6, 7])
    numbers = by_row(vectors)
    encoded = dict(zip(RAW, store.split("train").read_block(0).ids[:, 0].tolist(), strict=True))
    assert numbers[encoded[5]] == 5
    assert vectors.shared == 5 - len(numbers) > 0


INVALID = {
    "a value twice": ("vocabulary", ["5", "3", "5"], ["row 3, column id", "once", "'5'"]),
    "a row twice": ("integer", ["5", "3", "05"], ["row 3, column id", "once", "'05'"]),
    "no value": ("vocabulary", ["5", None], ["row 2, column id", "an empty value"]),
    "no number": ("integer", ["5", "five"], ["row 2, column id", "a row number", "'five'"]),
    "no value of the table": (
        "vocabulary",
        ["ad_5", "ad_3"],
        ["none of its 3 values", "['5', '3', '8']", "['ad_5', 'ad_3']"],
    ),
    "no row of the table": ("integer", [100], ["none of its 9 values", "['100']"]),
}


@pytest.mark.parametrize("name", INVALID)
def test_values_without_a_meaning_are_rejected(name, store, tmp_path):
    table, values, named = INVALID[name]
    with pytest.raises(InputError) as error:
        by_row(table_vectors(tmp_path, store, table, values))
    assert [part for part in [str(tmp_path), *named] if part not in str(error.value)] == []


def test_values_that_were_hashed_with_a_key_or_several_salts_are_rejected(tmp_path):
    (tmp_path / "key").write_bytes(b"k" * 16)
    hashed = dict(encoding="hash", rows=99, table="t")
    features = [
        dict(columns=["a"]),
        dict(columns=["b"], salt="b", **hashed),
        dict(columns=["c"], salt="c", **hashed),
    ]
    store = prepared(tmp_path, features, hash_key_file=str(tmp_path / "key"))
    for table, named in (("a", "--hash-key-file"), ("t", "`salt`")):
        with pytest.raises(InputError, match=named):
            table_vectors(tmp_path, store, table, ["5"])
