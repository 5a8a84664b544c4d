"""Batches of one task whose examples have requests."""

import numpy as np

from jaxrank.features import PAD, Batch

GROUP = 16


def batch(groups=4, seed=0, sampled=False, kind="binary"):
    """Returns scores f[B] and a batch of one task, of requests of 1 to 5 examples and fillers."""
    r = np.random.default_rng(seed)
    requests = np.full((groups, GROUP), PAD, np.int32)
    for group in range(groups):
        sizes = r.integers(1, 6, 20)
        numbers = np.repeat(np.arange(20), sizes)
        fitting = sizes.cumsum()[sizes.cumsum() <= GROUP - group][-1]
        requests[group, :fitting] = numbers[:fitting]
    size = groups * GROUP
    real = (requests != PAD).reshape(-1, 1)
    drawn = r.random((size, 1)) < 0.4 if kind == "binary" else r.poisson(0.7, (size, 1))
    weights = r.choice([0.0, 1.0, 2.0], (size, 1), p=[0.15, 0.6, 0.25]) * real
    correction = np.log(r.choice([0.25, 1.0], (size, 1)))
    nothing = np.zeros((size, 0), np.float32)
    case = Batch(
        nothing,
        {},
        {},
        labels=np.float32(drawn * (weights > 0)),
        weights=np.float32(weights),
        dropped=np.zeros((groups, 0), np.int32),
        logit_correction=np.float32(correction) if sampled else nothing,
        requests=requests.reshape(-1),
    )
    return np.float32(r.normal(size=size) * 2), case
