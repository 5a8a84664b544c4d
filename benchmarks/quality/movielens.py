"""Writes the files of the MovieLens-1M benchmarks from the official archive.

    python -m benchmarks.quality.movielens --archive=ml-1m.zip --output=/tmp/ml1m

- `ctr_{train,valid,test}.csv.gz`: 3 stars are dropped, `label` is 1 for 4 and 5 stars. The rows of
  AutoInt and DCN-V2.
- `mtl_{train,valid,test}.csv.gz`: all ratings, `like` is 1 for 4 and 5 stars, `love` for 5.

Columns are the labels, user, movie, gender, age, occupation, zip, year and genres, which `|`
separates. Rows are sorted by user and movie, permuted by --seed, and divided 80/10/10. The split
therefore depends on the ratings and the seed alone. With --rows in place of --archive, earlier
files of this form are divided again.
"""

import argparse
import io
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from benchmarks.harness.arguments import run_main
from jaxrank.errors import InputError

SPLITS = ("train", "valid", "test")
KINDS = {"ctr": ("label",), "mtl": ("like", "love")}
FEATURES = ("user", "movie", "gender", "age", "occupation", "zip", "year", "genres")
_FILES = {
    "ratings.dat": ("user", "movie", "stars", "time"),
    "users.dat": ("user", "gender", "age", "occupation", "zip"),
    "movies.dat": ("movie", "title", "genres"),
}
_NUMBERS = ("user", "movie", "stars", "time", "age", "occupation", "year")


def read_archive(path: Path) -> pa.Table:
    """Returns one row per rating with FEATURES and stars.

    Raises:
        InputError: a file is missing, or a line has another number of fields.
    """
    with zipfile.ZipFile(path) as archive:
        names = {Path(name).name: name for name in archive.namelist()}
        if missing := sorted(set(_FILES) - set(names)):
            raise InputError(f"{path}: must contain {', '.join(_FILES)}: missing {missing}.")
        ratings, users, movies = (
            _table(archive.open(names[file]), f"{path}: {file}", columns)
            for file, columns in _FILES.items()
        )
    years = pc.extract_regex(movies["title"], r"\((?P<year>\d{4})\)\s*$")
    movies = movies.append_column("year", pc.struct_field(years, "year").cast(pa.int64()))
    joined = ratings.join(users, "user", join_type="inner").join(movies, "movie", join_type="inner")
    if joined.num_rows != ratings.num_rows:
        raise InputError(
            f"{path}: each rating must have its user and movie: found {ratings.num_rows:,} ratings,"
            f" {joined.num_rows:,} with both."
        )
    return joined.select([*FEATURES, "stars"])


def _table(file: IO[bytes], where: str, columns: tuple[str, ...]) -> pa.Table:
    values: list[list[str]] = []
    for number, line in enumerate(io.TextIOWrapper(file, "latin-1"), 1):
        cells = line.rstrip("\r\n").split("::")
        if len(cells) != len(columns):
            raise InputError(
                f"{where}, line {number}: must have {len(columns)} fields with :: between:"
                f" found {len(cells)}."
            )
        values.append(cells)
    arrays = [pa.array(column) for column in zip(*values, strict=True)]
    return pa.table(
        {
            name: array.cast(pa.int64()) if name in _NUMBERS else array
            for name, array in zip(columns, arrays, strict=True)
        }
    )


def labelled(table: pa.Table, kind: str) -> pa.Table:
    """Returns the rows of `ctr` or `mtl` with their labels in front, without stars."""
    if kind == "ctr":
        table = table.filter(pc.not_equal(table["stars"], 3))
    thresholds = {"label": 4, "like": 4, "love": 5}
    labels = {
        name: pc.greater_equal(table["stars"], thresholds[name]).cast(pa.int64())
        for name in KINDS[kind]
    }
    return pa.table({**labels, **{name: table[name] for name in FEATURES}})


def divide(table: pa.Table, seed: int) -> dict[str, pa.Table]:
    """Returns the rows of each split."""
    table = table.sort_by([("user", "ascending"), ("movie", "ascending")])
    order = np.random.default_rng(seed).permutation(table.num_rows)
    ends = [int(0.8 * table.num_rows), int(0.9 * table.num_rows)]
    return {
        name: table.take(rows) for name, rows in zip(SPLITS, np.split(order, ends), strict=True)
    }


def write(table: pa.Table, path: Path) -> None:
    options = pyarrow.csv.WriteOptions(quoting_style="needed")
    with pa.CompressedOutputStream(str(path), "gzip") as file:
        pyarrow.csv.write_csv(table, file, options)


def read(path: Path) -> pa.Table:
    """Reads one file of the benchmarks."""
    convert = pyarrow.csv.ConvertOptions(column_types={"zip": "string"})
    return pyarrow.csv.read_csv(path, convert_options=convert)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--archive", type=Path, help="the official ml-1m.zip")
    source.add_argument("--rows", type=Path, help="folder of earlier files")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    ratings = read_archive(args.archive) if args.archive else None
    for kind in KINDS:
        if ratings is None:
            parts = [read(args.rows / f"{kind}_{split}.csv.gz") for split in SPLITS]
            table = pa.concat_tables(parts)
        else:
            table = labelled(ratings, kind)
        for split, rows in divide(table, args.seed).items():
            write(rows, args.output / f"{kind}_{split}.csv.gz")
            print(f"{kind}_{split}.csv.gz: {rows.num_rows:,} rows", flush=True)


if __name__ == "__main__":
    run_main(main)
