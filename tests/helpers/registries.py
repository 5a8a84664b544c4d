"""Removes what a test registers."""

import contextlib

from jaxrank import extensions, task_losses
from jaxrank.metrics import registry as metrics
from jaxrank.models import registry as models

_TABLES = (
    models._MODULES,
    task_losses._LOSSES,
    metrics.METRICS,
    metrics.BY_NAME,
    metrics.TITLES,
    extensions._ORIGINS,
)


@contextlib.contextmanager
def restored():
    """Restores models, losses and metrics at the end of the block."""
    before = [dict(table) for table in _TABLES]
    try:
        yield
    finally:
        for table, contents in zip(_TABLES, before, strict=True):
            table.clear()
            table.update(contents)
