"""DCN-V2 on the original Criteo format: 13 dense and 26 categorical features.

    jaxrank train --config=configs/criteo.py --workdir=/tmp/criteo \
        --config.source.files.train=/data/train.txt --config.source.files.valid=/data/valid.txt

On the sample of 28,000 rows, which says nothing about the model: validation AUC 0.741, logloss
0.486, in seconds.
"""

from ml_collections import ConfigDict

from jaxrank.config import default


def get_config():
    c = default()
    c.source = ConfigDict(
        dict(
            kind="criteo",
            files=dict(
                train="../shared/data/criteo_sample/train.tsv.gz",
                valid="../shared/data/criteo_sample/valid.tsv.gz",
            ),
        )
    )
    c.features.tasks = [dict(name="click", label="label")]
    c.features.dense = [dict(columns="I*", log=True, standardize=True, missing_indicator=True)]
    c.features.categorical = [dict(columns="C*", encoding="vocabulary", min_count=4)]

    # For the 28,000 rows of the sample. For all 45.8 M: larger batches, one epoch, no dropout.
    c.batch_size = 256
    c.num_epochs = 2.0
    c.steps_per_execution = 2
    c.log_every_steps = 10
    c.model.dropout = 0.3
    c.optim.dense.base_learning_rate = 0.0015
    c.optim.dense.base_batch = 256
    c.optim.tables.base_learning_rate = 0.0125
    c.optim.tables.base_batch = 256
    return c
