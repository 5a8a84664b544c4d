"""Names and counts in a config are held against a schema before any data is prepared."""

import flax.linen as nn
import pytest
import tiny
from ml_collections import ConfigDict
from registries import restored

from jaxrank import models, opening, optim, outputs
from jaxrank import step as steps
from jaxrank.build import Builder
from jaxrank.config import default
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import provisional_schema, resolve
from jaxrank.errors import InputError
from jaxrank.models import register

COLUMNS = ["click", "p_click", "conversion", "p_conversion", "f0", "c0", "c1", "l0", "l1"]


def make_schema(config):
    spec = FeatureSpec.from_state(config.features.to_dict())
    return provisional_schema(resolve(spec, [*COLUMNS, "l1_weight"]))


def bad(config, change):
    with config.unlocked():
        exec(f"config.{change}")  # as a line of a config file
    return config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("eval.metric = 'click/acu'", "eval.metric: must be one of .*'click/auc'"),
        ("eval.metric = 'clik/auc'", "eval.metric: must be one of .*found 'clik/auc'"),
        ("embedding.dims['nosuch'] = 4", "embedding.dims: 'nosuch' must match a table"),
        ("embedding.placements['x*'] = 'rows'", r"embedding.placements: 'x[*]' must match a table"),
        (
            "optim.tables.lr_multipliers.nosuch = 0",
            "optim.tables.lr_multipliers: 'nosuch' must match a table",
        ),
        (
            "optim.dense.lr_multipliers.nosuch = 0",
            "optim.dense.lr_multipliers: 'nosuch' must match a parameter",
        ),
        ("embedding.l2s.nosuch = 0.1", "embedding.l2s: 'nosuch' must match a table"),
        ("task_losses.nosuch = 'focal'", "task_losses: must be of tasks click, conversion"),
        ("model.dropouts = (0.1, 0.1, 0.1)", "model.dropouts: must have one number per layer"),
        ("task_weights = (1.0,)", "task_weights: must have one number per task: .*2 tasks"),
        ("task_weights = (0.0, 0.0)", "task_weights: must have a number above 0"),
        ("model.initial_bias.nosuch = 1.0", "model.initial_bias: 'nosuch' must be a task"),
        ("model.parents.conversion = 'clik'", "model.parents: 'conversion' and 'clik' must be"),
    ],
)
def test_names_that_no_data_can_have_are_rejected(change, message):
    config = bad(tiny.config(), change)
    with pytest.raises(InputError, match=message):
        Builder(config, make_schema(config)).check_names()


@pytest.mark.parametrize(
    ("model", "fields", "changes", "message"),
    [
        ("deepfm", {}, dict(dim=1), r"embedding.dim: .* dimensions \[1\], 2 tasks"),
        ("factorization_machine", {}, dict(dims=dict(c0=4)), r"embedding.dim: .* \[4, 8\]"),
        ("ranker", dict(cross="dlrm"), dict(dims=dict(c0=4)), r"model.cross: .* \[4, 8\]"),
        ("ranker", dict(sequences=dict(l2=dict(pool="mean"))), {}, "model.sequences: 'l2' must be"),
        ("final_mlp", dict(first_context=("c2",)), {}, "inputs.vectors must have a feature 'c2'"),
    ],
)
def test_rules_of_models_are_checked_before_data_is_prepared(model, fields, changes, message):
    config = tiny.config()
    with config.unlocked():
        config.model = default(model).model
        config.model.update(fields)
        config.embedding.update(changes)
    with pytest.raises(InputError, match=message):
        Builder(config, make_schema(config)).check_names(traces=True)


def test_a_deepfm_of_several_dimensions_is_rejected_before_its_data_is_prepared(tmp_path):
    config = tiny.config()
    with config.unlocked():
        config.model = default("deepfm").model
        config.embedding.dims.c0 = 4
    with pytest.raises(InputError, match=r"embedding.dim: .* \[4, 8\]"):
        opening.open_data(config, tmp_path, lambda text: None)
    assert not (tmp_path / "data").exists()


def test_a_scale_of_no_feature_is_rejected():
    schema = make_schema(tiny.config())

    def check(name, skip):
        features = dict(categorical=[dict(columns="*")], ragged=[], skip=skip)
        model = dict(name="factorization_machine", scales={"c0": 0.5, name: 0.1})
        config = ConfigDict(dict(model=model, features=features))
        assert opening.names_features(config)
        Builder(config, schema).check_fields_by_feature()

    with pytest.raises(InputError, match=r"model.scales: .* found 'c_1'\. Did you mean 'c1'\?"):
        check("c_1", ())
    for skip in (("c_*",), "c_1"):  # the second as the command line sets it
        check("c_1", skip)


def test_a_field_of_an_own_model_may_have_the_name_of_another_models():
    with restored():

        @register("scaled")
        class Scaled(nn.Module):
            tasks: int
            scales: float = 2.0

            @nn.compact
            def __call__(self, inputs, train):
                return self.scales * nn.Dense(self.tasks)(inputs.features)

        config = tiny.config()
        with config.unlocked():
            config.model = default("scaled").model
        assert not opening.names_features(config)
        builder = Builder(config, make_schema(config))
        builder.check_fields_by_feature()
        builder.check_names(traces=True)


def test_names_that_are_there_pass():
    config = tiny.config()
    config.features.categorical = [
        dict(columns="c*"),
        dict(columns="f0", encoding="bucket", buckets=3),
    ]
    bad(config, "optim.dense.lr_multipliers['tower/*'] = 0.5")
    bad(config, "embedding.dims['c?'] = 4")
    Builder(config, make_schema(config)).check_names()


def test_a_check_of_names_builds_no_optimizer_and_traces_a_model_for_its_parameters_alone(
    monkeypatch,
):
    built = []
    monkeypatch.setattr(models, "from_flax", lambda _, f=models.from_flax: built.append(1) or f(_))
    for part in ("dense_optimizer", "schedule"):
        monkeypatch.setattr(optim, part, None)
    monkeypatch.setattr(steps, "StepSpec", None)
    config = tiny.config()
    Builder(config, make_schema(config)).check_names()
    assert not built
    bad(config, "optim.dense.lr_multipliers['tower/*'] = 0.5")
    Builder(config, make_schema(config)).check_names()
    assert len(built) == 1


def test_a_check_of_the_schema_comes_before_any_record_is_read(tmp_path):
    (tmp_path / "day.csv").write_text("label,user\n1,u\nnot a label,v\n")

    def check(schema):
        assert [table.name for table in schema.tables] == ["user"]
        raise InputError("no")

    features = dict(tasks=[dict(name="click", label="label")], categorical=[dict(columns="user")])
    source = dict(kind="csv", files=dict(train=str(tmp_path / "day.csv")))
    with pytest.raises(InputError, match="^no$"):
        prepare(features, source, tmp_path / "store", report=lambda _: None, check=check)


def test_a_task_of_weight_0_is_not_trained_unless_a_child_trains_it():
    config = tiny.config()
    config.task_weights = (0.0, 1.0)
    builder = Builder(config, make_schema(config))
    assert builder.untrained() == ("click",)
    assert builder.watched_metric() == "conversion/logloss"
    config.eval.metric = "click/auc"
    with pytest.raises(InputError, match="must be of a task that is trained: found 'click/auc'"):
        builder.watched_metric()
    bad(config, "model.parents.conversion = 'click'")
    assert builder.untrained() == ()
    assert outputs.idle_tasks([0, 0, 1, 0], [1, -1, 0, -1]) == (3,)
