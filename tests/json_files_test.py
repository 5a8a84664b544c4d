"""One encoder makes JSON of every value, and files of it name themselves where they are invalid."""

import dataclasses
import datetime
import decimal
import json
import math
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrank import json_files
from jaxrank.checkpoints import record
from jaxrank.data.chunk import Part
from jaxrank.data.files import File
from jaxrank.data.prepare.units import WorkUnit
from jaxrank.data.store import manifest
from jaxrank.errors import InputError


class Pair(NamedTuple):
    a: int
    b: tuple[float, ...]


@dataclasses.dataclass
class Record:
    pair: Pair
    path: Path


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Record(Pair(1, (2.0, 3.0)), Path("x/y")), {"pair": {"a": 1, "b": [2, 3]}, "path": "x/y"}),
        (np.float32(0.5), 0.5),
        (np.int64(2**40), 2**40),
        (np.array([[1, 2], [3, 4]], np.int32), [[1, 2], [3, 4]]),
        (jnp.float32(0.25), 0.25),
        (jnp.arange(3), [0, 1, 2]),
        (MappingProxyType({"é": np.bool_(True)}), {"é": True}),
        (datetime.datetime(2024, 5, 1, 2), "2024-05-01 02:00:00"),
        (datetime.date(2024, 5, 1), "2024-05-01"),
        (decimal.Decimal("1.50"), "1.50"),
        (b"\0a", "b'\\x00a'"),
        (None, None),
    ],
)
def test_every_value_is_encoded(value, expected):
    assert json.loads(json_files.to_text({"x": value})) == {"x": expected}
    assert json_files.plain(value) == expected


@pytest.mark.parametrize(
    ("non_finite", "expected"),
    [
        ("number", "[NaN, Infinity, -Infinity, 1.5]"),
        ("null", "[null, null, null, 1.5]"),
        ("text", '["nan", "inf", "-inf", 1.5]'),
    ],
)
@pytest.mark.parametrize("make", [list, tuple, np.array, jnp.array])
def test_numbers_that_are_not_finite_become_what_is_asked_for(non_finite, expected, make):
    values = make([math.nan, math.inf, -math.inf, 1.5])
    assert json_files.to_text(values, non_finite=non_finite) == expected


def test_a_value_that_json_has_no_form_for_is_an_error():
    with pytest.raises(TypeError, match="found object"):
        json_files.to_text({"x": [object()]})


def test_a_file_is_read_as_it_was_written(tmp_path):
    tree = {"b": [1, {"c": "é"}], "a": math.inf}
    json_files.write(tmp_path / "file.json", tree)
    assert (tmp_path / "file.json").read_text() == json.dumps(tree, indent=1) + "\n"
    assert json_files.read(tmp_path / "file.json") == tree
    assert list(json_files.read(tmp_path / "file.json")) == ["b", "a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not readable as JSON"),
        (b"\xff", "not readable as JSON"),
        (b"[" * 100_000, "not readable as JSON"),
        (b"[3]", r"must hold a JSON object, as jaxrank wrote it: found \[3\]"),
        (None, "cannot be read: .*No such file"),
    ],
)
def test_an_error_names_the_file(tmp_path, content, message):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"{path}: {message}.* Prepare the data again.$"):
        json_files.read(path, " Prepare the data again.")


def test_the_fingerprint_of_a_unit_is_that_of_earlier_versions():
    parts = (Part("train", "a.csv", 0, 7), Part("train", "b.csv", 2, 1 << 40))
    unit = WorkUnit("train", 3, parts, 99, (File("a.csv", 70, "123"), File("b.csv", -1, "")))
    settings = [{"b": (1, 2.5), "a": "é"}, Path("x/y"), None, True]
    assert unit.fingerprint(settings, "skip", ["v", 3]) == "e20f1a6194f910f5646fd7bc11d9b615"


# Files as version 0.1.0 wrote them, with one encoder and one checksum for each.
RECORD = (
    '{"days": [], "spikes": {"first": [0.5, Infinity], "mean": 0.1}, "b": {"\\u00e9": null},'
    ' "metric": 0.75, "measures": "x/auc of y", "higher_is_better": true,'
    ' "digest": "28bc330d072fa09f"}'
)
MANIFEST = """{
 "format_version": 3,
 "jaxrank_version": "0.1.0",
 "splits": {
  "train": [
   0.3333,
   null,
   "\\u00e9",
   Infinity
  ]
 },
 "counts": {},
 "checksum": "e9396199b8e1eed9"
}
"""


def _write_sealed(tmp_path, which):
    """A file of an earlier version, and the function that reads it."""
    if which == "manifest":
        path, text = tmp_path / "manifest.json", MANIFEST
    else:
        path, text = tmp_path / "run" / "metadata", RECORD
        path.parent.mkdir()
    path.write_text(text)
    return path, lambda: manifest.read(path) if which == "manifest" else record.read(tmp_path)


@pytest.mark.parametrize("which", ["manifest", "record"])
def test_a_sealed_file_of_an_earlier_version_is_read_and_written_alike(tmp_path, which):
    path, read = _write_sealed(tmp_path, which)
    tree = json.loads(path.read_text())
    if which == "manifest":
        assert manifest.SEAL.to_text(tree) == MANIFEST
        tree.pop("checksum")
        tree["history"] = {}  # which format 5 added
    else:
        metric = record.Metric(0.75, "x/auc of y", True)
        assert record.sealed({k: tree[k] for k in ("days", "spikes", "b")}, metric) == tree
        tree.pop("digest")
    assert read() == tree


@pytest.mark.parametrize("which", ["manifest", "record"])
def test_no_changed_byte_of_a_sealed_file_is_read(tmp_path, which):
    path, read = _write_sealed(tmp_path, which)
    expected, content = read(), path.read_bytes()
    for place in range(len(content)):
        for bit in (1, 16):
            changed = bytearray(content)
            changed[place] ^= bit
            path.write_bytes(changed)
            try:
                result = read()
            except (InputError, KeyError):  # of which the store's reader makes an InputError
                continue
            # Only where the checksum is not of the bytes: a space that is another kind of space.
            assert result == expected
            assert which == "record"


def test_the_module_imports_neither_numpy_nor_jax():
    command = "import sys, jaxrank.json_files; sys.exit(bool({'numpy', 'jax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
