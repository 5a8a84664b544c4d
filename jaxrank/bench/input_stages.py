"""Measures the cost of each stage of the input, on one thread and without prefetching."""

import copy
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.data.examples import Examples
from jaxrank.data.store.split import Split, WrappedSplit

PARTS = ("read", "decompress", "shuffle", "pack")
_MIN_EXECUTIONS = 2


class _Watch:
    """Records seconds in functions by name, bytes read from files and examples read in blocks."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.bytes = 0
        self.rows = 0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return call


class _RawFile:
    """A Python file that times its reads, before decompression."""

    def __init__(self, file: Any, watch: _Watch):
        self._file, self._watch = file, watch
        self._read = watch.timed("raw", file.read)

    def read(self, *size: int) -> bytes:
        data = self._read(*size)
        self._watch.bytes += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _WatchedSplit(WrappedSplit):
    """A split that times its reads."""

    def __init__(self, split: Split, watch: _Watch):
        super().__init__(split)
        self._watch = watch
        self._read = watch.timed("read", split.read_block)

    def read_block(self, index: int) -> Examples:
        self._watch.rows += int(self.block_rows[index])
        return self._read(index)


def measure(
    split: Split, make: Callable[[Split], TrainBatches], examples: int, seconds: float
) -> dict[str, float]:
    """Measures seconds per million examples, by part.

    read: reads blocks, and their checksums the first time.
    decompress: decompresses blocks. 0 in a store that is not compressed.
    shuffle: joins and permutes windows, and takes each batch's share of them.
    pack: writes the arrays of a batch into the arrays of an execution.

    Args:
        make: makes the batches of a split, without workers and prefetching.
        examples: number of examples of an execution.
        seconds: approximate duration.
    """
    watch = _Watch()
    fresh = copy.copy(split)  # without the checksums of blocks that were already read
    batches = make(_WatchedSplit(fresh, watch))
    source = batches.source(watch.timed("pack", batches.batcher.fill))
    elements = map(watch.timed("execution", source.__getitem__), itertools.count())
    with _one_thread():
        next(elements)  # reads the first windows of all streams, which is not typical
        watch.seconds.clear()
        watch.rows = 0
        for executions in itertools.count(1):
            next(elements)
            if executions >= _MIN_EXECUTIONS and watch.seconds["execution"] >= 0.8 * seconds:
                break
        decompress = watch.rows * _decompress(split.files, 0.2 * seconds)
    spent = watch.seconds
    seconds_of = {
        "read": max(0.0, spent["read"] - decompress),
        "decompress": decompress,
        "shuffle": spent["execution"] - spent["read"] - spent["pack"],
        "pack": spent["pack"],
    }
    return {name: seconds_of[name] / (executions * examples) * 1e6 for name in PARTS}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits Arrow to one core. By default it decompresses the columns of a block on all cores."""
    cores = pa.cpu_count()
    pa.set_cpu_count(1)
    try:
        yield
    finally:
        pa.set_cpu_count(cores)


def _decompress(files: Sequence[Any], seconds: float) -> float:
    """Measures the seconds per example to decode a block, without reading the file."""
    watch, rows, size = _Watch(), 0, 0
    started = time.perf_counter()
    for batch in _blocks(files, watch):
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if time.perf_counter() - started >= seconds:
            break
    if watch.bytes >= size:  # the file is not compressed
        return 0.0
    return (watch.seconds["get"] - watch.seconds["raw"]) / rows


def _blocks(files: Sequence[Any], watch: _Watch) -> Iterator[pa.RecordBatch]:
    for file in files:
        with file.open("rb") as opened:
            raw = pa.PythonFile(_RawFile(opened, watch), "r")
            reader = watch.timed("get", pa.ipc.open_file)(raw)
            get_batch = watch.timed("get", reader.get_batch)
            yield from map(get_batch, range(reader.num_record_batches))
