"""The configuration of a run: every field with its default, unit, bounds and meaning.

A config file starts from `default()` and changes fields, as the command line does
(`--config.optim.dense.base_learning_rate=0.002`). `sections` checks all sections against these
declarations and returns them as dataclasses. `check` also checks that they fit each other.
docs/config.md and `--help-config` list all fields.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrank import task_losses
from jaxrank.data.sources import registry as sources
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.store import direct
from jaxrank.embedding import ROW_OPTIMIZERS
from jaxrank.errors import InputError
from jaxrank.features import Task
from jaxrank.models.fields import SECTIONS as MODELS
from jaxrank.models.registry import DEFAULT as DEFAULT_MODEL
from jaxrank.optim import DECAYS, OPTIMIZERS, SCALINGS
from jaxrank.run_schedule import NEXT_DAY
from jaxrank.validate import (
    COMPRESSIONS,
    ORDERS,
    OVERFLOWS,
    PLACEMENTS,
    Rules,
    Variants,
    field,
    field_default,
    field_rules,
    is_mapping,
    parse,
)


@dataclasses.dataclass(frozen=True)
class Data:
    """Prepared data, and how batches are made from it."""

    store: str = field(
        "", help="prepared data; empty: WORKDIR/data, prepared from `source` if absent"
    )
    direct: bool = field(False, help="read Parquet of row numbers as it is, without a store")
    compression: str = field(
        "", choices=COMPRESSIONS, help="compression of the blocks of a new store; empty: none"
    )
    train: str = field(
        "train", help="split to train on, or days of it: train/2024-05-01:2024-05-07"
    )
    order: str = field(
        "shuffled",
        choices=ORDERS,
        help="order of days. shuffled: all together; days: one by one, each shuffled",
    )
    valid: str = field(
        "valid",
        help="split to evaluate on; empty: none; next_day: each day before it is trained on",
    )
    shards: int = field(
        8,
        unit="streams",
        at_least=1,
        help="number of independent streams of examples; a multiple of the number of processes",
    )
    window_blocks: int = field(
        4, unit="blocks", at_least=1, help="blocks of a stream that are shuffled together"
    )
    num_workers: int = field(
        -1,
        unit="processes",
        at_least=-1,
        help="input processes per training process; 0: a thread; -1: by its cores and accelerators",
    )
    prefetch_batches: int = field(
        16, unit="batches", at_least=0, help="number of batches made ahead of training"
    )
    list_slack: float = field(
        8.0,
        unit="standard deviations",
        at_least=0,
        help="room for packed lists that may be cut: the mean of a group plus this many standard"
        " deviations",
    )
    on_overflow: str = field(
        "error",
        choices=OVERFLOWS,
        help="error: room for the largest group of the run; truncate: room by list_slack, and in a"
        " group that needs more the longest lists are cut",
    )


@dataclasses.dataclass(frozen=True)
class Embedding:
    """Embedding tables."""

    dim: int = field(
        0, at_least=0, unit="numbers", help="dimension of the vectors; 0: by the size of the data"
    )
    dims: Mapping[str, int] = field(
        {},
        at_least=1,
        unit="numbers",
        patterns=True,
        help="table pattern -> dim, where it differs; ? matches a dot",
    )
    init_std: float = field(
        0.01,
        at_least=0,
        help="standard deviation of the normal distribution that rows start from",
    )
    init_from: Mapping[str, str] = field(
        {},
        patterns=True,
        help="table pattern -> file of pre-trained vectors by raw value that its rows start from,"
        " Parquet or text of word2vec; read when a run starts, and never when it is resumed;"
        " ? matches a dot",
    )
    l2: float = field(0.0, at_least=0, help="adds l2 * row to a row's gradient")
    l2s: Mapping[str, float] = field(
        {},
        at_least=0,
        patterns=True,
        help="table pattern -> l2, where it differs; ? matches a dot",
    )
    l2_scope: str = field(
        "read",
        choices=("read", "table"),
        help="read: rows of the batch; table: all rows, slow for big tables",
    )
    clip_norm: float = field(0.0, at_least=0, help="maximum norm of a row's gradient; 0: no limit")
    placement: str = field(
        "auto", choices=PLACEMENTS, help="placement of all tables; see docs/placement.md"
    )
    placements: Mapping[str, str] = field(
        {},
        choices=PLACEMENTS,
        patterns=True,
        help="table pattern -> placement, where it differs; ? matches a dot",
    )
    exchange_slack: float = field(
        5.0,
        unit="standard deviations",
        at_least=0,
        help="room for rows that are exchanged: the mean plus this many standard deviations",
    )
    exchange_capacity: int = field(
        0,
        unit="ids",
        at_least=0,
        help="maximum ids sent from one device to another per round; 0: computed from the data",
    )


_BASE_LEARNING_RATE: dict[str, Any] = dict(
    at_least=0,
    help="learning rate at base_batch examples per step; 0: by the size of the data",
)
_SCALING: dict[str, Any] = dict(
    choices=SCALINGS,
    help="p of learning_rate = base_learning_rate * (batch / base_batch) ** p: none 0, sqrt 1/2,"
    " linear 1;"
    " sqrt_linear 1/2 up to base_batch and 1 above it",
)


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """A learning rate; see `optim.schedule`."""

    base_learning_rate: float = field(0.0, **_BASE_LEARNING_RATE)
    base_batch: int = field(
        0,
        unit="examples",
        at_least=0,
        help="batch size that base_learning_rate was chosen for; 0: by the size of the data",
    )
    scaling: str = field("sqrt", **_SCALING)
    warmup_steps: int = field(
        0,
        unit="steps",
        at_least=0,
        help="steps in which the learning rate rises, from learning rate / warmup_steps",
    )
    decay: str = field(
        "",
        choices=("", *DECAYS),
        help="decay of the learning rate after the warm-up; empty: by the size of the data",
    )
    decay_steps: int = field(
        0,
        unit="steps",
        at_least=0,
        help="length of the decay; 0: all steps after the warm-up. With decay step: steps between"
        " two reductions, at least 1",
    )
    final_fraction: float = field(
        0.0,
        at_least=0,
        at_most=1,
        help="fraction of the learning rate at the end of the decay, the least with decay step",
    )
    power: float = field(1.0, above=0, help="exponent of the polynomial decay")
    decay_factor: float = field(
        0.1, above=0, at_most=1, help="factor of the learning rate every decay_steps, of decay step"
    )

    def check(self, where: str) -> None:
        """Rejects reductions without an interval."""
        if self.decay == "step" and not self.decay_steps:
            raise InputError(
                f"{where}.decay_steps: must be at least 1 with {where}.decay = 'step', which"
                " reduces the learning rate every decay_steps steps: found 0."
            )


@dataclasses.dataclass(frozen=True)
class Dense(LearningRate):
    """The optimizer of the dense parameters, and its learning rate."""

    name: str = field("adam", choices=OPTIMIZERS, help="name of the optimizer")
    clip_norm: float = field(
        0.0, at_least=0, help="maximum norm of the gradient of all parameters; 0: no limit"
    )
    clip_scope: str = field(
        "dense",
        choices=("dense", "all"),
        help="dense: clip_norm limits the norm over dense parameters; all: over dense parameters"
        " and the rows of tables that a step reads, also in frozen tables, scaled by one"
        " factor",
    )
    weight_decay: float = field(
        0.0,
        at_least=0,
        help="weight_decay * weight is added to the gradient; adamw instead subtracts"
        " learning_rate * weight_decay * weight from the weight; 0: none, or for the factorization"
        " machine computed from the training labels",
    )
    lr_multipliers: Mapping[str, float] = field(
        {},
        at_least=0,
        patterns=True,
        help='parameter pattern -> factor of its learning rate; 0 freezes: "cross/*"',
    )
    settings: Any = field(
        {},
        variants=Variants("name", OPTIMIZERS),
        partial=True,
        help="fields of the optimizer, such as b1, b2, eps",
    )

    def check(self, where: str) -> None:
        """Rejects a scope of a norm without a limit."""
        super().check(where)
        if self.clip_scope == "all" and not self.clip_norm:
            raise InputError(
                f"{where}.clip_norm: must be above 0 with {where}.clip_scope = 'all': found 0."
            )


@dataclasses.dataclass(frozen=True)
class Tables(LearningRate):
    """The row optimizer of the tables, and its learning rate."""

    scaling: str = field("sqrt_linear", **_SCALING)
    name: str = field(
        "",
        choices=("", *ROW_OPTIMIZERS),
        help="name of the row optimizer; empty: by the size of the data",
    )
    lr_multipliers: Mapping[str, float] = field(
        {},
        at_least=0,
        patterns=True,
        help="table pattern -> factor of its learning rate; 0 freezes; ? matches a dot",
    )
    settings: Any = field(
        {},
        variants=Variants("name", ROW_OPTIMIZERS, default="rowwise_adagrad"),
        partial=True,
        help="fields of the optimizer, such as initial_accumulator, eps, l1",
    )


@dataclasses.dataclass(frozen=True)
class Optim:
    """Optimizers."""

    dense: Dense = field(Dense(), help="optimizer of the dense parameters")
    tables: Tables = field(Tables(), help="row optimizer of the tables")


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluation while training."""

    every_steps: int = field(
        0,
        unit="steps",
        at_least=0,
        help="interval of evaluations, each of which also saves a checkpoint; 0: once per epoch, or"
        " per day with data.order = days",
    )
    batch_size: int = field(
        8192,
        unit="examples",
        at_least=1,
        help="examples per batch of an evaluation; rounded up to a multiple of 512 on every device",
    )
    metric: str = field(
        "",
        help="metric that selects the best checkpoint, such as click/auc, or mean/auc over all"
        " tasks that have it; empty: the loss of the first task",
    )
    early_stopping_patience: int = field(
        0,
        unit="evaluations",
        at_least=0,
        help="evaluations without improvement before training stops; 0: never",
    )
    reduce_lr_patience: int = field(
        0,
        unit="evaluations",
        at_least=0,
        help="evaluations without improvement before both learning rates are"
        " multiplied by reduce_lr_factor; 0: never",
    )
    reduce_lr_factor: float = field(
        0.1, at_least=0, at_most=1, help="factor of both learning rates after reduce_lr_patience"
    )
    reduce_lr_least: float = field(
        0.0,
        at_least=0,
        at_most=1,
        help="least fraction of both learning rates that reductions leave",
    )
    min_delta: float = field(
        0.0, at_least=0, help="minimum change of the metric that counts as improvement"
    )
    top_k: int = field(
        10,
        unit="ranks",
        at_least=1,
        help="k of ndcg@k and recall@k of requests, the examples with one value of features.group",
    )
    cluster: str = field(
        "",
        help="the column whose values are independent, such as the user, the request or day, for"
        " intervals of metrics; empty: all examples are independent",
    )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Checkpoints."""

    every_steps: int = field(
        0,
        unit="steps",
        at_least=0,
        help="interval of saves, in addition to every evaluation; 0: evaluations only",
    )
    every_minutes: float = field(
        10.0,
        unit="minutes",
        at_least=0,
        help="maximum time between saves; 0: no limit",
    )
    keep: int = field(
        2, unit="checkpoints", at_least=1, help="newest checkpoints kept, beside the best one"
    )
    keep_every_steps: int = field(
        0,
        unit="steps",
        at_least=0,
        help="also keep the first checkpoint of every interval of this many steps; 0: none",
    )


@dataclasses.dataclass(frozen=True)
class Watch:
    """Supervision of a run."""

    on_nonfinite: str = field(
        "stop",
        choices=("stop", "skip"),
        help="action at a loss or gradient that is not finite: stop, or skip the step",
    )
    max_skipped_steps: int = field(
        10,
        unit="steps",
        at_least=0,
        help="maximum number of consecutive skipped steps; one more stops training",
    )
    loss_spike: float = field(
        10.0,
        unit="standard deviations",
        at_least=0,
        help="report a loss this many standard deviations above the running mean, from step 101 on;"
        " 0: never",
    )
    hang_seconds: float = field(
        1800.0,
        unit="seconds",
        at_least=0,
        at_most=1e6,
        help="report if no execution, evaluation or save ends for this long; 0: never",
    )


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Devices."""

    replicas: int = field(
        1,
        unit="copies",
        at_least=1,
        help="copies of each split table; must divide the number of devices",
    )
    devices: int = field(0, unit="devices", at_least=0, help="number of devices; 0: all")


@dataclasses.dataclass(frozen=True)
class Config:
    """Configuration of a run. `source` and `features` are None as long as they are empty."""

    seed: int = field(
        0,
        at_least=0,
        at_most=2**31 - 1,
        help="seed of initial values, dropout and the order of examples",
    )
    batch_size: int = field(
        0,
        unit="examples",
        at_least=0,
        help="examples per step, over all devices; 0: by the size of the data",
    )
    num_steps: int = field(0, unit="steps", at_least=0, help="length of the run; 0: by num_epochs")
    num_epochs: float = field(
        0.0,
        unit="epochs",
        at_least=0,
        help="length of the run in passes over the training split; 0: by num_steps, or if that is"
        " also 0, by the size of the data",
    )
    steps_per_execution: int = field(
        8,
        unit="steps",
        at_least=1,
        help="steps in one execution of the program; intervals must be multiples of it, and the"
        " last execution may be shorter",
    )
    log_every_steps: int = field(
        64,
        unit="steps",
        at_least=1,
        help="interval of progress lines; every step is recorded in any case",
    )
    source: Any = field(
        None,
        variants=Variants("source.kind", sources.KINDS),
        partial=True,
        help="raw data, for `prepare`; see docs/data.md",
    )
    features: FeatureSpec | None = field(
        None,
        partial=True,
        help="tasks, dense, categorical and ragged features of the raw data; see docs/data.md",
    )
    data: Data = field(Data(), help="prepared data, and how batches are made from it")
    embedding: Embedding = field(Embedding(), help="tables")
    model: Any = field(
        {},
        variants=Variants("model.name", MODELS, default=DEFAULT_MODEL),
        help="the model; see docs/models.md",
    )
    task_losses: Mapping[str, Any] = field(
        {},
        help="task -> name of the loss to minimise, or a dict of name and settings; tasks without"
        " an entry: bce, squared or poisson, by their kind",
    )
    task_weights: tuple[float, ...] = field(
        (),
        at_least=0,
        help="weight of each task's loss in the sum; empty: all 1, but less for noisy counts if the"
        " model is a factorization machine",
    )
    task_weighting: str = field(
        "fixed",
        choices=("fixed", "uncertainty"),
        help="fixed: task_weights; uncertainty: task_weights times learned weights",
    )
    ema_decay: float = field(
        0.0,
        at_least=0,
        at_most=0.9999,  # in float32 a slower average would stop before it has converged
        help="decay per step of the moving average of all weights, which evaluations, predictions"
        " and exports then use; 0: no average",
    )
    optim: Optim = field(Optim(), help="optimizers and learning rates")
    eval: Eval = field(Eval(), help="evaluation while training")
    checkpoint: Checkpoint = field(Checkpoint(), help="checkpoints")
    watch: Watch = field(Watch(), help="supervision of the run")
    mesh: Mesh = field(Mesh(), help="devices")

    def check_run(self) -> None:
        """Rejects fields of a run that contradict each other. `prepare` needs the losses only."""
        if self.batch_size % self.data.shards:
            raise InputError(
                "batch_size: must be a multiple of data.shards: found"
                f" batch_size={self.batch_size}, data.shards={self.data.shards}."
            )
        self._check_days()
        if self.num_steps and self.num_epochs:
            raise InputError(
                "num_steps, num_epochs: one of them must be 0:"
                f" found num_steps={self.num_steps}, num_epochs={self.num_epochs}. Set"
                " --config.num_epochs=0 to train for num_steps, or --config.num_steps=0."
            )
        self._check_patience()
        self._check_intervals()
        self.check_losses()
        if self.data.direct:
            direct.check_kind(self.source and self.source.kind)

    def _check_days(self) -> None:
        order, every = self.data.order, self.eval.every_steps
        if self.data.valid == NEXT_DAY and (order != "days" or every):
            raise InputError(
                f"data.valid = {NEXT_DAY!r} must have data.order = 'days', and eval.every_steps ="
                f" 0, because every day is evaluated: found {order!r} and {every}."
            )

    def _check_patience(self) -> None:
        patience = {
            "early_stopping_patience": self.eval.early_stopping_patience,
            "reduce_lr_patience": self.eval.reduce_lr_patience,
        }
        for name, evaluations in patience.items():
            if evaluations and not self.data.valid:
                raise InputError(
                    f"data.valid: must name a split, because eval.{name} counts evaluations: found"
                    f" eval.{name}={evaluations} and data.valid=''."
                )

    def check_losses(self) -> None:
        """Rejects losses that are unknown, or that do not suit the kinds of the tasks."""
        chosen = {
            task: entry.to_dict() if isinstance(entry, ConfigDict) else entry
            for task, entry in self.task_losses.items()
        }
        tasks = self.features.tasks if self.features else ()
        task_losses.check(chosen, [Task(task.name, task.kind) for task in tasks])

    def _check_intervals(self) -> None:
        intervals = {
            "eval.every_steps": self.eval.every_steps,
            "checkpoint.every_steps": self.checkpoint.every_steps,
            "log_every_steps": self.log_every_steps,
        }
        for name, steps in intervals.items():  # 0 stands for a computed interval
            if steps % self.steps_per_execution:
                raise InputError(
                    f"{name}: must be a positive multiple of steps_per_execution: found"
                    f" {name}={steps},"
                    f" steps_per_execution={self.steps_per_execution}."
                )


class _ModelSection(ConfigDict):
    """The section `model`, whose fields follow from its name.

    A name of another registered model replaces the fields at the defaults of the model before it.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        names = [
            name or DEFAULT_MODEL for name in (self.get("name"), value) if isinstance(name, str)
        ]
        if key == "name" and len(names) == 2 and names[0] != names[1] and set(names) <= {*MODELS}:
            before, fields = (_defaults(MODELS[name]) for name in names)
            with self.unlocked():
                for name in {*before} - {"name"}:
                    if name in self and self[name] == before[name]:
                        del self[name]
                for name in {*fields} - {*self}:
                    super().__setitem__(name, fields[name])
            for name in {*fields}.intersection(_named(MODELS[names[1]])):
                self[name].unlock()  # it accepts fields of any name
        super().__setitem__(key, value)


class _Root(ConfigDict):
    """A config whose section `model` may be assigned as a whole."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "model" and type(value) is ConfigDict:
            value = _ModelSection(value)
        super().__setitem__(key, value)


def default(model: str = "") -> ConfigDict:
    """Returns a config with all fields. `source` and `features` must be filled in.

    Args:
        model: name of a registered model, whose fields the section `model` gets. Empty: the fields
            of `ranker`, which is the model if one of them is set. Otherwise the model depends on
            the size of the data.

    Raises:
        InputError: no model has that name.
    """
    config = _Root(_defaults(Config))
    config.source = ConfigDict()
    features = {f.name: field_default(f) for f in dataclasses.fields(FeatureSpec)}
    config.features = ConfigDict(
        {k: v if isinstance(v, str | bool) else [] for k, v in features.items()},
        type_safe=False,  # a text may replace a list with one entry
    )
    config.model = _ModelSection(_defaults(MODELS[model]))
    config.model.name = model
    config.lock()
    for path in ("source", *named_fields(model)):
        section: Any = config
        for part in path.split("."):
            section = section.get(part) if isinstance(section, ConfigDict) else None
        if isinstance(section, ConfigDict):
            section.unlock()  # it accepts fields of any name
    return config


def _defaults(section: type) -> ConfigDict:
    """Returns the defaults of a section. Sections that depend on the data or a name are empty."""
    config = ConfigDict()
    for entry in dataclasses.fields(section):
        value = field_default(entry)
        if dataclasses.is_dataclass(value):
            value = _defaults(type(value))
        if value in (None, {}):  # values of named fields may change their type: text or a dict
            value = ConfigDict(type_safe=value is None)
        config[entry.name] = value
    return config


def sections(config: ConfigDict) -> Config:
    """Converts a config to dataclasses. The kind or name of a section selects its class.

    Raises:
        InputError: a field is missing or invalid.
    """
    return parse(Config, config, "", complete=True)


def check(config: ConfigDict) -> None:
    """Checks everything about the config of a run that does not depend on its data.

    Raises:
        InputError: a field is missing or invalid, or contradicts another one.
    """
    sections(config).check_run()


def check_validated(config: ConfigDict, flag: str, why: str) -> None:
    """Checks that a config names a validation split, which a flag needs.

    Raises:
        InputError: it names none, or each day is evaluated before it is trained on.
    """
    if config.data.valid in ("", NEXT_DAY):
        raise InputError(
            f"{flag}: data.valid must name a split, {why}: found {config.data.valid!r}."
        )


def mesh(config: ConfigDict) -> Mesh:
    """Returns the section `mesh`."""
    return parse(Mesh, config.mesh, "mesh")


def _has_settings(rules: Rules) -> bool:
    """Returns True if a field holds a section whose fields depend on the name beside it."""
    return rules.variants is not None and "." not in rules.variants.chosen_by


def _named(section: type, where: str = "", patterns: bool = False) -> list[str]:
    """Returns the paths of sections that map arbitrary names to values."""
    paths = []
    kinds = typing.get_type_hints(section)
    for entry in dataclasses.fields(section):
        rules, path = field_rules(entry), f"{where}{entry.name}"
        if dataclasses.is_dataclass(kinds[entry.name]):
            paths += _named(kinds[entry.name], f"{path}.", patterns)
        elif is_mapping(kinds[entry.name]) or _has_settings(rules):
            paths += [path] if rules.patterns or not patterns else []
    return paths


PATTERN_FIELDS = tuple(_named(Config, patterns=True))
_NAMED_FIELDS = (*_named(Config), "source.files")


def named_fields(model: str) -> tuple[str, ...]:
    """Returns the paths of sections that map arbitrary names to values, with those of a model.

    Args:
        model: name of a registered model. Empty: the ranker.

    Raises:
        InputError: no model has that name.
    """
    return (*_NAMED_FIELDS, *_named(MODELS[model], "model."))


# Fields that may change when a run is resumed, because they do not change its result.
FREE = (
    "data.num_workers",
    "data.prefetch_batches",
    "log_every_steps",
    "watch.hang_seconds",
    "checkpoint.every_minutes",
    "checkpoint.keep",
    "checkpoint.keep_every_steps",
)
