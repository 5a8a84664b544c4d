"""Compares a bundle with the trained program, and measures its latency."""

import dataclasses
import time
from typing import Any, NamedTuple

import numpy as np

from jaxrank.errors import RunError
from jaxrank.export.comparison.raw_rows import RawRows
from jaxrank.export.comparison.reference import Reference
from jaxrank.export.stack_files import restored
from jaxrank.features import Schema
from jaxrank.metrics import exact

MAX_DIFFERENCE = 1e-5  # of a prediction, absolute or relative if it is above 1
CANDIDATES = (1, 200, 2000)
_REPEATS = {1: 200, 200: 100, 2000: 20}


class Parity(NamedTuple):
    """Result of the comparison.

    rows: number of raw rows.
    difference: the largest difference of a prediction.
    rounding: the largest difference to the program in the precision that it was trained with. None
        if that is the same.
    """

    rows: int
    difference: float
    rounding: float | None


def compare(scorer: Any, raw: RawRows, reference: Reference, schema: Schema, dtype: str) -> Parity:
    """Scores raw rows by a bundle and by the trained program.

    Args:
        scorer: of the bundle, which accepts any column with each candidate.
        dtype: of the bundle's tables.

    Raises:
        RunError: predictions differ.
    """
    scores = scorer.score({}, raw.batch.to_pydict())

    def change(vectors: np.ndarray) -> np.ndarray:
        return restored(vectors, dtype)

    difference, rounding = 0.0, None
    for is_exact in (True, False) if reference.rounds else (True,):
        logits = reference.logits(change, exact=is_exact)
        largest = 0.0
        for i, task in enumerate(schema.tasks):
            expected = exact.prediction(logits[:, i], task.kind)
            actual = scores[task.name]
            errors = np.abs(actual - expected) / np.maximum(1, np.abs(expected))
            worst = int(errors.argmax())
            largest = float(np.maximum(largest, errors[worst]))  # also NaN
            if is_exact and not errors[worst] <= MAX_DIFFERENCE:
                raise RunError(
                    f"the bundle must predict like the trained program, to {MAX_DIFFERENCE:g}:"
                    f" found {actual[worst]:.9g} for task {task.name} in raw row {worst}, and"
                    f" {expected[worst]:.9g} by the program. Report this as a bug of jaxrank."
                )
        if is_exact:
            difference = largest
        else:
            rounding = largest
    return Parity(raw.examples.rows, difference, rounding)


def latency(scorer: Any, raw: RawRows) -> dict[int, dict[str, float]]:
    """Measures requests of 1, 200 and 2,000 candidates in process: {candidates: {p50, p99}} in ms.

    Columns of the context have the value of the first row.
    """
    columns = raw.batch.to_pydict()
    shared = {c.name for c in scorer.signature.columns if c.source == "context"}
    context = {name: values[0] for name, values in columns.items() if name in shared}
    result = {}
    for count in CANDIDATES:
        candidates = {
            name: (values * (count // len(values) + 1))[:count]
            for name, values in columns.items()
            if name not in shared
        }
        scorer.score(context, candidates)
        times = []
        for _ in range(_REPEATS[count]):
            start = time.perf_counter()
            scorer.score(context, candidates)
            times.append(1e3 * (time.perf_counter() - start))
        p50, p99 = np.percentile(times, [50, 99])
        result[count] = {"p50_ms": float(p50), "p99_ms": float(p99)}
    return result


def without_sources(signature: Any) -> Any:
    """Returns a signature that accepts any column with each candidate."""
    columns = [
        dataclasses.replace(c, source="any", required=True, default=None) for c in signature.columns
    ]
    return dataclasses.replace(signature, columns=tuple(columns))
