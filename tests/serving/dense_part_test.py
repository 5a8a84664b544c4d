"""Several threads compute parts of the candidates, and never wait for a thread that is busy."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from checkout import ROOT
from jaxrank_serving import dense_part
from jaxrank_serving.dense_part import MIN_SHARED, SharedDensePart

SECONDS = 10  # after which a call that waits for a busy thread would end


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    """Threads of each test are its own."""
    monkeypatch.setattr(dense_part, "_cores", lambda: 4)
    dense_part._helpers.cache_clear()
    yield
    dense_part._helpers(os.getpid()).shutdown()
    dense_part._helpers.cache_clear()


class Recorded:
    """A dense part that records its calls, the thread and the number of candidates of each."""

    def __init__(self, before=lambda: None):
        self.calls, self.before = [], before

    def __call__(self, arrays):
        self.before()
        self.calls.append((threading.get_ident(), len(arrays["dense"])))
        return np.sin(arrays["dense"]) + arrays["ids"].sum((1, 2))[:, None]


def arrays(count):
    r = np.random.default_rng(count)
    return {"dense": r.normal(size=(count, 3)), "ids": r.normal(size=(count, 2, 4))}


@pytest.mark.parametrize(
    ("count", "threads", "parts"),
    [
        (MIN_SHARED - 1, 2, [63]),
        (MIN_SHARED, 2, [32, 32]),
        (MIN_SHARED, 3, [32, 32]),
        (201, 1, [201]),
        (201, 2, [100, 101]),
        (200, 3, [66, 67, 67]),
        (1000, 9, [250] * 4),  # as many as cores
    ],
)
def test_a_result_is_the_same_for_any_number_of_threads(count, threads, parts):
    meeting = threading.Barrier(len(parts), timeout=SECONDS)
    recorded = Recorded(meeting.wait)
    result = SharedDensePart(recorded, threads)(arrays(count))
    assert sorted(n for _, n in recorded.calls) == parts
    # All met at the barrier, so each was in a thread of its own.
    assert len({thread for thread, _ in recorded.calls}) == len(parts)
    np.testing.assert_array_equal(result, Recorded()(arrays(count)))


def test_a_call_does_not_wait_for_busy_threads():
    free, busy = threading.Event(), threading.Semaphore(0)

    def wait():
        busy.release()
        free.wait(SECONDS)

    helpers = dense_part._helpers(os.getpid())
    waiting = [helpers.submit(wait) for _ in range(3)]
    for _ in waiting:
        busy.acquire()
    recorded = Recorded()
    result = SharedDensePart(recorded, 3)(arrays(200))
    assert recorded.calls == [(threading.get_ident(), n) for n in (66, 67, 67)]
    assert not any(future.done() for future in waiting)
    free.set()
    np.testing.assert_array_equal(result, Recorded()(arrays(200)))


def test_an_error_of_another_thread_is_raised():
    caller, meeting = threading.get_ident(), threading.Barrier(2, timeout=SECONDS)

    def fail():
        meeting.wait()
        if threading.get_ident() != caller:
            raise ValueError("a part")

    with pytest.raises(ValueError, match="a part"):
        SharedDensePart(Recorded(fail), 2)(arrays(200))


def test_without_threads_the_calling_one_computes_all_parts():
    dense_part._helpers(os.getpid()).shutdown()  # as at the end of the interpreter
    recorded = Recorded()
    SharedDensePart(recorded, 2)(arrays(200))
    assert recorded.calls == [(threading.get_ident(), 100)] * 2


FORK = f"""
import os, threading
import numpy as np
from jaxrank_serving import dense_part

dense_part._cores = lambda: 2

def run(arrays):
    meeting.wait()
    return arrays["x"] + 1

shared = dense_part.SharedDensePart(run, 2)

def succeeds():
    global meeting
    meeting = threading.Barrier(2, timeout={SECONDS})
    return (shared({{"x": np.arange(200)}}) == 1 + np.arange(200)).all()

assert succeeds()
child = os.fork()
if not child:
    status = 1
    try:
        status = 0 if succeeds() else 1
    finally:
        os._exit(status)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_process_has_threads_of_its_own():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "serving")}
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "0", done.stderr
