"""Checkpoints: the state, and what the run has seen so far.

    WORKDIR/checkpoints/<step>/weights    what predicts: parameters, model state, biases of tasks,
                                          table rows
    WORKDIR/checkpoints/<step>/training   what else training needs: optimizer states, rate factor,
                                          and the weights themselves where an average predicts
    WORKDIR/checkpoints/<step>/run        JSON: what the run has seen so far; see `record`

Of where the run stands in its data the step says all, as batch k is a function of k; see
`data.batches.pipeline`. Tables are stored in an order that does not depend on the devices; see
`embedding.storage`. The checksums are of all arrays, made before they were saved and compared when
they are restored: nothing else would find a bit that flipped on a disk.
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
from jaxrank.checkpoints.record import Metric
from jaxrank.checkpoints.retention import Retention
from jaxrank.embedding import GROUPS
from jaxrank.errors import InputError, RunError
from jaxrank.runtime import processes
from jaxrank.step import TrainState, Weights, trained, weights_of


@functools.cache
def quieten_libraries() -> None:
    """Silences Orbax, asyncio and what TensorStore's threads raise, once for the process.

    A save logs about twenty lines otherwise. A failed save logs a page of traceback for each array,
    as late as the end of the process. The exception itself is raised where the save is waited for.
    """
    absl.logging.set_verbosity(absl.logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = functools.partial(_unraisable, hook=sys.unraisablehook)


def _unraisable(
    raised: "sys.UnraisableHookArgs", hook: Callable[["sys.UnraisableHookArgs"], object]
) -> None:
    # Each of TensorStore's threads raises once a save has failed and its event loop is closed.
    # Orbax leaves a coroutine for each array when a restore fails.
    coroutine = raised.object if inspect.iscoroutine(raised.object) else None
    is_left = coroutine is not None and "orbax" in coroutine.cr_code.co_filename
    if not is_left and str(raised.exc_value) != "Event loop is closed":
        hook(raised)


# Seconds between looks at whether a checkpoint that cannot be read is being deleted, file by file.
_PAUSES = (0.0, 0.5, 3.0)
_LOOKS = 8  # at the checkpoints of a run that deletes some meanwhile
_MOST_TOLD = 8  # arrays that are not those of the config
_PIECE = 2**26  # bytes of an array that are written together


class _Training(NamedTuple):
    """The part of TrainState that is not in `weights_of`. Scratch arrays are not saved.

    trained: the weights to go on from, where those that predict are their average; or {}.
    """

    step: Any
    earlier: Any
    opt_state: Any
    slots: dict[str, dict[str, Any]]
    rate_factor: Any
    trained: Any


def _training_of(state: TrainState) -> _Training:
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


# Fields of `Weights` that checkpoints of earlier versions lack, and the values that they stand for.
_SINCE = {"bias": 0.0, "scale": 1.0}


def lacking(names: Container[str]) -> tuple[str, ...]:
    """Returns the fields of `Weights` that a checkpoint with arrays of these names lacks."""
    return tuple(field for field in _SINCE if field not in names)


@functools.cache
def _older_weights(fields: tuple[str, ...]) -> Any:
    """Returns the class of the `Weights` of an earlier version, without some fields."""
    return collections.namedtuple("_OlderWeights", [f for f in Weights._fields if f not in fields])


def without(tree: Any, fields: tuple[str, ...]) -> Any:
    """Returns a tree whose `Weights` lack these fields, as those of an earlier version."""
    older = _older_weights(fields)

    def changed(node: Any) -> Any:
        is_weights = isinstance(node, Weights)
        return older(*(getattr(node, f) for f in older._fields)) if is_weights else node

    return jax.tree.map(changed, tree, is_leaf=lambda node: isinstance(node, Weights))


def _with_defaults(tree: Any, like: Any, fields: tuple[str, ...]) -> Any:
    """The inverse of `without`; new arrays lie where those of `like` do."""
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

    return jax.tree.map(changed, tree, like, is_leaf=lambda n: isinstance(n, older | Weights))


def _looked(look: Callable[[], Any]) -> Any:
    """What `look` gives. Orbax looks at each checkpoint that it found, of which a run beside this
    one may have deleted some since."""
    for _ in range(_LOOKS - 1):
        with contextlib.suppress(FileNotFoundError):
            return look()
    return look()


def _agreed(read: Callable[[], Any]) -> Any:
    """What `read` gives, where it does in all processes.

    Raises:
        InputError, RunError: in all, what it raised in any.
    """
    found, failure = None, None
    try:
        found = read()
    except (InputError, RunError) as error:
        failure = error
    with processes.together():
        if failure is not None:
            raise failure
    return found


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def _in_pieces(tree: Any) -> ocp.args.StandardSave:
    """So that writing takes little more memory than the pieces that are in the making."""
    pieces, whole = ocp.SaveArgs(chunk_byte_size=_PIECE), ocp.SaveArgs()

    def how(array: jax.Array) -> ocp.SaveArgs:
        # Orbax makes pieces whose size divides the array's: of a prime number of rows single ones.
        return pieces if array.ndim and array.shape[0] % GROUPS == 0 else whole

    return ocp.args.StandardSave(tree, save_args=jax.tree.map(how, tree))


class Checkpoints:
    """The checkpoints of one run.

    Args:
        workdir: of the run.
        keep: how many of the newest to keep; the best one is kept beside them.
        keep_every: steps, of each so many of which the first checkpoint is kept too. 0: none.
        read_only: for evaluation; nothing is created or deleted.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        keep: int = 2,
        keep_every: int = 0,
        read_only: bool = False,
    ):
        quieten_libraries()
        self.path = Path(workdir).absolute() / "checkpoints"
        if read_only and not self.path.is_dir():
            raise InputError(f"{workdir}: holds no checkpoints. Is it the workdir of a run?")
        self._retention = Retention(self.path, keep=max(1, keep), keep_every=keep_every)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._retention,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
        )
        self._manager = _looked(lambda: ocp.CheckpointManager(self.path, options=options))

    def step(self, which: str | int = "newest") -> int | None:
        """The step of the newest or best checkpoint, or None if there is none.

        Process 0 says, for a run that goes on beside this one may just save another.

        Raises:
            InputError: a step was named that has no checkpoint.
        """
        found = None
        with processes.together():
            if processes.is_first():
                found = self._find(which)
        return processes.from_first(found)

    def _find(self, which: str | int) -> int | None:
        steps = sorted(self._manager.all_steps())
        if which == "newest":
            return steps[-1] if steps else None
        if which == "best":
            best = self._retention.best(steps)
            return self._find("newest") if best is None else best
        if str(which).isdecimal() and int(which) in steps:
            return int(which)
        raise InputError(
            f"{self.path}: checkpoint must be newest, best or one of the steps {steps}:"
            f" found {which!r}."
        )

    def reload(self) -> None:
        """Looks anew which checkpoints there are, for a run beside this one saves and deletes."""
        _looked(self._manager.reload)

    def read(self, which: str | int, read: Callable[[int], Any]) -> tuple[int, Any]:
        """The step of the newest or best checkpoint or a step, and what `read` gives of it; chosen
        anew where a run beside this one deletes it before it is read.

        Raises:
            InputError: there is none, a step was named that has none, or what `read` raises.
        """
        for _ in range(_LOOKS):
            step = self.step(which)
            if step is None:
                break
            try:
                return step, read(step)
            except InputError:
                if not self.is_deleted(step):
                    raise
            self.reload()
        raise InputError(
            f"{self.path.parent}: holds no checkpoint yet, or each was deleted before it was read."
        )

    def trained_on(self) -> str:
        """The fingerprint of the data that the newest checkpoint tells; empty where there is none,
        or it is damaged."""
        found = ""
        with processes.together():
            if processes.is_first() and (step := self._find("newest")) is not None:
                with contextlib.suppress(InputError):  # damaged: told by who restores it
                    found = self._read(step)["data"]["fingerprint"]
        return processes.from_first(found)

    def older(self, step: int) -> int | None:
        """The newest checkpoint before `step`, or None."""
        return self._next_to(lambda steps: max((s for s in steps if s < step), default=None))

    def newer(self, step: int) -> int | None:
        """The oldest checkpoint after `step`, or None; also one that another run just saved."""
        self.reload()
        return self._next_to(lambda steps: min((s for s in steps if s > step), default=None))

    def _next_to(self, choose: Callable[[Sequence[int]], int | None]) -> int | None:
        found = None
        with processes.together():
            if processes.is_first():
                found = choose(self._manager.all_steps())
        return processes.from_first(found)

    def is_there(self, step: int) -> bool:
        """Whether a checkpoint has not been deleted, as process 0 sees it."""
        return processes.from_first((self.path / str(step)).is_dir())

    @contextlib.contextmanager
    def told_if_deleted(self, step: int) -> Iterator[None]:
        """Tells where a run beside this one deletes the checkpoint while it is read.

        Raises:
            InputError: so it is, or as the block raises.
        """
        try:
            yield
        except (InputError, RunError) as error:
            if not self.is_deleted(step):
                raise
            raise InputError(
                f"{self.directory(step)}: must stay while it is read: the run beside this command"
                " has deleted it. Try again, or let it keep more (checkpoint.keep)."
            ) from error

    def is_deleted(self, step: int) -> bool:
        """Whether a checkpoint that could not be read is being deleted, as process 0 sees it."""

        def is_gone_after(seconds: float) -> bool:
            time.sleep(seconds)
            return not (self.path / str(step)).is_dir()

        return processes.from_first(processes.is_first() and any(map(is_gone_after, _PAUSES)))

    def put_aside(self, step: int) -> Path:
        """Moves a checkpoint to where no run looks for one; returns where it is."""
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
        """Saves in the background; what was saved before stays until this one is whole.

        Args:
            record: what the run has seen so far, of what JSON has.
            metric: by which the best is chosen, among those whose `measures` is that of the newest.

        Raises:
            RunError: this or the save before it could not be written.
        """
        weights, training = weights_of(state), _training_of(state)
        record = record | {
            "jaxrank_version": jaxrank.__version__,
            "checksums": {"weights": checksums(weights), "training": checksums(training)},
        }
        self._retention.add(step, metric)
        with self._told_as_run_error():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    weights=_in_pieces(weights),
                    training=_in_pieces(training),
                    run=ocp.args.JsonSave(run_record.sealed(record, metric)),
                ),
                force=True,
            )

    def restore(
        self, step: int, state: TrainState, shapes: TrainState, shardings: TrainState
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state at `step`, placed as `shardings`, with the scratch arrays of `state`; and the
        record that was saved with it.

        Raises:
            InputError: it cannot be read, or is that of another model.
        """
        record = self._record(step)
        found = self._checked(
            step,
            record,
            weights=_placed(weights_of(shapes), weights_of(shardings)),
            training=_placed(_training_of(shapes), _training_of(shardings)),
        )
        return _joined(state, found["weights"], found["training"]), record

    def restore_weights(self, step: int, shapes: Weights, shardings: Weights) -> Weights:
        """What predicts, at `step`.

        Raises:
            InputError: as `restore`.
        """
        record = self._record(step)
        return self._checked(step, record, weights=_placed(shapes, shardings))["weights"]

    def _checked(self, step: int, record: dict[str, Any], **parts: Any) -> dict[str, Any]:
        """The parts of a checkpoint, each as its tree of shapes has it, checked."""
        names = {path.removeprefix(".") for path in record["checksums"]["weights"]}
        fields = lacking(names)
        older = {name: without(tree, fields) for name, tree in parts.items()} if fields else parts
        found = self._restored(step, **older)
        self._compare(step, record, **found)
        if not fields:
            return found
        return {name: _with_defaults(tree, parts[name], fields) for name, tree in found.items()}

    def worse_than_constant(self, step: int) -> list[str]:
        """Returns the tasks for which a constant did better when the checkpoint was evaluated."""
        return list(self._record(step).get("worse_than_constant", ()))

    def saved_checksums(self, step: int) -> dict[str, dict[str, int]]:
        """Of the arrays of each part, by path.

        Raises:
            InputError: what is saved beside the arrays is damaged.
        """
        return self._record(step)["checksums"]

    def _record(self, step: int) -> dict[str, Any]:
        """What is saved beside the arrays, checked; the same in all processes."""
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
                    f"{self.directory(step)}/{part}: arrays must have the checksums that they had"
                    " when they were saved: this checkpoint is damaged in"
                    f" {', '.join(wrong[:3])}{' and others' if len(wrong) > 3 else ''}."
                )

    def _restored(self, step: int, **parts: Any) -> Any:
        """The parts of a checkpoint, each as its tree of shapes has it."""
        trees = {name: ocp.args.StandardRestore(tree) for name, tree in parts.items()}
        args = ocp.args.Composite(**trees)

        def restore() -> Any:
            try:
                return self._manager.restore(step, args=args)
            except Exception as error:  # Orbax raises many kinds for damage and for other shapes
                text = " ".join(str(error).split())[:500]
                if "RESOURCE_EXHAUSTED" in text:
                    raise RunError(
                        f"{self.directory(step)}: no room to restore it: {text}"
                    ) from error
                other = self._differences(step, parts)
                if other:
                    raise InputError(
                        f"{self.directory(step)}: must be of the model and the optimizers of the"
                        " config, and is not:\n  " + "\n  ".join(other) + "\nGo on with the config"
                        " that it was trained with, or start another --workdir from it by"
                        " --init-from."
                    ) from error
                raise InputError(
                    f"{self.directory(step)}: this checkpoint cannot be restored; it is damaged:"
                    f" {text}"
                ) from error

        found = _agreed(restore)
        return {name: found[name] for name in parts}

    def _differences(self, step: int, parts: dict[str, Any]) -> list[str]:
        """Where a checkpoint has other arrays than trees of shapes, a line each; of many the first.
        None where it cannot be read. Of one process: others may not have failed."""
        try:
            sums = self._read(step)["checksums"]
            lines = [
                f"{part}/{line}"
                for part, tree in parts.items()
                for line in CheckpointReader(self.path / str(step) / part, sums[part]).unlike(tree)
            ]
        except InputError:
            return []
        more = [f"and {len(lines) - _MOST_TOLD} more"] if len(lines) > _MOST_TOLD else []
        return lines[:_MOST_TOLD] + more

    def wait(self) -> None:
        """Returns when the save in progress, if any, is on disk.

        Raises:
            RunError: it could not be written.
        """
        with self._told_as_run_error():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _told_as_run_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many kinds for a full disk
            told = str(error).strip() or type(error).__name__
            raise RunError(
                f"{self.path}: a checkpoint could not be written, those before it are untouched:"
                f" {told.splitlines()[0]}"
            ) from error

    def directory(self, step: int) -> str:
        return str(self.path / str(step))

    def close(self) -> None:
        with contextlib.suppress(Exception):  # told by `wait` before, where it matters
            self._manager.close()
