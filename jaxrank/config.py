"""The configuration of a run: every field with its default, its unit and its meaning.

A config file starts from `default()` and changes fields; so does the command line
(`--config.optim.dense.base_rate=0.002`). Sections are the keyword arguments of what they build.
"""

import difflib
import numbers
import os
import sys
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrank.errors import InputError
from jaxrank.validate import COMPRESSIONS, ORDERS, OVERFLOWS, PLACEMENTS, check_choice


def default() -> ConfigDict:
    """A config with all fields; `source` and `features` must be filled in."""
    c = ConfigDict()
    c.seed = 0  # of initial values, of dropout and of the order of examples
    c.batch_size = 4096  # examples per step, over all devices
    c.num_steps = 0  # either this; 0: unset
    c.num_epochs = 0.0  # or this: passes over the training split; 0: unset
    c.steps_per_call = 8  # steps in one launched program; intervals are multiples of it
    c.log_every_steps = 64  # the progress line; every step is recorded whatever this says

    # Raw data, for `prepare`. kind: criteo, csv, parquet, tfrecord or synthetic; see docs/data.md.
    c.source = ConfigDict()
    # What is in the raw data; see data/spec/features.py.
    c.features = ConfigDict(dict(tasks=[], floats=[], ids=[], lists=[], keep=[], time="", group=""))
    c.features.as_of = ""  # for tasks with a time: when the data was looked at
    c.features.by_day = False  # a store with the days of features.time apart

    c.data = ConfigDict()
    c.data.store = ""  # prepared data; empty: WORKDIR/data, prepared from `source` if not there
    c.data.direct = False  # read Parquet of row numbers as it is, without a store
    c.data.compression = ""  # of a store's blocks when it is prepared: lz4 or zstd; empty: none
    c.data.train = "train"  # split to train on, or days of it: train/2024-05-01:2024-05-07
    c.data.order = "shuffled"  # of days: shuffled together, or days: one by one, each shuffled
    c.data.valid = "valid"  # split to evaluate on; empty: none; next_day: each before it is read
    c.data.shards = 8  # independent streams of examples; a multiple of the number of processes
    c.data.window_blocks = 4  # blocks of a stream that are shuffled together
    c.data.num_workers = 0  # input processes of each training process; 0: a thread of it
    c.data.prefetch_batches = 16  # batches made ahead
    c.data.list_slack = 8.0  # room for packed lists: mean of a group + this many deviations
    c.data.on_overflow = "error"  # of that room: error, or truncate the longest lists

    c.embedding = ConfigDict()
    c.embedding.dim = 16  # numbers in a vector
    c.embedding.dims = ConfigDict()  # table pattern -> dim, where it differs; ? matches a dot
    c.embedding.init_std = 0.01  # standard deviation of the normal distribution rows start from
    c.embedding.l2 = 0.0  # adds l2 * row to a row's gradient
    c.embedding.l2_scope = "read"  # read: rows of the batch; table: all rows, slow for big tables
    c.embedding.clip_norm = 0.0  # longest gradient of a row; 0: no limit
    c.embedding.placement = "auto"  # of tables: auto, rows or replicated; see docs/placement.md
    c.embedding.placements = ConfigDict()  # table pattern -> placement, where it differs
    c.embedding.exchange_slack = 5.0  # room for rows that travel: mean + this many deviations
    c.embedding.exchange_capacity = 0  # ids from a device to another in one round; 0: from the data

    # Of cross network and tower, and then of the tasks; a field that the chosen kind does not read
    # must keep its default.
    c.model = ConfigDict()
    c.model.cross = "matrix"  # matrix, low_rank: DCN-V2; mix: DCN-Mix; vector: DCN; dot: DLRM; none
    c.model.structure = "stacked"  # tower behind the cross layers, or parallel to them
    c.model.cross_layers = 2  # of matrix, low_rank, mix and vector
    c.model.cross_rank = 64  # of the matrices of low_rank, and of each expert of mix
    c.model.cross_experts = 4  # of a layer of mix
    c.model.bottom_hidden = (128,)  # of dot: widths between the floats and the vectors' dimension
    c.model.floats_hidden = ()  # of all but dot: widths between the floats and what is crossed
    c.model.hidden = (256, 128)  # widths of the tower
    c.model.activation = "relu"  # relu, gelu (by tanh), silu or tanh
    c.model.norm = "none"  # none, batch (over the global batch) or layer
    c.model.dropout = 0.0  # share of tower units dropped in training
    c.model.multitask = "shared_bottom"  # all tasks read the tower; mmoe or ple: experts behind it
    c.model.experts = 4  # of mmoe; the shared ones of a level of ple
    c.model.task_experts = 2  # each task's own on a level of ple
    c.model.levels = 2  # of ple; 1 is CGC
    c.model.expert_hidden = (128,)  # widths of an expert of mmoe or ple
    c.model.head_hidden = ()  # widths of each task's own tower
    c.model.parents = ConfigDict()  # task -> the one it cannot be positive without: ESMM
    # Of matrix products: highest is float32 on every device; bfloat16 has float32 sums;
    # mixed_bfloat16 also keeps what lies between layers in bfloat16, for accelerators.
    c.model.precision = "highest"

    c.task_weights = ()  # weight of each task's loss in the sum; empty: all 1
    c.task_weighting = "fixed"  # or uncertainty: learned, beside these weights
    # Per step, of the moving average of all weights that evaluations, predictions and exports then
    # use; 0: no average.
    c.ema_decay = 0.0

    rate = dict(
        base_rate=0.001,  # at base_batch examples per step
        base_batch=4096,  # examples
        # rate = base_rate * (batch / base_batch) ** p: none 0, sqrt 1/2, linear 1; sqrt_linear 1/2
        # up to base_batch, 1 above it
        scaling="sqrt",
        warmup_steps=0,  # in which the rate rises, from rate / warmup_steps
        decay="constant",  # after warm-up: constant, linear, cosine or polynomial
        decay_steps=0,  # 0: all steps after the warm-up
        final_fraction=0.0,  # of the rate, at the end of the decay
        power=1.0,  # of the polynomial decay
    )
    c.optim = ConfigDict()
    c.optim.dense = ConfigDict(rate)
    c.optim.dense.name = "adam"  # sgd, momentum, adagrad, adam or adamw
    c.optim.dense.clip_norm = 0.0  # longest gradient of all parameters together; 0: no limit
    c.optim.dense.weight_decay = 0.0  # times a weight, added to its gradient; of adamw see optim.py
    c.optim.tables = ConfigDict(rate | dict(base_rate=0.05, scaling="sqrt_linear"))
    c.optim.tables.name = "rowwise_adagrad"  # sgd, adagrad, rowwise_adagrad, lazy_adam or ftrl
    c.optim.dense.factors = ConfigDict()  # parameter pattern -> of its rate; 0 freezes: "cross/*"
    c.optim.tables.factors = ConfigDict()  # table pattern -> of its rate; ? matches a dot
    c.optim.dense.settings = ConfigDict()  # of the optimizer, such as b1, b2, eps
    c.optim.tables.settings = ConfigDict()  # such as initial_accumulator, eps, l1

    c.eval = ConfigDict()
    c.eval.every_steps = 0  # 0: once per epoch, or day. Every evaluation also saves a checkpoint
    c.eval.batch_size = 8192  # examples, rounded up to whole groups of 512 on every device
    c.eval.metric = ""  # as click/auc; empty: the first task's own loss. Picks the best
    c.eval.stop_patience = 0  # evaluations without improvement before training stops; 0: never
    c.eval.rate_patience = 0  # the same before both rates are multiplied by rate_factor; 0: never
    c.eval.rate_factor = 0.1  # of both rates, each time that rate_patience is over
    c.eval.min_delta = 0.0  # least change of the metric that counts as improvement

    c.checkpoint = ConfigDict()
    c.checkpoint.every_steps = 0  # more often than at every evaluation; 0: not more often
    c.checkpoint.keep = 2  # newest checkpoints kept, beside the best one
    c.checkpoint.keep_every_steps = 0  # and of each so many steps the first one; 0: none

    c.watch = ConfigDict()
    c.watch.on_nonfinite = "stop"  # at a loss or gradient that is not: stop, or skip the step
    c.watch.most_skipped = 10  # steps skipped one after another; at one more training stops
    # Deviations over the mean of the losses before, from step 101 on; told; 0: never.
    c.watch.loss_spike = 10.0
    c.watch.hang_seconds = 1800.0  # in which no call, evaluation or save ends; told; 0: never

    c.mesh = ConfigDict()
    c.mesh.replicas = 1  # copies of each split table; must divide the devices
    c.mesh.devices = 0  # 0: all
    return c.lock()


# Least and, where there is one, greatest value of a field.
_AT_LEAST: Mapping[str, float] = dict.fromkeys(
    (
        "batch_size",
        "steps_per_call",
        "log_every_steps",
        "data.shards",
        "data.window_blocks",
        "embedding.dim",
        "eval.batch_size",
        "checkpoint.keep",
        "mesh.replicas",
    ),
    1,
) | dict.fromkeys(
    (
        "seed",
        "num_steps",
        "num_epochs",
        "data.num_workers",
        "data.prefetch_batches",
        "data.list_slack",
        "embedding.init_std",
        "embedding.l2",
        "embedding.clip_norm",
        "embedding.exchange_slack",
        "embedding.exchange_capacity",
        "eval.every_steps",
        "eval.stop_patience",
        "eval.rate_patience",
        "eval.rate_factor",
        "eval.min_delta",
        "checkpoint.every_steps",
        "checkpoint.keep_every_steps",
        "watch.most_skipped",
        "watch.loss_spike",
        "watch.hang_seconds",
        "mesh.devices",
        "task_weights",
        "ema_decay",
    ),
    0,
)


_AT_MOST = {
    "watch.hang_seconds": 1e6,
    "eval.rate_factor": 1,
    "ema_decay": 0.9999,  # in float32 a slower average would stand still before it is there
    "seed": 2**31 - 1,
}


# Sections whose fields are not those of `default`: their readers check them.
DATA_SECTIONS = ("source", "features")


PATTERN_FIELDS = (
    "embedding.dims",
    "embedding.placements",
    "optim.dense.factors",
    "optim.tables.factors",
)


NAMED_FIELDS = (
    *PATTERN_FIELDS,
    "source.files",
    "model.parents",
    "optim.dense.settings",
    "optim.tables.settings",
)


def _check_finite(config: ConfigDict, prefix: str) -> None:
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            _check_finite(value, f"{prefix}{name}.")
            continue
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, int | float) and not abs(number) <= sys.float_info.max:
                raise InputError(f"{prefix}{name} must be a finite number: found {value!r}.")


def check(config: ConfigDict) -> None:
    """Refuses fields that are not there, and numbers that mean nothing.

    Raises:
        InputError: naming the field, what it must be and what was found.
    """
    _check_fields(default(), config, "")
    _check_finite(config, "")
    for field, least in _AT_LEAST.items():
        value: Any = config
        for part in field.split("."):
            value = value[part]
        most = _AT_MOST.get(field, float("inf"))
        for number in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(number, int | float) or not least <= number <= most:
                limit = f" and at most {most}" if field in _AT_MOST else ""
                raise InputError(f"{field} must be at least {least}{limit}: found {value!r}.")
    check_choice("data.on_overflow", config.data.on_overflow, OVERFLOWS)
    check_choice("watch.on_nonfinite", config.watch.on_nonfinite, ("stop", "skip"))
    check_choice("task_weighting", config.task_weighting, ("fixed", "uncertainty"))
    check_choice("data.compression", config.data.compression, COMPRESSIONS)
    check_choice("data.order", config.data.order, ORDERS)
    check_choice("embedding.l2_scope", config.embedding.l2_scope, ("read", "table"))
    check_choice("embedding.placement", config.embedding.placement, PLACEMENTS)


def no_such_field(where: str, name: str, fields: list[str]) -> InputError:
    near = difflib.get_close_matches(name, fields, 1)
    hint = f" Did you mean {where}{near[0]}?" if near else ""
    return InputError(f"config: no such field: {where}{name}.{hint}")


def _check_fields(expected: ConfigDict, found: ConfigDict, where: str) -> None:
    for key in found:
        name = f"{where}{key}"
        if key not in expected:
            raise no_such_field(where, key, list(expected))
        section, value = expected[key], found[key]
        if isinstance(section, ConfigDict) != isinstance(value, ConfigDict):
            kind = "a section" if isinstance(section, ConfigDict) else "a value"
            raise InputError(f"config: {name} must be {kind}: found {value!r}.")
        _check_type(section, value, name)
        if isinstance(section, ConfigDict) and name not in (*DATA_SECTIONS, *NAMED_FIELDS):
            _check_fields(section, value, f"{name}.")
    for key in expected:
        if key not in found:
            raise InputError(f"config: {where}{key} is missing. Start from config.default().")


# What a field may hold, by the type of its default. ConfigDict looks at what is assigned to one,
# but not into a section that is assigned whole.
_TYPES: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("True or False", (bool,)),
    int: ("a whole number", (numbers.Integral,)),
    float: ("a number", (numbers.Real,)),
    str: ("text", (str, os.PathLike)),
    tuple: ("a tuple", (tuple, list)),
}


def _check_type(default: Any, value: Any, name: str) -> None:
    kind = type(default)
    if kind not in _TYPES:
        return
    must, types = _TYPES[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{name} must be {must}: found {value!r}.")


# Fields that may change from one start of a run to the next: none changes what it computes.
FREE = (
    "data.num_workers",
    "data.prefetch_batches",
    "log_every_steps",
    "watch.hang_seconds",
    "checkpoint.keep",
    "checkpoint.keep_every_steps",
)
