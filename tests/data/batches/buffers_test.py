"""Memory that batches share, in one process and between workers and the reader."""

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest
import tiny
from checkout import ROOT

from jaxrank import mesh as meshes
from jaxrank.config_files import to_plain
from jaxrank.data.batches.buffers import (
    BufferPool,
    Shape,
    add_step_axis,
    batch_arrays,
    batch_bytes,
    batch_views,
    map_arrays,
)
from jaxrank.data.batches.shared_memory import SharedRing
from jaxrank.data.prepare.passes import prepare
from jaxrank.features import Batch, Lists


def _shapes():
    def array(dtype, *shape):
        return Shape(shape, dtype)

    return Batch(
        dense=array(np.float32, 6, 3),
        ids={"dim8": array(np.int32, 6, 5), "dim16": array(np.int32, 6, 1)},
        lists={"dim8": Lists(*(array(d, 2, 128) for d in (np.int32, np.int32, np.float32)))},
        labels=array(np.float32, 6, 1),
        weights=array(np.float32, 6, 1),
        dropped=array(np.int32, 2, 0),
        logit_correction=array(np.float32, 6, 0),
    )


def test_the_arrays_of_a_batch_lie_in_one_piece_aligned_and_apart():
    shapes = add_step_axis(_shapes(), 2)
    memory = BufferPool(batch_bytes(shapes), kept=1)
    batch = batch_views(memory.acquire(), shapes)
    for number, array in enumerate(batch_arrays(batch)):
        array.fill(number)
    for number, (array, model) in enumerate(
        zip(batch_arrays(batch), batch_arrays(shapes), strict=True)
    ):
        assert array.shape == model.shape
        assert array.dtype == model.dtype
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0 or not array.size
        assert (array == number).all()
    assert list(batch.ids) == ["dim8", "dim16"]
    assert batch.lists["dim8"].weights.shape == (2, 2, 128)
    sums = map_arrays(lambda first, other: first.shape[0] + other.shape[1], batch, batch)
    assert sums.ids["dim16"] == 2 + 6
    assert sums.lists["dim8"].ids == 2 + 2


def test_memory_is_lent_again_only_when_no_array_in_it_is_held():
    memory = BufferPool(1 << 16, kept=2)
    first = memory.acquire()
    part = first[100:200].view(np.int32).reshape(5, 5)[1:, 2:]
    address = first.ctypes.data
    part.fill(7)
    del first
    gc.collect()
    others = [memory.acquire() for _ in range(3)]
    assert address not in [o.ctypes.data for o in others]
    for other in others:
        other.fill(0)
    assert (part == 7).all()
    del part, other
    assert memory.acquire().ctypes.data == address
    addresses = {o.ctypes.data for o in others}
    del others
    again = [memory.acquire() for _ in range(3)]  # two of three were kept
    assert len(addresses & {a.ctypes.data for a in again}) >= 2


def test_what_was_put_on_a_device_keeps_its_values_when_the_host_has_let_go_of_it():
    mesh = meshes.make_mesh(devices=1)
    memory = BufferPool(1 << 20, kept=4)
    put = []
    for number in range(12):
        array = memory.acquire().view(np.int32).reshape(512, 512)
        array.fill(number)
        put.append(meshes.put_batch(array, mesh))
        del array
        if number % 3 == 2:
            put.pop(0)  # releases its memory for reuse
    for number, array in enumerate(put, start=4):
        assert (np.asarray(jax.device_get(array)) == number).all()


def test_a_worker_waits_for_a_piece_and_one_that_is_held_keeps_only_itself():
    slots = SharedRing(pieces=2, size=16)
    writer = pickle.loads(pickle.dumps(slots))
    for number in range(2):
        writer.to_fill(number).fill(10 + number)
    (held, first), (piece, second) = slots.filled(0), slots.filled(1)
    filled = threading.Event()

    def fill_third():
        writer.to_fill(2).fill(12)
        filled.set()

    thread = threading.Thread(target=fill_third)
    thread.start()
    assert not filled.wait(0.1)
    give_back = slots.giver()
    assert (second == 11).all()
    give_back(piece)
    assert filled.wait(10)
    thread.join()
    for number in range(3, 9):  # all in the piece that is not referenced
        assert slots.filled(number - 1)[0] == piece
        assert (slots.filled(number - 1)[1] == 9 + number).all()
        give_back(piece)
        writer.to_fill(number).fill(10 + number)
    assert (first == 10).all()
    give_back(held)
    writer.to_fill(9).fill(19)
    assert slots.filled(9)[0] == held
    slots.close()
    with pytest.raises(EOFError):
        writer.to_fill(10)
    give_back(piece)  # also after the end


_SCRIPT = """
    import json, multiprocessing, os, signal, sys
    from jaxrank.data.batches.pipeline import TrainBatches
    from jaxrank.data.store.reader import open_store
    from jaxrank.layout import layout

    if __name__ == "__main__":
        store = open_store(sys.argv[1])
        lay = layout(store.schema, {t.name: 8 for t in store.schema.tables})
        batches = TrainBatches(
            store.split("train"), lay, batch_size=64, steps_per_execution=2, seed=0, shards=4,
            window_blocks=1, num_workers=2, prefetch_batches=2, list_slack=8.0,
            on_overflow="truncate", order="shuffled", num_steps=10**6,
        )
        next(batches)
        print(json.dumps([p.pid for p in multiprocessing.active_children()]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def _is_there(pid):
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs the /proc of Linux")
def test_workers_end_when_the_process_that_reads_is_killed(tmp_path):
    config = tiny.config()
    path = tmp_path / "store"
    prepare(to_plain(config.features), to_plain(config.source), path, report=lambda _: None)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    workers = json.loads(done.stdout)
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(map(_is_there, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_there, workers))
