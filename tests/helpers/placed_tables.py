"""Tables of two dimensions, read by every kind of feature, and their placements."""

import numpy as np

from jaxrank.features import Categorical, Dense, Ragged, Schema, Table, Task
from jaxrank.layout import ReplicatedRows
from jaxrank.placement import planner
from jaxrank.placement.traffic import TableReads, Traffic

SCHEMA = Schema(
    tasks=(Task("click"), Task("conversion")),
    dense=(Dense("f0"), Dense("f1")),
    categorical=(Categorical("a", "ta"), Categorical("b", "tb"), Categorical("c", "tc", length=2)),
    ragged=(
        Ragged("sum", "ta", "sum"),
        Ragged("mean", "ta", "mean", weighted=True),
        Ragged("sqrtn", "tc", "sqrtn", weighted=True),
        Ragged("sequence", "tb", "none", length=3),
    ),
    tables=(Table("ta", 700, "integer"), Table("tb", 9, "integer"), Table("tc", 60, "integer")),
)
DIMS = {"ta": 4, "tb": 4, "tc": 8}
PLACEMENTS = {
    "split": {},
    "replicated": {
        "dim4": ReplicatedRows(replicated_tables=("ta", "tb")),
        "dim8": ReplicatedRows(replicated_tables=("tc",)),
    },
    "mixed": {
        "dim4": ReplicatedRows(("tb",), ("ta",) * 9, 4),
        "dim8": ReplicatedRows((), ("tc", "tc"), 0),
    },
}
BATCH = 32


def hot_rows(placement, devices):
    """Returns the placement of these tables for a config. "auto" calls the planner."""
    if placement != "auto":
        return PLACEMENTS[placement]
    # Reads per row, by a power law with 40 reads per example.
    reads = {
        t.name: TableReads(
            np.arange(t.rows, dtype=np.int32), 4000 // (1 + np.arange(t.rows, dtype=np.int64))
        )
        for t in SCHEMA.tables
    }
    hot = planner.make_plan(
        SCHEMA,
        DIMS,
        Traffic(1000, reads, np.arange(1), {}),
        devices=devices,
        share=BATCH // devices,
        placement_of={t.name: "auto" for t in SCHEMA.tables},
    ).hot
    assert any(result.replicated_tables for result in hot.values())
    assert any(0 < result.replicated < len(result.hot_rows) for result in hot.values())
    return hot
