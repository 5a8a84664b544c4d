"""The shapes of MLPerf's recommendation benchmarks, on generated data.

    jaxrank compile --config=configs/mlperf.py:dcnv2 --topology=v4-128

26 tables of dimension 128, 204 M rows, 104 GB.

dcnv2: DLRM-DCNv2 of 2023, 214 ids an example on average, summed by feature; a low-rank DCN-V2 of
three layers under a tower; the dense features pass three layers before they meet the vectors.
The benchmark's lists all have the same length, here their mean.
dlrm: the one before, with one id of each feature, and dot products of the vectors.

References:
    MLCommons, training benchmarks for recommendation (rows, lengths, layers).
    Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation
    Systems, 2019.
"""

from ml_collections import ConfigDict

from jaxrank.config import default

# Of each feature: rows of its table, ids of an example.
FEATURES = (
    (40_000_000, 3), (39_060, 2), (17_295, 1), (7_424, 2), (20_265, 6), (3, 1), (7_122, 1),
    (1_543, 1), (63, 1), (40_000_000, 7), (3_067_956, 3), (405_282, 8), (10, 1), (2_209, 6),
    (11_938, 9), (155, 5), (4, 1), (976, 1), (14, 1), (40_000_000, 12), (40_000_000, 100),
    (40_000_000, 27), (590_152, 10), (12_973, 3), (108, 1), (36, 1),
)  # fmt: skip


def get_config(model: str = "dcnv2"):
    """`model`: dcnv2 or dlrm."""
    if model not in ("dcnv2", "dlrm"):
        raise ValueError(f"the model must be dcnv2 or dlrm: found {model!r}")
    is_list = {"dcnv2": lambda length: length > 1, "dlrm": lambda length: False}[model]
    c = default()
    ids = [rows for rows, length in FEATURES if not is_list(length)]
    lists = [(rows, length) for rows, length in FEATURES if is_list(length)]
    c.source = ConfigDict(
        dict(
            kind="synthetic",
            rows=dict(train=2**27, valid=2**20),
            seed=1,
            dense=13,
            categorical=ids,
            exponent=1.05,
            ragged=[dict(rows=rows, mean_length=length, weighted=False) for rows, length in lists],
        )
    )
    c.features.tasks = [dict(name="click", label="click", truth="p_click")]
    c.features.dense = [dict(columns="f*", standardize=True)]
    c.features.categorical = [
        dict(columns=f"c{i}", encoding="integer", rows=rows) for i, rows in enumerate(ids)
    ]
    c.features.ragged = [
        dict(columns=f"l{i}", encoding="integer", rows=rows, combiner="sum")
        for i, (rows, _) in enumerate(lists)
    ]
    c.embedding.dim = 128
    c.model.mlp_units = (1024, 1024, 512, 256)
    c.model.precision = "bfloat16"
    if model == "dcnv2":
        c.model.cross = "dcn_v2_low_rank"
        c.model.cross_layers = 3
        c.model.cross_rank = 512
        c.model.dense_mlp_units = (512, 256, 128)
        c.optim.tables.name = "adagrad"
        c.batch_size = 65_536
    else:
        c.model.cross = "dlrm"
        c.model.bottom_mlp_units = (512, 256)
        c.optim.dense.name = "sgd"
        c.optim.tables.name = "sgd"
        c.batch_size = 55_296
    c.eval.batch_size = c.batch_size
    c.num_epochs = 1.0
    c.steps_per_execution = 4
    c.log_every_steps = 16
    return c
