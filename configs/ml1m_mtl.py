"""Two tasks on MovieLens-1M: like (4 stars or more) and love (5 stars, which implies like).

jaxrank train --config=configs/ml1m_mtl.py:ple --workdir=/tmp/ml1m_mtl
jaxrank evaluate --workdir=/tmp/ml1m_mtl --checkpoint=best --split=test

In place of ple also mmoe and shared_bottom; or like and love, each task trained alone.
"""

import ml1m_dcnv2

FILES = {split: f"../shared/data/ml1m/mtl_{split}.csv.gz" for split in ("train", "valid", "test")}
ALONE = {"like": (1.0, 0.0), "love": (0.0, 1.0)}


def get_config(model: str = "ple"):
    """`model`: ple, mmoe, shared_bottom, like or love."""
    c = ml1m_dcnv2.get_config()
    c.source.files = FILES
    c.features.tasks = [dict(name="like", label="like"), dict(name="love", label="love")]
    c.model.structure = "stacked"
    c.model.mlp_units = (192,)
    c.model.task_mlp_units = (64,)
    if model in ALONE:
        c.task_weights = ALONE[model]
        c.model.mlp_units = (192, 128)
        c.eval.metric = f"{model}/auc"
    elif model == "shared_bottom":
        c.model.mlp_units = (192, 128)
        c.eval.metric = "love/auc"
    elif model in ("mmoe", "ple"):
        c.model.multitask = model
        c.model.expert_mlp_units = (128,)
        c.eval.metric = "love/auc"
    else:
        raise ValueError(f"no such model: {model!r}")
    return c
