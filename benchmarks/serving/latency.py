"""Measures one request of a bundle in process, beside its dense part alone.

    jaxrank train --config=configs/criteo.py --workdir=/tmp/criteo
    python -m benchmarks.serving.latency --workdir=/tmp/criteo --context='C?,C1[0-3]'

Exports the run with tables in float32, bfloat16 and int8, and scores `--candidates` raw rows of its
data that share a context. The floor is ONNX Runtime with one thread on the dense part, with the
vectors in hand. Each round runs the floor and a request, so both see the same load of the machine.
Prints p50 and p99 of both, their ratios, and p50 of the parts of a request.

Then other ways to run the model take turns with the floor: an ONNX graph that has the tables
inside, and with `--torch-python` the dense part by torch.compile, each with one thread.
"""

import argparse
import contextlib
import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxrank_serving import Scorer, load
from jaxrank_serving.dense_part import open_onnx
from jaxrank_serving.requests import cells_of_request
from jaxrank_serving.scorer import THREADS

from benchmarks.harness.arguments import positive, run_main
from benchmarks.serving import peers
from jaxrank.export.bundle import bundle_features, export_bundle
from jaxrank.export.comparison.raw_rows import raw_rows
from jaxrank.export.signature import Requests
from jaxrank.export.write import open_source

_BATCHES = 5  # requests with different candidates
DTYPES = ("float32", "bfloat16", "int8")


class Request:
    """A request, and its parts as functions without arguments.

    Args:
        scorer: of the bundle.
        columns: raw values of at least `count` rows. Requests take the candidates in turn.
        count: number of candidates.
        by_column: True if candidates are given as columns, False as a list of dicts.
    """

    def __init__(
        self, scorer: Scorer, columns: Mapping[str, list[Any]], count: int, by_column: bool
    ):
        shared = {c.name for c in scorer.signature.columns if c.source == "context"}
        self.context = {name: columns[name][0] for name in shared}
        others = {name: values for name, values in columns.items() if name not in shared}
        total = len(next(iter(columns.values())))
        batches = []
        for start in range(0, total - count + 1, count):
            candidates: Any = {n: values[start : start + count] for n, values in others.items()}
            if not by_column:
                candidates = [{n: candidates[n][i] for n in others} for i in range(count)]
            batches.append(candidates)
        self.batches = itertools.cycle(batches)
        self.candidates = batches[0]
        self.scorer = scorer
        self.by_name = {column.name: column for column in scorer.signature.columns}
        self.features, self.rows = scorer.encode(self.context, self.candidates)
        self.arrays = scorer.arrays(self.features, self.rows)
        self.logits = scorer.logits(self.arrays)
        self.dense_part = open_onnx(scorer.bundle)  # with one thread

    def score(self) -> Any:
        return self.scorer.score(self.context, next(self.batches))

    def floor(self) -> Any:
        return self.dense_part(self.arrays)

    @property
    def parts(self) -> dict[str, Callable[[], Any]]:
        cells, _ = cells_of_request(self.context, self.candidates, self.by_name)
        encoder = self.scorer.encoder
        return {
            "columns": lambda: cells_of_request(self.context, self.candidates, self.by_name),
            "encoding": lambda: encoder.encode(cells, self.rows),
            "vectors": lambda: self.scorer.arrays(self.features, self.rows),
            "dense part": lambda: self.scorer.logits(self.arrays),
            "predictions": lambda: self.scorer.predictions(self.logits),
        }


def alternate(
    functions: list[Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> np.ndarray:
    """Returns f64[functions, rounds] milliseconds of each function, called one after another."""
    times = np.empty((len(functions), rounds))
    for function in functions * 10:
        function()
    for i in range(rounds):
        for j, function in enumerate(functions):
            start = clock()
            function()
            times[j, i] = 1e3 * (clock() - start)
    return times


def measure(name: str, request: Request, rounds: int, clock: Callable[[], float]) -> None:
    floor, whole = alternate([request.floor, request.score], rounds, clock)
    (floor_50, floor_99), (p50, p99) = np.percentile([floor, whole], [50, 99], axis=1).T
    parts = alternate(list(request.parts.values()), rounds // 4, clock)
    shown = ", ".join(
        f"{part} {time:.3f}" for part, time in zip(request.parts, np.median(parts, 1), strict=True)
    )
    print(
        f"{name}: p50 {p50:.2f} ms = {p50 / floor_50:.2f} x floor {floor_50:.2f};"
        f" p99 {p99:.2f} ms = {p99 / floor_99:.2f} x floor {floor_99:.2f}; p50 of parts: {shown}",
        flush=True,
    )


def measure_peers(
    request: Request, rounds: int, clock: Callable[[], float], args: argparse.Namespace
) -> None:
    """Prints the times of the peers over the floor."""

    def timed(function: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            start = clock()
            function()
            return 1e3 * (clock() - start)

        return run

    inside = peers.with_tables(request.scorer, request.features)
    np.testing.assert_allclose(inside(), request.logits, atol=1e-5)
    functions = {"floor": timed(request.floor), "graph with tables": timed(inside)}
    with contextlib.ExitStack() as stack:
        if args.torch_python:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options = request.scorer, request.arrays, args.clock, folder
            peer = peers.compiled_by_torch(args.torch_python, *options)
            functions["torch.compile"] = stack.enter_context(peer)
        times = {name: np.empty(rounds) for name in functions}
        for i in range(-10, rounds):  # the first ten are a warm-up
            for name, function in functions.items():
                times[name][max(i, 0)] = function()
    floor = np.percentile(times["floor"], [50, 99])
    for name, of_peer in times.items():
        p50, p99 = np.percentile(of_peer, [50, 99])
        ratios = f"p50 {p50:.2f} ms = {p50 / floor[0]:.2f} x floor"
        print(f"{name}: {ratios}; p99 {p99:.2f} ms = {p99 / floor[1]:.2f} x floor", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--context", default="", help="as for jaxrank export")
    parser.add_argument("--candidates", type=positive, default=200)
    parser.add_argument("--rounds", type=positive, default=2000)
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time of the thread, for a machine that is in use",
    )
    parser.add_argument("--threads", type=positive, default=THREADS, help="of a request")
    parser.add_argument("--torch-python", default="", help="a Python with torch, for torch.compile")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    args = parser.parse_args()
    requests = Requests.parse([args.context], []) if args.context else Requests()
    gc.freeze()  # as servers do: collections then skip the imported modules
    clock = time.perf_counter if args.clock == "wall" else time.thread_time
    source = open_source(args.workdir, "newest", "")
    spec = bundle_features(source)
    raw = raw_rows(source.run, source.store, spec, _BATCHES * args.candidates, None)
    columns = raw.batch.to_pydict()
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtypes:
            output = str(Path(folder) / dtype)
            export_bundle(
                args.workdir,
                output=output,
                tables=dtype,
                requests=requests,
                report=lambda _: None,
            )
            scorer = load(output, threads=args.threads)
            for form, by_column in (("dicts", False), ("columns", True)):
                request = Request(scorer, columns, args.candidates, by_column)
                measure(
                    f"{dtype}, {args.candidates} candidates as {form}", request, args.rounds, clock
                )
            if dtype == "float32":
                measure_peers(request, args.rounds, clock, args)


if __name__ == "__main__":
    run_main(main)
