"""The loop: build, restore, step, log, evaluate, save."""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from jaxrank import evaluate as evaluation
from jaxrank import mesh as meshes
from jaxrank import workdir
from jaxrank.checkpoint import Checkpoints
from jaxrank.config import differences, to_plain
from jaxrank.data import prepare, spec
from jaxrank.data.pipeline import TrainBatches
from jaxrank.data.store import Split, Store, is_store, open_store
from jaxrank.errors import InputError
from jaxrank.monitor import Monitor, make_monitor
from jaxrank.program import BatchShape, Program, check_batch, make_layout, make_trainee
from jaxrank.recorder import Recorder
from jaxrank.step import TrainState, weights_of
from jaxrank.writers import Progress, Writer

Report = Callable[[str], None]


class Result(NamedTuple):
    """How a run ended.

    step: steps done.
    examples_per_second: of training alone, without compilation, evaluation and saving.
    seconds: of the whole command.
    checkpoint: the one that `metrics` are of; the newest, or the best under early stopping.
    metrics, best_possible, constant: of the validation data; see `evaluate`.
    """

    step: int
    examples_per_second: float
    seconds: float
    metrics: evaluation.Metrics
    best_possible: evaluation.Metrics | None
    constant: evaluation.Metrics | None
    checkpoint: str
    checkpoint_step: int


class Plan(NamedTuple):
    """When things happen, in steps."""

    num_steps: int
    eval_every: int
    save_every: int
    log_every: int


def make_plan(config: ConfigDict, rows: int) -> Plan:
    """Turns epochs into steps and checks that every interval is whole calls.

    Raises:
        InputError: neither or both of num_steps and num_epochs, or an interval does not divide.
    """
    call = config.steps_per_call
    if (config.num_steps is None) == (config.num_epochs is None):
        raise InputError(
            "one of num_steps and num_epochs must be set:"
            f" got num_steps={config.num_steps}, num_epochs={config.num_epochs}."
        )
    epoch = rows / config.batch_size

    def whole_calls(steps: float) -> int:
        return max(1, math.ceil(steps / call)) * call

    num_steps = config.num_steps or whole_calls(config.num_epochs * epoch)
    eval_every = config.eval.every_steps or min(whole_calls(epoch), num_steps)
    save_every = config.checkpoint.every_steps or eval_every
    plan = Plan(num_steps, eval_every, save_every, config.log_every_steps)
    names = ("num_steps", "eval.every_steps", "checkpoint.every_steps", "log_every_steps")
    for name, steps in zip(names, plan, strict=True):
        if steps < 1 or steps % call:
            raise InputError(
                f"{name} must be a positive multiple of steps_per_call: got {name}={steps},"
                f" steps_per_call={call}."
            )
    return plan


def open_data(config: ConfigDict, directory: Path, report: Report) -> Store:
    """The run's store, prepared first if the config says how and it is not there.

    Raises:
        InputError: it is not there and cannot be made, or was made of other features.
    """
    path = Path(config.data.store) if config.data.store else directory / "data"
    features = to_plain(config.features)
    if not is_store(path):
        if not to_plain(config.source):
            raise InputError(f"data.store: no store at {path}, and config.source does not say how.")
        report(f"Preparing {path}")
        prepare.prepare(features, to_plain(config.source), path, report=report)
    store = open_store(path)
    expected = spec.canonical(features)
    if store.spec["features"] != expected:
        lines = differences(store.spec["features"], expected, "features")
        raise InputError(
            f"{path}: the store was prepared with other features than the config's:\n  "
            + "\n  ".join(lines)
        )
    return store


class Job(NamedTuple):
    """What a run consists of, built once from its config."""

    plan: Plan
    program: Program
    batches: TrainBatches
    train_split: Split
    valid_split: Split | None
    monitor: Monitor
    checkpoints: Checkpoints


def build(config: ConfigDict, directory: Path, report: Report) -> Job:
    """Everything that `train` needs, without running a step.

    Raises:
        InputError: config and data do not fit together or the machine.
    """
    store = open_data(config, directory, report)
    split = store.split(config.data.train)
    plan = make_plan(config, split.rows)
    mesh = meshes.make_mesh(**config.mesh)
    layout = make_layout(store.schema, config.embedding)
    data = {k: v for k, v in config.data.items() if k not in ("store", "train", "valid")}
    batches = TrainBatches(
        split,
        layout,
        batch_size=config.batch_size,
        steps_per_call=config.steps_per_call,
        seed=config.seed,
        num_steps=plan.num_steps,
        process=(jax.process_index(), jax.process_count()),
        **data,
    )
    check_batch("batch_size", config.batch_size, batches.group, mesh)
    trainee = make_trainee(config, layout, mesh, num_steps=plan.num_steps)
    watched = {k: v for k, v in config.eval.items() if k not in ("every_steps", "batch_size")}
    monitor = make_monitor([t.name for t in store.schema.tasks], **watched)
    workdir.save_schema(directory, store.schema)
    return Job(
        plan=plan,
        program=Program(
            trainee, mesh, BatchShape(config.batch_size, batches.group, batches.capacities)
        ),
        batches=batches,
        train_split=split,
        valid_split=store.split(config.data.valid) if config.data.valid else None,
        monitor=monitor,
        checkpoints=Checkpoints(
            directory, keep=config.checkpoint.keep, higher_is_better=monitor.higher_is_better
        ),
    )


def start(job: Job, report: Report) -> TrainState:
    """The state to go on from: of the newest checkpoint, or a new one."""
    state = job.program.init()
    step = job.checkpoints.step()
    if step is None:
        return state
    report(f"Resuming after step {step}")
    state, run = job.checkpoints.restore(
        step, state, job.program.state_shape, job.program.state_sharding
    )
    job.batches.set_state(run["data"])
    job.monitor.set_state(run["monitor"])
    return state


def save(job: Job, step: int, state: TrainState, metric: float | None) -> None:
    # Batches are made ahead, so the position is that of the step, not of the pipeline.
    run = {"data": {"next_step": step}, "monitor": job.monitor.get_state()}
    if metric is not None and math.isnan(metric):
        metric = None  # as an AUC where all labels are equal; such a checkpoint is never the best
    job.checkpoints.save(step, state, run, metric)


def describe(job: Job, state: TrainState) -> str:
    """What is trained, in a few words."""
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    rows = [table.rows for table in state.tables.values()]
    schema = job.program.trainee.embedding.layout.schema
    return (
        f"{parameters:,} parameters in layers, {sum(x.size for x in rows):,} in"
        f" {len(schema.tables)} tables ({sum(x.nbytes for x in rows) / 2**20:,.0f} MiB);"
        f" {len(schema.floats)} floats, {len(schema.ids)} ids, {len(schema.lists)} lists;"
        f" {job.train_split.rows:,} examples, {job.plan.num_steps:,} steps,"
        f" {job.program.mesh.size} {jax.default_backend()} device(s)"
    )


def train(
    config: ConfigDict,
    directory: str | Path,
    *,
    report: Report = print,
    quiet: bool = False,
    allow_config_change: bool = False,
) -> Result:
    """Trains to the end of `config`, from the newest checkpoint in `directory` if there is one.

    Args:
        config: see `config.default`.
        directory: the workdir; made if it is not there.
        report: gets a line for each thing worth telling.
        quiet: no live progress line.
        allow_config_change: go on where a run of another config stopped.

    Raises:
        InputError: config, data or workdir cannot be used.
        RunError: the loss is no longer finite.
    """
    began = time.perf_counter()
    directory = Path(directory)
    progress = Progress(quiet=quiet)

    def tell(text: str) -> None:
        progress.clear()
        report(text)

    make_plan(config, rows=1)  # what can be refused at once is refused before anything is written
    workdir.claim(directory, config, allow_config_change=allow_config_change)
    job = build(config, directory, tell)
    plan = job.plan
    with contextlib.ExitStack() as stack:
        stack.callback(job.checkpoints.close)
        stack.callback(job.batches.close)
        state = start(job, tell)
        step = int(state.step)
        tell(describe(job, state))
        writer = stack.enter_context(contextlib.closing(Writer(directory, start_step=step)))
        writer.text("config", str(config))
        recorder = Recorder(
            writer,
            stack.enter_context(contextlib.closing(progress)),
            job.program.trainee.embedding.layout.schema,
            batch_size=config.batch_size,
            num_steps=plan.num_steps,
            log_every=plan.log_every,
        )
        if step:
            recorder.saved(job.checkpoints.directory(step))
        scores: dict[int, evaluation.Scores] = {}

        while step < plan.num_steps and not job.monitor.should_stop:
            batch = meshes.put_batch(next(job.batches), job.program.mesh, leading=1)
            state, told = job.program.train(state, batch)
            step += config.steps_per_call

            # One call late: the devices are busy with the next one while the host writes.
            recorder.record_later(step, told)
            last = step == plan.num_steps
            evaluates = job.valid_split is not None and (last or step % plan.eval_every == 0)
            if not evaluates and not last and step % plan.save_every:
                continue
            recorder.finish()
            metric = None
            if evaluates:
                scores[step] = _evaluate(job, config, state, step, writer, tell)
                metric = scores[step].metrics[job.monitor.task][job.monitor.metric]
                if job.monitor.update(step, metric):
                    state = state._replace(rate_factor=state.rate_factor * config.eval.rate_factor)
            save(job, step, state, metric)
            recorder.saved(job.checkpoints.directory(step))
        job.checkpoints.wait()
        seconds = time.perf_counter() - began
        return _result(job, config, state, scores, recorder.examples_per_second, seconds)


def _evaluate(
    job: Job,
    config: ConfigDict,
    state: TrainState,
    step: int,
    writer: Writer,
    report: Report,
) -> evaluation.Scores:
    assert job.valid_split is not None
    scores = evaluation.evaluate(
        job.program, weights_of(state), job.valid_split, config.eval.batch_size
    )
    values = {f"{t}/{n}": v for t, found in scores.metrics.items() for n, v in found.items()}
    writer.write(step, values, kind="valid")
    writer.flush()
    found = "; ".join(
        f"{task}: logloss {m['logloss']:.5f}, AUC {m['auc']:.5f}"
        for task, m in scores.metrics.items()
    )
    report(f"step {step}: {found}")
    return scores


def _result(
    job: Job,
    config: ConfigDict,
    state: TrainState,
    scores: dict[int, evaluation.Scores],
    speed: float,
    seconds: float,
) -> Result:
    """Scores the checkpoint that the run ends with, unless the run itself just did."""
    step = job.checkpoints.step("best" if config.eval.stop_patience else "newest")
    assert step is not None
    metrics: evaluation.Metrics = {}
    reference = None
    if job.valid_split is not None:
        if step not in scores:
            weights = weights_of(state)
            if step != int(state.step):
                weights = job.checkpoints.restore_weights(
                    step,
                    weights_of(job.program.state_shape),
                    weights_of(job.program.state_sharding),
                )
            scores[step] = evaluation.evaluate(
                job.program, weights, job.valid_split, config.eval.batch_size
            )
        metrics = scores[step].metrics
        schema = job.program.trainee.embedding.layout.schema
        reference = evaluation.reference(job.valid_split, schema)
    return Result(
        step=int(state.step),
        examples_per_second=speed,
        seconds=seconds,
        metrics=metrics,
        best_possible=reference.best_possible if reference else None,
        constant=reference.constant if reference else None,
        checkpoint=job.checkpoints.directory(step),
        checkpoint_step=step,
    )
