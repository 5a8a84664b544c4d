"""Public sets of the benchmark of defaults: their features, and random splits.

`PUBLIC` are the sets of ../shared/data. `FURTHER` are sets in files as they were published, chosen
before anything was measured on them. The defaults were tuned on those whose names say so.
"""

import csv
import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
from ml_collections import ConfigDict

from jaxrank.config import default
from jaxrank.errors import InputError

# Whether the defaults were tuned on the set.
PUBLIC = {"avazu": True, "open_bandit": True, "criteo": True, "ml1m": False, "ml1m_tenth": False}


class Further(NamedTuple):
    """A public set in text files as published.

    files: pattern of their names in the folder of --further.
    label: its column. A row is positive if it has the value `positive`.
    dense: columns of amounts, counts and measures. Others have ids: text, codes and flags.
    left_out: columns that are known only with the label.
    names: of the columns, where the files have no header.
    """

    files: str
    label: str
    positive: str
    dense: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    delimiter: str = ","


FURTHER = {
    # Campaign 2997 as published with FNN (Zhang et al., ECIR 2016): one id per field.
    "iPinYou sample": Further(
        "ipinyou_2997/*.fm.txt",
        label="click",
        positive="1",
        names=("click", "weekday", "hour", "useragent", "ip", "region", "city", "exchange")
        + ("domain", "slot", "width", "height", "visibility", "format", "creative")
        + ("advertiser", "price"),
        delimiter=" ",
    ),
    "Access requests, Amazon, tuned on": Further(
        "amazon_access/train.csv", label="ACTION", positive="0"
    ),
    "Bank marketing, UCI": Further(
        "bank-full.csv",
        label="y",
        positive="yes",
        dense=("age", "balance", "campaign", "pdays", "previous"),
        left_out=("duration",),
        delimiter=";",
    ),
    "E-mail campaigns, MineThatData": Further(
        "Kevin_Hillstrom_MineThatData_*.csv",
        label="visit",
        positive="1",
        dense=("recency", "history"),
        left_out=("conversion", "spend"),
    ),
    "Online shoppers, UCI": Further(
        "online_shoppers_intention.csv",
        label="Revenue",
        positive="TRUE",
        dense=("Administrative", "Administrative_Duration", "Informational")
        + ("Informational_Duration", "ProductRelated", "ProductRelated_Duration")
        + ("BounceRates", "ExitRates", "PageValues", "SpecialDay"),
    ),
    "Adult, UCI": Further(
        "adult.data",
        label="income",
        positive=">50K",
        dense=("age", "weight", "school_years", "capital_gain", "capital_loss", "hours"),
        names=("age", "workclass", "weight", "education", "school_years", "marital_status")
        + ("occupation", "relationship", "race", "sex", "capital_gain", "capital_loss")
        + ("hours", "country", "income"),
    ),
    "Coupons in cars, UCI": Further(
        "in-vehicle-coupon-recommendation.csv", label="Y", positive="1", dense=("temperature",)
    ),
}


def public(name: str, data: Path, folder: Path, seed: int) -> ConfigDict:
    """The config of a public set, split at random into files in `folder`."""
    c = default()
    features = c.features
    if name == "avazu":
        files = sorted((data / "avazu_sample").glob("*.csv.gz"))
        features.tasks = [dict(name="click", label="click")]
        columns = [f"C{i}" for i in (1, *range(14, 22))] + [
            *("banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain"),
            *("app_category", "device_id", "device_ip", "device_model", "device_type"),
            "device_conn_type",
        ]
    elif name == "open_bandit":
        files = sorted((data / "open_bandit").glob("*.csv.gz"))
        features.tasks = [dict(name="click", label="click")]
        columns = ["policy", "campaign", "item", "position"]
        columns += [f"user_{i}" for i in range(4)] + [f"item_{i}" for i in (1, 2, 3)]
        features.dense = [dict(columns="item_price", standardize=True)]
    elif name == "criteo":
        files = sorted((data / "criteo_sample").glob("*.tsv.gz"))
        features.tasks = [dict(name="click", label="label")]
        columns = [f"C{i}" for i in range(1, 27)]
        features.dense = [dict(columns="I*", log=True, standardize=True, missing_indicator=True)]
    else:
        files = sorted((data / "ml1m").glob("ctr_*.csv.gz"))
        features.tasks = [dict(name="like", label="label")]
        columns = ["user", "movie", "gender", "age", "occupation", "zip"]
    features.categorical = [dict(columns=column, encoding="vocabulary") for column in columns]
    table = read(files, is_criteo=name == "criteo")
    tenths = 1 if name == "ml1m_tenth" else 10
    c.source = ConfigDict(dict(kind="csv", files=split_at_random(table, folder, seed, tenths)))
    return c


def further(source: Further, data: Path, folder: Path, seed: int) -> ConfigDict:
    """The config of a set of FURTHER, split at random into files in `folder`."""
    table = read_further(source, data)
    c = default()
    c.features.tasks = [dict(name="label", label=source.label)]
    c.features.dense = [dict(columns=column) for column in source.dense]
    ids = set(table.column_names) - {source.label, *source.dense, *source.left_out}
    c.features.categorical = [
        dict(columns=column, encoding="vocabulary")
        for column in table.column_names
        if column in ids
    ]
    c.source = ConfigDict(dict(kind="csv", files=split_at_random(table, folder, seed)))
    return c


def read_further(source: Further, data: Path) -> pa.Table:
    """Returns the columns as text, and 0 or 1 as the label."""
    files = sorted(data.glob(source.files))
    if not files:
        raise InputError(f"--further: must contain {source.files}: found none in {data}.")
    rows: list[dict[str, str]] = []
    for file in files:
        with file.open(newline="") as lines:
            rows += csv.DictReader(
                lines, source.names or None, delimiter=source.delimiter, skipinitialspace=True
            )
    table = pa.table({column: [row[column] for row in rows] for column in rows[0]})
    labels = [str(int(row[source.label] == source.positive)) for row in rows]
    return table.set_column(table.column_names.index(source.label), source.label, [labels])


def read(files: list[Path], is_criteo: bool) -> pa.Table:
    """Returns the columns of all files as text."""
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    parse = pyarrow.csv.ParseOptions(delimiter="\t" if is_criteo else ",")
    options = pyarrow.csv.ReadOptions(column_names=names if is_criteo else None)
    parts = []
    for file in files:
        with gzip.open(file) as stream:
            table = pyarrow.csv.read_csv(stream, read_options=options, parse_options=parse)
        texts = pa.schema([(column, pa.string()) for column in table.column_names])
        parts.append(table.cast(texts))
    return pa.concat_tables(parts)


def split_at_random(table: pa.Table, folder: Path, seed: int, tenths: int = 10) -> dict[str, str]:
    """Writes 70%, 15% and 15% of the rows; returns the file of each split.

    Args:
        tenths: of the rows that are used, other rows for each seed.
    """
    order = np.random.default_rng(seed).permutation(table.num_rows)
    order = order[: len(order) * tenths // 10]
    ends = 15 * len(order) // 100, 30 * len(order) // 100
    rows = zip(("valid", "test", "train"), np.split(order, ends), strict=True)
    paths = {split: str(folder / f"{split}.csv") for split in ("train", "valid", "test")}
    for split, chosen in rows:
        pyarrow.csv.write_csv(table.take(pa.array(np.sort(chosen))), paths[split])
    return paths
