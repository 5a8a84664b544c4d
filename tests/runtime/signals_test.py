"""Ctrl-C and SIGTERM outside the training loop: while a program starts, waits and exits."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from checkout import ROOT

_CHILDREN = """
    import os, signal, threading, time

    def children():
        ids = []
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                ids += file.read().split()
        return ids

    def interrupt_group_at(count):
        def wait():
            while len(children()) < count:
                time.sleep(0.01)
            os.killpg(0, signal.SIGINT)
        threading.Thread(target=wait, daemon=True).start()
"""

# multiprocessing starts a process of its own in addition to the workers.
_TRAIN = """
    import contextlib, json, sys
    from jaxrank.data.batches.pipeline import TrainBatches
    from jaxrank.data.store.reader import open_store
    from jaxrank.runtime.prefetch import DevicePrefetcher
    from jaxrank.layout import layout

    if __name__ == "__main__":
        store = open_store(sys.argv[1])
        lay = layout(store.schema, {t.name: 8 for t in store.schema.tables})
        batches = TrainBatches(store.split("train"), lay, **json.loads(sys.argv[2]))
        interrupt_group_at(3)
        feed = DevicePrefetcher(batches, list)
        with contextlib.closing(batches), contextlib.closing(feed):
            try:
                for _ in feed:
                    pass
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        batches.seek(5)
        next(batches)
        batches.close()
        print("and on")
"""

_PREPARE = """
    import sys
    from types import SimpleNamespace
    from jaxrank import cli
    from jaxrank.data.prepare.runners import Local

    def work(folder, unit):
        open(f"{folder}/{os.getpid()}", "w").close()
        time.sleep(600)

    def prepare(_):
        if sys.argv[2] == "interrupted":
            interrupt_group_at(3)
        Local(2).run(work, sys.argv[1], 3 * [SimpleNamespace(bytes=1 << 30)])

    if __name__ == "__main__":
        cli.run = prepare
        cli.main()
"""

_COMMAND = """
    import ctypes, os, signal, sys, threading, time
    from jaxrank import cli

    def work(_):
        if sys.argv[1] == "a thread works":
            threading.Thread(target=time.sleep, args=(600,)).start()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(600)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # it would end a sleep
        for after in (0.2, 0.6):
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()
        ctypes.CDLL(None).sleep(60)

    cli.run = work
    cli.main()
"""

_LOOP = """
    import ctypes, os, signal, sys, threading
    from jaxrank.runtime.stop import ShutdownSignal

    with ShutdownSignal(None, None) as stop:
        assert stop.asked() == (0, False)
        sleeps, *signals = sys.argv[1:]
        for after in signals:
            threading.Timer(float(after), os.kill, (os.getpid(), signal.SIGTERM)).start()
        for _ in range(int(sleeps)):  # a signal ends a sleep
            ctypes.CDLL(None).sleep(60)
        print(f"stopped by {stop.caught}")
"""


def begin(tmp_path, script, *arguments):
    """Starts a program in its own process group, so that signals to the group stay there."""
    path = tmp_path / "script.py"
    path.write_text("".join(textwrap.dedent(part) for part in script))
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def end(program):
    """Returns status, output and errors of a program, and kills its group if it does not end.

    A program that starts and restarts workers takes 10 CPU seconds, on a loaded machine minutes.
    """
    try:
        out, errors = program.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
        raise
    return program.returncode, out, errors


def test_ctrl_c_while_workers_that_read_start_waits_for_nobody(tmp_path, store):
    settings = dict(
        batch_size=64,
        steps_per_execution=1,
        seed=1,
        shards=2,
        window_blocks=2,
        num_workers=2,
        prefetch_batches=2,
        list_slack=6.0,
        on_overflow="truncate",
        order="shuffled",
        num_steps=1 << 20,
    )
    program = begin(tmp_path, (_CHILDREN, _TRAIN), str(store), json.dumps(settings))
    assert end(program) == (0, "interrupted\nand on\n", "")


def test_ctrl_c_while_workers_that_prepare_start_is_reported_once(tmp_path):
    (tmp_path / "at_work").mkdir()
    program = begin(tmp_path, (_CHILDREN, _PREPARE), str(tmp_path / "at_work"), "interrupted")
    assert end(program) == (130, "", "jaxrank: interrupted\n")


def test_workers_that_prepare_end_with_the_program(tmp_path):
    at_work = tmp_path / "at_work"
    at_work.mkdir()
    program = begin(tmp_path, (_CHILDREN, _PREPARE), str(at_work), "killed")
    while len(workers := list(at_work.iterdir())) < 2:
        assert program.poll() is None
        time.sleep(0.02)
    program.kill()
    _, out, errors = end(program)  # workers that still run would hold these open
    assert (len(workers), out) == (2, "")
    assert "Traceback" not in errors


def test_a_second_signal_ends_a_loop_that_waits(tmp_path):
    assert end(begin(tmp_path, [_LOOP], "3", "0.2", "1.4")) == (143, "", "")


def test_signals_together_are_one(tmp_path):
    assert end(begin(tmp_path, [_LOOP], "2", "0.2", "0.4")) == (0, "stopped by 15\n", "")


def test_a_second_ctrl_c_ends_a_command_that_waits(tmp_path):
    assert end(begin(tmp_path, [_COMMAND], "waits")) == (130, "", "")


def test_an_interrupted_command_waits_for_no_thread(tmp_path):
    result = end(begin(tmp_path, [_COMMAND], "a thread works"))
    assert result == (130, "", "jaxrank: interrupted\n")


_DROPPED = """
    import gc, os, signal, sys, threading, time
    from jaxrank import cli

    def collect(phase, _):
        # As in a callback of JAX's, where Python drops what the handler of a signal raises.
        if phase == "start" and not sent:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):
                time.sleep(0.001)

    def work(_):
        gc.callbacks.append(collect)
        gc.collect()
        for _ in range(3000):
            time.sleep(0.01)
        print("lost")

    if __name__ == "__main__":
        sent = []
        cli.run = work
        sys.argv[1:] = []
        cli.main()
"""


# Native code aborts the program if a module that it imports raises.
_NATIVE_IMPORT = """
    import os, signal, sys, time
    from importlib.machinery import ExtensionFileLoader
    from jaxrank import cli

    class Loader(ExtensionFileLoader):
        def create_module(self, spec):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(50):
                time.sleep(0.001)
            print("imported", flush=True)

    def work(_):
        Loader("x", "x").create_module(None)
        for _ in range(3000):
            time.sleep(0.01)
        print("lost")

    cli.run = work
    cli.main()
"""

_EARLY = """
    import os, signal, sys, time

    class Finder:
        def find_spec(self, name, *_):
            if name == "jaxrank.cli":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)

    sys.meta_path.insert(0, Finder())
    from jaxrank.__main__ import main
    main()
"""


@pytest.mark.parametrize(
    ("script", "out"),
    [(_DROPPED, ""), (_NATIVE_IMPORT, "imported\n"), (_EARLY, "")],
    ids=["dropped by a callback", "in a native import", "before the program"],
)
def test_a_ctrl_c_that_no_code_can_handle_still_interrupts(tmp_path, script, out):
    assert end(begin(tmp_path, [script])) == (130, out, "jaxrank: interrupted\n")


_SIGTERM = """
    import hashlib, os, signal, sys, threading, time
    from jaxrank import cli

    def work(_):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        {busy}

    cli.run = work
    cli.main()
"""


@pytest.mark.parametrize(
    "busy", ["time.sleep(60)", "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"]
)
def test_sigterm_before_the_first_step_is_reported(tmp_path, busy):
    """The second one is in C, as a compiler is, where Python runs no handlers."""
    script = _SIGTERM.replace("{busy}", busy)
    out, errors = (program := begin(tmp_path, [script], "train", "--json")).communicate(timeout=50)
    assert program.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in errors
    assert json.loads(out) == {"error": "stopped by SIGTERM", "status": 143}
