"""Small runs of every kind, each trained once for all tests that compare with it."""

import functools

import daily
import histories
import own_model  # noqa: F401  registers "own"
import task_kinds
import tiny
from ml_collections import ConfigDict
from runs import nothing, store_config

from jaxrank.config import default
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store.reader import open_store
from jaxrank.train import train

# Runs of `tiny.config()`, with their config changes.
OF_TINY = {
    "plain": {},
    "average": dict(ema_decay=0.9),
    "learned weights": dict(task_weighting="uncertainty", task_weights=(1.0, 3.0)),
    # Statistics and random numbers in the model, two slots per row, decaying learning rates.
    "experts": {
        "model.multitask": "ple",
        "model.experts": 1,
        "model.levels": 1,
        "model.expert_mlp_units": (4,),
        "model.norm": "batch",
        "model.dropout": 0.1,
        "optim.tables.name": "lazy_adam",
        "eval.min_delta": 10.0,  # only the first evaluation is an improvement
        "eval.reduce_lr_patience": 1,
    },
    "warm start": {"seed": 5},
    "own model": {"model": default(model="own").model},
}
# A run on whole requests, with fillers that batch norm must not count.
REQUESTS = {
    "features.group": "request",
    "task_losses.click": "listwise_softmax",
    "task_losses.conversion": ConfigDict(dict(name="pairwise", pointwise=1.0)),
    "eval.metric": "click/ndcg@10",
    "model.norm": "batch",
}
SEQUENCES = {"log_every_steps": 4, "eval.every_steps": 4}
NAMES = [*OF_TINY, "kinds", "days", "requests", "sequences"]


def changed(config, changes):
    for path, value in changes.items():
        *sections, field = path.split(".")
        with config.unlocked():
            functools.reduce(ConfigDict.__getitem__, sections, config)[field] = value
    return config


def grouped(path):
    """Prepares the data of `tiny.config()` with requests of 7 examples on average."""
    c = changed(tiny.config(), {"source.request_size": 7.0, "features.group": "request"})
    features, source = c.features.to_dict(), c.source.to_dict()
    prepare(features, source, path, block_size=512, report=nothing)
    return path


class Variants:
    """The stores, configs and uninterrupted runs of all kinds.

    Args:
        folder: of stores and runs.
        store: of `tiny.config()`.
    """

    def __init__(self, folder, store):
        self._folder, self._tiny = folder, store
        self.store = functools.cache(self._store)
        self.unbroken = functools.cache(self._unbroken)

    def _store(self, name):
        if name in OF_TINY:
            return self._tiny
        folder = self._folder / f"{name} data"
        if name == "requests":
            return grouped(folder)
        folder.mkdir()
        if name == "sequences":
            c = histories.config(histories.write(folder / "raw"))
            prepare(c.features.to_dict(), c.source.to_dict(), folder / "store", report=nothing)
            return folder / "store"
        return task_kinds.prepared(folder) if name == "kinds" else daily.prepared(folder).path

    def config(self, name, **changes):
        store = self.store(name)
        if name == "kinds":
            result = task_kinds.config(store.parent)
        elif name == "days":
            result = daily.config(open_store(store))
        elif name == "requests":
            result = changed(store_config(store), REQUESTS)
        elif name == "sequences":
            result = changed(histories.config(store.parent / "raw"), SEQUENCES)
            result.data.store = str(store)
        else:
            result = changed(store_config(store), OF_TINY[name])
        return changed(result, changes)

    def start(self, name):
        """Returns further arguments of `train` for the start of a run."""
        return dict(init_from=str(self.unbroken("plain")[0])) if name == "warm start" else {}

    def _unbroken(self, name):
        """Returns the workdir of a run, its result, and its reports."""
        workdir, lines = self._folder / name, []
        result = train(self.config(name), workdir, report=lines.append, **self.start(name))
        return workdir, result, lines
