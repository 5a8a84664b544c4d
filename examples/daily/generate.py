"""Generates the clicks of one day, from ads and users that appear, drift and leave.

    python examples/daily/generate.py --root=/tmp/daily --day=0

A day depends on its number only, so any day can be written by itself.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrank.atomic import replacing

FIRST_DAY = np.datetime64("2024-05-01")
ROWS = 6_000  # per day
BORN = {"ad": 15, "user": 20}  # per day
LIFE = {"ad": 12.0, "user": 25.0}  # mean days
_MAX_LIFE = 8  # maximum of a life, in mean lives


def day_name(day: int) -> str:
    """Returns the date of a day, counted from 0."""
    return str(FIRST_DAY + day)


def generate(day: int, rows: int = ROWS) -> pa.Table:
    """Returns the examples of a day, in order of time."""
    r = np.random.default_rng([1, day])
    ads, users = _alive("ad", day), _alive("user", day)
    ad = r.choice(len(ads["name"]), rows, p=ads["popularity"])
    user = r.choice(len(users["name"]), rows, p=users["popularity"])
    seconds = np.sort(r.integers(86_400, size=rows))
    price = r.lognormal(1, 0.5, rows)
    hour = seconds // 3600
    logit = -1.8 + 0.4 * np.sin(2 * np.pi * (hour - 6) / 24) - 0.3 * np.log(price)
    logit += ads["quality"][ad] + users["quality"][user]
    logit += 0.7 * (ads["taste"][ad] * users["taste"][user]).sum(axis=1)
    p = 1 / (1 + np.exp(-logit))
    times = (FIRST_DAY + day).astype("datetime64[s]") + seconds
    return pa.table(
        {
            "time": times,
            "ad": ads["name"][ad],
            "user": users["name"][user],
            "price": price.round(2),
            "click": (r.random(rows) < p).astype(np.int8),
            "p_click": p,
        }
    )


def _alive(kind: str, day: int) -> dict[str, np.ndarray]:
    """Returns the ads or users that live on a day, with what they are like on that day."""
    life, most = LIFE[kind], int(LIFE[kind] * _MAX_LIFE)
    parts = []
    for born in range(day - most, day + 1):
        r = np.random.default_rng([2, len(kind), born + most])
        count = BORN[kind]
        lives, fame = r.geometric(1 / life, count), r.lognormal(0, 1, count)
        quality, drift = r.normal(0, 0.7, count), r.normal(0, 0.03, count)
        taste = r.normal(0, 0.7, (count, 2))
        alive = np.flatnonzero(born + lives > day)
        quality = quality + drift * (day - born)
        names = np.array([f"{kind}{born + most:04}-{i:02}" for i in range(count)])
        parts.append([array[alive] for array in (names, fame, quality, taste)])
    name, fame, quality, taste = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return dict(name=name, popularity=fame / fame.sum(), quality=quality, taste=taste)


def raw_path(root: Path, day: int) -> Path:
    return root / "raw" / f"{day_name(day)}.parquet"


def write(root: Path, day: int, rows: int = ROWS) -> Path:
    """Writes the raw data of a day, unless it exists."""
    path = raw_path(root, day)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            pq.write_table(generate(day, rows), partial)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="directory of all files")
    parser.add_argument("--day", type=int, required=True, help="number of the day, from 0")
    parser.add_argument("--rows", type=int, default=ROWS, help="examples of the day")
    args = parser.parse_args()
    print(write(args.root, args.day, args.rows))


if __name__ == "__main__":
    main()
