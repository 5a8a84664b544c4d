import json
import re
import sys

import numpy as np
import pytest
import tiny
from runs import nothing
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.evaluation import baseline, report
from jaxrank.evaluation.score import Scored
from jaxrank.features import PAD, Schema, Task
from jaxrank.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")


def dense_features(split):
    """Every feature of `tiny.config()` as plain columns, and the labels; an example at a time."""
    columns, labels = [], []
    for block in split.blocks():
        ends = np.concatenate([[0], block.list_lengths.reshape(-1).cumsum()])
        for i in range(block.rows):
            one_hot = np.zeros((4, 300))
            for j, row in enumerate(block.ids[i]):
                if row != PAD:
                    one_hot[j, row] = 1
            for j in range(2):
                span = slice(*ends[2 * i + j : 2 * i + j + 2])
                weights = block.list_weights[span].astype(float)
                if len(weights):  # l0 is sqrtn of plain ids, l1 the weighted mean
                    weights /= np.sqrt((weights**2).sum()) if j == 0 else weights.sum()
                np.add.at(one_hot[2 + j], block.list_values[span], weights)
            columns.append(np.concatenate([block.dense[i], one_hot.reshape(-1)]))
            labels.append(block.labels[i])
    return np.array(columns), np.array(labels)


@pytest.fixture(scope="module")
def splits(store):
    opened = open_store(store)
    return opened.split("train"), opened.split("valid"), opened.schema


@pytest.fixture(scope="module")
def fitted(splits):
    """C is chosen on the validation split. The training split is scored, also by a model of 0."""
    zeros = np.zeros((splits[0].rows, 2), np.float32)
    return baseline.fit(*splits, score_split=splits[0], model=Scored(zeros, zeros, zeros))


def test_the_regression_is_that_of_scikit_learn_on_one_hot_columns(splits, fitted):
    (train_x, train_y), (valid_x, valid_y) = map(dense_features, splits[:2])
    scaled = len(splits[2].dense)
    mean, std = train_x[:, :scaled].mean(axis=0), train_x[:, :scaled].std(axis=0)
    for x in (train_x, valid_x):
        x[:, :scaled] = (x[:, :scaled] - mean) / np.where(std > 0, std, 1)  # indicators may be 0
    assert fitted.features == "one-hot"
    assert fitted.distinct_ids == (train_x[:, scaled:] != 0).any(axis=0).sum()
    for i, task in enumerate(("click", "conversion")):
        known, chosen_on = ~np.isnan(train_y[:, i]), ~np.isnan(valid_y[:, i])
        losses = {}
        for strength in (fitted.strengths[task] * f for f in (10**-0.5, 1, 10**0.5)):
            model = LogisticRegression(C=strength, max_iter=1000, tol=1e-6)
            model.fit(sparse.csr_matrix(train_x[known]), train_y[known, i])
            p = model.predict_proba(valid_x[chosen_on])[:, 1]
            losses[strength] = log_loss(valid_y[chosen_on, i], p)
            if strength == fitted.strengths[task]:
                scored = model.predict_proba(train_x[known])[:, 1]
                logloss = log_loss(train_y[known, i], scored)
                auc = roc_auc_score(train_y[known, i], scored)
        metrics = fitted.metrics[task]
        assert min(losses, key=losses.get) == fitted.strengths[task]
        assert metrics["logloss"] == pytest.approx(logloss, abs=1e-4)
        assert metrics["auc"] == pytest.approx(auc, abs=1e-3)
        assert metrics["examples"] == known.sum()
        y = train_y[known, i]
        paired = np.log(2) + y * np.log(scored) + (1 - y) * np.log1p(-scored)
        half = 1.96 * paired.std() / len(y) ** 0.5
        ends = (paired.mean(), paired.mean() - half, paired.mean() + half)
        assert (*fitted.differences[task]["logloss"].values(),) == pytest.approx(ends, abs=1e-4)


def test_many_ids_are_hashed_and_score_like_one_hot(splits, fitted, monkeypatch):
    monkeypatch.setattr(baseline, "MAX_EXACT_IDS", 100)
    monkeypatch.setattr(baseline, "_HASHED_COLUMNS", 4096)
    hashed = baseline.fit(*splits, score_split=splits[0])
    assert hashed.features == "hashed"
    for task, metrics in fitted.metrics.items():
        assert hashed.metrics[task]["logloss"] == pytest.approx(metrics["logloss"], rel=0.05)


def test_a_finished_run_reports_the_regression_beside_the_model(run):
    workdir, _ = run
    result = train(tiny.config(), workdir, report=nothing, baseline=True)
    task = result.baseline["metrics"]["click"]
    assert set(task) == set(result.metrics["click"])
    assert task["examples"] == result.metrics["click"]["examples"]  # of the same split
    text = report.format_training(result, str(workdir))
    assert re.search(rf"regression +{task['logloss']:.5f} +{task['auc']:.5f}", text)
    difference = abs(result.metrics["click"]["logloss"] / task["logloss"] - 1)
    assert f"logloss is {difference:.2%}" in text
    difference = result.baseline["differences"]["click"]["logloss"]
    change = result.metrics["click"]["logloss"] - task["logloss"]
    assert difference["difference"] == pytest.approx(change, abs=1e-6)
    low, high = difference["low"], difference["high"]
    verdict = "do not show" if low < 0 < high else "is worse" if low > 0 else "is better"
    ends = f"{low:+.5f} to {high:+.5f}"
    assert re.search(rf"difference \{change:+.5f}, .* {re.escape(ends)}: .*{verdict}", text)
    saved = json.loads((workdir / "summary.json").read_text())["result"]["baseline"]
    assert saved["differences"]["click"]["logloss"] == difference


def test_a_baseline_without_scikit_learn_tasks_or_a_split_is_rejected(run, monkeypatch, splits):
    counts = Schema((Task("visits", "count"),), (), (), (), ())
    with pytest.raises(InputError, match="visits of kind count"):
        baseline.fit(*splits[:2], counts)
    config = tiny.config()
    config.data.valid = ""
    with pytest.raises(InputError, match="data.valid must name a split.*found ''"):
        train(config, run[0], report=nothing, baseline=True)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(InputError, match=r"pip install 'jaxrank\[baseline\]'"):
        train(tiny.config(), run[0], report=nothing, baseline=True)
