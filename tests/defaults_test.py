"""Open fields of a config are chosen by its data, once for a run."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict
from runs import nothing, store_config

from jaxrank import defaults
from jaxrank.config import default
from jaxrank.config_files import from_plain, to_plain
from jaxrank.data.statistics.prior.effects import Prior
from jaxrank.features import Categorical, Ragged, Schema, Table, Task
from jaxrank.run import build
from jaxrank.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")

MACHINE = "factorization_machine"


SCHEMA = Schema(
    tasks=(Task("click"), Task("conversion")),
    dense=(),
    categorical=(Categorical("c0", "c0"), Categorical("c1", "c1")),
    ragged=(Ragged("l0", "l0"), Ragged("l1", "l1")),
    tables=tuple(Table(name, 50, "integer") for name in ("c0", "c1", "l0", "l1")),
)


def data(**changes):
    known = defaults.Data(
        rows=40_000,
        schema=SCHEMA,
        positives={"click": 900},
        distinct_ids=300,
        prior=lambda: Prior({"c0": 0.5, "c1": 0.2, "l0": 0.1, "l1": 0.1}, 0.2),
        in_order=False,
    )
    return known._replace(**changes)


def chosen(config=None, **changes):
    return defaults.choose(config or default(), data(**changes), nothing)


def test_products_vary_less_where_no_pair_has_an_effect():
    prior = data().prior()
    scales = [
        chosen(prior=lambda has=has: prior._replace(has_pairs=has)).model.cross_scale
        for has in (True, False)
    ]
    assert scales[1] == pytest.approx(scales[0] * 0.1**0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("rows", "batch_size", "model", "epochs"),
    [
        (5_000, 256, MACHINE, 24.0),
        (10_000, 256, MACHINE, 12.0),
        (40_000, 512, MACHINE, 6.0),
        (1_000_000, 4096, MACHINE, 6.0),
        (1_000_001, 4096, "ranker", 1.0),
        (20_000_000, 4096, "ranker", 1.0),
    ],
)
def test_model_batch_size_and_epochs_follow_from_the_rows(rows, batch_size, model, epochs):
    c = chosen(rows=rows)
    assert (c.batch_size, c.model.name, c.num_epochs) == (batch_size, model, epochs)
    if model == MACHINE:
        assert to_plain(c.model.scales) == data().prior().ids
        assert c.optim.tables.settings.l2 == pytest.approx(1 / rows, rel=1e-3)
        assert c.optim.dense.weight_decay == pytest.approx(25 / rows, rel=1e-3)
        assert (c.optim.tables.name, c.embedding.dim) == ("proximal_adagrad", 10)
    else:
        assert c.optim.dense.weight_decay == 0
        assert (c.optim.tables.name, c.embedding.dim) == ("rowwise_adagrad", 16)
        assert (c.optim.tables.base_learning_rate, c.optim.dense.base_learning_rate) == (
            0.05,
            0.001,
        )
    again = defaults.choose(c, data(rows=17), pytest.fail)
    assert to_plain(again) == to_plain(c)  # nothing is open any more


LINEAR = {
    "schema": dataclasses.replace(SCHEMA, tasks=SCHEMA.tasks[:1], ragged=()),
    "prior": lambda: data().prior()._replace(has_pairs=False),
    "positives": {"click": 100_000},
}


@pytest.mark.parametrize(
    ("changes", "model", "epochs"),
    [
        ({}, MACHINE, 6.0),
        ({"rows": 20_000_000}, MACHINE, 6.0),
        ({"rows": 1_000_000}, MACHINE, 6.0),
        ({"positives": {"click": 7_000}}, "ranker", 1.0),  # too few for the test of pairs
        ({"positives": {}}, "ranker", 1.0),
        ({"prior": None}, "ranker", 1.0),
        ({"prior": data().prior}, "ranker", 1.0),
        ({"in_order": True}, "ranker", 1.0),
        ({"schema": dataclasses.replace(SCHEMA, tasks=SCHEMA.tasks[:1])}, "ranker", 1.0),
    ],
)
def test_large_data_has_a_network_only_if_pairs_may_have_effects(changes, model, epochs):
    c = chosen(**({"rows": 2_000_000} | LINEAR | changes))
    assert (c.model.name, c.num_epochs) == (model, epochs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 1024),
        ("num_steps", 8),
        ("embedding.dim", 4),
        ("model.mlp_units", (8,)),
        ("model.name", "ranker"),
        ("optim.dense.base_learning_rate", 0.3),
        ("optim.dense.weight_decay", 0.3),
        ("optim.tables.base_learning_rate", 0.3),
        ("optim.tables.base_batch", 128),
        ("optim.tables.decay", "cosine"),
        ("optim.tables.name", "ftrl"),
    ],
)
def test_a_field_that_is_set_stays_as_it_is(field, value):
    c = default()
    *sections, name = field.split(".")
    section = c
    for part in sections:
        section = section[part]
    section[name] = value
    c = chosen(c)
    for part in sections:
        c = c[part]
    assert c[name] == value


@pytest.mark.parametrize(("field", "entry"), [("parents", "click"), ("initial_bias", -2.0)])
def test_fields_of_any_model_leave_the_choice_open(field, entry):
    c, values = default(), {"conversion": entry}
    c.model[field] = ConfigDict(values)
    lines = []
    result = defaults.choose(c, data(), lines.append)
    assert (result.model.name, to_plain(result.model[field])) == (MACHINE, values)
    assert "model.name = 'factorization_machine'" in lines[0]
    older = chosen()
    inherited = defaults.inherit(c, older)
    assert to_plain(inherited.model) == to_plain(older.model) | {field: values}
    assert to_plain(defaults.inherit(default(), result).model) == to_plain(result.model)


def test_tasks_of_any_kind_train_as_long_as_binary_ones():
    tasks = (Task("visits", "count"), Task("click"), Task("price", "real"))
    prior = (
        data()
        .prior()
        ._replace(tasks={"visits": 0.1, "price": 0.7}, dispersions={"visits": 4.0, "price": 0.25})
    )
    changes = {"schema": dataclasses.replace(SCHEMA, tasks=tasks), "prior": lambda: prior}
    c, binary = chosen(**changes), chosen()
    assert to_plain(c.task_weights) == [0.25, 1.0, 1.0]
    assert to_plain(c.model.task_scales) == [0.1, 1.0, 1.4]
    assert to_plain(binary.task_weights) == to_plain(binary.model.task_scales) == []
    assert (c.num_epochs, c.optim.tables) == (binary.num_epochs, binary.optim.tables)
    assert (c.model.name, c.embedding.dim) == (MACHINE, binary.embedding.dim + 1)
    inherited = defaults.inherit(default(MACHINE), c)
    assert to_plain(inherited.model) == to_plain(c.model)
    assert to_plain(inherited.task_weights) == to_plain(c.task_weights)
    # Weights that are set stay. A larger weight needs a stronger prior.
    weighted = default()
    weighted.task_weights = (1.0, 1.0, 4.0)
    weighted = chosen(weighted, **changes)
    assert to_plain(weighted.task_weights) == [1.0, 1.0, 4.0]
    assert to_plain(weighted.model.task_scales) == [0.05, 1.0, 0.7]
    # The dispersion of counts is that of their own loss.
    ranked = default()
    ranked.task_losses = ConfigDict({"visits": "pairwise", "price": "squared"})
    ranked = chosen(ranked, **changes)
    assert to_plain(ranked.task_weights) == []
    assert to_plain(ranked.model.task_scales) == [0.1, 1.0, 1.4]


def test_factors_of_other_tasks_are_not_inherited():
    older, config = default(MACHINE), default()
    older.model.task_scales, older.task_weights = (0.5, 1.0), (0.1, 1.0)
    config.features.tasks = [dict(name="click", label="click")]
    inherited = defaults.inherit(config, older)
    assert to_plain(inherited.model.task_scales) == to_plain(inherited.task_weights) == []


def many_examples_per_id(fields=(), **changes):
    config = default()
    config.update_from_flattened_dict({"eval.early_stopping_patience": 3, **dict(fields)})
    one_task = dataclasses.replace(SCHEMA, tasks=SCHEMA.tasks[:1])
    return chosen(config, **{"rows": 600_000, "schema": one_task, **changes})


def test_ids_with_many_examples_have_a_penalised_network():
    c = many_examples_per_id()
    assert (c.model.name, c.model.cross, c.embedding.dim) == ("ranker", "dcn_v2", 32)
    assert c.embedding.l2 == pytest.approx(1 / (0.024**2 * 600_000), rel=1e-3)
    assert (c.embedding.l2_scope, c.ema_decay, c.num_epochs) == ("table", 0.999, 45)
    assert (c.optim.tables.name, c.optim.tables.base_learning_rate) == ("lazy_adam", 0.001)
    inherited = defaults.inherit(default(), c)
    assert to_plain(inherited.embedding) == to_plain(c.embedding)
    # Without early stopping the length is open.
    assert (inherited.ema_decay, inherited.num_epochs) == (0.999, 0)


def test_a_config_that_names_its_model_takes_no_penalty_from_an_older_run():
    older = many_examples_per_id()
    config = default()
    config.model = older.model
    config.embedding.dim = 32
    inherited = defaults.inherit(config, older)
    assert to_plain(inherited.model) == to_plain(older.model)
    assert to_plain(inherited.embedding) == to_plain(config.embedding)
    assert inherited.ema_decay == 0


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {"rows": 100_000}),
        ({}, {"rows": 1_000_001}),
        ({}, {"in_order": True}),
        ({}, {"schema": dataclasses.replace(SCHEMA, tables=(Table("c0", 20_001, "integer"),))}),
        ({}, {"schema": SCHEMA}),
        ({"optim.tables.base_learning_rate": 0.05}, {}),
        ({"eval.early_stopping_patience": 0}, {}),
        ({"num_epochs": 2.0}, {}),
        ({"embedding.l2": 0.1}, {}),
        ({"model.dropout": 0.1}, {}),
    ],
)
def test_other_data_and_settings_have_no_penalised_network(fields, changes):
    c = many_examples_per_id(fields, **changes)
    assert (c.optim.tables.name, c.embedding.l2_scope) != ("lazy_adam", "table")


def test_days_that_are_trained_in_order_have_the_ranker():
    lines = []
    c = defaults.choose(default(), data(in_order=True), lines.append)
    assert c.model.name == "ranker"
    assert "model.name = 'ranker': days are trained in order" in lines[0]


def test_the_choice_is_reported_with_its_reason():
    lines = []
    defaults.choose(default(), data(), lines.append)
    assert "40,000 training examples, 300 distinct ids, 900 positives of click" in lines[0]
    assert "batch_size = 512: 79 steps per epoch, as near to 100 as" in lines[0]
    assert "num_epochs = 6.0: 469 steps; the optimum is near 480, within 6 to 24 epochs" in lines[0]


def open_config(store):
    """The tiny run, which leaves open what it can."""
    c = store_config(store)
    plain, unset = to_plain(c), to_plain(default())
    for field in ("batch_size", "embedding", "optim", "model"):
        plain[field] = unset[field]
    c = from_plain(plain)
    c.num_steps, c.num_epochs = 0, 1.0
    c.data.valid = "valid"
    return c


@pytest.mark.parametrize(
    ("rows", "batch_size", "epochs", "base_batch"),
    [
        (24_000, 256, 3.0, 256),
        (60_000, 512, 3.0, 512),
        (100_000, 1024, 3.0, 1024),
        (100_001, 1024, 1.0, 4096),
    ],
)
def test_a_network_that_is_named_trains_enough_on_few_examples(
    rows, batch_size, epochs, base_batch
):
    config = default("ranker")
    c = chosen(config, rows=rows)
    assert (c.batch_size, c.num_epochs) == (batch_size, epochs)
    assert c.optim.dense.base_batch == c.optim.tables.base_batch == base_batch
    # A rate that is set keeps its base, and so do days in order.
    config.optim.dense.base_learning_rate = 0.1
    c = chosen(config, rows=rows)
    assert (c.optim.dense.base_batch, c.optim.tables.base_batch) == (4096, base_batch)
    c = chosen(config, rows=rows, in_order=True)
    assert (c.num_epochs, c.optim.tables.base_batch) == (1.0, 4096)


@pytest.mark.parametrize(
    ("rows", "has_pairs", "strides"),
    [(1_000_000, False, [4]), (20_000_000, True, [67]), (20_000_000, False, [67, 7])],
)
def test_the_prior_of_a_large_machine_is_of_more_rows(rows, has_pairs, strides, monkeypatch):
    read = []

    def prior(blocks, schema):
        read.append(list(blocks))
        return Prior({}, 1.0, has_pairs)

    monkeypatch.setattr(defaults.effects, "prior", prior)
    blocks = SimpleNamespace(
        rows=rows, has_statistics=False, block_rows=[1] * 1000, read_block=lambda i: i
    )
    schema = dataclasses.replace(SCHEMA, ragged=())
    defaults.measure_data(blocks, schema, "shuffled").prior()
    assert read == [list(range(0, 1000, stride)) for stride in strides]


def test_a_resumed_run_and_one_started_from_it_never_choose_again(store, tmp_path, monkeypatch):
    first = tmp_path / "first"
    result = train(open_config(store), first, report=nothing)
    assert result.metrics["click"]["normalized_entropy"] < 1
    saved = json.loads((first / "config.json").read_text())
    assert (saved["model"]["name"], saved["batch_size"]) == (MACHINE, 256)
    monkeypatch.setattr(defaults, "MAX_SMALL", 10)
    again = train(open_config(store), first, report=nothing)
    assert again.metrics == result.metrics
    other = open_config(store)
    other.seed = 1
    train(other, tmp_path / "second", report=nothing, init_from=str(first))
    carried = json.loads((tmp_path / "second" / "config.json").read_text())
    for tree in (saved, carried):
        del tree["seed"]
    assert carried == saved
    job = build(open_config(store), tmp_path / "third", nothing)
    job.batches.close()
    assert job.config.model.name == "ranker"


def test_open_fields_take_the_values_of_an_older_run():
    older = chosen()
    assert to_plain(defaults.inherit(default(), older)) == to_plain(older)
    c = default()
    c.model.mlp_units = (8,)
    c.optim.tables.settings = ConfigDict({"eps": 1e-3})
    inherited = defaults.inherit(c, older)
    assert inherited.model.name == "ranker"
    assert to_plain(inherited.optim.tables.settings) == {"eps": 1e-3}
    assert (inherited.optim.dense.weight_decay, older.optim.dense.weight_decay) == (0, 6.25e-4)
