"""Checkpoints: the train state and the record of the run.

    WORKDIR/checkpoints/<step>/weights    for prediction: parameters, model state, biases of tasks,
                                          table rows
    WORKDIR/checkpoints/<step>/training   the rest of the train state: optimizer states, learning
                                          rate multiplier, and the trained weights where their
                                          average predicts
    WORKDIR/checkpoints/<step>/run        JSON: the record of the run, see `record`

The step alone defines the position in the data, because batch k is a function of k (see
`data.batches.pipeline`). Tables are stored in an order that does not depend on the devices (see
`embedding.storage`). Checksums of all arrays are computed before saving and compared after
restoring. Nothing else would detect a bit that flipped on a disk.
"""

import collections
import contextlib
import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import absl.logging
import jax
import numpy as np
import orbax.checkpoint as ocp

import jaxrank
from jaxrank import json_files
from jaxrank.checkpoints import record as run_record
from jaxrank.checkpoints.checksums import checksums, differing
from jaxrank.checkpoints.reader import CheckpointReader
from jaxrank.checkpoints.record import OTHER_CHECKPOINT, Metric
from jaxrank.checkpoints.retention import Retention
from jaxrank.embedding import GROUPS
from jaxrank.errors import InputError, RunError
from jaxrank.runtime import processes
from jaxrank.step import TrainState, Weights, prediction_weights, trained


@functools.cache
def quieten_libraries() -> None:
    """Silences Orbax, asyncio and exceptions of TensorStore's threads, once per process.

    Otherwise a save logs about twenty lines, and a failed save logs a page of traceback per array,
    some of them only when the process exits. The exception itself is raised by `Checkpoints.wait`.
    """
    absl.logging.set_verbosity(absl.logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = functools.partial(_unraisable, hook=sys.unraisablehook)


def _unraisable(
    raised: "sys.UnraisableHookArgs", hook: Callable[["sys.UnraisableHookArgs"], object]
) -> None:
    # After a failed save, each of TensorStore's threads raises when its event loop is closed.
    # After a failed restore, Orbax leaves one coroutine per array that was never awaited.
    coroutine = raised.object if inspect.iscoroutine(raised.object) else None
    is_left = coroutine is not None and "orbax" in coroutine.cr_code.co_filename
    if not is_left and str(raised.exc_value) != "Event loop is closed":
        hook(raised)


# Seconds between checks whether an unreadable checkpoint is being deleted, file by file.
_PAUSES = (0.0, 0.5, 3.0)
_LOOKS = 8  # attempts to list the checkpoints of a run that deletes some at the same time
_MAX_REPORTED_ARRAYS = 8  # maximum number of mismatching arrays that an error lists
_PIECE = 2**26  # bytes per chunk of a stored array


class _Training(NamedTuple):
    """The part of TrainState that is not in `prediction_weights`. Scratch arrays are not saved.

    trained: the weights that training continues from where their average predicts, else {}.
    """

    step: Any
    earlier: Any
    opt_state: Any
    slots: dict[str, dict[str, Any]]
    rate_factor: Any  # `TrainState.lr_multiplier`, under the name that stored checkpoints have
    trained: Any


def _training_state(state: TrainState) -> _Training:
    slots = {name: table.slots for name, table in state.tables.items()}
    weights = trained(state) if state.average else {}
    return _Training(
        state.step, state.earlier, state.opt_state, slots, state.lr_multiplier, weights
    )


def _joined(state: TrainState, predicts: Weights, training: _Training) -> TrainState:
    weights = training.trained or predicts
    tables = {
        name: table._replace(rows=weights.rows[name], slots=training.slots[name])
        for name, table in state.tables.items()
    }
    return state._replace(
        step=training.step,
        earlier=training.earlier,
        params=weights.params,
        model_state=weights.model_state,
        opt_state=training.opt_state,
        bias=weights.bias,
        scale=weights.scale,
        tables=tables,
        lr_multiplier=training.rate_factor,
        average=predicts if training.trained else {},
    )


# Fields of `Weights` that checkpoints of earlier versions lack, and their implied values.
_SINCE = {"bias": 0.0, "scale": 1.0}


def lacking(names: Container[str]) -> tuple[str, ...]:
    """Returns the fields of `Weights` that a checkpoint with arrays of these names lacks."""
    return tuple(field for field in _SINCE if field not in names)


@functools.cache
def _older_weights(fields: tuple[str, ...]) -> Any:
    """Returns the class of the `Weights` of an earlier version, without some fields."""
    return collections.namedtuple("_OlderWeights", [f for f in Weights._fields if f not in fields])


def drop_fields(tree: Any, fields: tuple[str, ...]) -> Any:
    """Returns a tree with `Weights` of an earlier version, which lack these fields."""
    older = _older_weights(fields)

    def changed(node: Any) -> Any:
        is_weights = isinstance(node, Weights)
        return older(*(getattr(node, f) for f in older._fields)) if is_weights else node

    return jax.tree.map(changed, tree, is_leaf=lambda node: isinstance(node, Weights))


def _add_defaults(tree: Any, target: Any, fields: tuple[str, ...]) -> Any:
    """Inverts `drop_fields`: adds arrays of default values with the shardings of `target`."""
    older = _older_weights(fields)

    def filled(field: str, shape: Any) -> jax.Array:
        values = np.full(shape.shape, _SINCE[field], shape.dtype)
        return jax.make_array_from_callback(
            shape.shape, shape.sharding, lambda index: values[index]
        )

    def changed(node: Any, shapes: Any) -> Any:
        if not isinstance(node, older):
            return node
        defaults = {field: filled(field, getattr(shapes, field)) for field in fields}
        return Weights(**(node._asdict() | defaults))

    return jax.tree.map(changed, tree, target, is_leaf=lambda n: isinstance(n, older | Weights))


def _looked(look: Callable[[], Any]) -> Any:
    """Returns `look()`, and retries when a listed checkpoint is deleted meanwhile.

    Orbax opens every checkpoint that it lists. A run that trains at the same time may have deleted
    some of them since.
    """
    for _ in range(_LOOKS - 1):
        with contextlib.suppress(FileNotFoundError):
            return look()
    return look()


def _agreed(read: Callable[[], Any]) -> Any:
    """Returns `read()` if it succeeds in all processes.

    Raises:
        InputError, RunError: in all processes, the error that any of them raised.
    """
    result, failure = None, None
    try:
        result = read()
    except (InputError, RunError) as error:
        failure = error
    with processes.together():
        if failure is not None:
            raise failure
    return result


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def _save_in_chunks(tree: Any) -> ocp.args.StandardSave:
    """Saves a tree in chunks, so that writing needs little more memory than a few chunks."""
    pieces, whole = ocp.SaveArgs(chunk_byte_size=_PIECE), ocp.SaveArgs()

    def how(array: jax.Array) -> ocp.SaveArgs:
        # The chunk size of Orbax divides the number of rows: a prime number gives single rows.
        return pieces if array.ndim and array.shape[0] % GROUPS == 0 else whole

    return ocp.args.StandardSave(tree, save_args=jax.tree.map(how, tree))


class Checkpoints:
    """The checkpoints of one run.

    Args:
        workdir: of the run.
        keep: number of newest checkpoints to keep. The best one is kept in addition.
        keep_every: interval in steps. The first checkpoint of each interval is kept. 0: none.
        read_only: creates and deletes nothing, for evaluation.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        keep: int = 1,
        keep_every: int = 0,
        read_only: bool = False,
    ):
        quieten_libraries()
        self.path = Path(workdir).absolute() / "checkpoints"
        if read_only and not self.path.is_dir():
            raise InputError(
                f"{workdir}: must be the workdir of a run: found no checkpoints. Check --workdir."
            )
        self._retention = Retention(self.path, keep=keep, keep_every=keep_every)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._retention,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
        )
        self._manager = _looked(lambda: ocp.CheckpointManager(self.path, options=options))

    def step(self, choice: str | int = "newest") -> int | None:
        """Returns the step of the newest, the best or a named checkpoint, or None without any.

        Process 0 decides for all processes, because a concurrent run may save another checkpoint.

        Raises:
            InputError: the named step has no checkpoint.
        """
        step = None
        with processes.together():
            if processes.is_first():
                step = self._find(choice)
        return processes.broadcast_value(step)

    def _find(self, choice: str | int) -> int | None:
        steps = sorted(self._manager.all_steps())
        if choice == "newest":
            return steps[-1] if steps else None
        if choice == "best":
            best = self._retention.best(steps)
            return self._find("newest") if best is None else best
        if str(choice).isdecimal() and int(choice) in steps:
            return int(choice)
        raise InputError(
            f"{self.path}: checkpoint must be newest, best or one of the steps {steps}:"
            f" found {choice!r}."
        )

    def reload(self) -> None:
        """Lists the checkpoints again, because a concurrent run saves and deletes some."""
        _looked(self._manager.reload)

    def read(self, choice: str | int, read: Callable[[int], Any]) -> tuple[int, Any]:
        """Reads a checkpoint, and chooses again if a concurrent run deletes it before it is read.

        Args:
            choice: "newest", "best" or a step number.
            read: reads the checkpoint of a step.

        Returns:
            The step and the result of `read`.

        Raises:
            InputError: there is no checkpoint, the named step has none, or `read` fails.
        """
        for _ in range(_LOOKS):
            step = self.step(choice)
            if step is None:
                break
            try:
                return step, read(step)
            except InputError:
                if not self.is_deleted(step):
                    raise
            self.reload()
        raise InputError(
            f"{self.path.parent}: must hold a checkpoint: found none, or each was deleted before it"
            " was read. Wait until the run saves one, or let it keep more (checkpoint.keep)."
        )

    def data_fingerprint(self) -> str:
        """Returns the data fingerprint in the newest checkpoint, "" if it is absent or damaged."""
        fingerprint = ""
        with processes.together():
            if processes.is_first() and (step := self._find("newest")) is not None:
                with contextlib.suppress(InputError):  # damaged: restoring it reports that
                    fingerprint = self._read(step)["data"]["fingerprint"]
        return processes.broadcast_value(fingerprint)

    def older(self, step: int) -> int | None:
        """Returns the step of the newest checkpoint before `step`, or None."""
        return self._choose_step(lambda steps: max((s for s in steps if s < step), default=None))

    def newer(self, step: int) -> int | None:
        """Returns the step of the oldest checkpoint after `step`, or None.

        Checkpoints that a concurrent run has just saved are included.
        """
        self.reload()
        return self._choose_step(lambda steps: min((s for s in steps if s > step), default=None))

    def _choose_step(self, choose: Callable[[Sequence[int]], int | None]) -> int | None:
        chosen = None
        with processes.together():
            if processes.is_first():
                chosen = choose(self._manager.all_steps())
        return processes.broadcast_value(chosen)

    def is_there(self, step: int) -> bool:
        """Returns True if a checkpoint exists, as process 0 sees it."""
        return processes.broadcast_value((self.path / str(step)).is_dir())

    @contextlib.contextmanager
    def deletion_as_input_error(self, step: int) -> Iterator[None]:
        """Raises a clear error if a concurrent run deletes the checkpoint while it is read.

        Raises:
            InputError: the checkpoint was deleted, or the block raised it.
        """
        try:
            yield
        except (InputError, RunError) as error:
            if not self.is_deleted(step):
                raise
            raise InputError(
                f"{self.directory(step)}: must exist until it is read: a concurrent run has deleted"
                " it. Try again, or let that run keep more checkpoints (checkpoint.keep)."
            ) from error

    def is_deleted(self, step: int) -> bool:
        """Returns True if an unreadable checkpoint is being deleted, as process 0 sees it."""

        def is_missing(seconds: float) -> bool:
            time.sleep(seconds)
            return not (self.path / str(step)).is_dir()

        return processes.broadcast_value(processes.is_first() and any(map(is_missing, _PAUSES)))

    def move_to_damaged(self, step: int) -> Path:
        """Moves a checkpoint to WORKDIR/damaged, where no run reads it, and returns its path."""
        aside = self.path.parent / "damaged" / str(step)
        with processes.together():
            if processes.is_first():
                aside.parent.mkdir(exist_ok=True)
                while aside.exists():
                    aside = aside.with_name(f"{aside.name}-again")
                (self.path / str(step)).rename(aside)
        self.reload()
        return aside

    def save(
        self,
        step: int,
        state: TrainState,
        record: dict[str, Any],
        metric: Metric,
    ) -> None:
        """Saves in the background. Older checkpoints stay until this one is complete.

        Args:
            record: the record of the run, in types that JSON has.
            metric: selects the best checkpoint among those with the same `measures` as the newest.

        Raises:
            RunError: this checkpoint or the one before it could not be written.
        """
        weights, training = prediction_weights(state), _training_state(state)
        record = record | {
            "jaxrank_version": jaxrank.__version__,
            "checksums": {"weights": checksums(weights), "training": checksums(training)},
        }
        self._retention.add(step, metric)
        with self._write_errors_as_run_error():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    weights=_save_in_chunks(weights),
                    training=_save_in_chunks(training),
                    run=ocp.args.JsonSave(run_record.sealed(record, metric)),
                ),
                force=True,
            )

    def restore(
        self, step: int, state: TrainState, shapes: TrainState, shardings: TrainState
    ) -> tuple[TrainState, dict[str, Any]]:
        """Restores the state at `step` with `shardings`, and the record that was saved with it.

        The scratch arrays are taken from `state`.

        Raises:
            InputError: the checkpoint cannot be read, or belongs to another model.
        """
        record = self._record(step)
        restored = self._checked(
            step,
            record,
            weights=_placed(prediction_weights(shapes), prediction_weights(shardings)),
            training=_placed(_training_state(shapes), _training_state(shardings)),
        )
        return _joined(state, restored["weights"], restored["training"]), record

    def restore_weights(self, step: int, shapes: Weights, shardings: Weights) -> Weights:
        """Restores the weights that predict at `step`.

        Raises:
            InputError: as `restore`.
        """
        record = self._record(step)
        return self._checked(step, record, weights=_placed(shapes, shardings))["weights"]

    def _checked(self, step: int, record: dict[str, Any], **parts: Any) -> dict[str, Any]:
        """Restores parts of a checkpoint into their trees of shapes, and compares the checksums."""
        names = {path.removeprefix(".") for path in record["checksums"]["weights"]}
        fields = lacking(names)
        older = (
            {name: drop_fields(tree, fields) for name, tree in parts.items()} if fields else parts
        )
        restored = self._restored(step, **older)
        self._compare(step, record, **restored)
        if not fields:
            return restored
        return {name: _add_defaults(tree, parts[name], fields) for name, tree in restored.items()}

    def untrained(self, step: int) -> list[str]:
        """Returns the tasks that the run did not train, none if it does not say."""
        return list(self._record(step).get("untrained", ()))

    def worse_than_constant(self, step: int) -> list[str]:
        """Returns the tasks for which a constant did better when the checkpoint was evaluated."""
        return list(self._record(step).get("worse_than_constant", ()))

    def saved_checksums(self, step: int) -> dict[str, dict[str, int]]:
        """Returns the saved checksums of the arrays of each part, by path.

        Raises:
            InputError: the record of the checkpoint is damaged.
        """
        return self._record(step)["checksums"]

    def _record(self, step: int) -> dict[str, Any]:
        """Reads the record of a checkpoint, and checks that it is the same in all processes."""
        record = _agreed(lambda: self._read(step))
        processes.check_same(f"the checkpoint {self.directory(step)}", json_files.to_text(record))
        return record

    def _read(self, step: int) -> dict[str, Any]:
        return run_record.read(self.path / str(step))

    def _compare(self, step: int, record: dict[str, Any], **restored: Any) -> None:
        for part, arrays in restored.items():
            wrong = differing(record["checksums"][part], checksums(arrays))
            if wrong:
                raise InputError(
                    f"{self.directory(step)}/{part}: arrays must have the checksums recorded when"
                    " they were saved: this checkpoint is damaged in"
                    f" {', '.join(wrong[:3])}{' and others' if len(wrong) > 3 else ''}."
                    f"{OTHER_CHECKPOINT}"
                )

    def _restored(self, step: int, **parts: Any) -> Any:
        """Restores parts of a checkpoint, each into its tree of shapes."""
        trees = {name: ocp.args.StandardRestore(tree) for name, tree in parts.items()}
        args = ocp.args.Composite(**trees)

        def restore() -> Any:
            try:
                return self._manager.restore(step, args=args)
            except Exception as error:  # Orbax raises many types for damage and wrong shapes
                text = " ".join(str(error).split())[:500]
                if "RESOURCE_EXHAUSTED" in text:
                    raise RunError(
                        f"{self.directory(step)}: not enough memory to restore it: {text}"
                    ) from error
                other = self._differences(step, parts)
                if other:
                    raise InputError(
                        f"{self.directory(step)}: arrays must match the model and the optimizers of"
                        " the config:\n  " + "\n  ".join(other) + "\nContinue with the config of"
                        " that run, or start a new --workdir from this checkpoint with"
                        " --init-from."
                    ) from error
                raise InputError(
                    f"{self.directory(step)}: this checkpoint is damaged and cannot be restored:"
                    f" {text.removesuffix('.')}.{OTHER_CHECKPOINT}"
                ) from error

        restored = _agreed(restore)
        return {name: restored[name] for name in parts}

    def _differences(self, step: int, parts: dict[str, Any]) -> list[str]:
        """Lists arrays that differ from trees of shapes, one line each, up to a maximum.

        Returns no lines if the record cannot be read. Exchanges nothing with other processes, which
        may not have failed.
        """
        try:
            sums = self._read(step)["checksums"]
            lines = [
                f"{part}/{line}"
                for part, tree in parts.items()
                for line in CheckpointReader(self.path / str(step) / part, sums[part]).unlike(tree)
            ]
        except InputError:
            return []
        more = (
            [f"and {len(lines) - _MAX_REPORTED_ARRAYS} more"]
            if len(lines) > _MAX_REPORTED_ARRAYS
            else []
        )
        return lines[:_MAX_REPORTED_ARRAYS] + more

    def wait(self) -> None:
        """Waits until a save in progress is on disk.

        Raises:
            RunError: the checkpoint could not be written.
        """
        with self._write_errors_as_run_error():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _write_errors_as_run_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many types for a full disk
            text = str(error).strip() or type(error).__name__
            raise RunError(
                f"{self.path}: a checkpoint could not be written, older checkpoints are unchanged:"
                f" {text.splitlines()[0]}"
            ) from error

    def directory(self, step: int) -> str:
        return str(self.path / str(step))

    def close(self) -> None:
        with contextlib.suppress(Exception):  # `wait` has reported it where it matters
            self._manager.close()
