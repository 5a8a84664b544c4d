"""`features.skip`: a run on a store without some of its features."""

import json
import shutil

import jax
import numpy as np
import pytest
import runs
import tiny

from jaxrank.data.prepare.passes import prepare
from jaxrank.errors import InputError
from jaxrank.evaluation import evaluate
from jaxrank.export.write import export


@pytest.mark.usefixtures("shared_programs")
def test_a_run_that_skips_features_is_that_on_a_store_without_them(store, tmp_path):
    """The model, its resumed training, its evaluation and its export do not know the features."""
    skipped = runs.store_config(store)
    skipped.features.skip = ("c0", "l1", "f1")
    without = tiny.config()
    without.features.categorical = without.features.categorical[1:]
    without.features.ragged = without.features.ragged[:1]
    without.features.dense = [dict(columns=["f0", "f2"], standardize=True, missing_indicator=True)]
    other = tmp_path / "other"
    prepare(
        without.features.to_dict(),
        without.source.to_dict(),
        other,
        block_size=512,
        report=runs.nothing,
    )
    without.data.store = str(other)
    result = runs.train(skipped, tmp_path / "run", report=runs.nothing)
    expected = runs.train(without, tmp_path / "without", report=runs.nothing)
    assert result.metrics == expected.metrics
    states = [
        runs.newest_state(c, tmp_path / name)
        for c, name in ((skipped, "run"), (without, "without"))
    ]
    for local, other_leaf in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(local, other_leaf)

    shutil.rmtree(tmp_path / "run/checkpoints/16")
    again = runs.train(skipped, tmp_path / "run", report=runs.nothing)
    assert again.metrics == expected.metrics
    scores = evaluate.evaluate(str(tmp_path / "run"), data=str(store))
    assert scores.metrics == expected.metrics
    export(str(tmp_path / "run"), output=str(tmp_path / "out"))
    description = json.loads((tmp_path / "out/export.json").read_text())
    assert [f["name"] for f in description["dense"]] == ["f0", "f2"]
    assert [f["name"] for f in description["categorical"]] == ["c1"]
    assert [f["name"] for f in description["ragged"]] == ["l0"]
    assert sorted(p.stem for p in (tmp_path / "out/tables").iterdir()) == ["c1", "l0"]

    skipped.features.skip = ("c0",)
    with pytest.raises(InputError, match=r"features.skip: .*c0.*l1.*now"):
        runs.train(skipped, tmp_path / "run", report=runs.nothing)
    with pytest.raises(InputError, match="must be those that the run .* found also "):
        runs.train(skipped, tmp_path / "run", report=runs.nothing, allow_config_change=True)
