import numpy as np
import pytest
import tiny
from runs import nothing

from jaxrank import cli
from jaxrank.data.examples import Examples
from jaxrank.errors import InputError
from jaxrank.evaluation.evaluate import evaluate
from jaxrank.explain import importance
from jaxrank.explain.importance import describe, explain
from jaxrank.explain.permute import groups, permuted
from jaxrank.features import Categorical, Dense, Ragged, Schema, Table, Task
from jaxrank.train import train

SCHEMA = Schema(
    (Task("click"),),
    (
        *(Dense("age"), Dense("age:missing"), Dense("price")),
        *(Dense("image[0]"), Dense("image[0]:missing"), Dense("image[1]")),
    ),
    (Categorical("pair", "t", 2), Categorical("item", "t")),
    (
        Ragged("tags", "t"),
        Ragged("seen", "t", sequence="past"),
        Ragged("when", "t", sequence="past"),
    ),
    (Table("t", 100, "integer"),),
)


def examples(rows=50):
    r = np.random.default_rng(0)
    lengths = r.integers(0, 4, (rows, 3)).astype(np.int32)
    lengths[:, 2] = lengths[:, 1]
    total = lengths.sum()
    return Examples(
        dense=r.normal(size=(rows, len(SCHEMA.dense))).astype(np.float32),
        ids=r.integers(0, 100, (rows, 3)).astype(np.int32),
        list_lengths=lengths,
        list_values=r.integers(0, 100, total).astype(np.int32),
        list_weights=r.random(total).astype(np.float32),
        labels=r.random((rows, 1)).astype(np.float32),
    )


def feature_arrays(batch):
    """Returns {feature: its values of each example, as text}."""
    rows = range(batch.rows)
    result = {f.name: [str(batch.dense[i, c]) for i in rows] for c, f in enumerate(SCHEMA.dense)}
    result["pair"] = [str(batch.ids[i, :2]) for i in rows]
    result["item"] = [str(batch.ids[i, 2]) for i in rows]
    for c, f in enumerate(SCHEMA.ragged):
        result[f.name], start = [], 0
        for i in rows:
            for other, length in enumerate(batch.list_lengths[i]):
                span = slice(start, start + length)
                if other == c:
                    values = batch.list_values[span], batch.list_weights[span]
                    result[f.name].append(str(values))
                start += length
    return result


@pytest.mark.parametrize("unit", ["age", "price", "image", "pair", "tags", "past"])
def test_only_the_features_of_a_group_are_permuted(unit):
    before = examples()
    order = np.random.default_rng(1).permutation(before.rows)
    features = groups(SCHEMA, ())[unit]
    after = permuted(before, SCHEMA, features, order)
    old, new = feature_arrays(before), feature_arrays(after)
    for name, values in old.items():
        assert new[name] == ([values[i] for i in order] if name in features else values), name
    assert after.labels is before.labels


def test_groups_join_features_and_leave_the_others_alone():
    result = groups(SCHEMA, ["ids=pair,it*"])
    assert result["ids"] == ("pair", "item")
    assert result["age"] == ("age", "age:missing")
    assert result["past"] == ("seen", "when")
    assert set(result) == {"ids", "age", "price", "image", "tags", "past"}


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (["ids"], "NAME=FEATURES: found 'ids'"),
        (["a=itm"], "'itm'.*'item'"),
        (["age=pair"], "another name than a feature outside all groups: found 'age'"),
        (["a=pair", "a=item"], "a name for each group: found 'a' twice"),
        (["a=pair", "b=pa*,item"], r"in one group: found 'pair' of 'b=pa\*,item' in an earlier"),
    ],
)
def test_invalid_groups_are_named(requested, message):
    with pytest.raises(InputError, match=f"--group: .*{message}"):
        groups(SCHEMA, requested)


def test_a_group_may_have_the_name_of_a_feature_in_it():
    assert groups(SCHEMA, ["item=pair,item"])["item"] == ("pair", "item")


def test_importance_by_auc_has_the_largest_loss_first():
    changes = {name: {"click": {"auc": [value]}} for name, value in (("a", 0.1), ("b", -0.2))}
    assert importance._sorted(changes, "click") == ["b", "a"]
    assert importance._names([Task("sales", "count")], ["sales"]) == {}


@pytest.mark.usefixtures("shared_programs")
def test_the_most_important_feature_has_an_interval_above_zero(tmp_path):
    c = tiny.config(num_steps=40)
    c.optim.dense.base_learning_rate = 0.02
    workdir = tmp_path / "run"
    train(c, workdir, report=nothing)
    lines = []
    result = explain(str(workdir), group=["ids=c*"], by="c1", report=lines.append)
    assert lines[0].startswith(f"{len(result.groups) + 1} passes over 1,000 examples")
    metrics = evaluate(str(workdir)).metrics
    for task, base in result.base.items():
        assert base == pytest.approx({name: metrics[task][name] for name in base}, abs=1e-6)
    changes = {name: change["click"]["logloss"] for name, change in result.changes.items()}
    assert max(changes.values(), key=lambda c: c[0])[1] > 0
    for change, low, high in changes.values():
        assert low <= change <= high
    sizes = [entry["examples"] for entry in result.by["values"]]
    assert sizes == sorted(sizes, reverse=True)
    assert "ids" in describe(result)
    picture = workdir / "p.svg"
    cli.run(["explain", f"--workdir={workdir}", "--rows=500", f"--picture={picture}"])
    assert "importance of features" in picture.read_text()
