"""Compares the defaults with regressions on clicks, counts and real labels of the same rows.

    python -m benchmarks.quality.label_kinds --workdir=/tmp/label_kinds

4,000 generated rows for training, 3,000 for validation and 10,000 on which all are scored. Nothing
but the features is set in `default settings`. The regressions are logistic, Poisson and ridge, with
one-hot ids. Their penalty is chosen on the validation split. Each seed has rows and effects of its
own. Prints the loss relative to that of the best constant, the mean over the seeds. With --results
it also writes it as benchmarks/results has it. Scores that are there already are not computed
again.
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from ml_collections import ConfigDict
from scipy import sparse
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

from benchmarks.harness.arguments import positive, run_main
from jaxrank import json_files
from jaxrank.config import default
from jaxrank.evaluation.evaluate import evaluate, load_run
from jaxrank.metrics import exact
from jaxrank.train import train

Rows = dict[str, np.ndarray]

SPLITS = dict(train=4_000, valid=3_000, test=10_000)
DEVIATIONS = {"a": (50, 0.8), "b": (20, 0.5), "c": (1_000, 0.3)}  # ids, deviation of their effects
KINDS = dict(click="binary", count="count", real="real")
LOSSES = dict(
    binary="normalized_entropy", count="normalized_deviance", real="normalized_squared_error"
)
REGRESSION = "regression"
PROGRAMS: dict[str, dict[str, Any]] = {
    "default settings": {},
    "ranker, one epoch": {"model.name": "ranker", "num_epochs": 1.0},
    "default settings, task_scales 1": {
        "model.name": "factorization_machine",  # the default here, named because it has the field
        "model.task_scales": (1.0, 1.0, 1.0),
    },
    "default settings, task_weights 1": {"task_weights": (1.0, 1.0, 1.0)},
}
ALONE = ("default settings", "ranker, one epoch")  # also trained on clicks alone


def generated(seed: int) -> dict[str, Rows]:
    """The columns of each split.

    Counts have a mean of about 20, and a variance of about 1.3 squared means. Real labels are
    lognormal, with outliers.
    """
    random = np.random.default_rng(seed)
    total = sum(SPLITS.values())
    columns: Rows = {name: random.integers(0, n, total) for name, (n, _) in DEVIATIONS.items()}
    columns["x"] = random.normal(size=total)
    output = 0.5 * columns["x"]
    for name, (n, deviation) in DEVIATIONS.items():
        output += random.normal(0, deviation, n)[columns[name]]
    columns["click"] = (random.random(total) < 1 / (1 + np.exp(-output))).astype(np.int64)
    columns["count"] = random.poisson(20 * np.exp(0.3 * output) * random.gamma(1, 1, total))
    columns["real"] = np.exp(0.3 * output + random.normal(0, 1, total))
    ends = np.cumsum(list(SPLITS.values()))[:-1]
    parts = {name: np.split(column, ends) for name, column in columns.items()}
    return {split: {n: p[i] for n, p in parts.items()} for i, split in enumerate(SPLITS)}


def score_regressions(data: dict[str, Rows]) -> dict[str, float]:
    """Returns the relative loss on the test split of each task."""
    matrix = {
        split: sparse.hstack([rows["x"][:, None], *_one_hot(rows)], format="csr")
        for split, rows in data.items()
    }
    result = {}
    for task, kind in KINDS.items():
        losses = []
        for penalty in 10.0 ** np.arange(-2, 4, 0.5):
            model: Any = dict(
                binary=lambda c: LogisticRegression(C=1 / c, max_iter=1000),
                count=lambda c: PoissonRegressor(
                    solver="newton-cholesky", alpha=c / SPLITS["train"]
                ),
                real=lambda c: Ridge(alpha=c),
            )[kind](penalty)
            model.fit(matrix["train"], data["train"][task])
            losses.append([_loss(model, matrix[s], data[s][task], kind) for s in ("valid", "test")])
        result[task] = min(losses)[1]
    return result


def _one_hot(rows: Rows) -> list[Any]:
    size = len(rows["x"])
    return [
        sparse.csr_matrix((np.ones(size), (np.arange(size), rows[name])), shape=(size, n))
        for name, (n, _) in DEVIATIONS.items()
    ]


def _loss(model: Any, matrix: Any, labels: np.ndarray, kind: str) -> float:
    output = model.decision_function(matrix) if kind == "binary" else model.predict(matrix)
    output = np.log(output) if kind == "count" else output
    return exact.exact(output, labels, np.ones(len(labels)), kind)[LOSSES[kind]]


def score_run(
    data: dict[str, Rows], folder: Path, changes: dict[str, Any], tasks: list[str], seed: int
) -> dict[str, float]:
    """Trains the default config with changes; returns the relative losses on the test split."""
    c = default()
    c.features.tasks = [dict(name=task, label=task, kind=KINDS[task]) for task in tasks]
    c.features.dense = [dict(columns="x")]
    c.features.categorical = [dict(columns=name) for name in DEVIATIONS]
    folder.mkdir(parents=True, exist_ok=True)
    files = {split: str(folder / f"{split}.csv") for split in SPLITS}
    for split, rows in data.items():
        pyarrow.csv.write_csv(pa.table(rows), files[split])
    c.source = ConfigDict(dict(kind="csv", files=files))
    c.seed = seed
    c.update_from_flattened_dict(changes)
    train(c, folder / "run", report=lambda _: None, quiet=True)
    checkpoint = load_run(folder / "run").default_checkpoint
    metrics = evaluate(str(folder / "run"), checkpoint=checkpoint, split="test").metrics
    return {task: metrics[task][LOSSES[KINDS[task]]] for task in tasks}


def scores(workdir: Path, seed: int) -> dict[str, dict[str, float]]:
    """{program: {workload: relative loss}} of a seed."""
    path = workdir / f"seed{seed}" / "scores.json"
    if path.exists():
        return json.loads(path.read_text())
    data = generated(seed)
    regressions = score_regressions(data)
    result = {REGRESSION: {"click alone": regressions["click"], **regressions}}
    for number, (program, changes) in enumerate(PROGRAMS.items()):
        alone = {}
        if program in ALONE:
            only = score_run(data, path.parent / f"{number}_alone", changes, ["click"], seed)
            alone = {"click alone": only["click"]}
        together = score_run(data, path.parent / str(number), changes, list(KINDS), seed)
        result[program] = alone | together
    json_files.write(path, result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--seeds", type=positive, default=5)
    parser.add_argument("--results", type=Path, help="file to which results are appended")
    parser.add_argument("--commit", default="", help="commit named in the results")
    args = parser.parse_args()
    all_scores = [scores(args.workdir.absolute(), seed) for seed in range(args.seeds)]
    for program, losses in all_scores[0].items():
        for workload in losses:
            values = [result[program][workload] for result in all_scores]
            listed = ", ".join(f"{value:.3f}" for value in values)
            print(f"{program}, {workload}: {np.mean(values):.3f} ({listed})", flush=True)
            if args.results:
                record = dict(
                    workload=workload,
                    program=program,
                    metric="loss relative to the best constant",
                    value=round(float(np.mean(values)), 3),
                    unit="",
                    hardware="2 cores",
                    date=str(datetime.date.today()),
                    commit=args.commit,
                    command="python -m benchmarks.quality.label_kinds --workdir=/tmp/label_kinds"
                    f" --seeds={args.seeds}",
                    note=f"4,000 generated rows, mean of {args.seeds} seeds",
                )
                with args.results.open("a") as lines:
                    lines.write(json_files.to_text(record) + "\n")


if __name__ == "__main__":
    run_main(main)
