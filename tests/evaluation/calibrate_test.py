from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny
import xxhash
from runs import nothing

from jaxrank import cli
from jaxrank.checkpoints.manager import Checkpoints
from jaxrank.errors import InputError
from jaxrank.evaluation import evaluate, slices
from jaxrank.evaluation.calibrate import calibrate, describe
from jaxrank.evaluation.calibrate_by_value import fit_by_value
from jaxrank.evaluation.score import Scored
from jaxrank.features import Table
from jaxrank.metrics import exact
from jaxrank.runtime import processes
from jaxrank.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has learned enough for its predictions to rise with the labels."""
    workdir = tmp_path_factory.mktemp("calibrated") / "run"
    c = tiny.config(num_steps=40)
    c.optim.dense.base_learning_rate = 0.02
    train(c, workdir, report=nothing)
    return workdir


def test_a_calibration_is_used_until_it_is_removed(trained):
    before = evaluate.evaluate(str(trained))
    assert before.calibrated is None
    lines = []
    result = calibrate(str(trained), split="train", measure_on="valid", report=lines.append)
    assert "trained on these labels" in lines[0]
    assert result.before["click"]["logloss"] == before.metrics["click"]["logloss"]
    picture = trained / "picture.svg"
    cli.run(["evaluate", f"--workdir={trained}", f"--picture={picture}"])
    after = evaluate.evaluate(str(trained))
    assert after.calibrated == {
        "method": "platt",
        "split": "train",
        "tasks": ["click", "conversion"],
    }
    for task, metrics in result.after.items():
        assert metrics["logloss"] == pytest.approx(after.metrics[task]["logloss"])
        assert metrics["calibration_error"] == after.calibration_error[task]
        assert after.metrics[task]["auc"] == pytest.approx(before.metrics[task]["auc"], abs=1e-6)
    assert after.metrics["click"]["logloss"] < before.metrics["click"]["logloss"]
    assert "higher than before" not in describe(result)
    swapped = describe(result._replace(before=result.after, after=result.before))
    assert "Warning: click: the logloss on valid is higher than before" in swapped
    assert f"{after.calibration_error['click']:.5f}" in picture.read_text()

    output = trained / "p.parquet"
    evaluate.predict(str(trained), output=str(output))
    table = pq.read_table(output)
    y, p = table["label_click"].to_numpy(), table["predicted_click"].to_numpy()
    predicted = exact.exact_from_probabilities(p, y, np.ones(len(y)))
    assert predicted["logloss"] == pytest.approx(after.metrics["click"]["logloss"], rel=1e-5)

    removed = calibrate(str(trained), split="train", method="none")
    assert "no calibration" in describe(removed)
    assert evaluate.evaluate(str(trained)).metrics == before.metrics


def test_the_values_of_a_feature_are_corrected_and_reported(trained, monkeypatch):
    """`evaluate` limits the number of values, and `calibrate` does not."""
    monkeypatch.setattr(slices, "MAX_VALUES", 2)
    command = ["calibrate", f"--workdir={trained}", "--split=train", "--measure-on=valid"]
    result = calibrate(
        str(trained), split="train", measure_on="valid", by="c1", report=lambda _: None
    )
    with pytest.raises(InputError, match="--by: column 'c1' must have at most 2"):
        evaluate.evaluate(str(trained), by="c1")
    monkeypatch.undo()
    after = evaluate.evaluate(str(trained), by="c1")
    assert after.calibrated["by"] == "c1"
    assert 2 <= result.by["fitted"] <= tiny.IDS[1]
    of_value = {entry["value"]: entry["metrics"] for entry in after.by["values"]}
    assert {entry["value"] for entry in result.by["values"]} == of_value.keys()
    for entry in result.by["values"]:
        metrics = of_value[entry["value"]]
        assert entry["examples"] == metrics["click"]["examples"]
        for task in ("click", "conversion"):
            expected = pytest.approx(metrics[task]["calibration"], rel=1e-5, nan_ok=True)
            assert entry["after"][task]["calibration"] == expected
    output = trained / "by.parquet"
    evaluate.predict(str(trained), output=str(output))
    p = pq.read_table(output)["predicted_click"].to_numpy()
    y = pq.read_table(output)["label_click"].to_numpy()
    logloss = exact.exact_from_probabilities(p, y, np.ones(len(y)))["logloss"]
    assert logloss == pytest.approx(result.after["click"]["logloss"], rel=1e-5)
    text = describe(result)
    assert f"{result.by['fitted']} values of c1 have a correction" in text
    assert "click by c1" in text
    cli.run([*command, "--method=none"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(split="valid"), "must name another split than --split.*found 'valid' for both"),
        (dict(split="train", measure_on="vald"), "^--measure-on: .*'vald'"),
        (
            dict(split="train", by="l0"),
            "--by: must be one of.*found .l0.*. The feature must have one id per",
        ),
        (dict(split="train", by="c1", method="none"), "--by: must be used without --method=none"),
        (dict(split="train", method="plat"), "--method: must be one of.*found 'plat'.*'platt'"),
    ],
)
def test_what_cannot_be_calibrated_is_rejected(trained, arguments, message):
    with pytest.raises(InputError, match=message):
        calibrate(str(trained), **arguments)


def test_all_processes_exchange_the_checksums_and_only_the_first_writes(trained, monkeypatch):
    exchanged = []
    read = Checkpoints.saved_checksums
    monkeypatch.setattr(
        Checkpoints, "saved_checksums", lambda *args: exchanged.append(args[1]) or read(*args)
    )
    other = SimpleNamespace(is_first=lambda: False, together=processes.together)
    monkeypatch.setattr("jaxrank.evaluation.calibrate.processes", other)
    result = calibrate(str(trained), split="train", measure_on="valid", report=nothing)
    assert exchanged == [result.step]
    assert not (trained / "calibration" / f"{result.step}.json").exists()


def test_a_calibration_that_cannot_be_measured_is_not_kept(trained, monkeypatch):
    calibrate(str(trained), split="train", measure_on="valid", method="none")

    def fail(*_):
        raise InputError("a column is damaged")

    monkeypatch.setattr("jaxrank.evaluation.calibrate.measure_by_value", fail)
    with pytest.raises(InputError, match="a column is damaged"):
        calibrate(str(trained), split="train", measure_on="valid", by="c1", report=nothing)
    assert evaluate.evaluate(str(trained)).calibrated is None


@pytest.mark.parametrize(("encoding", "expected"), [("integer", [0, 1, 2]), ("vocabulary", [2, 3])])
def test_rows_that_values_share_have_no_correction(encoding, expected):
    """Row 3 of numbers is the one of invalid ids, rows 0 and 1 of a vocabulary are reserved."""
    table = Table("t", 4, encoding, xxhash.xxh3_64_hexdigest(b"oov"))
    schema = SimpleNamespace(
        id_columns=[SimpleNamespace(name="c", table="t")], tables=[table], tasks=["click"]
    )
    rows = np.arange(4).repeat(100)
    labels = np.tile([0.0, 1.0], 200)[:, None]
    scored = Scored(np.zeros((400, 1)), labels, np.ones((400, 1)))
    fitted = fit_by_value("c", {0: lambda x: x}, scored, rows, schema, "data")
    assert list(fitted.rows) == expected
