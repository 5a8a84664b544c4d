"""Tests of traces, read from the JSON file that the profiler writes beside each trace."""

import functools
import gzip
import itertools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_config
from runs import newest_state, store_config

from jaxrank import cli
from jaxrank.errors import InputError, RunError
from jaxrank.runtime.prefetch import DevicePrefetcher
from jaxrank.telemetry import profiler as profile
from jaxrank.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")


def run(c, workdir, **options):
    """Returns the lines that a run reports about its trace."""
    lines = []
    train(c, workdir, report=lines.append, quiet=True, **options)
    return [line for line in lines if "traced" in line]


def read_executions(path):
    """Returns the events in a trace that mark executions, in order."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sorted((e for e in events if e.get("name") == "train"), key=lambda e: e["ts"])


def traces(workdir):
    """Returns {name of the trace: step numbers of its executions, in order}."""
    result = {}
    for path in (workdir / "profile").rglob("*.trace.json.gz"):
        result[path.parent.name] = [
            int(execution["args"]["step_num"]) for execution in read_executions(path)
        ]
        host = path.name.removesuffix(".trace.json.gz")
        assert path.with_name(f"{host}.xplane.pb").stat().st_size > 0
        assert path.parent.parent == workdir / "profile" / "plugins" / "profile"
    return result


@pytest.mark.parametrize("text", ["5:7", "8:9", "16:99"])
def test_a_trace_holds_the_calls_of_the_steps_asked_for_and_no_other(store, tmp_path, text):
    asked = range(int(text.split(":")[0]), int(text.split(":")[1]) + 1)
    executions = [(step, step + 1) for step in range(1, 17, 2)]
    expected = [execution for execution in executions if set(execution) & set(asked)]
    first, last = expected[0][0], expected[-1][-1]

    lines = run(store_config(store), tmp_path, profile_steps=text)
    assert lines == [f"Steps {first} to {last} are traced to {tmp_path / 'profile'}"]
    assert traces(tmp_path) == {
        f"steps_{first}_to_{last}": [execution[-1] for execution in expected]
    }
    assert [p.name for p in (tmp_path / "profile").iterdir()] == ["plugins"]


def test_the_mark_of_a_call_lasts_as_long_as_the_call(store, tmp_path, monkeypatch):
    seconds = 0.05
    take = DevicePrefetcher.__next__
    monkeypatch.setattr(
        DevicePrefetcher, "__next__", lambda feed: time.sleep(seconds) or take(feed)
    )
    run(store_config(store), tmp_path, profile_steps="5:8")
    (path,) = tmp_path.rglob("*.trace.json.gz")
    assert [execution["dur"] > 1e6 * seconds for execution in read_executions(path)] == [True, True]


@pytest.mark.parametrize("execution", [1, 3, 4])
def test_calls_to_trace_are_those_that_hold_a_step_asked_for(execution):
    for begin in (0, 7, 12):
        end = begin + 5 * execution
        for first in range(1, end + 3):
            for last in range(first, end + 3):
                cuts = sorted(
                    {begin, end, *range(-(-begin // execution) * execution, end, execution)}
                )
                held = [
                    (before, after)
                    for before, after in itertools.pairwise(cuts)
                    if any(first <= step <= last for step in range(before + 1, after + 1))
                ]
                before, after = profile.whole_executions(
                    profile.Steps(first, last), begin, end, execution
                )
                if held:
                    assert (before, after) == (held[0][0], held[-1][1])
                else:
                    assert after <= before


def test_a_run_that_is_traced_trains_the_same_weights_to_the_bit(store, tmp_path):
    c = store_config(store)
    run(c, tmp_path / "plain")
    run(c, tmp_path / "traced", profile_steps="3:12")
    assert list(traces(tmp_path / "traced").values()) == [[4, 6, 8, 10, 12]]
    assert not (tmp_path / "plain" / "profile").exists()
    states = [newest_state(c, tmp_path / name) for name in ("plain", "traced")]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_of_a_resumed_run_only_steps_that_are_left_are_traced(store, tmp_path):
    run(store_config(store, num_steps=8), tmp_path)
    lines = run(store_config(store), tmp_path, profile_steps="5:11", allow_config_change=True)
    assert lines == [f"Steps 9 to 12 are traced to {tmp_path / 'profile'}"]
    assert traces(tmp_path) == {"steps_9_to_12": [10, 12]}

    lines = run(store_config(store), tmp_path, profile_steps="5:11")
    assert lines == ["Nothing was traced: the run ended at step 16, --profile-steps=5:11"]


def test_steps_after_the_end_of_the_run_are_reported_and_not_traced(store, tmp_path):
    lines = run(store_config(store), tmp_path, profile_steps="17:20")
    assert lines == ["Nothing was traced: the run has steps 1 to 16, --profile-steps=17:20"]
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize(
    ("text", "report", "executions"),
    [
        ("13:31", "Only steps up to 16 were traced: training ended at step 16", [14, 16]),
        ("30:31", "Nothing was traced: training ended at step 16", None),
    ],
)
def test_a_run_that_stops_early_keeps_what_was_traced(store, tmp_path, text, report, executions):
    c = store_config(store, num_steps=32)
    c.eval.min_delta = 10.0  # only the first evaluation is an improvement
    c.eval.early_stopping_patience = 1
    assert run(c, tmp_path, profile_steps=text)[-1] == report
    assert list(traces(tmp_path).values()) == ([] if executions is None else [executions])


def test_a_run_that_fails_while_it_is_traced_keeps_what_was_traced(store, tmp_path):
    c = store_config(store)
    c.optim.dense.base_learning_rate = 1e30
    with pytest.raises(RunError, match="must be finite"):
        run(c, tmp_path, profile_steps="1:16")
    ((name, executions),) = traces(tmp_path).items()
    assert name == "steps_1_to_16"
    assert executions == list(range(2, executions[-1] + 1, 2))

    # The only profiler of the process is free again.
    run(store_config(store), tmp_path / "next", profile_steps="1:2")
    assert traces(tmp_path / "next") == {"steps_1_to_2": [2]}


def test_a_trace_that_cannot_be_written_ends_the_run_with_its_place(store, tmp_path):
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "plugins").touch()
    with pytest.raises(RunError, match=f"{tmp_path}/profile: .*cannot be written: .*plug"):
        run(store_config(store), tmp_path, profile_steps="3:4")

    c = store_config(store)
    c.optim.dense.base_learning_rate = 1e30
    with pytest.raises(
        RunError, match="must be finite"
    ):  # the first error, not the one that follows
        run(c, tmp_path, profile_steps="1:16", allow_config_change=True)

    c = store_config(store, num_steps=32)
    c.eval.min_delta, c.eval.early_stopping_patience = 10.0, 1
    with pytest.raises(RunError, match="the trace cannot be written"):
        run(c, tmp_path, profile_steps="1:32", allow_config_change=True)


@pytest.mark.parametrize(
    "text",
    [
        "5:4",
        "0:3",
        "5",
        "5:",
        ":5",
        "-1:3",
        "1:2:3",
        "1.5:3",
        "a:b",
        "1:2 ",
        "1:" + "9" * 5000,
        "9" * 5000 + ":1",
    ],
)
def test_what_is_no_range_of_steps_is_rejected_before_anything_is_written(tmp_path, text):
    command = ["train", f"--config={tiny_config.__file__}", f"--workdir={tmp_path / 'run'}"]
    with pytest.raises(InputError) as result:
        cli.run([*command, f"--profile-steps={text}"])
    assert str(result.value).startswith(
        "--profile-steps: must be FIRST:LAST, the first and the last step to trace, counted from 1:"
        f" found {text!r}"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_traces_too(store, tmp_path, capsys):
    command = ["train", f"--config={tiny_config.__file__}", f"--workdir={tmp_path}"]
    cli.run([*command, f"--config.data.store={store}", "--profile-steps=3:3"])
    assert f"\nSteps 3 to 4 are traced to {tmp_path / 'profile'}\n" in capsys.readouterr().out
    assert traces(tmp_path) == {"steps_3_to_4": [4]}


def test_the_devices_are_waited_for_before_a_trace_starts_and_before_it_stops(
    tmp_path, monkeypatch
):
    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 30, lambda _, y: y @ x / jnp.max(y), x)

    inputs, ready, pauses = jnp.ones((700, 700)), [], []
    slow(inputs).block_until_ready()  # compiled
    states = {}

    def watched(name, execution, *args, **options):
        ready.append((name, states["now"].is_ready(), len(pauses)))
        return execution(*args, **options)

    for name in ("start_trace", "stop_trace"):
        execution = functools.partial(watched, name, getattr(jax.profiler, name))
        monkeypatch.setattr(jax.profiler, name, execution)
    run = dict(steps_per_execution=5, num_steps=20)
    steps = profile.parse("6:10")
    with profile.Profile(steps, tmp_path, 0, lambda: pauses.append(1), str, **run) as profiler:
        for step in range(0, 20, 5):
            states["now"] = slow(inputs)
            assert not states["now"].is_ready()  # otherwise this test would prove nothing
            profiler.start_if_due(step, states["now"])
            with profiler.execution(step + 5):
                states["now"] = slow(states["now"])
            assert not states["now"].is_ready()
            profiler.stop_if_due(step + 5, states["now"])
    assert ready == [("start_trace", True, 1), ("stop_trace", True, 2)]
    assert traces(tmp_path) == {"steps_6_to_10": [10]}
