"""Runs many days, and compares the chain with others.

    python examples/daily/run.py --root=/tmp/daily --days=60

Beside the chain of `day.py` it runs one without eviction, and every few days trains from scratch on
the window of the last days. A run that was interrupted continues.
"""

import argparse
import resource
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import day as daily
import generate

from jaxrank import json_files
from jaxrank.data.store.reader import open_store

TABLES = ("ad", "user")
WITHOUT_EVICTION = tuple(
    f"--config.features.categorical[{i}].{field}=0"
    for i in range(len(TABLES))
    for field in ("keep_days", "max_rows")
)


def table_state(chain: daily.Chain, day: int) -> dict[str, Any]:
    """Returns the rows of the tables after a day, and the share of ids without a row."""
    store = open_store(chain.store(day))
    features = store.splits["train"].statistics["categorical"]
    return {
        "rows": {t.name: t.rows for t in store.schema.tables if t.name in TABLES},
        "unknown": {name: features[name]["unknown_share"] for name in TABLES},
    }


def prepare_seconds(chain: daily.Chain, day: int) -> float | None:
    """Prepares a day and returns the processor time of its preparation.

    None if another command began it, because what an interrupted command used is unknown.
    """
    path, store = chain.folder / "prepared" / f"{generate.day_name(day)}.json", chain.store(day)
    is_first = not path.exists() and not any(store.parent.glob(f"*{store.name}*"))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        json_files.write(path, {"seconds": None})
    started = _processor_seconds()
    daily.prepare(chain, day)
    if is_first:
        json_files.write(path, {"seconds": _processor_seconds() - started})
    return json_files.read(path)["seconds"]


def _processor_seconds() -> float:
    """Returns the processor time of this process and of the processes that it has waited for.

    Unlike the elapsed time, it is independent of other programs.
    """
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def run_day(chain: daily.Chain, day: int) -> dict[str, Any]:
    """Runs a day and returns its state with the processor time of its preparation."""
    path = chain.folder / "days" / f"{generate.day_name(day)}.json"
    if not path.exists():
        seconds = prepare_seconds(chain, day)
        daily.run_day(chain, day)
        path.parent.mkdir(parents=True, exist_ok=True)
        json_files.write(path, table_state(chain, day) | {"prepare_seconds": seconds})
    return json_files.read(path)


def from_scratch(root: Path, day: int, window: int) -> float:
    """Returns the logloss on a day of a new model that was trained on the days before it."""
    folder = root / "scratch" / generate.day_name(day)
    if not (folder / "score.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted command has left
        (folder / "raw").mkdir(parents=True)
        for past in range(max(day - window, 0), day):
            raw = generate.raw_path(root, past).resolve()
            (folder / "raw" / raw.name).symlink_to(raw)
        config = f"--config={daily.CONFIG}"
        raw_data = f"--config.source.files.train={folder / 'raw'}/*.parquet"
        daily.jaxrank("prepare", config, raw_data, f"--output={folder / 'store'}")
        data = f"--config.data.store={folder / 'store'}"
        daily.jaxrank("train", config, f"--workdir={folder / 'run'}", data, "--no-report")
        raw_data = f"--config.source.files.train={generate.raw_path(root, day)}"
        scored, before = folder / "scored", f"--vocabularies={folder / 'store'}"
        daily.jaxrank("prepare", config, raw_data, f"--output={scored}", before)
        run = f"--workdir={folder / 'run'}"
        result = daily.jaxrank("evaluate", run, f"--data={scored}", "--split=train")
        json_files.write(folder / "score.json", result)
    return json_files.read(folder / "score.json")["metrics"]["click/logloss"]


def compare(
    root: Path,
    days: int,
    *,
    window: int = 7,
    every: int = 10,
    rows: int = generate.ROWS,
    limits: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Runs all chains, and returns a line of numbers for each day, which it prints.

    Args:
        window: days that a model from scratch is trained on.
        every: days between models from scratch.
        rows: examples of a day.
        limits: flags of fields that limit the tables in another way than the config.
    """
    evicting = daily.Chain(root, "evicting", limits)
    growing = daily.Chain(root, "growing", WITHOUT_EVICTION)
    lines = []
    for day in range(days):
        generate.write(root, day, rows)
        states = [run_day(chain, day) for chain in (evicting, growing)]
        line = {"day": day, **states[0], "rows_growing": states[1]["rows"]}
        if day:
            scores = [json_files.read(chain.scores(day)) for chain in (evicting, growing)]
            losses = [score["metrics"]["click/logloss"] for score in scores]
            line |= {"logloss": losses[0], "logloss_growing": losses[1]}
            line["constant"] = scores[0]["constant"]["click/logloss"]
            line["best"] = scores[0]["best_possible"]["click/logloss"]
            line["promoted"] = scores[0].get("gate", {"passed": True})["passed"]
            if day % every == 0:
                line["scratch"] = from_scratch(root, day, window)
        lines.append(line)
        print(_text(line), flush=True)
    return lines


def _text(line: dict[str, Any]) -> str:
    rows, growing, unknown = line["rows"], line["rows_growing"], line["unknown"]
    seconds = line["prepare_seconds"]
    text = f"day {line['day']:>2}  prepare {'?' if seconds is None else f'{seconds:.2f}'} s"
    for name in TABLES:
        text += f"  {name} {rows[name]:,} rows ({growing[name]:,}), {unknown[name]:.2%} unknown"
    if "logloss" in line:
        text += f"  logloss {line['logloss']:.4f} ({line['logloss_growing']:.4f} without eviction"
        text += f", {line['scratch']:.4f} from scratch)" if "scratch" in line else ")"
        text += "" if line["promoted"] else "  not promoted"
    return text


def summary(lines: Sequence[dict[str, Any]], first: int = 10) -> str:
    """Formats the means of the days from `first` on, and the trend of what must stay flat."""
    late = [line for line in lines if line["day"] >= min(first, len(lines) // 2)]

    def mean(name: str, rows: Sequence[dict[str, Any]]) -> float:
        return sum(line[name] for line in rows) / len(rows)

    scored = [line for line in late if "logloss" in line]
    ours, growing = mean("logloss", scored), mean("logloss_growing", scored)
    text = [
        f"next-day logloss, days {scored[0]['day']} to {scored[-1]['day']}: {ours:.5f};"
        f" without eviction {growing:.5f}, so {ours / growing - 1:+.3%};"
        f" best constant {mean('constant', scored):.5f}, best possible {mean('best', scored):.5f}"
    ]
    beside = [line for line in scored if "scratch" in line]
    if beside:
        ours, scratch = mean("logloss", beside), mean("scratch", beside)
        text.append(
            f"on {len(beside)} of these days: {ours:.5f}; from scratch on the window {scratch:.5f},"
            f" so {ours / scratch - 1:+.3%}"
        )
    half = len(late) // 2
    for title, value in (
        ("processor time of preparation, s", lambda line: line["prepare_seconds"]),
        *((f"rows of {n}", lambda line, n=n: line["rows"][n]) for n in TABLES),
        *((f"unknown share of {n}", lambda line, n=n: line["unknown"][n]) for n in TABLES),
    ):
        values = [value(line) for line in late]
        parts = [[v for v in part if v is not None] for part in (values[:half], values[half:])]
        shown = " then ".join(f"{sum(part) / len(part):.4g}" for part in parts if part)
        text.append(f"{title}, mean of the first and the second half: {shown or 'unknown'}")
    rejected = [str(line["day"]) for line in scored if not line["promoted"]]
    text.append(f"days whose model was not promoted: {', '.join(rejected) or 'none'}")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="directory of all files")
    parser.add_argument("--days", type=int, default=60, help="number of days")
    parser.add_argument("--window", type=int, default=7, help="days of training from scratch")
    parser.add_argument("--every", type=int, default=10, help="days between models from scratch")
    parser.add_argument("--rows", type=int, default=generate.ROWS, help="examples of a day")
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in ("window", "every", "rows")}
    print(summary(compare(args.root, args.days, **options)))


if __name__ == "__main__":
    main()
