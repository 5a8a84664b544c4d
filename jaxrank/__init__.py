"""A synchronous trainer for click and conversion ranking models in JAX."""

import importlib
from typing import Any

__version__ = "0.1.0"

# The public names, and the module and name behind each. They are imported when they are used, so
# that `jaxrank --help` needs neither JAX nor NumPy. `__init__.pyi` has their types.
_PUBLIC = {
    "InputError": ("jaxrank.errors", "InputError"),
    "Inputs": ("jaxrank.models", "Inputs"),
    "Requests": ("jaxrank.export.signature", "Requests"),
    "RunError": ("jaxrank.errors", "RunError"),
    "default_config": ("jaxrank.config", "default"),
    "evaluate_run": ("jaxrank.evaluation.evaluate", "evaluate"),
    "export_bundle": ("jaxrank.export.bundle", "export_bundle"),
    "field": ("jaxrank.validate", "field"),
    "load_config": ("jaxrank.config_files", "load"),
    "predict_run": ("jaxrank.evaluation.evaluate", "predict"),
    "prepare_data": ("jaxrank.data.prepare.passes", "prepare"),
    "register_loss": ("jaxrank.task_losses", "register"),
    "register_metric": ("jaxrank.metrics.registry", "register"),
    "register_model": ("jaxrank.models", "register"),
    "train_model": ("jaxrank.train", "train"),
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
