"""DCN-Mix on MovieLens-1M: configs/ml1m_dcnv2.py with a mixture of low-rank experts.

jaxrank train --config=configs/ml1m_mix.py --workdir=/tmp/ml1m_mix
jaxrank evaluate --workdir=/tmp/ml1m_mix --checkpoint=best --split=test

Six to nine minutes on one CPU core. Test AUC 0.9006, logloss 0.3112, the mean of five seeds
(docs/benchmarks/quality.md).
"""

import ml1m_dcnv2


def get_config():
    c = ml1m_dcnv2.get_config()
    c.model.cross = "dcn_mix"
    c.model.cross_rank = 32
    c.model.cross_experts = 4
    return c
