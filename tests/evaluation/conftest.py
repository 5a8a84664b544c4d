"""Fixtures: a run and its predictions."""

import pyarrow.parquet as pq
import pytest
import tiny
from runs import nothing

from jaxrank.evaluation import evaluate
from jaxrank.train import train


@pytest.fixture(scope="package")
def run(tmp_path_factory):
    """A finished run that prepared its own data."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    result = train(tiny.config(), workdir, report=nothing)
    return workdir, result


@pytest.fixture(scope="package")
def predictions(run):
    workdir, _ = run
    output = workdir / "out" / "predictions.parquet"
    result = evaluate.predict(
        str(workdir), output=str(output), checkpoint="newest", data="", split=""
    )
    assert result.rows == 1000
    return pq.read_table(output)
