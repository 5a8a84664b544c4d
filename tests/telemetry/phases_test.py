import time

import jax
import jax.numpy as jnp
import pytest
from jax import monitoring

from jaxrank.telemetry.phases import PhaseTimer


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def compiled(seconds, name="/jax/core/compile/backend_compile_duration"):
    monitoring.record_event_duration_secs(name, seconds)


def test_each_second_belongs_to_one_phase_and_compilation_to_its_own(clock):
    with PhaseTimer() as timer:
        clock[0] += 5.0
        compiled(2.0, "/jaxrank/compile/native")
        timer.enter("training")
        clock[0] += 10.0
        compiled(1.0)
        clock[0] += 3.0
        compiled(6.0)  # contains the one before, which ended 3 seconds ago
        compiled(60.0, "/jax/another/duration")
        with timer.phase("evaluation"):
            clock[0] += 7.0
            compiled(0.5)
            with timer.phase("saving"):
                clock[0] += 0.25
        clock[0] += 1.0
        assert timer.seconds() == {
            "preparation": 3.0,
            "compilation": 8.5,
            "training": 8.0,
            "evaluation": 6.5,
            "saving": 0.25,
        }
    assert timer.started == 100.0
    clock[0] += 1.0
    compiled(1.0)  # no longer its own
    assert timer.seconds()["compilation"] == 8.5


def test_a_program_that_jax_compiles_counts_as_compilation():
    with PhaseTimer() as timer:
        jax.jit(lambda x: jnp.cumsum(x) + len("a new program"))(jnp.arange(7.0))
        phases = timer.seconds()
    assert phases["compilation"] > 0
    assert phases["preparation"] > 0
