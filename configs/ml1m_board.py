"""Models of the public boards on MovieLens-1M with seven features, by the name of the model.

jaxrank train --config=configs/ml1m_board.py:qnn --workdir=/tmp/ml1m_qnn
jaxrank evaluate --workdir=/tmp/ml1m_qnn --checkpoint=best --split=test

The features are the six of configs/ml1m_dcnv2.py without zip, the genres and the decade of the
release year. `benchmarks/quality/board.py` tunes every model and compares them.
"""

from collections.abc import Callable

import ml1m_dcnv2

from jaxrank.config import default

# What a config without settings gets, with early stopping, and its model by name.
DEFAULTS = ("defaults", "factorization_machine")
NETWORKS = ("dcn_v2", "dcn", "dcn_mix", "dlrm", "none")  # values of model.cross of the ranker


def _features(c):
    """Sets source and features."""
    c.source = ml1m_dcnv2.get_config().source
    c.features.tasks = [dict(name="like", label="label")]
    decades = [float(year) for year in range(1930, 2001, 10)]
    c.features.derived = [dict(name="decade", kind="bucket", columns="year", boundaries=decades)]
    c.features.categorical = [
        dict(columns=["user", "movie", "gender", "age", "occupation", "decade"])
    ]
    c.features.ragged = [dict(columns="genres", separator="|", combiner="mean")]


def _qnn_dcn_v2(model):
    model.cross_layers = 2
    model.mlp_units = (192, 192)


MODELS: dict[str, Callable] = {
    "gdcn": lambda model: model.update(cross_layers=2, mlp_units=(192, 192)),
    "final_mlp": lambda model: model.update(first_mlp_units=(192, 192), second_mlp_units=(192,)),
    "qnn": lambda model: None,
    "qnn_dcn_v2": _qnn_dcn_v2,
    "deepfm": lambda model: model.update(mlp_units=(192, 192)),
}


def get_config(model: str = "dcn_v2"):
    """`model`: a name in DEFAULTS, NETWORKS or MODELS."""
    if model in DEFAULTS:
        c = default("" if model == "defaults" else model)
        _features(c)
        c.eval.metric = "like/auc"
        c.eval.early_stopping_patience = 3
        return c
    c = ml1m_dcnv2.get_config()
    _features(c)
    if model in NETWORKS:
        c.model.cross = model
    elif model in MODELS:
        c.model = default(model.removesuffix("_dcn_v2")).model
        c.model.dropout = 0.2
        MODELS[model](c.model)
    else:
        raise ValueError(f"no such model: {model!r}")
    return c
