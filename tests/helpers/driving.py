"""Drives studies with made-up results."""

import re

from jaxrank.config_files import to_plain
from jaxrank.errors import InputError
from jaxrank.studies.study import Outcome, RunResult


def check_texts(conclusion, notes):
    """A conclusion has one or two sentences, each an entry, and everything else is a note."""
    assert 1 <= len(conclusion) <= 2
    for sentence in conclusion:
        assert re.fullmatch(r"[A-Z].+\.", sentence)
        assert not re.search(r"[.?!] [A-Z]", sentence), sentence
        assert len(sentence.split()) <= 60, sentence
    assert all(re.fullmatch(r"[A-Z0-9].+\.", note) for note in notes)


def drive(runs, answer):
    """Returns the outcome of a generator of runs, and the batches of its specs."""
    batches, results = [], None
    while True:
        try:
            batch = next(runs) if results is None else runs.send(results)
        except StopIteration as stop:
            if isinstance(stop.value, Outcome):
                check_texts(stop.value.conclusion, stop.value.notes)
            return stop.value, batches
        batches.append(batch)
        results = [answer(spec) for spec in batch]


def rows_when_stopped(make_runs, answer):
    """Returns the number of rows of a study of which only the first k runs have finished, by k.

    0 where the study makes no table. `make_runs` starts the study again.
    """
    counts = []
    total = len([spec for batch in drive(make_runs(), answer)[1] for spec in batch])
    for most in range(total + 1):
        finished = set()

        def stopped(spec, finished=finished, most=most):
            if len(finished | {spec.name}) > most:
                return RunResult(spec, "failed", error="not executed")
            finished.add(spec.name)
            return answer(spec)

        try:
            counts.append(len(drive(make_runs(), stopped)[0].table.rows))
        except InputError:
            counts.append(0)
    return counts


def resolved(config, num_steps=100):
    """Returns the values of a run of kind "resolve"."""
    c = to_plain(config)
    c["optim"]["tables"]["decay"] = c["optim"]["dense"]["decay"] = "constant"
    return {"config": c, "rows": 6000, "num_steps": num_steps}
