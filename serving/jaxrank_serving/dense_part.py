"""The dense part of a model: vectors and numbers in, logits out."""

import functools
import itertools
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import onnxruntime

from jaxrank_serving.bundle import Bundle
from jaxrank_serving.errors import BundleError

LOGITS = "logits"
MIN_SHARED = 64  # candidates: below, a second thread gains less than it costs

Arrays = Mapping[str, np.ndarray]


class DensePart(Protocol):
    """The dense part of a model: arrays f[n, ...] by name -> logits f32[n, outputs]."""

    def __call__(self, arrays: Arrays) -> np.ndarray: ...


def open_onnx(bundle: Bundle) -> DensePart:
    """Opens the ONNX model of a bundle, which the calling thread runs.

    Raises:
        BundleError: there is none, or it cannot be read.
    """
    name = bundle.signature.model.onnx
    if not name:
        raise BundleError(
            f"{bundle.path}: must have a model in ONNX: found StableHLO only. Run that by"
            " jax.export, as `dense_part` of a Scorer."
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(
            bundle.file(name).read_bytes(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # ONNX Runtime raises its own types
        text = str(error).rstrip(".")
        raise BundleError(f"{bundle.path / name}: must be readable: {text}.") from error
    read = {tensor.name for tensor in session.get_inputs()}

    def run(arrays: Arrays) -> np.ndarray:
        return session.run([LOGITS], {n: a for n, a in arrays.items() if n in read})[0]

    return run


class SharedDensePart:
    """Runs a dense part by several threads, each on a part of the candidates.

    A logit depends on its candidate alone, so the result is the same for any number of threads.
    The threads belong to the process and serve all models. A part that none of them has begun when
    the calling thread has done its own is computed by the calling thread. So a call never waits
    for a thread that is busy with another one.

    Args:
        dense_part: that releases the interpreter lock.
        threads: maximum number of threads of a call, with the calling one. No more than cores that
            the process may use are taken.
    """

    def __init__(self, dense_part: DensePart, threads: int):
        self._run, self._threads = dense_part, threads

    def __call__(self, arrays: Arrays) -> np.ndarray:
        count = len(next(iter(arrays.values())))
        threads = min(self._threads, _cores(), 2 * count // MIN_SHARED)
        if threads < 2:
            return self._run(arrays)
        ends = [count * i // threads for i in range(threads + 1)]
        first, *others = [
            {name: array[start:end] for name, array in arrays.items()}
            for start, end in itertools.pairwise(ends)
        ]
        helped = [self._submit(part) for part in others]
        results = [self._run(first)]
        for part, future in zip(others, helped, strict=True):
            if future is None or future.cancel():
                results.append(self._run(part))
            else:
                results.append(future.result())
        return np.concatenate(results)

    def _submit(self, part: Arrays) -> "Future[np.ndarray] | None":
        try:
            return _helpers(os.getpid()).submit(self._run, part)
        except RuntimeError:  # the interpreter ends, or no thread can be started
            return None


@functools.cache
def _helpers(process: int) -> ThreadPoolExecutor:
    """Returns the threads of a process. A forked process starts its own."""
    return ThreadPoolExecutor(max(_cores() - 1, 1), "jaxrank-serving")


def _cores() -> int:
    """Returns the number of cores that the process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
