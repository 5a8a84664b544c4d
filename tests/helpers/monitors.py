"""Monitors with the settings that a test names."""

from jaxrank.metrics.early_stopping import make_monitor

_SETTINGS = {
    "early_stopping_patience": 0,
    "reduce_lr_patience": 0,
    "reduce_lr_factor": 0.1,
    "reduce_lr_least": 0.0,
    "min_delta": 0.0,
}


def new_monitor(tasks, metric, **changes):
    return make_monitor(tasks, metric, **(_SETTINGS | changes))
