"""Compares a bundle with the trained program, and reports its latency and validation results."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxrank.export.comparison import parity
from jaxrank.export.comparison.raw_rows import RawRows
from jaxrank.export.comparison.reference import Reference
from jaxrank.export.comparison.validation import Validation, validate
from jaxrank.export.write import Source
from jaxrank.report import Report
from jaxrank.step import Weights

if TYPE_CHECKING:
    from jaxrank_serving.bundle import Bundle
    from jaxrank_serving.dense_part import DensePart


class Checked(NamedTuple):
    """Results of the comparison with the trained program; see `bundle.BundleExport`.

    validation: see `validation.validate`.
    """

    parity: parity.Parity
    latency_ms: dict[int, dict[str, float]]
    validation: Validation


def check(
    bundle: "Bundle",
    source: Source,
    weights: Weights,
    raw: RawRows,
    key: bytes | None,
    tables: str,
    report: Report,
) -> Checked:
    """Scores raw rows by the bundle and by the trained program.

    Args:
        key: of a store with keyed hashes.
        tables: dtype of the stored rows.

    Raises:
        RunError: predictions differ.
    """
    from jaxrank_serving import Scorer

    run, layout = source.run, source.layout
    stand_in = None if bundle.signature.model.onnx else load_stablehlo(bundle)
    every = bundle._replace(signature=parity.without_sources(bundle.signature))
    predicted = functools.partial(
        Reference,
        run.builder.model_fields,
        layout,
        source.stored,
        weights,
        calibration=source.calibration,
        parents=run.builder.parents,
        learns_task_weights=run.builder.learns_task_weights,
    )
    reference = predicted(raw.examples)
    scorer = Scorer(every, dense_part=stand_in, hash_key=key)
    compared = parity.compare(scorer, raw, reference, run.schema, tables)
    report(f"Largest difference of {compared.rows:,} raw rows: {compared.difference:.2g}")
    if compared.rounding is not None:
        report(f"Largest difference from training precision: {compared.rounding:.2g}")
    latency = {}
    if stand_in is None:
        latency = parity.latency(Scorer(bundle, hash_key=key), raw)
        for count, times in latency.items():
            report(
                f"{count:,} candidates: p50 {times['p50_ms']:.2f} ms, p99 {times['p99_ms']:.2f} ms"
            )
    return Checked(compared, latency, validate(source, predicted, tables, report))


def load_stablehlo(bundle: "Bundle") -> "DensePart":
    """Returns the dense part of a bundle as JAX runs its StableHLO."""
    from jax import export

    model = bundle.signature.model
    program = export.deserialize(bytearray(bundle.file(model.stablehlo).read_bytes()))

    def run(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.asarray(program.call(*(arrays[name] for name in model.inputs))[1])

    return run
