"""Public sets of the benchmark of defaults, from files as they are published."""

import csv

import pytest

from benchmarks.quality.public_sets import Further, further
from jaxrank.errors import InputError

SOURCE = Further(
    "*.txt", label="bought", positive=">1", dense=("age",), left_out=("paid",), delimiter=";"
)
HEADER = "age; city; bought; paid\n"


def rows_of(path):
    with open(path, newline="") as lines:
        return [tuple(row.values()) for row in csv.DictReader(lines)]


def test_the_splits_have_all_rows_once_and_other_ones_for_another_seed(tmp_path):
    cells = [(str(i), f"city {i % 7}", (">1", "<=1")[i % 3 > 0], str(i)) for i in range(60)]
    for name, part in (("a.txt", cells[:25]), ("b.txt", cells[25:])):
        (tmp_path / name).write_text(HEADER + "".join("; ".join(row) + "\n" for row in part))
    drawn = []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        config = further(SOURCE, tmp_path, folder, seed)
        splits = {name: rows_of(path) for name, path in config.source.files.items()}
        assert {name: len(rows) for name, rows in splits.items()} == dict(train=42, valid=9, test=9)
        expected = [(age, city, str(int(y == ">1")), paid) for age, city, y, paid in cells]
        assert sorted(sum(splits.values(), [])) == sorted(expected)
        drawn.append(splits["test"])
    assert drawn[0] != drawn[1]
    features = config.features
    assert [entry["columns"] for entry in features.dense] == ["age"]
    assert [entry["columns"] for entry in features.categorical] == ["city"]
    assert [entry["label"] for entry in features.tasks] == ["bought"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"must contain \*\.txt: found none in .*" + tmp_path.name):
        further(SOURCE, tmp_path, tmp_path, 0)
