"""JSON that programs read: what the declarations in `jaxrank.records` accept.

The helpers that run verbs, read metrics.jsonl and call the server compare all output of the suite
with them, see `declarations`.
"""

import re
from typing import Annotated, Literal, NotRequired, TypedDict

import pytest
import runs
from declarations import VERBS, fits, mismatches

from jaxrank import cli
from jaxrank.records import steps

pytestmark = pytest.mark.usefixtures("shared_programs")

Inner = TypedDict("Inner", {"<task>/<metric>": Annotated[float | None, ""], "<task>/n": int})


class Outer(TypedDict):
    step: Annotated[int, "steps", "s"]
    kind: Literal["a", "b"]
    by: NotRequired[dict[str, list[Inner]]]


VALID = {"step": 1, "kind": "a", "by": {"x": [{"click/auc": None, "click/n": 3}]}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"step": 1.0}, r"\$.step: 1.0 is not <class 'int'>"),
        ({"step": True}, r"\$.step: True is not"),
        ({"step": None}, r"\$.step: None is not"),
        ({"kind": "c"}, r"\$.kind: 'c' is none of"),
        ({"more": 1}, r"\$.more: is not declared by Outer"),
        ({"by": {"x": [{"click/auc": "1"}]}}, r"\$.by.x\[0\].click/auc: '1' is not"),
        ({"by": {"x": [{"click/n": 0.5}]}}, r"\$.by.x\[0\].click/n: 0.5 is not"),
        ({"by": {"x": [{"click": 1}]}}, r"\$.by.x\[0\].click: is not declared by Inner"),
        ({"by": None}, r"\$.by: None is not"),
    ],
)
def test_a_key_or_a_type_that_is_not_declared_is_reported(changes, message):
    errors = mismatches(VALID | changes, Outer)
    assert len(errors) == bool(message)
    assert not message or re.match(message, errors[0])


def test_an_absent_key_is_reported_unless_it_is_optional():
    assert mismatches({"step": 1}, Outer) == ["$: has no kind"]
    assert mismatches({"step": 1, "kind": "a"}, Outer) == []


def test_every_verb_but_serve_has_a_record():
    assert VERBS.keys() == cli._RUN.keys() - {"serve"}


def test_every_declared_key_of_a_step_is_written(store, tmp_path):
    """But of a loss spike, which `watch_test` provokes."""
    c = runs.store_config(store, task_weighting="uncertainty")
    c.mesh.devices, c.num_steps, c.eval.every_steps = 2, 4, 4
    c.watch.on_nonfinite = "skip"
    runs.train(c, tmp_path, report=runs.nothing)
    written = {key for line in runs.records(tmp_path) for key in line}
    for key in steps.TrainStep.__annotations__.keys() - {"loss_spike"}:
        assert any(fits(name, key) for name in written), key
