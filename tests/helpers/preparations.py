"""Prepares small CSV files."""

import csv
import json
from pathlib import Path

import numpy as np

from jaxrank.data.prepare import encode_unit, fit_unit, runners, settings, units
from jaxrank.data.prepare import passes as prepare_module
from jaxrank.data.prepare.passes import prepare

TASK = dict(name="click", label="label")
FEATURES = dict(
    tasks=[TASK],
    dense=[dict(columns="x", standardize=True, log=True)],
    categorical=[dict(columns="user")],
    ragged=[dict(columns="tags")],
    keep=["n"],
)
HEADER = ["n", "label", "x", "user", "tags", "day"]


def make_rows(count, first=0):
    draw = np.random.default_rng([7, first])
    return [
        [
            first + i,
            int(draw.integers(2)),
            round(float(draw.normal()), 3),
            f"u{int(draw.pareto(1.2))}",
            "|".join(f"t{k}" for k in draw.integers(0, 9, draw.integers(0, 4))),
            f"2024-05-0{1 + (first + i) // 100}",
        ]
        for i in range(count)
    ]


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])
    return str(path)


def files(folder, *counts):
    """Writes CSV files with the given numbers of rows."""
    folder.mkdir(exist_ok=True)
    first, result = 0, []
    for i, count in enumerate(counts):
        result.append(write_csv(folder / f"{i}.csv", make_rows(count, first)))
        first += count
    return result


def run(output, train, features=FEATURES, **options):
    section = dict(kind="csv", files=dict(train=train)) | options.pop("source", {})
    return prepare(
        features, section, output, report=options.pop("report", lambda _: None), **options
    )


def content(path):
    """Returns the content of every file below a directory, by name."""
    return {str(p.relative_to(path)): p.read_bytes() for p in Path(path).rglob("*") if p.is_file()}


def lasting_content(path):
    """Returns `content` of a store, without the modification times of its source files."""
    result = content(path)
    tree = json.loads(result.pop("manifest.json"))
    del tree["checksum"]
    tree["source_files"] = [[name, size] for name, size, _ in tree["source_files"]]
    return result | {"manifest.json": tree}


def small_units(monkeypatch):
    """Makes every file a unit, without a minimum of work that is worth resuming."""
    monkeypatch.setattr(units, "_UNIT_BYTES", 1)
    monkeypatch.setattr(runners, "_FEW_BYTES", 0)
    monkeypatch.setattr(prepare_module, "_LITTLE", 0)


def counted(monkeypatch):
    """Records the index of each unit, once per time that it is read."""
    chunks = []
    real_chunks = settings.chunks

    def read(settings, unit, rejects):
        chunks.append(unit.index)
        return real_chunks(settings, unit, rejects)

    for module in (fit_unit, encode_unit):
        monkeypatch.setattr(module, "chunks", read)
    return chunks
