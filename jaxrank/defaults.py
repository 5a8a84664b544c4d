"""Values of the fields that a config leaves open, from the size of its data.

A field is open at its automatic value, such as 0 or "". Up to `MAX_SMALL` examples, and on more
where no pair of features has an effect, the model is a factorization machine with a prior estimated
from the labels, trained close to its optimum. Otherwise it is the ranker, as it overfits rare ids
on less. Where ids have many examples each and early stopping ends training, it is the ranker with
penalised vectors. Another model that is named for so few examples has a few epochs at rates that
are not reduced for its small batches. The choice depends on the data alone, not on devices, and is
in the config that a run saves.
"""

import fnmatch
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrank.config import default
from jaxrank.config_files import id_patterns, to_plain
from jaxrank.data.statistics.prior import effects
from jaxrank.data.statistics.prior.effects import Prior
from jaxrank.data.store.split import Split
from jaxrank.features import Schema
from jaxrank.losses import DEFAULT_OF_KIND
from jaxrank.models.registry import FACTORIZATION_MACHINE, RANKER
from jaxrank.report import Report
from jaxrank.runtime import processes
from jaxrank.task_losses import loss_name

MAX_SMALL = 1_000_000  # examples
_ESTIMATED_FROM = 300_000  # examples
# Of a large machine: rare ids have too few examples among fewer. Limited by memory, too.
_ESTIMATED_FROM_LARGE, _MAX_VALUES = 3_000_000, 60_000_000
_STEPS_PER_EPOCH = 100  # from which on batches grow with the data
_BATCHES = 256, 4096
_STEPS = 480  # of a factorization machine, within its range of epochs
_EPOCHS = 6, 24
# Labels of each value per example, from which on the test of pairs can be believed on large data.
_RATE_OF_PAIRS = 0.004
# Of a network on few examples, where fewer steps at reduced rates leave it near its start.
_NETWORK_ROWS = 100_000
_NETWORK_STEPS, _NETWORK_EPOCHS = 500, 3
# A network with penalised vectors, for ids with many examples each. Tuned on MovieLens-1M.
_EXAMPLES_PER_ROW = 30  # at least, of all tables together
_VECTOR_DEVIATION = 0.024  # of the prior of a number of a vector
_PENALISED_EPOCHS = 45.0  # at most; early stopping ends training before
_FACTORS = 8
# Variance of all products of pairs, relative to that of all single effects: where pairs have an
# effect beyond chance, and where they have none. There the products would only overfit.
_CROSSES, _FEW_CROSSES = 0.05, 0.005

# Fields of the section `model` that leave the choice of the model open.
_OF_ANY_MODEL = "parents", "initial_bias"

# Open fields beside the model and the length: {path: automatic value}.
_OPEN: Mapping[str, Any] = {
    "batch_size": 0,
    "embedding.dim": 0,
    "optim.dense.base_learning_rate": 0.0,
    "optim.dense.base_batch": 0,
    "optim.dense.decay": "",
    "optim.dense.weight_decay": 0.0,
    "optim.tables.base_learning_rate": 0.0,
    "optim.tables.base_batch": 0,
    "optim.tables.decay": "",
}
# Fields that are open too while the model is, at the values that they have by default.
_OPEN_WITH_MODEL = ("embedding.init_std", "embedding.l2", "embedding.l2_scope", "ema_decay")


class Data(NamedTuple):
    """Properties of the training data that the choice depends on.

    positives: number of labels above 0 by task; empty if not counted.
    distinct_ids: number over all features; 0 if not counted.
    prior: returns the deviations of the effects of features; None: no labels are available.
    in_order: whether days are trained in order, so that later labels are not known at the start.
    """

    rows: int
    schema: Schema
    positives: Mapping[str, int]
    distinct_ids: int
    prior: Callable[[], Prior] | None
    in_order: bool


def measure_data(split: Split, schema: Schema, order: str) -> Data:
    """Returns the properties of a training split.

    Process 0 estimates the effects of features from some blocks and sends them to all processes. It
    reads more of them where the model may be a factorization machine of more than `MAX_SMALL`
    examples.

    Args:
        order: the field of `config.data`.
    """

    def sample(examples: int) -> Prior:
        stride = -(-split.rows // examples)
        blocks = map(split.read_block, range(0, len(split.block_rows), stride))
        return effects.prior(blocks, schema)

    def prior() -> Prior:
        estimated = Prior({}, 1.0)
        with processes.together():
            if processes.is_first():
                estimated = sample(_ESTIMATED_FROM)
                if split.rows > MAX_SMALL and not (estimated.has_pairs or schema.ragged):
                    columns = len(schema.id_columns) + len(schema.dense)
                    most = min(_ESTIMATED_FROM_LARGE, _MAX_VALUES // columns)
                    estimated = sample(max(most, _ESTIMATED_FROM))
        ids = {name: _rounded(deviation) for name, deviation in estimated.ids.items()}
        tasks, dispersions = (
            {name: _rounded(factor) for name, factor in by_task.items()}
            for by_task in (estimated.tasks, estimated.dispersions)
        )
        values = [ids, _rounded(estimated.numbers), estimated.has_pairs, tasks, dispersions]
        return Prior(*processes.broadcast_value(values))

    statistics = (
        split.statistics if split.has_statistics else {"tasks": {}, "categorical": {}, "ragged": {}}
    )
    features = (*statistics["categorical"].values(), *statistics["ragged"].values())
    return Data(
        rows=split.rows,
        schema=schema,
        positives={name: task["positives"] for name, task in statistics["tasks"].items()},
        distinct_ids=sum(feature["distinct"] for feature in features),
        prior=functools.cache(prior),
        in_order=order == "days",
    )


def choose_unread(config: ConfigDict, rows: int, schema: Schema, report: Report) -> ConfigDict:
    """Applies `choose` without reading labels, as `plan` needs it."""
    in_order = config.data.order == "days"
    data = Data(rows, schema, {}, 0, None, in_order)
    return choose(config, data, report)


def choose(config: ConfigDict, data: Data, report: Report) -> ConfigDict:
    """Returns the config with a value in each open field, and reports which and why."""
    config = config.copy_and_resolve_references()
    reasons: dict[str, str] = {}
    with config.unlocked():
        if _suits_penalised(config, data):
            _choose_penalised_network(config, data, reasons)
        _choose_model(config, data, reasons)
        _choose_training(config, data, reasons)
    if reasons:
        counts = [f"{data.rows:,} training examples"]
        counts += [f"{data.distinct_ids:,} distinct ids"] if data.distinct_ids else []
        counts += [f"{count:,} positives of {task}" for task, count in data.positives.items()]
        lines = [f"{path} = {_get(config, path)!r}: {why}" for path, why in reasons.items()]
        title = f"Settings chosen from the data ({', '.join(counts)}). A field that is set is kept:"
        report("\n  ".join([title, *lines]))
    return config


def inherit(config: ConfigDict, older: ConfigDict) -> ConfigDict:
    """Returns the config with the values of an older run in its open fields."""
    config = config.copy_and_resolve_references()
    is_open = has_open_model(config)
    with config.unlocked():
        if is_open:
            config.model = _keep_open(ConfigDict(to_plain(older.model)), config.model)
            if config.model.name == FACTORIZATION_MACHINE:
                config.model.scales = _scales_of_features(config, config)
        elif not config.model.name:
            config.model.name = RANKER
        elif config.model.name == older.model.get("name") == FACTORIZATION_MACHINE:
            if not config.model.scales:
                config.model.scales = _scales_of_features(older, config)
            config.model.cross_scale = config.model.cross_scale or older.model.cross_scale
        is_same = config.model.name == older.model.get("name")
        if is_same and config.model.name == FACTORIZATION_MACHINE:
            _inherit_tasks(config, older)
        # Where the config names its model, an l2 of 0 is a choice.
        if is_open and is_same and _is_penalised(older):
            for path in _OPEN_WITH_MODEL:
                if _get(config, path) == _get(default(), path):
                    _set(config, path, _get(older, path))
        for path, automatic in _OPEN.items():
            # The prior of one model does not suit another.
            suits = is_same or path != "optim.dense.weight_decay"
            if suits and _get(config, path) == automatic:
                _set(config, path, _get(older, path))
        if not config.optim.tables.name:
            config.optim.tables.name = older.optim.tables.name
            if not config.optim.tables.settings:
                config.optim.tables.settings = older.optim.tables.settings
        # Early stopping ended the older run before its length, which is too long without it.
        is_stopped = config.eval.early_stopping_patience or not older.eval.early_stopping_patience
        if is_stopped and not config.num_steps and not config.num_epochs:
            config.num_steps, config.num_epochs = older.num_steps, older.num_epochs
    return config


def _scales_of_features(older: ConfigDict, config: ConfigDict) -> ConfigDict:
    """Returns the scales of the older run's features that a config may still have."""
    patterns = id_patterns(config.features)
    if not patterns:  # a store has the features
        return older.model.scales
    return ConfigDict(
        {
            name: scale
            for name, scale in to_plain(older.model.scales).items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        }
    )


def _is_penalised(config: ConfigDict) -> bool:
    """Returns True if a run has the vectors of `_choose_penalised_network`."""
    return config.embedding.l2_scope == "table" and config.optim.tables.name == "lazy_adam"


def _inherit_tasks(config: ConfigDict, older: ConfigDict) -> None:
    """Takes open weights and factors from an older run with the same tasks."""
    scales = older.model.get("task_scales", ())
    if to_plain(config.features.tasks) == to_plain(older.features.tasks):
        config.task_weights = config.task_weights or older.task_weights
        config.model.task_scales = config.model.task_scales or scales
    elif tuple(config.model.task_scales) == tuple(scales):
        config.model.task_scales = ()


def _suits_penalised(config: ConfigDict, data: Data) -> bool:
    """Returns True if ids have so many examples that a network with early stopping is best.

    Early stopping is needed, because the best number of epochs differs by data. Several tasks, and
    tasks of other kinds, were not measured.
    """
    embedding, rows = config.embedding, sum(table.rows for table in data.schema.tables)
    tables = config.optim.tables
    return (
        has_open_model(config)
        and not data.in_order
        and [task.kind for task in data.schema.tasks] == ["binary"]
        and config.eval.early_stopping_patience > 0
        and _NETWORK_ROWS < data.rows <= MAX_SMALL
        and 0 < rows <= data.rows // _EXAMPLES_PER_ROW
        and not (embedding.dims or embedding.init_from or embedding.l2s)
        and not (config.num_steps or config.num_epochs)
        and not (tables.name or tables.settings or tables.base_learning_rate)
        and all(_get(config, path) == _get(default(), path) for path in _OPEN_WITH_MODEL)
    )


def _choose_penalised_network(config: ConfigDict, data: Data, reasons: dict[str, str]) -> None:
    """Sets a ranker whose vectors are penalised, and the length and optimizer that suit it."""
    model, embedding = config.model, config.embedding
    model.update(name=RANKER, structure="parallel", cross="dcn_v2", cross_layers=2)
    model.update(mlp_units=(192, 192), dropout=0.2)
    reasons["model.name"] = (
        f"at least {_EXAMPLES_PER_ROW} examples per row of the tables, and early stopping: a"
        " network with penalised vectors"
    )
    embedding.dim = embedding.dim or 32
    embedding.init_std, embedding.l2_scope = 1e-4, "table"
    embedding.l2 = _rounded(1 / (_VECTOR_DEVIATION**2 * data.rows))
    reasons["embedding.l2"] = f"1 / ({_VECTOR_DEVIATION}^2 * examples), a prior of vectors"
    config.ema_decay = 0.999
    reasons["ema_decay"] = "averages the noise of batches"
    config.num_epochs = _PENALISED_EPOCHS
    reasons["num_epochs"] = "at most; early stopping ends training before"
    config.optim.tables.name = "lazy_adam"
    reasons["optim.tables.name"] = "Adam, as every row changes in every step"


def _is_linear(data: Data) -> bool:
    """Returns True if no pair of features has an effect, by a test with enough labels.

    Then a network has nothing to learn beyond the effects of single features, and its noise makes
    it worse. Pairs with lists are not tested, and tasks of other kinds were not measured.
    """
    schema = data.schema
    return (
        data.prior is not None
        and not schema.ragged
        and len(schema.categorical) + len(schema.dense) > 1
        and all(task.kind == "binary" for task in schema.tasks)
        and all(
            _RATE_OF_PAIRS <= data.positives.get(task.name, 0) / data.rows <= 1 - _RATE_OF_PAIRS
            for task in schema.tasks
        )
        and not data.prior().has_pairs
    )


def _choose_model(config: ConfigDict, data: Data, reasons: dict[str, str]) -> None:
    """Sets the model and the dimension of its tables."""
    if has_open_model(config):
        is_small = data.rows <= MAX_SMALL and not data.in_order
        embedding = config.embedding
        may = not (data.in_order or embedding.dims or embedding.init_from)
        suits = may and (is_small or _is_linear(data))
        config.model = _keep_open(
            default(FACTORIZATION_MACHINE if suits else RANKER).model, config.model
        )
        reasons["model.name"] = (
            f"up to {MAX_SMALL:,} examples a network overfits rare ids"
            if suits and is_small
            else "no pair of features has an effect beyond chance"
            if suits
            else "days are trained in order, whose later labels are not known at the start"
            if data.in_order
            else f"more than {MAX_SMALL:,} examples, whose pairs of features may have effects"
            if not is_small
            else "the factorization machine is for tables of one dimension without pre-trained"
            " vectors"
        )
    config.model.name = config.model.name or RANKER
    if config.model.name != FACTORIZATION_MACHINE:
        if not config.embedding.dim:
            config.embedding.dim = 16
            reasons["embedding.dim"] = "the usual size for networks"
        return
    if not config.embedding.dim:
        config.embedding.dim = len(data.schema.tasks) + _FACTORS
        reasons["embedding.dim"] = f"a weight for each task and {_FACTORS} factors"
    if not config.model.scales and data.prior is not None:
        config.model.scales = ConfigDict(data.prior().ids)
        reasons["model.scales"] = "deviations of the effects of ids, estimated from the labels"
    if data.prior is not None and any(task.kind != "binary" for task in data.schema.tasks):
        _choose_task_scales(config, data.prior(), data.schema, reasons)
    if not config.model.cross_scale:
        factors = config.embedding.dim - len(data.schema.tasks)
        has_pairs = data.prior is None or data.prior().has_pairs
        share = _CROSSES if has_pairs else _FEW_CROSSES
        config.model.cross_scale = _cross_scale(config.model.scales, data.schema, factors, share)
        reasons["model.cross_scale"] = f"pairs vary {share} times as much as single features" + (
            "" if has_pairs else ", because no pair of features has an effect beyond chance"
        )


def _choose_task_scales(
    config: ConfigDict, prior: Prior, schema: Schema, reasons: dict[str, str]
) -> None:
    """Sets the weights of tasks with more noise than their losses expect, and factors of effects.

    A loss over its dispersion is a log likelihood. With another weight, the prior compensates.
    Tasks whose loss is not that of their kind keep both at 1, as it has no such dispersion.
    """
    losses = {task: loss_name(entry) for task, entry in to_plain(config.task_losses).items()}
    dispersions = [
        prior.dispersions.get(task.name, 1.0)
        if losses.get(task.name, "") in ("", DEFAULT_OF_KIND[task.kind])
        else 1.0
        for task in schema.tasks
    ]
    if not config.task_weights and config.task_weighting == "fixed" and max(dispersions) > 1:
        config.task_weights = tuple(_rounded(1 / max(noise, 1.0)) for noise in dispersions)
        reasons["task_weights"] = "1 / dispersion of counts, which vary more than by chance"
    weights = tuple(config.task_weights) or (1.0,) * len(dispersions)
    if config.model.task_scales or len(weights) != len(dispersions):
        return
    scales = []
    for task, noise, weight in zip(schema.tasks, dispersions, weights, strict=True):
        likelihood = noise * weight if task.kind != "binary" and weight else 1.0
        scales.append(_rounded(prior.tasks.get(task.name, 1.0) / math.sqrt(likelihood)))
    if set(scales) != {1.0}:
        config.model.task_scales = tuple(scales)
        reasons["model.task_scales"] = "factors of these deviations for the outputs of tasks"


def _cross_scale(scales: Mapping[str, float], schema: Schema, factors: int, share: float) -> float:
    """Returns the factor that gives all products of pairs a share of the variance of weights."""
    features = [f.name for f in schema.id_columns] + [f.name for f in schema.ragged]
    variances = [scales.get(name, 1.0) ** 2 for name in features]
    pairs = (sum(variances) ** 2 - sum(v**2 for v in variances)) / 2
    if not pairs or factors < 1:
        return 1.0
    return _rounded(math.sqrt(share * sum(variances) / (factors * pairs)))


def _choose_training(config: ConfigDict, data: Data, reasons: dict[str, str]) -> None:
    """Sets batch size, length, optimizers and learning rates."""
    is_machine = config.model.name == FACTORIZATION_MACHINE
    if not config.batch_size:
        low, high = _BATCHES
        size = 2 ** round(math.log2(max(data.rows, 1) / _STEPS_PER_EPOCH))
        size = min(max(size, low), high)
        config.batch_size = -(-size // config.data.shards) * config.data.shards
        reasons["batch_size"] = (
            f"{math.ceil(data.rows / config.batch_size):,} steps per epoch, as near to"
            f" {_STEPS_PER_EPOCH} as batches from {low} to {high} allow"
        )
    is_short = (
        not is_machine
        and not data.in_order
        and 0 < data.rows <= min(_NETWORK_ROWS, _NETWORK_STEPS * config.batch_size)
    )
    if not config.num_steps and not config.num_epochs:
        epochs = min(max(_STEPS * config.batch_size // max(data.rows, 1), _EPOCHS[0]), _EPOCHS[1])
        if is_short:
            epochs = min(math.ceil(_NETWORK_STEPS * config.batch_size / data.rows), _NETWORK_EPOCHS)
        config.num_epochs = float(epochs) if is_machine or is_short else 1.0
        reasons["num_epochs"] = (
            f"{_steps(config, data):,} steps; the optimum is near {_STEPS}, within {_EPOCHS[0]} to"
            f" {_EPOCHS[1]} epochs"
            if is_machine
            else f"{_steps(config, data):,} steps; a network needs about {_NETWORK_STEPS}, within"
            f" {_NETWORK_EPOCHS} epochs"
            if is_short
            else "networks overfit rare ids from the second epoch on"
        )
    tables = config.optim.tables
    if not tables.name:
        is_penalised = is_machine and not tables.settings
        tables.name = "proximal_adagrad" if is_penalised else "rowwise_adagrad"
        if is_penalised:
            tables.settings = ConfigDict({"l2": _rounded(1 / max(data.rows, 1))})
        reasons["optim.tables.name"] = (
            "l2 = 1 / examples is the prior of `model.scales`"
            if is_penalised
            else "one accumulator per row"
        )
    dense = config.optim.dense
    if is_machine and not dense.weight_decay and dense.name != "adamw" and data.prior is not None:
        variance = data.prior().numbers ** 2
        dense.weight_decay = _rounded(1 / (variance * max(data.rows, 1)))
        reasons["optim.dense.weight_decay"] = "1 / (variance of the effects of numbers * examples)"
    rates = {"proximal_adagrad": (0.02, 0.5), "lazy_adam": (0.001, 0.001)}.get(
        tables.name, (0.001, 0.05)
    )
    for name, rate in zip(("dense", "tables"), rates, strict=True):
        section, path = config.optim[name], f"optim.{name}"
        if not section.base_batch:
            is_tuned = not section.base_learning_rate
            section.base_batch = 4096
            if is_tuned and is_machine:
                section.base_batch = config.batch_size
            elif is_tuned and is_short:
                section.base_batch = min(config.batch_size, 4096)
        if not section.base_learning_rate:
            section.base_learning_rate = rate
            reasons[f"{path}.base_learning_rate"] = f"for batches of {section.base_batch:,}"
        if not section.decay:
            section.decay = "linear" if is_machine else "constant"
            reasons[f"{path}.decay"] = (
                "the last steps average the noise of batches"
                if is_machine
                else "few epochs"
                if is_short
                else "averaged weights take its place"
                if config.ema_decay
                else "one epoch"
            )


def _steps(config: ConfigDict, data: Data) -> int:
    """Returns the number of steps of `num_epochs`, as `run_schedule` does."""
    return math.ceil(config.num_epochs * data.rows / config.batch_size)


def has_open_model(config: ConfigDict) -> bool:
    """Returns True if no field of the section `model` that belongs to a model is set."""
    plain, automatic = to_plain(config.model), to_plain(default().model)
    for name in _OF_ANY_MODEL:
        plain.pop(name, None), automatic.pop(name, None)
    return not plain.get("name") and plain == automatic


def _keep_open(model: ConfigDict, given: ConfigDict) -> ConfigDict:
    """Returns `model` with the fields of `given` that belong to no model, where they are set."""
    with model.unlocked(), model.ignore_type():
        for name in _OF_ANY_MODEL:
            if given.get(name):
                model[name] = given[name]
    return model


def _rounded(number: float) -> float:
    """Rounds to four digits, which are the same on any machine."""
    return float(f"{number:.4g}")


def _get(config: ConfigDict, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = value[part]
    return to_plain(value)


def _set(config: ConfigDict, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    section: Any = config
    for part in parents:
        section = section[part]
    section[name] = value
