"""Files of pre-trained vectors in any form hold the same vectors, and errors name their place."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxrank.data.vectors import read
from jaxrank.data.vectors.read import open_vectors
from jaxrank.errors import InputError

VALUES = ["i7", "ünï", '"quoted"', "12", "a,b"]
VECTORS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
LINES = [
    " ".join([value, *map(repr, row.tolist())]) for value, row in zip(VALUES, VECTORS, strict=True)
]


def lists(vectors=VECTORS):
    return pa.array([row.tolist() for row in vectors], pa.list_(pa.float64()))


def fixed():
    return pa.FixedSizeListArray.from_arrays(pa.array(VECTORS.ravel()), 3)


def parquet(columns):
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def text(*lines):
    return "\n".join([*lines, ""]).encode()


FORMS = {
    "lists": parquet({"item": VALUES, "embedding": lists()}),
    "fixed-size lists": parquet({"embedding": fixed(), "item": VALUES}),
    "named columns": parquet({"vector": fixed(), "lists": lists(), "value": VALUES}),
    "text": text(*LINES),
    "first line with counts": text("5 3", *LINES),
    "spaces at the ends": text("5 3", *(f"{line} " for line in LINES)),
    "tabs": text(*(line.replace(" ", "\t") for line in LINES)),
    "Windows": text(*LINES).replace(b"\n", b"\r\n"),
    "spaces at the ends of Windows": text("5 3", *(f"{line} " for line in LINES)).replace(
        b"\n", b"\r\n"
    ),
    "a space at the end": text(*LINES)[:-1] + b" ",
    "empty lines": text("5 3", LINES[0], "", *LINES[1:], "", ""),
    "no end": text(*LINES)[:-1],
    "gzip": gzip.compress(text(*LINES)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("together", [2, 100])
def test_each_form_holds_the_same_vectors(form, together, tmp_path, monkeypatch):
    monkeypatch.setattr(read, "_ROWS", together)
    monkeypatch.setattr(read, "_TEXT_BYTES", 32 * together)
    (tmp_path / "vectors").write_bytes(FORMS[form])
    opened = open_vectors(str(tmp_path / "vectors"), "field")
    batches = list(opened.batches())
    assert opened.width == 3
    assert [v for b in batches for v in b.values.values.to_pylist()] == VALUES
    np.testing.assert_array_equal(np.concatenate([b.vectors for b in batches]), VECTORS)
    assert batches[0].vectors.dtype == np.float32


def test_the_files_of_a_directory_are_read_in_order(tmp_path):
    for i in range(5):
        (tmp_path / f"part-{i}").write_bytes(text(LINES[i]))
    batches = open_vectors(str(tmp_path), "field").batches()
    assert [v for b in batches for v in b.values.values.to_pylist()] == VALUES


INVALID = {
    "a short line": (text(*LINES[:2], "x 1 2"), ["row 3", "a value and 3", "3 words"]),
    "a value with a space": (text("1 3", "new york 1 2 3"), ["row 2", "5 words"]),
    "a word": (text(LINES[0], "", "x 1 two 3"), ["row 3", "'two'"]),
    "not a number": (text(LINES[0], "x 1 nan 3"), ["row 2", "'nan'"]),
    "beyond float32": (text(LINES[0], "x 1 2 1e39"), ["row 2", "'1e39'"]),
    "not UTF-8": (text(LINES[0]) + b"\xff 1 2 3\n", ["row 2", "UTF-8"]),
    "fewer lines than the first one says": (text("6 3", *LINES), ["6 vectors", "found 5"]),
    "a CSV file": (text("item,v", "a,1"), ["row 1", "'item,v'"]),
    "a NumPy file": (b"\x93NUMPY\x01\x00v\x00", ["a NumPy file: write it as Parquet"]),
    "an empty file": (b"", ["row 1", "an empty line"]),
    "a short list": (
        parquet({"item": VALUES[:2], "v": pa.array([[1.0, 2.0], [1.0]])}),
        ["row 2, column v", "have 2 numbers", "found 1"],
    ),
    "a missing list": (
        parquet({"item": VALUES[:2], "v": pa.array([[1.0, 2.0], None])}),
        ["row 2, column v", "have 2 numbers", "found 0"],
    ),
    "a missing number": (
        parquet({"item": VALUES[:2], "v": pa.array([[1.0, 2.0], [1.0, None]])}),
        ["row 2, column v", "float32", "an empty value"],
    ),
    "three columns": (
        parquet({"item": VALUES, "v": fixed(), "w": fixed()}),
        ["'value' and 'vector'", "w (list<"],
    ),
    "no list": (parquet({"item": VALUES, "v": [1.0] * 5}), ["v (double)"]),
    "no rows": (parquet({"item": VALUES[:0], "v": lists()[:0]}), ["at least one vector"]),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_file_is_rejected(name, tmp_path, monkeypatch):
    monkeypatch.setattr(read, "_ROWS", 1)
    monkeypatch.setattr(read, "_TEXT_BYTES", 16)
    content, named = INVALID[name]
    path = tmp_path / "vectors"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        list(open_vectors(str(path), "field").batches())
    assert [part for part in [str(path), *named] if part not in str(error.value)] == []


def test_files_that_a_log_has_removed_are_not_read(tmp_path):
    for name in ("old", "new"):
        table = pa.table({"value": [name], "vector": [[1.0, 2.0]]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    (tmp_path / "_delta_log").mkdir()
    for version, action in enumerate(("add", "remove")):
        lines = [json.dumps({action: {"path": "old.parquet"}})]
        lines += [json.dumps({"add": {"path": "new.parquet"}})] * version
        (tmp_path / "_delta_log" / f"{version:020d}.json").write_text("\n".join(lines))
    batches = open_vectors(str(tmp_path), "embedding.init_from.item").batches()
    assert [batch.values.values.to_pylist() for batch in batches] == [["new"]]
